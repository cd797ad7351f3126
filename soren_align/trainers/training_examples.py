"""The examples that a recipe names: loaded, held out, mixed, and as tokens."""

from collections.abc import Callable
from typing import Any

from ..data import (
    BATCH_SIZE,
    LoadedSplit,
    Preview,
    from_token_columns,
    hold_out,
    load_split,
    mix,
    open_split,
    open_stream,
    tokenize,
    without_empty_answers,
)
from ..errors import UserError
from ..files import default_cache_folder
from ..recipe import DataSplit, HeldOut, HeldOutNumber, Recipe, TrainSplit, trainer_value


def tokenize_splits(
    recipe: Recipe, splits: dict[str, Any], tokenizer: Any, on_examples: Callable[[int], object] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(both splits, their tokens), without examples that teach empty answers. on_examples: of the training examples."""
    cache = default_cache_folder() if recipe.data.cache and not recipe.data.streaming else None
    remaining: dict[str, Any] = dict.fromkeys(splits)
    tokens: dict[str, Any] = dict.fromkeys(splits)
    for name, split in splits.items():
        if split:
            report = on_examples if name == "train" else None
            all_tokens = tokenize(split.dataset, recipe.data_task, tokenizer, cache, *loss_of(recipe), report)
            remaining[name], tokens[name] = without_empty_answers(split, all_tokens)
    if recipe.data.eval_tokens and tokens["eval"]:
        tokens["eval"] = _first_tokens(tokens["eval"], recipe.data.eval_tokens, recipe)
    return remaining, tokens


def _first_tokens(tokens: Any, number: int, recipe: Recipe) -> Any:
    """Return the first examples with so many predicted tokens, or all. tokens: Dataset."""
    max_length = None if recipe.trainer.get("packing") else trainer_value(recipe, "max_length")
    num_examples = num_tokens = 0
    for batch in tokens.iter(BATCH_SIZE):
        for example in from_token_columns(batch, recipe.data_task):
            if num_tokens >= number:
                return tokens.select(range(num_examples))
            num_tokens += sum(sum(side.truncated(max_length).trained[1:]) for side in example.sides)
            num_examples += 1
    return tokens


def loss_of(recipe: Recipe) -> tuple[bool, bool]:
    """(assistant_only_loss, completion_only_loss), as `encode` takes them."""
    trainer = recipe.trainer
    return bool(trainer.get("assistant_only_loss")), trainer.get("completion_only_loss") is not False


def load_splits(recipe: Recipe) -> dict[str, Any]:
    """Load the recipe's data: {"train": data.LoadedSplit, or data.Preview of a stream, "eval": data.LoadedSplit or
    None}.

    Raises UserError if only one of both has turns, or texts have different columns.
    """
    evaluation, is_streamed = recipe.data.eval, recipe.data.streaming is not None
    train, held_out = _load_stream(recipe) if is_streamed else _load_train(recipe)
    if isinstance(evaluation, DataSplit):
        if is_streamed and evaluation.limit:  # of a dataset on the hub, no more than these is downloaded
            held_out = open_split(TrainSplit(**evaluation.model_dump()), recipe.data_task).first(evaluation.limit)
        else:
            held_out = load_split(evaluation, recipe.data_task)
    if held_out and held_out.kind != train.kind:
        raise UserError(f"data.eval: has {held_out.layout}, and data.train {train.layout}; evaluate on the same kind")
    if recipe.task == "pretrain":
        _refuse_other_than_texts(train)
    return {"train": train, "eval": held_out}


def _refuse_other_than_texts(train: LoadedSplit) -> None:
    """Raise UserError if the examples are not plain texts."""
    if train.dataset.column_names != ["text"]:
        raise UserError(
            f"data.train: {train.source['path']} has {train.layout}; pretrain takes plain texts (a column `text`, or "
            ".txt files), and `soren-align sft` the others"
        )


def _load_train(recipe: Recipe) -> tuple[LoadedSplit, LoadedSplit | None]:
    """(the training examples, those of them that are held out)."""
    evaluation, held_out = recipe.data.eval, None
    sources = [load_split(source, recipe.data_task) for source in recipe.data.sources]
    if isinstance(evaluation, HeldOut | HeldOutNumber):
        sources, held_out = hold_out(sources, **evaluation.model_dump())
    return mix(sources, recipe.data.sources, recipe.trainer.get("seed", 42)), held_out


def _load_stream(recipe: Recipe) -> tuple[Preview, LoadedSplit | None]:
    """(the first training examples of a stream, some that are held out)."""
    evaluation, streaming = recipe.data.eval, recipe.data.streaming
    assert streaming is not None, "the caller checks"
    fraction = evaluation.fraction if isinstance(evaluation, HeldOut) else None
    seed = recipe.trainer.get("seed", 42)
    return open_stream(recipe.data.sources, recipe.data_task, streaming.shuffle_buffer, seed, fraction)
