"""Load the starting checkpoint: folder, tokenizer, model and dtype."""

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from trl.chat_template_utils import get_training_chat_template

from ..core.errors import UserError, as_user_error, in_one_line
from ..core.files import (
    CHANGED,
    Content,
    contents,
    default_cache_folder,
    read_json,
    rename_durably,
    resolve_path,
    write,
)
from ..data import check_template, dataset_of, set_template, trained_tokenizer, within_vocabulary
from ..recipe import Recipe, adapter_config, is_local, quantization
from ..recipe.schema import TrainedTokenizer
from ..run import weights
from ..run.folder import COMPLETE_MARKER, RunFolder
from . import adapters
from .adapters import freeze, refuse_unmatched
from .checkpoints import write_errors


def starting_checkpoint(
    recipe: Recipe, folder: RunFolder, examples: Any = None, *, verify: bool = True
) -> tuple[str, str]:
    """Return the folder or hub name that training starts from, and that of its tokenizer.

    With model.init_seed, random weights are drawn and saved to `folder.start` first, unless they
    are there already.
    examples: the dataset that model.tokenizer is trained on, if it is. verify: hash the files that
    are there; one rank does. Raises UserError if the model cannot have the tokenizer, or these
    files have changed.
    """
    model = recipe.model
    if model.init_seed is not None and folder.start.is_dir():
        if verify:
            marker = folder.start / COMPLETE_MARKER
            saved = read_json(marker) if marker.is_file() else {}
            actual = _contents(folder.start)
            if changed := sorted(
                name for name in {*saved, *actual} if saved.get(name) != actual.get(name)
            ):
                raise UserError(
                    f"{folder.start}: {', '.join(changed)}: {CHANGED}; remove this folder and "
                    "rerun the same command, which makes the folder again"
                )
        return str(folder.start), str(folder.start)
    if isinstance(model.tokenizer, TrainedTokenizer):
        tokenizer_source = str(
            trained_tokenizer(examples, model.tokenizer.vocab_size, default_cache_folder())
        )
    else:
        tokenizer_source = _resolved(model.tokenizer or model.name_or_path)
    if model.init_seed is None and model.tokenizer is None:
        return _resolved(model.name_or_path), tokenizer_source
    # A tokenizer of another model must fit the embeddings, and its special tokens are the config's.
    config = load_config(recipe)
    tokenizer = weights.load_tokenizer(tokenizer_source)
    if model.tokenizer is not None:
        tokenizer = within_vocabulary(tokenizer, config.vocab_size)
        # Generation stops at the config's ids: those of the folder's own tokenizer would be other
        # words of this one.
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer, name))
    if model.init_seed is None:  # of a plan, which draws no weights
        return _resolved(model.name_or_path), tokenizer_source
    # Draw the random weights once and keep them: a resumed run, and the table's first row, start
    # from the same ones on any number of processes.
    partial = folder.start.with_name("start.part")
    torch.manual_seed(model.init_seed)
    with write_errors(partial), as_user_error(f"model {model.name_or_path}", Exception):
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write(partial / COMPLETE_MARKER, json.dumps(_contents(partial), indent=2) + "\n")
        rename_durably(partial, folder.start)
    return str(folder.start), str(folder.start)


def _contents(start: Path) -> dict[str, Content]:
    files = sorted(
        path for path in start.iterdir() if path.is_file() and path.name != COMPLETE_MARKER
    )
    return dict(zip((path.name for path in files), contents(files), strict=True))


def _resolved(name: str) -> str:
    return str(resolve_path(name)) if is_local(name) else name


def _named(recipe: Recipe, source: str) -> str:
    """Return what to call a folder or hub name in messages: the recipe's name for it, or the folder
    that a run made.
    """
    names = [
        name
        for name in (recipe.model.name_or_path, recipe.model.tokenizer)
        if isinstance(name, str)
    ]
    own = (
        f"{source} (made by soren-align; if you remove this folder, soren-align makes the folder "
        "again)"
    )
    return next((name for name in names if _resolved(name) == source), own)


def load_config(recipe: Recipe) -> Any:
    """Load the model's config, with the size of a trained tokenizer.

    Raises UserError if transformers does not load it as a causal language model.
    """
    name = recipe.model.name_or_path
    base, revision = adapters.base_model(_resolved(name), recipe.model.revision)
    config = weights.load_config(base, revision)
    if isinstance(recipe.model.tokenizer, TrainedTokenizer):
        config.vocab_size = recipe.model.tokenizer.vocab_size
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    kind = "no causal language model"
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        kind = "a model of images and text that transformers does not load as a language model"
    raise UserError(
        f"model {name}: {config.model_type} is {kind}; name a causal language model, which "
        "predicts the next token"
    )


def load_model(recipe: Recipe, start: str) -> PreTrainedModel:
    """Load the model with parameters of model.dtype, and the adapter that `start` holds, if it
    holds one.

    The adapter is trainable. Where a DeepSpeed config for ZeRO 3 is alive, the model is sharded
    while it loads.
    """
    # An adapter is loaded onto its base, whose revision its config has.
    name, revision = adapters.base_model(start, recipe.model.revision)
    options: dict[str, Any] = {"revision": revision, "dtype": getattr(torch, recipe.model.dtype)}
    options["attn_implementation"] = recipe.model.attn_implementation
    if recipe.model.quantize and recipe.trainer.get("use_cpu"):
        # Otherwise transformers quantizes on a GPU where there is one.
        options["device_map"] = {"": "cpu"}
    place = _named(recipe, start)
    with as_user_error(f"model {place}", ValueError, OSError, ImportError):
        model = weights.load_model(name, quantization(recipe), place=place, **options)
        weights.make_savable_(model.generation_config, f"model {place}")
        refuse_unmatched(model, recipe.model.freeze)
        if recipe.model.lora is None:  # an adapter freezes all; its factors are added later
            freeze(model, recipe.model.freeze)
        if adapter_config(start) is not None:
            adapted: Any = weights.load_adapter(model, start, is_trainable=True)
            adapted.peft_config["default"].base_model_name_or_path = name
            model = adapted
    return model


def generation_notices(recipe: Recipe, start: str) -> list[str]:
    """Return a notice if the starting checkpoint's generation_config.json will be saved with a
    change.

    Raises UserError if transformers would not save it with the trained model.
    """
    name, revision = adapters.base_model(start, recipe.model.revision)
    place = f"model {_named(recipe, start)}"
    try:
        config = GenerationConfig.from_pretrained(name, revision=revision or "main")
    except OSError:  # it has none
        return []
    except Exception as error:
        reason = in_one_line(error, 300)
        raise UserError(
            f"{place}: generation_config.json cannot be read: {reason}; correct this file"
        ) from error
    notice = weights.make_savable_(config, place)
    return [notice] if notice else []


TWO_ANSWERS: list[dict[str, Any]] = [
    {"role": role, "content": content}
    for content in ("first", "second")
    for role in ("user", "assistant")
]
"""Templates that leave out parts of earlier turns render them differently as the second answer
follows."""


def load_tokenizer(recipe: Recipe, source: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with the chat template and the end token that training will use.

    source: its folder or hub name, as `starting_checkpoint` returns it. TRL's variant of the
    template, with {% generation %}, replaces one whose answers cannot be derived (Qwen3's).
    """
    revision = recipe.model.revision if recipe.model.tokenizer is None else None
    tokenizer = weights.load_tokenizer(source, revision, place=_named(recipe, source))
    set_template(tokenizer, recipe.model.chat_template, recipe.model.eos_token)
    # Try the template on two answers before TRL's variant: a template whose answers can be derived,
    # with their reasoning and a stop token, stays the user's.
    if recipe.trainer.get("assistant_only_loss") and tokenizer.chat_template:
        try:
            turns = [
                turn | {"content": f"<think>\n{turn['role']}\n</think>\n\n{turn['content']}"}
                for turn in TWO_ANSWERS
            ]
            check_template(tokenizer, "sft", True, dataset_of([{"messages": turns}]))
        except ValueError:
            # TRL does not support the template, or it fails on a conversation of TRL's:
            # check_template reports it.
            with contextlib.suppress(Exception):
                tokenizer.chat_template = (
                    get_training_chat_template(tokenizer) or tokenizer.chat_template
                )
    return tokenizer


def save_dtype(recipe: Recipe, start: str) -> torch.dtype:
    """Return the dtype of the saved model: run.save_dtype, or that of the starting checkpoint's
    config.

    Adapters are always saved in float32; run.save_dtype is then the dtype of the merged model.
    """
    if recipe.model.lora or adapter_config(start):
        return torch.float32
    if recipe.run.save_dtype is not None:
        return getattr(torch, recipe.run.save_dtype)
    dtype = weights.load_config(start, recipe.model.revision, place=_named(recipe, start)).dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
