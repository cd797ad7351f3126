"""Load and check everything that a recipe names, except the model.

Starting checkpoint, tokenizer, examples (loaded, held out, mixed, as tokens), TRL's config,
learning-rate schedule.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import trl
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, get_scheduler
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.optimization import GreedyLR

from .. import data
from ..core.errors import UserError, as_user_error, first_sentence
from ..core.files import default_cache_folder
from ..optim import names_of_matrices, route
from ..recipe import DataSplit, HeldOut, HeldOutNumber, Recipe, TrainSplit
from ..recipe.parallel import (
    Parallel,
    accumulation,
    batch_unit,
    drops_last,
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
from .measure.samples import Prompt, read_prompts
from .model import generation_notices, load_config, load_tokenizer, starting_checkpoint
from .notices import plain_pair_notices, setup_notices, template_remedy
from .packing import Packing, TokenStream, pack

T = TypeVar("T")


@dataclass(frozen=True)
class Splits(Generic[T]):
    """The training examples and the held-out ones: as loaded, or as tokens."""

    train: T
    eval: T | None = None


@dataclass(frozen=True)
class HeldOutCounts:
    """The held-out examples; tokens of those kept, after truncation."""

    num_examples: int
    num_kept: int
    dropped: Mapping[str, int]
    """The number of dropped examples by reason."""
    num_truncated: int
    num_truncated_tokens: int
    num_tokens: int


@dataclass(frozen=True)
class TrainingSetup:
    """A checked recipe with everything that training loads before the model.

    The fields from `account` on are those of the first rank, which alone counts and reports. Where
    examples are read while training, the splits and counts are those of the first ones.
    """

    recipe: Recipe
    start: str
    """Folder or hub name of the starting checkpoint."""
    tokenizer: PreTrainedTokenizerBase
    splits: Splits[data.LoadedSplit]
    tokens: Splits[Any]
    """The examples of `splits` as tokens, datasets."""
    stream: TokenStream | None = None
    """The training examples where they are read while training."""
    account: Any = None
    """data.DatasetStats of the training examples. With packing, tokens are counted after it."""
    packing: Packing | None = None
    held_out: HeldOutCounts | None = None
    prompts: tuple[Prompt, ...] = ()
    """The prompts of run.samples."""
    notices: tuple[str, ...] = ()
    """Findings about data and template that do not stop the run."""


def set_up_training(
    recipe: Recipe,
    folder: RunFolder,
    on_examples: Callable[[int, int], object] | None = None,
    ranks: Ranks = Ranks(),
) -> TrainingSetup:
    """Load tokenizer and data, and check all that can be checked before the model is loaded.

    The examples are counted on the first rank only. Call it within `Ranks.main_process_first`, so
    that the other ranks use the files that the first one cached. on_examples: called with the
    number of examples just counted. Raises UserError if the recipe cannot be trained.
    """
    # Load: config, data, tokenizer. An earlier run in this process may have left DeepSpeed's
    # config, by which models would be sharded while they load.
    unset_hf_deepspeed_config()
    model_config = load_config(recipe)
    _check_names(recipe, model_config)
    splits = load_splits(recipe)
    train, stream = splits.train, None
    start, tokenizer_source = starting_checkpoint(
        recipe, folder, train.dataset, verify=ranks.is_first
    )
    tokenizer = load_tokenizer(recipe, tokenizer_source)
    config = trl_arguments(recipe, folder.checkpoints, ranks)
    if isinstance(train, data.Preview):
        stream = TokenStream(train.stream, recipe.data_task, tokenizer, config, loss_of(recipe))
    _check_schedule(config)
    check_attention(recipe, model_config)
    # The others only need the examples: they read what the first rank has cached, and check and
    # count nothing twice.
    if not ranks.is_first:
        splits, tokens = tokenize_splits(recipe, splits, tokenizer)
        return TrainingSetup(recipe, start, tokenizer, splits, tokens, stream)

    # Check the templates before tokenizing, which takes minutes.
    pair_notices = plain_pair_notices(recipe, train, tokenizer)
    template_notices = data.check_template(
        tokenizer,
        recipe.data_task,
        bool(recipe.trainer.get("assistant_only_loss")),
        train.dataset,
        recipe.trainer.get("completion_only_loss"),
        template_remedy(tokenizer),
    )
    final_notices = generation_notices(recipe, start)

    # Tokenize and count: what would be dropped or cut decides whether the run can be trained.
    splits, tokens = tokenize_splits(recipe, splits, tokenizer, on_examples)
    setup = TrainingSetup(recipe, start, tokenizer, splits, tokens, stream)
    account, packing = _count_training(setup, config, ranks.num_ranks)
    refuse_unembedded(
        model_config, tokenizer, account.max_token_id, getattr(config, "pad_token", None)
    )
    held_out = _count_held_out(setup, config)
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    positions = positions if isinstance(positions, int) else None
    prompts = ()
    if recipe.run.samples:
        has_turns = data.has_turns(splits.train.dataset)
        prompts = read_prompts(recipe.run.samples, tokenizer, has_turns, positions)

    setup = replace(setup, account=account, packing=packing, held_out=held_out, prompts=prompts)
    notices = [
        *splits.train.notices,
        *(splits.eval.notices if splits.eval else ()),
        *template_notices,
        *pair_notices,
        *setup_notices(setup, config.max_length, positions, template_notices),
        *final_notices,
    ]
    return replace(setup, notices=tuple(notices))


def _check_names(recipe: Recipe, model_config: Any) -> None:
    """Check the recipe's names of weights and matrices on the model without weights.
    Raises UserError.
    """
    # Only where the recipe names weights or matrices: to build a large model takes seconds, even
    # without weights.
    routing, logged = recipe.optimizer.routing, recipe.run.log_spectra
    records = logged.steps and recipe.optimizer.spectral_map
    if not (routing.get("split") or records):
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


def _check_schedule(config: Any) -> None:
    """Raise UserError if transformers refuses lr_scheduler_kwargs. config: TRL's."""
    # A schedule of ten steps of a single number: transformers checks these values nowhere but in
    # the schedule itself, after the model is loaded.
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    settings = config.lr_scheduler_kwargs or {}
    place = "trainer.lr_scheduler_type and lr_scheduler_kwargs"
    # It refuses some values as it makes the schedule, and others as it steps it.
    with as_user_error(place, ValueError, TypeError, ArithmeticError):
        schedule = get_scheduler(
            config.lr_scheduler_type, optimizer, 1, 10, scheduler_specific_kwargs=settings
        )
        # These two step by a loss, of which there is none here.
        if not isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau | GreedyLR):
            optimizer.step()
            schedule.step()


def _count_training(
    setup: TrainingSetup, config: Any, num_ranks: int
) -> tuple[data.DatasetStats, Packing | None]:
    """Count the training examples. Raises UserError if there are none. config: TRL's."""
    recipe, train = setup.recipe, setup.splits.train
    packs = getattr(config, "packing", False)
    counts, packing = _count(setup, config, setup.tokens.train, train.source_indices, packs=packs)
    if counts.num_kept == 0:
        raise UserError(
            f"{train.source['path']}: none of {counts.num_examples} examples can be trained on: "
            f"{describe_dropped(counts.dropped)}; raise trainer.max_length ({config.max_length}), "
            "or fix the data"
        )
    if counts.labels:
        counts.labels.refuse_one_class(train.source["path"])
    num_examples = packing.num_sequences if packing else counts.num_kept
    micro_batch = trainer_value(recipe, "per_device_train_batch_size") * num_ranks
    drops = setup.stream is None and drops_last(recipe, num_ranks)
    if drops and num_examples < micro_batch:
        start, remedy = "data.train: ", "train in fewer processes, or"
        if recipe.trainer.get(key := "dataloader_drop_last"):
            start, remedy = f"trainer.{key}: would drop all data, as ", "remove this key, or"
        raise UserError(
            f"{start}{num_examples} {batch_unit(recipe)} are less than one batch of {micro_batch}"
            f" in {num_ranks} process{'es' * (num_ranks > 1)}; {remedy} lower"
            " trainer.per_device_train_batch_size"
        )
    return counts, packing


def _count_held_out(setup: TrainingSetup, config: Any) -> HeldOutCounts | None:
    """Count the held-out examples; None if there are none. Raises UserError if none can be
    evaluated. config: TRL's.
    """
    evaluation = setup.splits.eval
    if not evaluation:
        return None
    # TRL's own rule: held-out examples are packed as the training examples are, unless eval_packing
    # is set.
    packs = getattr(config, "eval_packing", None)
    packs = getattr(config, "packing", False) if packs is None else packs
    counts, _ = _count(setup, config, setup.tokens.eval, (), packs=packs)
    dropped = evaluation.dropped | counts.dropped
    if counts.num_trained_tokens == 0:
        reasons = f": {text}" if (text := describe_dropped(dropped)) else ""
        raise UserError(
            f"data.eval: none of the {evaluation.num_examples:,} held-out examples of "
            f"{evaluation.source['path']} can be evaluated{reasons}; raise trainer.max_length "
            f"({config.max_length}), or fix the data"
        )
    return HeldOutCounts(
        evaluation.num_examples,
        counts.num_kept,
        dropped,
        counts.num_truncated,
        counts.num_truncated_tokens,
        counts.num_tokens,
    )


def _count(
    setup: TrainingSetup, config: Any, tokens: Any, source_indices: Sequence[int], *, packs: bool
) -> tuple[data.DatasetStats, Packing | None]:
    """Count examples and their tokens, after packing if they are packed. config: TRL's."""
    # Packed examples are counted after packing: max_length cuts sequences then, not examples.
    masks, max_length = (data.LossMasks(), None) if packs else (None, config.max_length)
    counts = data.dataset_stats(
        tokens,
        setup.recipe.data_task,
        setup.tokenizer,
        max_length=max_length,
        source_indices=source_indices,
        masks=masks,
    )
    if masks is None or not masks.masks:
        return counts, None
    packing = pack(masks, config)
    # If every example is cut, none keeps its stop token.
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
    # Before the model is loaded: on a GPU the lookup would end in an assertion that names no token.
    vocab_size = getattr(model_config.get_text_config(), "vocab_size", None)
    pad_token = padding_token(tokenizer, own_pad_token)
    pad_id = None if pad_token is None else tokenizer.convert_tokens_to_ids(pad_token)
    for finding, token_id in {
        "examples have token": max_token_id,
        "the padding is token": pad_id,
    }.items():
        if isinstance(vocab_size, int) and token_id is not None and token_id >= vocab_size:
            raise UserError(
                f"model.tokenizer: {finding} {token_id:,}, but the model's vocab_size is only "
                f"{vocab_size:,}, because the tokenizer or its chat template is that of another "
                "model, or was changed; restore the model's files"
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
        raise UserError(
            f"model.attn_implementation: {name} cannot be used:"
            f" {first_sentence(error).rstrip('.')}. Remove this key to let transformers choose; for"
            " flash attention, install the package flash-attn or kernels"
        ) from error


def load_splits(recipe: Recipe) -> Splits[data.LoadedSplit]:
    """Load the recipe's data; `train` is a data.Preview of a stream.

    Raises UserError if only one of both has turns, or texts have different columns.
    """
    evaluation, streaming, held_out = recipe.data.eval, recipe.data.streaming, None
    task, seed = recipe.data_task, recipe.trainer.get("seed", 42)
    # Hold out before mixing: an example that a weight repeats would otherwise be in both parts.
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
        if TASKS[recipe.task].keeps_order:  # a file may begin with all answers of one label
            train = data.shuffled(train, seed)
    if isinstance(evaluation, DataSplit):
        # Of a dataset on the hub, no more than these examples is downloaded.
        if streaming is not None and evaluation.limit:
            held_out = data.open_split(TrainSplit(**evaluation.model_dump()), task).first(
                evaluation.limit
            )
        else:
            held_out = data.load_split(evaluation, task)
    # One collator serves both: turns and plain texts have other columns.
    if held_out and held_out.kind != train.kind:
        raise UserError(
            f"data.eval: has {held_out.layout}, but data.train has {train.layout}; use data of "
            "the same kind"
        )
    if recipe.task == "pretrain" and train.dataset.column_names != ["text"]:
        raise UserError(
            f"data.train: {train.source['path']} has {train.layout}, but pretrain needs plain "
            "texts; name data with a column `text` or .txt files, or run `soren-align sft`"
        )
    return Splits(train, held_out)


def tokenize_splits(
    recipe: Recipe,
    splits: Splits[data.LoadedSplit],
    tokenizer: Any,
    on_examples: Callable[[int, int], object] | None = None,
) -> tuple[Splits[data.LoadedSplit], Splits[Any]]:
    """Return both splits and their tokens, without examples that teach empty answers.
    on_examples: of the training examples.
    """
    cache = default_cache_folder() if recipe.data.cache and not recipe.data.streaming else None

    # Streams are not cached: only their first examples are tokenized here, to count them.
    def tokenized(split: data.LoadedSplit, report: Any) -> tuple[data.LoadedSplit, Any]:
        tokens = data.tokenize(
            split.dataset,
            recipe.data_task,
            tokenizer,
            cache,
            *loss_of(recipe),
            report,
            recipe.trainer.get("dataset_num_proc"),
        )
        return data.without_empty_answers(split, tokens, template_remedy(tokenizer))

    train, train_tokens = tokenized(splits.train, on_examples)
    if splits.eval is None:
        return Splits(train), Splits(train_tokens)
    held_out, evaluation = tokenized(splits.eval, None)
    if recipe.data.eval_tokens:
        num_examples = _num_with_tokens(evaluation, recipe, recipe.data.eval_tokens)
        evaluation = evaluation.select(range(num_examples))
    if recipe.data.eval_part:
        if len(evaluation) < 2:
            raise UserError(
                "data.eval: has 1 example, and a study splits the held-out examples; hold out 100 "
                "or more"
            )
        # The even examples choose, the odd ones judge.
        first = int(recipe.data.eval_part == "verdict")
        evaluation = evaluation.select(range(first, len(evaluation), 2))
    return Splits(train, held_out), Splits(train_tokens, evaluation)


def _num_with_tokens(tokens: Any, recipe: Recipe, num_tokens: int) -> int:
    """Return how many of the first examples have so many predicted tokens, or the number of all."""
    max_length = None if recipe.trainer.get("packing") else trainer_value(recipe, "max_length")
    batches = (
        data.from_token_columns(batch, recipe.data_task) for batch in tokens.iter(data.BATCH_SIZE)
    )
    numbers = (
        sum(sum(side.truncated(max_length).trained[1:]) for side in example.sides)
        for example in chain.from_iterable(batches)
    )
    # At the first example that reaches the number: no example is cut in two.
    totals = enumerate(accumulate(numbers), 1)
    return next((number for number, total in totals if total >= num_tokens), len(tokens))


def loss_of(recipe: Recipe) -> tuple[bool, bool]:
    """(assistant_only_loss, completion_only_loss), as `encode` takes them."""
    trainer = recipe.trainer
    return (
        bool(trainer.get("assistant_only_loss")),
        trainer.get("completion_only_loss") is not False,
    )


def trl_arguments(recipe: Recipe, output_dir: Path, ranks: Ranks) -> Any:
    """Return TRL's config object for one of `ranks`: the recipe's `trainer` section, and the keys
    derived from others.

    Raises UserError if TRL refuses a value, if there is no GPU and no `use_cpu`, and if the
    launcher started another number of processes than accelerate sees.
    """
    on_cpu = bool(recipe.trainer.get("use_cpu"))
    if not (on_cpu or torch.accelerator.is_available()):
        raise UserError(
            "trainer.use_cpu: this machine has no GPU; write trainer.use_cpu: true and "
            "trainer.bf16: false"
        )
    shared = parallel(recipe.run.parallel) if ranks.launched else Parallel("ddp")
    # Derived: keys that other sections own, so that no value stands in a recipe twice.
    derived: dict[str, Any] = {
        "output_dir": str(output_dir),
        # Only for TRL's logs: the optimizer gets the recipe's section.
        "learning_rate": recipe.optimizer.lr,
        "weight_decay": recipe.optimizer.weight_decay,
        "disable_tqdm": True,
        "gradient_accumulation_steps": accumulation(recipe, ranks.num_ranks),
    }
    # DeepSpeed starts before TRL's config, which sets up the processes through it.
    if shared.kind == "zero":
        with as_user_error("run.parallel", ImportError):
            start_deepspeed(on_cpu)
        derived["deepspeed"] = shared.config
    if shared.kind == "fsdp2":
        # transformers has another name for accelerate's fsdp_offload_params
        offloads = shared.config.get("offload_params")
        derived |= {"fsdp": True, "fsdp_config": {**shared.config, "cpu_offload": offloads}}
    if recipe.data_task == "sft":
        # The tokens have their labels; TRL would ask for conversations.
        derived["assistant_only_loss"] = False
    # transformers would have DDP search the graph for parameters without a gradient at every step.
    defaults: dict[str, Any] = {"ddp_find_unused_parameters": False}
    # The other ranks' libraries are as quiet as those of the first.
    defaults["log_level_replica"] = "passive"
    defaults["run_name"] = RunFolder(recipe.run.output_dir).name
    if recipe.run.early_stopping:
        # As transformers does, but only with load_best_model_at_end.
        defaults["metric_for_best_model"] = "loss"
    if shared.kind == "fsdp2":
        # Otherwise FSDP2 keeps whole gradients until the last micro-batch of a step, instead of 1/N
        # of them.
        defaults["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    # TRL's own class checks the values, by the version that is installed.
    with as_user_error("trainer", ValueError, TypeError, ImportError):
        config = getattr(trl, TASKS[recipe.task].config)(
            **{**defaults, **recipe.trainer, **derived}
        )
    if config.world_size != ranks.num_ranks:
        # Such as under `accelerate launch --cpu`: each process would train alone on all examples,
        # without a warning.
        raise UserError(
            f"the launcher started {ranks.num_ranks} processes, but the trainer found "
            f"{config.world_size}; start the processes with --processes N or with torchrun"
        )
    return config
