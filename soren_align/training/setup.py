"""Load and check everything that a recipe names, except the model.

Starting checkpoint, tokenizer, examples (loaded, held out, mixed, as tokens), TRL's config,
learning-rate schedule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, takewhile
from pathlib import Path
from typing import Any

import torch
import trl
from transformers import AutoModelForCausalLM, get_scheduler
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.optimization import GreedyLR

from .. import data
from ..core.errors import UserError, as_user_error, first_sentence
from ..core.files import default_cache_folder
from ..optim import names_of_matrices, route
from ..recipe import (
    DataSplit,
    HeldOut,
    HeldOutNumber,
    Recipe,
    TrainSplit,
    columns_text,
    compute_dtype,
)
from ..recipe.parallel import (
    Parallel,
    accumulation,
    batch_unit,
    gradient_notice,
    parallel,
    trainer_value,
)
from ..run.folder import RunFolder
from ..run.record import describe_dropped
from ..sharding import start_deepspeed
from ..sharding.ranks import Ranks
from ..tasks import TASKS
from .adapters import add_empty_adapter, freeze
from .measure.measurements import matching
from .measure.samples import Prompt, prompt_ids, read_prompts
from .model import generation_notices, load_config, load_tokenizer, starting_checkpoint
from .packing import Packing, TokenStream, pack

UNKNOWN_SHARE = 0.001
"""Of all tokens: from it on a notice reports unknown ones. A tenth of a percent is a word in every
other page."""


@dataclass(frozen=True)
class TrainingSetup:
    """A checked recipe with everything that training loads before the model."""

    recipe: Recipe
    start: str
    """Folder or hub name of the starting checkpoint."""
    tokenizer: Any
    splits: dict[str, Any]
    """{"train": data.LoadedSplit, "eval": data.LoadedSplit or None}"""
    tokens: dict[str, Any]
    """The examples of `splits` as tokens: {"train": Dataset, "eval": Dataset or None}."""
    account: Any
    """data.DatasetStats of the training examples; None on all ranks but the first. With packing,
    tokens are counted after it."""
    held_out: dict[str, Any] | None = None
    """Of the held-out examples, on the first rank: "num_examples", "num_kept", "dropped" by reason,
    "num_truncated", "num_truncated_tokens", and "num_tokens" of those kept, after truncation."""
    notices: tuple[str, ...] = ()
    """Findings about data and template that do not stop the run."""
    prompts: tuple[Prompt, ...] = ()
    """Of run.samples; none on all ranks but the first."""
    packing: Packing | None = None
    """Of the training examples, on the first rank."""
    stream: TokenStream | None = None
    """The training examples where they are read while training; `splits`, `tokens`, `account` and
    `packing` are then of the first ones."""


def _check_names(recipe: Recipe, model_config: Any) -> None:
    """Check the recipe's names of weights and matrices on the model without weights.
    Raises UserError.
    """
    routing, logged = recipe.optimizer.routing, recipe.run.log_spectra
    records = logged.steps and recipe.optimizer.spectral_map
    if not (routing.get("split") or routing.get("lora_update") == "product" or records):
        return
    with torch.device("meta"), as_user_error("optimizer", ValueError):
        model = AutoModelForCausalLM.from_config(model_config)
        freeze(model, recipe.model.freeze)
        routes = route(add_empty_adapter(model, recipe, recipe.model.name_or_path), **routing)
    if records:
        mapped = [each for each in routes if each.rule == "spectral"]
        matching(
            [n for each in mapped for n in names_of_matrices(each.name, each.shape, each.layout)],
            logged.matrices,
        )


def set_up_training(
    recipe: Recipe,
    folder: RunFolder,
    on_examples: Callable[[int], object] | None = None,
    ranks: Ranks = Ranks(),
) -> TrainingSetup:
    """Load tokenizer and data, and check all that can be checked before the model is loaded.

    The examples are counted on the first rank only. Call it within `Ranks.main_process_first`, so
    that the other ranks use the files that the first one cached. on_examples: called with the
    number of examples just counted. Raises UserError if the recipe cannot be trained.
    """
    # of an earlier run in this process: models would be sharded while they load
    unset_hf_deepspeed_config()
    model_config = load_config(recipe)
    _check_names(recipe, model_config)
    splits = load_splits(recipe)
    train, stream = splits["train"], None
    start, tokenizer_source = starting_checkpoint(
        recipe, folder, train.dataset, verify=ranks.is_first
    )
    tokenizer = load_tokenizer(recipe, tokenizer_source)
    config = trl_arguments(recipe, folder.checkpoints, ranks)
    if isinstance(train, data.Preview):
        stream = TokenStream(train.stream, recipe.data_task, tokenizer, config, loss_of(recipe))
    # transformers may refuse lr_scheduler_kwargs when it makes the schedule or steps it
    optimizer, settings = (
        torch.optim.SGD([torch.zeros(1)], lr=1.0),
        config.lr_scheduler_kwargs or {},
    )
    with as_user_error(
        "trainer.lr_scheduler_type and lr_scheduler_kwargs", ValueError, TypeError, ArithmeticError
    ):
        schedule = get_scheduler(
            config.lr_scheduler_type, optimizer, 1, 10, scheduler_specific_kwargs=settings
        )
        # these step by a loss
        if not isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau | GreedyLR):
            optimizer.step()
            schedule.step()
    check_attention(recipe, model_config)
    if not ranks.is_first:
        splits, tokens = tokenize_splits(recipe, splits, tokenizer)
        return TrainingSetup(recipe, start, tokenizer, splits, tokens, None, stream=stream)

    of_pairs = _plain_pair_notices(recipe, train, tokenizer)
    assistant_only, completion_only = map(
        recipe.trainer.get, ("assistant_only_loss", "completion_only_loss")
    )
    of_template = data.check_template(
        tokenizer, recipe.data_task, bool(assistant_only), train.dataset, completion_only
    )
    of_generation = generation_notices(recipe, start)
    splits, tokens = tokenize_splits(recipe, splits, tokenizer, on_examples)
    train = splits["train"]
    packs = getattr(config, "packing", False)
    counts, packing = _count(
        recipe, config, tokens["train"], train.source_indices, tokenizer, packs=packs
    )
    if counts.num_kept == 0:
        raise UserError(
            f"{train.source['path']}: none of {counts.num_examples} examples can be trained on: "
            f"{describe_dropped(counts.dropped)}; raise trainer.max_length ({config.max_length}), or fix the data"
        )

    refuse_unembedded(
        model_config, tokenizer, counts.max_token_id, getattr(config, "pad_token", None)
    )
    held_out = None
    if evaluation := splits["eval"]:
        packs_held_out = getattr(config, "eval_packing", None)
        packs = packs if packs_held_out is None else packs_held_out
        evaluated, _ = _count(recipe, config, tokens["eval"], (), tokenizer, packs=packs)
        dropped = evaluation.dropped | evaluated.dropped
        if evaluated.num_trained_tokens == 0:
            reasons = f": {text}" if (text := describe_dropped(dropped)) else ""
            raise UserError(
                f"data.eval: none of the {evaluation.num_examples:,} held-out examples of {evaluation.source['path']} "
                f"can be evaluated{reasons}; raise trainer.max_length ({config.max_length}), or fix the data"
            )
        held_out = {
            "num_examples": evaluation.num_examples,
            "num_kept": evaluated.num_kept,
            "dropped": dropped,
        }
        held_out |= {
            key: getattr(evaluated, key)
            for key in ("num_truncated", "num_truncated_tokens", "num_tokens")
        }
    num_examples, unit = packing.num_sequences if packing else counts.num_kept, batch_unit(recipe)
    micro_batch = trainer_value(recipe, "per_device_train_batch_size") * ranks.num_ranks
    if stream is None and recipe.trainer.get("dataloader_drop_last") and num_examples < micro_batch:
        raise UserError(
            f"trainer.dataloader_drop_last: would drop all data, as {num_examples} {unit} are less than one batch of "
            f"{micro_batch}; remove this key, or lower trainer.per_device_train_batch_size"
        )
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    positions = positions if isinstance(positions, int) else None
    samples = recipe.run.samples
    prompts = (
        read_prompts(samples, tokenizer, data.has_turns(train.dataset), positions)
        if samples
        else ()
    )
    setup = TrainingSetup(
        recipe, start, tokenizer, splits, tokens, counts, held_out, (), prompts, packing, stream
    )
    notices = [*train.notices, *(evaluation.notices if evaluation else ()), *of_template, *of_pairs]
    notices += _notices(setup, config.max_length, positions, of_template)
    return replace(setup, notices=(*notices, *of_generation))


def _count(
    recipe: Recipe,
    config: Any,
    tokens: Any,
    source_indices: Sequence[int],
    tokenizer: Any,
    *,
    packs: bool,
) -> tuple[data.DatasetStats, Packing | None]:
    """Count examples and their tokens, after packing if they are packed. config: TRL's."""
    masks, max_length = (data.LossMasks(), None) if packs else (None, config.max_length)
    counts = data.dataset_stats(
        tokens,
        recipe.data_task,
        tokenizer,
        max_length=max_length,
        source_indices=source_indices,
        masks=masks,
    )
    if masks is None or not masks.masks:
        return counts, None
    packing = pack(masks, config)
    loses_stop = packing.num_lost_tokens and packing.num_long_examples >= counts.num_kept
    counts = replace(
        counts,
        num_tokens=packing.num_tokens,
        num_trained_tokens=packing.num_trained_tokens,
        trained_share=packing.num_trained_tokens / max(1, packing.num_tokens),
        stop_token_trained=counts.stop_token_trained and not loses_stop,
        num_truncated=packing.num_long_examples if packing.num_lost_tokens else 0,
        num_truncated_tokens=packing.num_lost_tokens,
    )
    return counts, packing


def refuse_unembedded(
    model_config: Any, tokenizer: Any, max_token_id: int | None, own_pad_token: str | None = None
) -> None:
    """Raise UserError if the model has no embedding of a token of the examples, or of the padding.

    Its lookup on a GPU would end in an assertion. own_pad_token: of TRL's config, which not every
    config of TRL has.
    """
    vocab_size = getattr(model_config.get_text_config(), "vocab_size", None)
    pad_token = padding_token(tokenizer, own_pad_token)
    pad_id = None if pad_token is None else tokenizer.convert_tokens_to_ids(pad_token)
    for finding, token_id in {
        "examples have token": max_token_id,
        "the padding is token": pad_id,
    }.items():
        if isinstance(vocab_size, int) and token_id is not None and token_id >= vocab_size:
            raise UserError(
                f"model.tokenizer: {finding} {token_id:,}, but the model's vocab_size is only {vocab_size:,}, because "
                "the tokenizer or its chat template is that of another model, or was changed; restore the model's files"
            )


def padding_token(tokenizer: Any, own: str | None = None) -> str | None:
    """The token that TRL pads with. own: of TRL's config."""
    return own or tokenizer.pad_token or tokenizer.eos_token


def check_attention(recipe: Recipe, config: Any) -> None:
    """Raise UserError if model.attn_implementation is not installed, or the architecture does not
    have it.

    config: the model's. transformers itself checks, on a model without weights. Hub kernels are
    downloaded.
    """
    name = recipe.model.attn_implementation
    if name is None:
        return
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, attn_implementation=name)
    except Exception as error:  # of the config too
        reason = first_sentence(error).rstrip(".")
        raise UserError(
            f"model.attn_implementation: {name} cannot be used: {reason}. Remove this key to let transformers choose; "
            "for flash attention, install the package flash-attn or kernels"
        ) from error


def _notices(
    setup: TrainingSetup, max_length: int | None, positions: int | None, of_template: Sequence[str]
) -> list[str]:
    """Return the notices about the tokens that are trained. Raises UserError if no answer is.

    positions: of the model, if its config has a number. of_template: the notices about the chat
    template, one of which is about the stop token.
    """
    recipe, tokenizer, counts, packing = setup.recipe, setup.tokenizer, setup.account, setup.packing
    dataset, notices = setup.splits["train"].dataset, []
    columns = set(dataset.column_names)
    is_cut = not counts.stop_token_trained and not recipe.trainer.get("packing")
    if is_cut and max_length is not None and columns & {"messages", "prompt"}:
        # If every example is cut before its first answer, the loss would be that of prompts alone.
        pairs = ((one.get("prompt"), one.get("messages", ())) for one in dataset)
        prompts = (
            prompt or [*takewhile(lambda turn: turn["role"] != "assistant", turns)]
            for prompt, turns in pairs
        )
        lengths = (
            len(prompt_ids(prompt, tokenizer, "the chat template fails on a prompt"))
            for prompt in prompts
        )
        too_long = [*takewhile(lambda length: length >= max_length, lengths)]
        if len(too_long) == len(dataset):
            raise UserError(
                f"trainer.max_length: {max_length} cuts every example before its answer, as the shortest prompt has "
                f"{min(too_long)} tokens; write a larger number"
            )
    if not counts.stop_token_trained and not of_template:
        notices.append(
            f"the stop token is never trained, because trainer.max_length {max_length} cuts every answer"
        )
    if "messages" in columns and "assistant_only_loss" not in recipe.trainer:
        notices.append(
            "the loss contains all tokens of conversations, also the user's messages. To train only on the answers, "
            "write trainer.assistant_only_loss: true. To hide this notice, write false for this key"
        )
    if "completion" in columns and not data.has_turns(dataset) and tokenizer.chat_template:
        # the `columns` by which prompts and answers in plain text become turns
        own: dict[str, str] = {**recipe.data.sources[0].columns}
        answers = {"instruction": "prompt", "output": "completion"}
        turns = {ours: own.get(column, column) for ours, column in answers.items()}
        notices.append(
            "prompts and answers are plain texts and are trained without the model's chat template, but `soren-align "
            "chat` and some suites use the template. To train with the template, write data.train.columns: "
            f"{columns_text(turns)}"
        )
    if counts.pairs:
        notices += counts.pairs.notices(
            dataset, repeats=any(source.weight > 1 for source in recipe.data.sources)
        )
    notices += packing.notices() if packing else []
    # whose update does not lift them
    if recipe.optimizer.states == "8bit" and recipe.optimizer.name != "adamw":
        notices.append(
            "optimizer.states: 8bit rounds the momentum. The map raises small singular values, which amplifies this "
            "rounding error to a third or more of the update's norm (docs/optimizers.md, 8-bit states)"
        )
    notices += gradient_notice(recipe.run.parallel, compute_dtype(recipe))
    # In all other sequences positions restart at each example.
    is_wrapped = packing is not None and packing.strategy == "wrapped"
    longest = counts.lengths["max"]
    longest = (max_length or longest) if is_wrapped else min(longest, max_length or longest)
    if positions is not None and longest > positions:
        notices.append(
            f"examples have up to {longest:,} tokens, but the model has {positions:,} positions; lower "
            "trainer.max_length"
        )
    notices += [
        f"the chat template leaves out {kind} of {number:,} of {counts.num_examples:,} examples, so that the model "
        "does not see this part. Another template may print this part"
        for kind, number in counts.num_left_out.items()
    ]
    num_tokens = counts.num_tokens + counts.num_truncated_tokens
    share = counts.num_unknown_tokens / max(1, num_tokens)
    if share >= UNKNOWN_SHARE:
        notices.append(
            f"{counts.num_unknown_tokens:,} of {num_tokens:,} tokens ({share:.2%}) are {tokenizer.unk_token}: the "
            "tokenizer does not know this text, so the model does not see this text. Use a model whose tokenizer does"
        )
    return notices


def _plain_pair_notices(recipe: Recipe, train: Any, tokenizer: Any) -> list[str]:
    """Return a notice about plain pairs that are rendered with the chat template, unless the recipe
    has the key.

    Raises UserError if there is no template.
    """
    if data.PLAIN_PAIRS not in train.layout:
        return []
    key, turns = "data.train.apply_chat_template", train.dataset[0]["chosen"]
    without = f"train the texts as they are, write {key}: false"
    if not tokenizer.chat_template:
        raise UserError(
            f"{train.source['path']}: has {data.PLAIN_PAIRS}, but the tokenizer has no chat template; write "
            f"model.chat_template, or, to {without}"
        )
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    if marks := sorted(mark for mark in special if any(mark in turn["content"] for turn in turns)):
        return [
            f"the first pair contains {', '.join(marks)}, and is rendered with the chat template. If the texts are "
            f"already rendered, write {key}: false"
        ]
    if all(source.apply_chat_template is not None for source in recipe.data.sources):
        return []
    return [
        "prompts and answers are plain texts, and are trained with the model's chat template. To "
        f"{without}. To hide this notice, write true for this key"
    ]


def load_splits(recipe: Recipe) -> dict[str, Any]:
    """Load the recipe's data: {"train": data.LoadedSplit, or data.Preview of a stream, "eval":
    data.LoadedSplit or None}.

    Raises UserError if only one of both has turns, or texts have different columns.
    """
    evaluation, streaming, held_out = recipe.data.eval, recipe.data.streaming, None
    task, seed = recipe.data_task, recipe.trainer.get("seed", 42)
    if streaming is not None:
        fraction = evaluation.fraction if isinstance(evaluation, HeldOut) else None
        train, held_out = data.open_stream(
            recipe.data.sources, task, streaming.shuffle_buffer, seed, fraction
        )
    else:
        sources = [data.load_split(source, task) for source in recipe.data.sources]
        if isinstance(evaluation, HeldOut | HeldOutNumber):
            sources, held_out = data.hold_out(sources, **evaluation.model_dump())
        train = data.mix(sources, recipe.data.sources, seed)
    if isinstance(evaluation, DataSplit):
        # of a dataset on the hub, no more than these is downloaded
        if streaming is not None and evaluation.limit:
            held_out = data.open_split(TrainSplit(**evaluation.model_dump()), task).first(
                evaluation.limit
            )
        else:
            held_out = data.load_split(evaluation, task)
    if held_out and held_out.kind != train.kind:
        raise UserError(
            f"data.eval: has {held_out.layout}, but data.train has {train.layout}; use data of the same kind"
        )
    if recipe.task == "pretrain" and train.dataset.column_names != ["text"]:
        raise UserError(
            f"data.train: {train.source['path']} has {train.layout}, but pretrain needs plain texts; name data with a "
            "column `text` or .txt files, or run `soren-align sft`"
        )
    return {"train": train, "eval": held_out}


def tokenize_splits(
    recipe: Recipe,
    splits: dict[str, Any],
    tokenizer: Any,
    on_examples: Callable[[int], object] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(both splits, their tokens), without examples that teach empty answers.
    on_examples: of the training examples.
    """
    cache = default_cache_folder() if recipe.data.cache and not recipe.data.streaming else None
    remaining: dict[str, Any] = dict.fromkeys(splits)
    tokens: dict[str, Any] = dict.fromkeys(splits)
    for name, split in splits.items():
        if split:
            report = on_examples if name == "train" else None
            all_tokens = data.tokenize(
                split.dataset, recipe.data_task, tokenizer, cache, *loss_of(recipe), report
            )
            remaining[name], tokens[name] = data.without_empty_answers(split, all_tokens)
    if recipe.data.eval_tokens and (evaluation := tokens["eval"]):
        # the first examples with so many predicted tokens, or all
        max_length = None if recipe.trainer.get("packing") else trainer_value(recipe, "max_length")
        batches = (
            data.from_token_columns(batch, recipe.data_task)
            for batch in evaluation.iter(data.BATCH_SIZE)
        )
        examples = chain.from_iterable(batches)
        numbers = (
            sum(sum(side.truncated(max_length).trained[1:]) for side in one.sides)
            for one in examples
        )
        ends = (
            number
            for number, total in enumerate(accumulate(numbers), 1)
            if total >= recipe.data.eval_tokens
        )
        if (num_examples := next(ends, len(evaluation))) < len(evaluation):
            tokens["eval"] = evaluation.select(range(num_examples))
    if recipe.data.eval_part and (evaluation := tokens["eval"]):
        if len(evaluation) < 2:
            raise UserError(
                "data.eval: has 1 example, and a study splits the held-out examples; hold out 100 or more"
            )
        tokens["eval"] = evaluation.select(
            range(recipe.data.eval_part == "verdict", len(evaluation), 2)
        )
    return remaining, tokens


def loss_of(recipe: Recipe) -> tuple[bool, bool]:
    """(assistant_only_loss, completion_only_loss), as `encode` takes them."""
    trainer = recipe.trainer
    return bool(trainer.get("assistant_only_loss")), trainer.get(
        "completion_only_loss"
    ) is not False


def trl_arguments(recipe: Recipe, output_dir: Path, ranks: Ranks) -> Any:
    """Return TRL's config object for one of `ranks`: the recipe's `trainer` section, and the keys
    derived from others.

    Raises UserError if TRL refuses a value, if there is no GPU and no `use_cpu`, and if the
    launcher started another number of processes than accelerate sees.
    """
    on_cpu = bool(recipe.trainer.get("use_cpu"))
    if not (on_cpu or torch.accelerator.is_available()):
        raise UserError(
            "trainer.use_cpu: this machine has no GPU; write trainer.use_cpu: true and trainer.bf16: false"
        )
    shared = parallel(recipe.run.parallel) if ranks.launched else Parallel("ddp")
    derived: dict[str, Any] = {
        "output_dir": str(output_dir),
        # only for TRL's logs: the optimizer gets the recipe's section
        "learning_rate": recipe.optimizer.lr,
        "weight_decay": recipe.optimizer.weight_decay,
        "disable_tqdm": True,
        "gradient_accumulation_steps": accumulation(recipe, ranks.num_ranks),
    }
    if shared.kind == "zero":
        with as_user_error("run.parallel", ImportError):
            start_deepspeed(on_cpu)
        derived["deepspeed"] = shared.config
    if shared.kind == "fsdp2":
        # transformers has another name for accelerate's fsdp_offload_params
        offloads = shared.config.get("offload_params")
        derived |= {"fsdp": True, "fsdp_config": {**shared.config, "cpu_offload": offloads}}
    if recipe.data_task == "sft":
        # the tokens have their labels; TRL would ask for conversations
        derived["assistant_only_loss"] = False
    # transformers would have DDP search the graph for parameters without a gradient at every step.
    defaults: dict[str, Any] = {"ddp_find_unused_parameters": False}
    # the other ranks' libraries are as quiet as those of the first
    defaults["log_level_replica"] = "passive"
    defaults["run_name"] = RunFolder(recipe.run.output_dir).name
    if recipe.run.early_stopping:
        # as transformers, but only with load_best_model_at_end
        defaults["metric_for_best_model"] = "loss"
    if shared.kind == "fsdp2":
        # Otherwise FSDP2 keeps whole gradients until the last micro-batch of a step, instead of 1/N
        # of them.
        defaults["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    with as_user_error("trainer", ValueError, TypeError, ImportError):
        config = getattr(trl, TASKS[recipe.task].config)(
            **{**defaults, **recipe.trainer, **derived}
        )
    if config.world_size != ranks.num_ranks:
        # Such as under `accelerate launch --cpu`: each process would train alone on all examples,
        # without a warning.
        raise UserError(
            f"the launcher started {ranks.num_ranks} processes, but the trainer found {config.world_size}; start the "
            "processes with --processes N or with torchrun"
        )
    return config
