"""From a recipe to a trainer: the starting checkpoint, TRL's config, the data, and what is recorded of each."""

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file, extract_commit_hash
from trl import DPOConfig, SFTConfig
from trl.chat_template_utils import get_training_chat_template
from trl.trainer.utils import add_fused_lm_head

from .. import shipped, weights
from ..data import load_mixture, load_split, refuse_endless, set_template
from ..errors import OutOfReach, UserError
from ..optim import build_optimizer
from ..provenance import fingerprint
from ..recipe import Parallel, Recipe, accumulation, adapter_config, is_local, parallel, training_part
from ..run_folder import RunFolder
from ..sharding import start_deepspeed
from ..sharding.ranks import Ranks
from . import adapters
from .trl_trainers import SorenDPOTrainer, SorenSFTTrainer

CONFIGS = {"sft": SFTConfig, "dpo": DPOConfig}
TRAINERS = {"sft": SorenSFTTrainer, "dpo": SorenDPOTrainer}


def optimizer_settings(recipe: Recipe) -> dict[str, Any]:
    """The recipe's optimizer section as keywords of `build_optimizer`: what does not apply (null) is left to it."""
    return {k: v for k, v in recipe.optimizer.model_dump().items() if v is not None}


def trl_config(recipe: Recipe, output_dir: Path, ranks: Ranks) -> SFTConfig | DPOConfig:
    """TRL's config object for one of `ranks`; what it refuses is the user's to mend."""
    ours = {
        "output_dir": str(output_dir),
        "learning_rate": recipe.optimizer.lr,  # only for its own logs: the optimizer reads the recipe
        "weight_decay": recipe.optimizer.weight_decay,
        "disable_tqdm": True,
        "gradient_accumulation_steps": accumulation(recipe, ranks.num_ranks),
    }
    shared = parallel(recipe.run.parallel) if ranks.launched else Parallel("ddp")  # only a launched process shares
    on_cpu = bool(recipe.trainer.get("use_cpu"))
    if shared.kind == "zero":
        with the_users("run.parallel", ImportError):
            start_deepspeed(on_cpu)
        ours["deepspeed"] = shared.config
    elif shared.kind == "fsdp2":
        # transformers has another name for accelerate's fsdp_offload_params
        ours |= {"fsdp": True, "fsdp_config": {**shared.config, "cpu_offload": shared.config.get("offload_params")}}
    # transformers would have DDP look through the graph for parameters without a gradient at every step, and FSDP2 keep
    # whole gradients until the last of the batches that a step accumulates: no longer 1/N of them.
    defaults: dict[str, Any] = {"ddp_find_unused_parameters": False}
    defaults["run_name"] = RunFolder(recipe.run.output_dir).name
    if shared.kind == "fsdp2":
        defaults["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    settings = {**defaults, **recipe.trainer, **ours}
    if not (on_cpu or torch.accelerator.is_available()):
        raise UserError(
            "trainer.use_cpu: this machine has no GPU; write `use_cpu: true` and `bf16: false` under trainer"
        )
    with the_users("trainer", ValueError, TypeError, ImportError):
        config = CONFIGS[recipe.task](**settings)
    if config.world_size != ranks.num_ranks:
        # Such as under `accelerate launch --cpu`: each process would train alone, on all rows, without a word.
        raise UserError(
            f"the launcher started {ranks.num_ranks} processes, but the trainer sees {config.world_size}; "
            "start them with --processes N or torchrun"
        )
    return config


def starting_checkpoint(recipe: Recipe, folder: RunFolder) -> str:
    """The folder (or hub name) that training starts from; random weights are made and saved there first."""
    model = recipe.model
    if model.init_seed is None:
        return str(shipped.resolve(model.name_or_path)) if is_local(model.name_or_path) else model.name_or_path
    if not folder.start.is_dir():
        source = shipped.resolve(model.name_or_path)
        aside = folder.start.with_name("start.part")
        torch.manual_seed(model.init_seed)
        with the_users(f"model {model.name_or_path}"):
            random = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(source, trust_remote_code=False), dtype=torch.float32
            )
            random.save_pretrained(aside)
            AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(aside)
        aside.rename(folder.start)
    return str(folder.start)


_CALL = {"type": "function", "function": {"name": "dummy", "arguments": {"a": "b"}}}
_TRL_RENDERS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "dummy"}],
    [
        {"role": "user", "content": "dummy"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "dummy", "content": "dummy"},
    ],
]


def load_tokenizer(recipe: Recipe, start: str) -> PreTrainedTokenizerBase:
    """The tokenizer with the chat template and end token that training will use."""
    with the_users(f"tokenizer of {recipe.model.name_or_path}"):
        tokenizer = AutoTokenizer.from_pretrained(start, trust_remote_code=False, revision=recipe.model.revision)
    set_template(tokenizer, recipe.model.chat_template, recipe.model.eos_token)
    if recipe.trainer.get("assistant_only_loss") and tokenizer.chat_template:
        for turns in _TRL_RENDERS:  # in this process, to see whether the template knows tools
            refuse_endless(tokenizer, recipe.model.name_or_path, turns)
        with contextlib.suppress(ValueError):  # a template that TRL does not know: check_template says what to do
            tokenizer.chat_template = get_training_chat_template(tokenizer) or tokenizer.chat_template
    return tokenizer


def load_model(recipe: Recipe, start: str) -> PreTrainedModel:
    """The model with parameters of model.dtype; cut into parts while it loads, where a config for ZeRO 3 is alive.

    With the adapter that lies in `start`, if one does.
    """
    name, revision = adapters.base_of(start, recipe.model.revision)
    quantized = adapters.quantization(recipe.model.lora, bool(recipe.trainer.get("use_cpu")))
    with the_users(f"model {recipe.model.name_or_path}", ValueError, OSError, ImportError):
        dtype = getattr(torch, recipe.model.dtype)
        model = weights.load_model(name, revision=revision, dtype=dtype, quantization_config=quantized)
        return adapters.go_on(model, start)


def as_trl_calls_it(model: Any, checkpointing: bool) -> Any:
    """A function of token ids [rows, length] to an output with `loss`, as TRL's trainers have the model compute it."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    add_fused_lm_head(base)
    model.train()
    base.config.use_cache = False
    if checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    return lambda tokens: model(input_ids=tokens, labels=tokens, fused_lm_head=True)


def save_dtype(recipe: Recipe, start: str) -> torch.dtype:
    """What the model folder is written in: run.save_dtype, or what the starting checkpoint says of itself.

    An adapter always in float32: run.save_dtype is then that of `merge`.
    """
    if recipe.model.lora or adapter_config(start):
        return torch.float32
    if recipe.run.save_dtype is not None:
        return getattr(torch, recipe.run.save_dtype)
    with the_users(f"model {recipe.model.name_or_path}"):
        config = AutoConfig.from_pretrained(start, revision=recipe.model.revision, trust_remote_code=False)
    return config.dtype if config.dtype in (torch.bfloat16, torch.float16) else torch.float32


def build_trainer(
    recipe: Recipe,
    folder: RunFolder,
    start: str,
    tokenizer: PreTrainedTokenizerBase,
    splits: dict,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
):
    """The trainer, ready to train; splits: {'train': Loaded, 'eval': Loaded or None}.

    `trainer.origin` is what its checkpoints belong to: recipe, number of processes, data, starting weights,
    template.
    """
    args = trl_config(recipe, folder.checkpoints, ranks)
    model = load_model(recipe, start)
    if recipe.model.eos_token is not None:
        _stop_at(model, tokenizer)
    origin = {
        "training": training_part(recipe),
        "processes": ranks.num_ranks,
        "data": splits["train"].source,
        "start": fingerprint(start) or _commit(start, recipe.model.revision),
        # The recipe names a file, which may have changed since.
        "chat_template_sha256": hashlib.sha256(json.dumps(tokenizer.chat_template).encode()).hexdigest(),
    }
    new_adapter = adapters.lora_config(recipe, model)
    if new_adapter is None:  # otherwise TRL puts in first what is to be stepped
        with the_users("optimizer", ValueError):
            build_optimizer(model, **optimizer_settings(recipe))
    # TRL prints while it maps; what matters of it is counted and shown by data.preview.
    with the_users("trainer", ValueError, RuntimeError), contextlib.redirect_stdout(io.StringIO()):
        return TRAINERS[recipe.task](
            model=model,
            args=args,
            train_dataset=splits["train"].dataset,
            eval_dataset=splits["eval"].dataset if splits["eval"] else None,
            processing_class=tokenizer,
            peft_config=new_adapter,
            optimizer_settings=optimizer_settings(recipe),
            origin=origin,
            metrics=folder.metrics if ranks.is_first else None,
            save_dtype=save_dtype(recipe, start),
            parallel=parallel(recipe.run.parallel).kind if ranks.launched else None,
        )


def _commit(name: str, revision: str | None) -> str | None:
    """The commit of the hub's that a model was loaded from; its config no longer knows (transformers 5.23)."""
    return extract_commit_hash(cached_file(name, "config.json", revision=revision), None)


def _stop_at(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """End answers at the tokenizer's eos too, as TRL's SFTTrainer does for its eos_token; DPOTrainer has none."""
    token: Any = tokenizer.eos_token_id
    model.config.get_text_config().eos_token_id = token
    generation = model.generation_config
    assert generation is not None
    others = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    generation.eos_token_id = [token, *(other for other in others if other not in (None, token))]


def load_splits(recipe: Recipe) -> dict[str, Any]:
    """The recipe's rows, checked: {'train': Loaded, 'eval': Loaded or None}."""
    asked = recipe.data.eval
    splits = {
        "train": (train := load_mixture(recipe.data.sources, recipe.task, recipe.trainer.get("seed", 42))),
        "eval": (held_out := load_split(asked, recipe.task) if asked else None),
    }
    # TRL decides by the training rows what of the others is trained.
    if held_out and held_out.kind != train.kind:
        raise UserError(f"data.eval: has {held_out.layout}, and data.train {train.layout}; measure on the same kind")
    return splits


@contextlib.contextmanager
def the_users(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn what a library refuses into a UserError of one line: it speaks of the recipe, not of our code."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not isinstance(error, kinds or (ValueError, OSError)):
            raise
        unreachable = isinstance(error, OSError) and constants.HF_HUB_OFFLINE
        said = f"{what}: {' '.join(str(error).split())[:400]}"
        raise (OutOfReach if unreachable else UserError)(said) from error
