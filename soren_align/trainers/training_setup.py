"""All checks of a recipe that need no model: starting checkpoint, tokenizer, data, learning-rate schedule."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, get_scheduler
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.optimization import GreedyLR

from ..data import account, check_template, hold_out, load_split, mix
from ..errors import UserError
from ..manifest import describe_dropped
from ..recipe import HeldOut, Recipe, refuse_no_batch
from ..run_folder import RunFolder
from ..sharding.ranks import Ranks
from . import adapters
from .library_errors import as_user_error
from .starting_model import load_tokenizer, refuse_other_models, starting_checkpoint
from .trl_arguments import trl_arguments


@dataclass(frozen=True)
class TrainingSetup:
    """A checked recipe with everything that training loads before the model."""

    recipe: Recipe
    start: str
    """Folder or hub name of the starting checkpoint."""
    tokenizer: Any
    splits: dict[str, Any]
    """{"train": data.LoadedSplit, "eval": data.LoadedSplit or None}"""
    account: Any
    """data.Account of the training examples; None on all ranks but the first."""
    notices: tuple[str, ...] = ()
    """Findings about data and template that do not stop the run."""


def set_up_training(
    recipe: Recipe,
    folder: RunFolder,
    on_examples: Callable[[int], object] | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> TrainingSetup:
    """Load tokenizer and data, and check all that can be checked before the model is loaded.

    The examples are counted on the first rank only. Call it within `Ranks.first_goes_first`, so that the other ranks
    use the files that the first one cached. on_examples: called with the number of examples just counted.
    Raises UserError if the recipe cannot be trained.
    """
    unset_hf_deepspeed_config()  # of an earlier run in this process: models would be sharded while they load
    refuse_other_models(recipe)
    start = starting_checkpoint(recipe, folder)
    tokenizer = load_tokenizer(recipe, start)
    splits = load_splits(recipe)
    config = trl_arguments(recipe, folder.checkpoints, ranks)
    _check_schedule(config)
    if not ranks.is_first:
        return TrainingSetup(recipe, start, tokenizer, splits, None)
    assistant_only = bool(recipe.trainer.get("assistant_only_loss"))
    train = splits["train"].dataset
    completion_only = recipe.trainer.get("completion_only_loss")
    notices = check_template(tokenizer, recipe.task, assistant_only, train, completion_only)
    counts = account(
        train,
        recipe.task,
        tokenizer,
        max_length=None if recipe.trainer.get("packing") else config.max_length,  # packing truncates and drops nothing
        assistant_only_loss=assistant_only,
        completion_only_loss=completion_only is not False,
        source_indices=splits["train"].source_indices,
        on_examples=on_examples,
    )
    if counts.num_kept == 0:
        raise UserError(
            f"{splits['train'].source['path']}: none of {counts.num_examples} examples can be trained on: "
            f"{describe_dropped(counts.dropped)}. trainer.max_length is {config.max_length}"
        )
    refuse_no_batch(recipe, counts.num_kept, ranks.num_ranks)
    if not counts.stop_token_trained and not notices:
        notices = [f"the stop token is never trained: trainer.max_length {config.max_length} truncates every answer"]
    notices += _too_few_positions(recipe, start, counts.lengths["max"], config.max_length)
    return TrainingSetup(recipe, start, tokenizer, splits, counts, (*splits["train"].notices, *notices))


def load_splits(recipe: Recipe) -> dict[str, Any]:
    """Load the recipe's data: {"train": data.LoadedSplit, "eval": data.LoadedSplit or None}.

    Raises UserError if both are of different kinds.
    """
    evaluation = recipe.data.eval
    sources = [load_split(source, recipe.task) for source in recipe.data.sources]
    if isinstance(evaluation, HeldOut):
        sources, held_out = hold_out(sources, evaluation.fraction)
    else:
        held_out = load_split(evaluation, recipe.task) if evaluation else None
    train = mix(sources, recipe.data.sources, recipe.trainer.get("seed", 42))
    # TRL reads from the training data which tokens of both are trained.
    if held_out and held_out.kind != train.kind:
        raise UserError(f"data.eval: has {held_out.layout}, and data.train {train.layout}; evaluate on the same kind")
    return {"train": train, "eval": held_out}


def _check_schedule(config: Any) -> None:
    """Raise UserError for lr_scheduler_kwargs that transformers refuses when it makes the schedule or steps it."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    settings = config.lr_scheduler_kwargs or {}
    place = "trainer.lr_scheduler_type and lr_scheduler_kwargs"
    with as_user_error(place, ValueError, TypeError, ArithmeticError):
        schedule = get_scheduler(config.lr_scheduler_type, optimizer, 1, 10, scheduler_specific_kwargs=settings)
        if not isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau | GreedyLR):  # these step by a loss
            optimizer.step()
            schedule.step()


def _too_few_positions(recipe: Recipe, start: str, longest: int, max_length: int | None) -> list[str]:
    """Return a notice if examples have more tokens than the model has positions."""
    base, revision = adapters.base_model(start, recipe.model.revision)
    with as_user_error(f"model {recipe.model.name_or_path}"):
        config = AutoConfig.from_pretrained(base, trust_remote_code=False, revision=revision)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    length = max_length or longest
    length = length if recipe.trainer.get("packing") else min(longest, length)
    if not isinstance(positions, int) or length <= positions:
        return []
    return [
        f"examples have up to {length:,} tokens, but the model has {positions:,} positions; lower trainer.max_length"
    ]
