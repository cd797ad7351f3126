"""The examples of a split as tokens, from the user's cache folder."""

import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from ..core.errors import UserError
from ..core.figures import short
from ..core.silence import quiet_libraries
from ..tasks import TASKS, TaskName
from .cache import cache_key, cached, folder_errors
from .encode import BATCH_SIZE, encode
from .masks import token_columns
from .parallel import default_processes, in_order
from .rendering import TEMPLATE_REMEDY
from .split import LoadedSplit
from .turns import CUT_ANSWER, EMPTY_ANSWER

_VERSIONS = ("transformers", "tokenizers", "jinja2", "datasets")
_IDS = List(Value("int32"))
CHUNK_SIZE = 8 * BATCH_SIZE
"""Examples of which a process returns the tokens together."""


def tokenize(
    dataset: Dataset,
    task: TaskName,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path | None,
    assistant_only_loss: bool = False,
    completion_only_loss: bool = True,
    on_examples: Callable[[int, int], object] | None = None,
    num_processes: int | None = None,
) -> Dataset:
    """The examples of a dataset from `load_split` as columns of tokens, before truncation:
    `masks.token_columns`.

    cache: the user's cache folder; None: a temporary folder, removed with the returned dataset.
    on_examples: called with the numbers of examples just tokenized or read, and of their tokens
    (0: read). num_processes: None:
    `default_processes`; any number writes the same bytes. Raises UserError if the template fails on
    an example, or the folder cannot be written.
    """
    passed_on, report = (
        TASKS[task].passed_on,
        on_examples or (lambda num_examples, num_tokens: None),
    )
    features = Features(
        {**dict.fromkeys(TASKS[task].token_columns, _IDS), "left_out": List(Value("string"))}
    )
    features |= {name: Value(kind) for name, kind in passed_on.items()}
    num_tokenized = 0

    def batches() -> Iterator[pa.Table]:
        nonlocal num_tokenized
        starts = range(0, len(dataset), CHUNK_SIZE)
        # A process costs as much as a thousand examples.
        number = min(num_processes or default_processes(), len(starts) // 4)
        for table in in_order(tokens_from, starts, number):
            num_tokenized += len(table)
            report(len(table), _num_tokens(table))
            yield table

    def tokens_from(start: int) -> pa.Table:
        chunk = dataset.select(range(start, min(start + CHUNK_SIZE, len(dataset))))
        tables = []
        for number, batch in enumerate(chunk.iter(BATCH_SIZE)):
            assert isinstance(batch, dict)
            texts = {name: values for name, values in batch.items() if name not in passed_on}
            try:
                columns = columns_of(texts)
            except UserError:
                _raise_with_place(texts, columns_of, start + number * BATCH_SIZE)
                raise
            columns |= {name: batch[name] for name in passed_on}
            tables.append(pa.table(columns, schema=features.arrow_schema))
        return pa.concat_tables(tables)

    def columns_of(texts: dict[str, list[Any]]) -> dict[str, list[Any]]:
        settings = (task, tokenizer, assistant_only_loss, completion_only_loss)
        return token_columns(encode(texts, *settings), task)

    # All of the tokenizer that changes tokens, but not its place.
    whole: Any = tokenizer
    words = (
        whole.backend_tokenizer.to_str()
        if whole.is_fast
        else [repr(whole), sorted(whole.get_vocab().items())]
    )
    special = sorted(whole.special_tokens_map.items())
    parts = [words, special, whole.chat_template, type(whole).__name__]
    settings = (task, assistant_only_loss, completion_only_loss)
    versions = [metadata.version(package) for package in _VERSIONS]
    key = cache_key(dataset._fingerprint, len(dataset), settings, parts, versions)

    root = Path(tempfile.mkdtemp(prefix="soren-align-")) if cache is None else cache / "tokens"
    remedy = (
        "set SOREN_ALIGN_CACHE to another folder, or write `cache: false` under data to use a "
        "temporary folder"
    )
    with folder_errors(root, "tokens", remedy), quiet_libraries():
        tokens = cached(root, key, features, batches)
    if cache is None:
        weakref.finalize(tokens, shutil.rmtree, root, ignore_errors=True)
    report(len(dataset) - num_tokenized, 0)
    return tokens


def _num_tokens(table: pa.Table) -> int:
    columns = [table.column(name) for name in table.column_names if name.endswith("_ids")]
    return sum(len(chunk.flatten()) for column in columns for chunk in column.chunks)


def _raise_with_place(
    texts: dict[str, list[Any]], work: Callable[[dict[str, list[Any]]], Any], start: int
) -> None:
    """Raise the UserError of the first example of a batch that has one by itself, with its place.
    start: the number of examples before the batch."""
    for i in range(len(next(iter(texts.values())))):
        own = {name: values[i : i + 1] for name, values in texts.items()}
        try:
            work(own)
        except UserError as error:
            begin = json.dumps([value for (value,) in own.values()], ensure_ascii=False)
            raise UserError(f"example {start + i + 1:,}, {short(begin, 80)}: {error}") from None


def without_empty_answers(
    split: LoadedSplit, tokens: Dataset, remedy: str = TEMPLATE_REMEDY
) -> tuple[LoadedSplit, Dataset]:
    """(the split, its tokens) without such examples, which are counted under `dropped`; unchanged
    if there are none.

    tokens: of `tokenize`, of the split's examples. remedy: for answers of which the template prints
    a part. Raises UserError if there are any, or if no example of a source is left.
    """
    rows = tokens["left_out"][:]
    if cut := [i for i, kinds in enumerate(rows) if CUT_ANSWER in kinds]:
        example: Any = split.dataset[cut[0]]
        answer = (example.get("messages") or example.get("completion") or example["chosen"])[-1]
        raise UserError(
            f"{split.source['path']}: {CUT_ANSWER}, in {len(cut):,} of {len(rows):,} examples, such"
            f" as in {answer['content'][:60]!r}; {remedy}"
        )
    indices = [i for i, kinds in enumerate(rows) if EMPTY_ANSWER not in kinds]
    if len(indices) == len(rows):
        return split, tokens
    # A source of a mixture that loses all of its examples is a mistake of the recipe, even where
    # the others are enough to train on.
    sources = tuple(split.source_indices[i] for i in indices) if split.source_indices else ()
    if not indices or set(sources) != set(split.source_indices):
        lost = set(split.source_indices) - set(sources)
        name = split.source["sources"][min(lost)]["path"] if lost else split.name
        raise UserError(
            f"{name}: in each example {EMPTY_ANSWER}; set model.chat_template to a template that"
            " prints tool calls, or remove this split"
        )
    dropped = {**split.dropped, EMPTY_ANSWER: len(rows) - len(indices)}
    rest = replace(
        split, dataset=split.dataset.select(indices), dropped=dropped, source_indices=sources
    )
    return rest, tokens.select(indices)
