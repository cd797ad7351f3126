"""Examples in datasets: the features of converted ones, reading without decoding, and several
datasets as one.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    Json,
    List,
    Value,
    concatenate_datasets,
    config,
)
from datasets.fingerprint import Hasher
from datasets.iterable_dataset import ExamplesIterable

from ..core.errors import UserError
from ..tasks import OPTIONS, TASKS
from .cache import BATCH_SIZE, cache_key, cached, folder_errors, uncached
from .turns import plain_turns, without_nulls


def features_of(names: Sequence[str], has_turns: bool) -> Features:
    """The features of converted examples: texts, or lists of turns."""
    # Turns with tool calls have other keys than those without; JSON holds both.
    types: dict[str, Any] = {name: List(Json()) for name in names} if has_turns else {}
    types |= {name: Value("string") for name in names if name not in types or name in OPTIONS}
    types |= {
        name: Value(kind)
        for task in TASKS.values()
        for name, kind in task.passed_on.items()
        if name in names
    }
    return Features(types)


def without_filled_keys(row: dict[str, Any]) -> dict[str, Any]:
    """A row of Arrow's without the nulls of its objects. JSON, in a file or as text in a column,
    keeps the nulls that it has.
    """
    return {column: without_nulls(value) for column, value in row.items()}


def examples_of(dataset: Dataset) -> Iterator[dict[str, Any]]:
    """The examples, read without decoding. Raises UserError if the files are damaged."""
    batches: Any = dataset.with_format("arrow").iter(batch_size=1000)
    # Json features are parsed here: `datasets`' own decoding keeps ten digits of a float and fails
    # on integers above 2^64 (notes/log.md).
    lists = [name for name, feature in dataset.features.items() if feature == List(Json())]
    try:
        for batch in batches:
            for example in batch.to_pylist():
                yield without_filled_keys(example) | {
                    name: [json.loads(turn) for turn in example[name]]
                    for name in lists
                    if example[name]
                }
    # ValueError: text that is not UTF-8
    except (pa.ArrowException, ValueError, OverflowError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        remedy = "remove these files from the cache, then rerun"
        raise UserError(f"the dataset's Arrow files cannot be read: {reason}; {remedy}") from None


def dataset_of(rows: Sequence[dict[str, Any]]) -> Dataset:
    """The rows, equal in their keys, as a dataset in memory."""
    return Dataset.from_list(list(rows))


def iterable_dataset(rows: Callable[[], Iterator[dict[str, Any]]]) -> IterableDataset:
    """The rows as a dataset without a length, which calls `rows` for each iteration."""
    return IterableDataset(ExamplesIterable(lambda: enumerate(rows()), {}))


def filtered(dataset: Any, is_kept: Callable[[Any], bool]) -> Any:
    """The examples of a dataset, or of one without a length, that are kept."""
    if isinstance(dataset, IterableDataset):
        return dataset.filter(is_kept)
    # By indices in memory: `Dataset.filter` would write a file beside the tokens.
    indices = [i for i, example in enumerate(dataset) if is_kept(example)]
    return dataset if len(indices) == len(dataset) else dataset.select(indices)


def token_lengths(dataset: Dataset) -> list[int]:
    """The tokens of each tokenized example; of a pair, of its longer side.

    By Arrow, which knows them: transformers would decode all tokens, on every rank.
    """
    columns = [name for name in dataset.column_names if name.endswith("_ids")]
    lengths: list[int] = []
    batches: Any = dataset.select_columns(columns).with_format("arrow").iter(BATCH_SIZE)
    for batch in batches:
        own = {
            name: pc.call_function("list_value_length", [batch[name]]).to_numpy()
            for name in columns
        }
        if "prompt_ids" in own:
            answers = [own[name] for name in columns if name != "prompt_ids"]
            lengths += (own["prompt_ids"] + np.maximum.reduce(answers)).tolist()
        else:
            lengths += own["input_ids"].tolist()
    return lengths


def with_other_answers(dataset: Dataset, size: int) -> Dataset:
    """Labelled answers as tokens, with the answer to another prompt: that of the example before, in
    the same batch of `size`.
    """

    def rotated(batch: dict[str, Any]) -> dict[str, Any]:
        own = batch["completion_ids"]
        return {"KL_completion_ids": [own[-1], *own[:-1]]}

    with uncached():
        name = Hasher.hash((dataset._fingerprint, size))
        made = dataset.map(rotated, batched=True, batch_size=size, new_fingerprint=name)
    # Each process has this copy in a folder of its own. What TRL caches beside a dataset, such as
    # log-probabilities, lies beside the tokens, where all ranks and a resumed run find it.
    vars(made)["_get_cache_file_path"] = dataset._get_cache_file_path
    return made


def filled(dataset: Any, number: int) -> Dataset:
    """The tokenized examples, and behind them `number` short ones without a label."""
    filler = {"input_ids": dataset[0]["input_ids"][:2], "labels": [-100, -100], "seq_lengths": [2]}
    columns = {name: [filler[name]] * number for name in dataset.column_names}
    return concatenate_datasets([dataset, Dataset.from_dict(columns, dataset.features)])


def has_turns(dataset: Dataset) -> bool:
    """Whether the columns contain lists of turns, and not texts."""
    return not all(isinstance(feature, Value) for feature in dataset.features.values())


def concatenated(datasets: Sequence[Dataset]) -> Dataset:
    """The examples of datasets of one kind, with the same columns for all: null where there are
    none, as `load_split` makes them of a file.
    """
    names = list(dict.fromkeys(name for dataset in datasets for name in dataset.column_names))
    canonical = []
    for dataset in datasets:
        features = features_of(names, has_turns(dataset))
        # Arrow concatenates equal schemas only: a source without tools gets a column of nulls.
        if dataset.features.arrow_schema != features.arrow_schema:
            parts = (dataset._fingerprint, "canonical", names)
            dataset = cached_examples(parts, features, partial(_canonical, dataset, names))
        canonical.append(dataset)
    return concatenate_datasets(canonical)


def _canonical(dataset: Dataset, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for example in examples_of(dataset):
        yield dict.fromkeys(names) | {
            name: plain_turns(value) if isinstance(value, list) else value
            for name, value in example.items()
        }


def cached_examples(
    parts: Sequence[Any], features: Features, examples: Callable[[], Iterable[Any]]
) -> Dataset:
    """The examples as a dataset in the datasets cache. parts: all that determines them.
    Raises UserError if it cannot be written there.
    """
    root = Path(config.HF_DATASETS_CACHE) / "soren-align"

    def batches() -> Iterator[dict[str, list[Any]]]:
        rows = iter(examples())
        while batch := list(islice(rows, BATCH_SIZE)):
            yield {name: [row[name] for row in batch] for name in features}

    with folder_errors(root, "examples", "set HF_DATASETS_CACHE to another folder"):
        return cached(root, cache_key(*parts), features, batches)
