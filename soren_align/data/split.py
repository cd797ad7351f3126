"""One split, from a local file or from the hub, reduced to the columns that TRL needs and checked row by row.

Nothing that cannot be trained on gets past here: every bad row is counted and the first few are named.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import pyarrow as pa
from datasets import Dataset, Features, List, Value, config
from datasets.exceptions import DatasetGenerationError

from .. import shipped
from ..errors import UserError
from ..recipe import is_local
from ..silence import quiet_libraries
from . import columns, hub, rows, turns
from .columns import Layout, Task

NUM_NAMED = 5
"""So many bad rows are named; the rest are counted."""


class Split(Protocol):
    """Where rows are; soren_align.recipe.DataSplit is one."""

    path: str
    split: str
    limit: int | None
    revision: str | None
    bad_rows: Literal["refuse", "drop"]


@dataclass(frozen=True)
class Loaded:
    """Rows ready for TRL, and where they came from."""

    dataset: Dataset
    """Exactly the columns that TRL needs: see data.columns."""
    layout: str
    """What was recognised, in words: "chat messages (ultrachat_200k)"."""
    num_rows: int
    """As read, with those that were dropped."""
    dropped: dict[str, int]
    """Bad rows left out, reason -> number; empty unless `bad_rows` is drop."""
    source: dict[str, Any]
    """For run.json: path, split, sha256 of a file or revision of a hub dataset, columns dropped; of a mixture all of
    this for each of its `sources`."""
    notices: tuple[str, ...] = ()
    """What a person should know and nothing stops for."""
    parts: tuple[int, ...] = ()
    """Of a mixture: for each row the number of the source that it came from, from 0."""

    @property
    def kind(self) -> tuple[bool, set[str]]:
        """What must be equal for rows to stand side by side: whether there are turns in the columns, and which."""
        return has_turns(self.dataset), set(self.dataset.column_names)


def load_split(spec: Split, task: Task) -> Loaded:
    """The rows that `spec` names, for `task`; UserError with everything that is wrong with them.

    A local file touches no network. It is converted once into the datasets cache, under its content's hash, and
    memory-mapped from there, so that several ranks share it and a changed file is always read anew.
    """
    if spec.limit is not None and spec.limit < 1:
        raise UserError(f"{spec.path}: limit is {spec.limit}; write 1 or more, or leave it out for every row")
    with quiet_libraries():
        read = _from_file if is_local(spec.path) else _from_hub
        dataset, layout, dropped, origin = read(spec, task)
    num_rows = len(dataset) + sum(dropped.values())
    notices = ()
    if spec.limit is not None and num_rows < spec.limit:
        notices = (f"{spec.path}: limit is {spec.limit}, there are {num_rows} rows; all are taken",)
    source = {"path": spec.path, **origin, "columns_dropped": list(layout.dropped), "num_rows": num_rows}
    return Loaded(dataset, layout.words, num_rows, dropped, source, notices)


def _from_file(spec: Split, task: Task) -> tuple[Dataset, Layout, dict[str, int], dict[str, Any]]:
    file = _existing_file(spec)
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    layout = columns.recognise(_sample((row for _, row in rows.read_rows(file)), task), task, spec.path)

    between = ":" if rows.in_lines(file) else " row "

    def numbered() -> Iterator[tuple[str, Any]]:
        return ((f"{spec.path}{between}{n}", row) for n, row in islice(rows.read_rows(file), spec.limit))

    key = _key(sha256, file.suffix, task, spec.limit, spec.bad_rows)
    try:
        good_rows = partial(_good_rows, numbered, layout, task, spec.path, spec.bad_rows)
        features = _features(layout.kept, layout.has_turns)
        dataset = Dataset.from_generator(good_rows, features=features, fingerprint=key)
    except (DatasetGenerationError, OSError) as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        if isinstance(cause, UserError):
            raise cause from None
        if not isinstance(cause, OSError):
            raise
        where = config.HF_DATASETS_CACHE
        raise UserError(f"{spec.path}: cannot be cached in {where} (HF_DATASETS_CACHE): {cause}") from None
    return dataset, layout, _dropped(numbered(), layout, spec), {"split": "all", "sha256": sha256}


def _sample(every: Iterable[Any], task: Task) -> dict[str, Any]:
    """A row to tell the form by: the first object, or one after it that leaves no column empty."""
    objects = list(islice((row for row in every if isinstance(row, dict)), 50))
    whole = (row for row in objects if None not in row.values())
    return next(whole, objects[0] if objects else dict.fromkeys(columns.COLUMNS[task]))


def _features(kept: Sequence[str], has_turns: bool) -> Features:
    chat = List({"role": Value("string"), "content": Value("string")})
    return Features({column: chat if has_turns else Value("string") for column in kept})


def _key(*what: Any) -> str:
    # The rules are part of the key: rows that an older rule let through are checked again.
    rules = b"".join(Path(m).read_bytes() for m in (columns.__file__, turns.__file__, rows.__file__, __file__))
    return hashlib.sha256(repr(what).encode() + rules).hexdigest()[:32]


def _existing_file(spec: Split) -> Path:
    file = shipped.resolve(spec.path)
    if not file.exists():
        raise UserError(f"{spec.path}: no such file; paths start at the working directory, {Path.cwd()}")
    if file.is_dir():
        raise UserError(f"{spec.path}: is a folder; name one file in it ({', '.join(rows.SUFFIXES)})")
    if not file.is_file():
        raise UserError(f"{spec.path}: is no regular file")
    if file.suffix not in rows.SUFFIXES:
        raise UserError(f"{spec.path}: cannot read '{file.suffix}' files; write one of {', '.join(rows.SUFFIXES)}")
    if not os.access(file, os.R_OK):
        raise UserError(f"{spec.path}: may not be read; see its permissions")
    if spec.revision is not None:
        raise UserError(f"{spec.path}: is a file and has no revision '{spec.revision}'; leave revision out")
    return file


def _good_rows(
    numbered: Callable[[], Iterable[tuple[str, Any]]], layout: Layout, task: Task, where: str, bad_rows: str
) -> Iterator[dict[str, Any]]:
    """Every good row, reduced; at the end a UserError if there was none, or a bad one that must not be dropped."""
    named: list[str] = []
    num_rows = num_bad = 0
    for place, row in numbered():
        num_rows += 1
        found = _read(row, layout)
        if not isinstance(found, str):
            yield found
        else:
            num_bad += 1
            if num_bad <= NUM_NAMED:
                named.append(f"  {place}: {found}")
    if num_rows == 0:
        raise UserError(f"{where}: has no rows")
    if num_bad == num_rows or (num_bad > 0 and bad_rows == "refuse"):
        more = [f"  and {num_bad - NUM_NAMED} more"] if num_bad > NUM_NAMED else []
        remedy = " (mend them, or write bad_rows: drop beside the path)" if num_bad < num_rows else ""
        head = f"{where}: {num_bad} of {num_rows} rows cannot be used for {task}{remedy}:"
        raise UserError(head, *named, *more)


def _read(row: Any, layout: Layout) -> dict[str, Any] | str:
    return row.reason if isinstance(row, rows.Unreadable) else columns.read_row(row, layout)


def _dropped(numbered: Iterable[tuple[str, Any]], layout: Layout, spec: Split) -> dict[str, int]:
    """Reasons of the rows that `_good_rows` left out: counted anew, since a cached dataset does not know them."""
    if spec.bad_rows == "refuse":
        return {}
    found = (_read(row, layout) for _, row in numbered)
    return dict(Counter(re.sub(r"\[\d+\]", "", f) for f in found if isinstance(f, str)).most_common())


def _from_hub(spec: Split, task: Task) -> tuple[Dataset, Layout, dict[str, int], dict[str, Any]]:
    where = f"{spec.path} ({spec.split})"
    dataset, revision = hub.fetch(spec.path, spec.split, spec.revision)
    if spec.limit is not None:
        dataset = dataset.select(range(min(spec.limit, len(dataset))))
    layout = columns.recognise(_sample(_rows(dataset.select(range(min(50, len(dataset))))), task), task, where)
    dataset = dataset.select_columns(list(layout.reads))

    def numbered() -> Iterator[tuple[str, Any]]:
        return ((f"{where} row {n}", row) for n, row in enumerate(_rows(dataset), start=1))

    for _ in _good_rows(numbered, layout, task, where, spec.bad_rows):
        pass
    dropped = _dropped(numbered(), layout, spec)
    origin = {"split": spec.split, "revision": revision}
    if dropped:
        dataset = dataset.select(
            [i for i, (_, row) in enumerate(numbered()) if not isinstance(_read(row, layout), str)]
        )
    return dataset if layout.reads == layout.kept else _rewritten(dataset, layout), layout, dropped, origin


def _rows(dataset: Dataset) -> Iterator[dict[str, Any]]:
    batches: Any = dataset.with_format("arrow").iter(batch_size=1000)
    try:
        for batch in batches:
            yield from batch.to_pylist()
    except (pa.ArrowException, ValueError, OverflowError) as error:  # ValueError: texts that are not UTF-8
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"the dataset's Arrow files cannot be read: {said}") from None


def _rewritten(dataset: Dataset, layout: Layout) -> Dataset:
    """The good rows of a hub dataset in TRL's columns; written once into the datasets cache."""
    return dataset.map(
        partial(columns.read_row, layout=layout),
        remove_columns=dataset.column_names,
        features=_features(layout.kept, layout.has_turns),
        new_fingerprint=_key(dataset._fingerprint, layout.words),
        load_from_cache_file=True,
    )


def has_turns(dataset: Dataset) -> bool:
    """Whether the columns hold lists of turns, and not texts."""
    return not any(isinstance(feature, Value) for feature in dataset.features.values())


def canonical(dataset: Dataset) -> Dataset:
    """The same rows with turns of exactly {role, content}, as they must be to stand beside others."""
    features = _features(dataset.column_names, has_turns(dataset))
    if dataset.features.arrow_schema == features.arrow_schema:
        return dataset
    key = _key(dataset._fingerprint, "canonical")
    with quiet_libraries():
        return dataset.map(columns.bare, features=features, new_fingerprint=key, load_from_cache_file=True)
