"""Load splits from files or from the hub, convert them to TRL's columns, and check each example.

Nothing that cannot be trained on passes: all invalid examples are counted and the first few are
reported. Examples of loaded splits are then held out (`hold_out`), and several splits made one
(`mix`). Both depend only on examples, weights and one seed, so that all ranks, and a resumed run,
use the same examples.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value

from ..core.errors import UserError, did_you_mean
from ..core.silence import quiet_libraries
from ..recipe import STDLIB, DataSplit, TrainSplit, columns_text, is_local
from ..tasks import TASKS, TaskName
from . import formats, hub
from .arrow import cached_examples, concatenated, examples_of, features_of, has_turns
from .files import InvalidRecord, LocalFiles, LocalReader, StandardLibrary
from .formats import ColumnMapping, Example, Format

MAX_REPORTED = 5
"""Invalid examples that an error message lists; the others are counted."""
SAMPLE_SIZE = 50
"""First examples, among which one is taken to recognize the format."""
_REASON = "reason"
"""A column beside the examples of a cached file: why an example is dropped."""


@dataclass(frozen=True)
class LoadedSplit:
    """Examples ready for TRL, and their origin."""

    dataset: Dataset
    """The examples, with TRL's columns only: see data.formats."""
    layout: str
    """Description of the format: "chat messages (like ultrachat_200k)"."""
    num_examples: int
    """The number of examples as read, including dropped ones."""
    dropped: dict[str, int]
    """Number of invalid examples by reason; empty unless `bad_examples` is drop."""
    source: dict[str, Any]
    """The origin, for run.json: path, split, sha256 of a file or revision of a hub dataset, columns
    dropped; of a mixture all of this for each of its `sources`."""
    notices: tuple[str, ...] = ()
    source_indices: tuple[int, ...] = ()
    """The index of each example's source, in a mixture."""

    @property
    def name(self) -> str:
        """Path and split, for messages."""
        return f"{self.source['path']} ({self.source['split']})"

    @property
    def kind(self) -> frozenset[str] | None:
        """Equal for datasets of one task that can be concatenated: None for turns, the columns of
        plain texts.
        """
        return None if has_turns(self.dataset) else frozenset(self.dataset.column_names)


def load_split(spec: DataSplit, task: TaskName) -> LoadedSplit:
    """The examples of `spec` for `task`.
    Raises UserError with all problems if there are invalid ones.

    A local file needs no network. It is converted once into the datasets cache, under its content's
    hash, and memory-mapped from there, so that several ranks share it and a changed file is read
    again.
    """
    if spec.limit is not None and spec.limit < 1:
        raise UserError(
            f"{spec.path}: limit is {spec.limit}; write 1 or more, or remove limit to use all"
            " examples"
        )
    with quiet_libraries():
        # Files are read by our own readers, which name the line of a broken record; `datasets`
        # reads what is on the hub.
        load = _from_file if is_local(spec.path) else _from_hub
        dataset, data_format, dropped, origin = load(spec, task)
    num_examples = len(dataset) + sum(dropped.values())
    notices = unread_notices(spec, data_format)
    if spec.limit is not None and num_examples < spec.limit:
        notices += (
            f"{spec.path}: limit is {spec.limit}, but there are only {num_examples} examples;"
            " all are used",
        )
    source = source_record(spec, origin, data_format) | {"num_examples": num_examples}
    return LoadedSplit(dataset, data_format.description, num_examples, dropped, source, notices)


def unread_notices(spec: DataSplit, data_format: Format) -> tuple[str, ...]:
    """A notice about columns of text that reach no token, if the recipe does not list columns."""
    if formats.LABEL in data_format.unread_texts:
        return (
            f"{spec.path}: the column label has thumbs, which sft does not read: bad answers are"
            " trained like good ones. To learn from both, run `soren-align kto`",
        )
    if not data_format.unread_texts:
        return ()
    columns = columns_text(dict(zip(data_format.inputs, data_format.columns_read, strict=True)))
    return (
        f"{spec.path}: the model does not see the columns {', '.join(data_format.unread_texts)}. To"
        f" train on them, map them in `columns`; to hide this notice, write columns: {columns}",
    )


def source_record(spec: DataSplit, origin: dict[str, Any], data_format: Format) -> dict[str, Any]:
    """`LoadedSplit.source` without the number of examples."""
    names = {key: dict(value) for key in ("columns", "roles") if (value := getattr(spec, key))}
    return {"path": spec.path, **origin, **names, "columns_dropped": list(data_format.unused)}


def _from_file(
    spec: DataSplit, task: TaskName
) -> tuple[Dataset, Format, dict[str, int], dict[str, Any]]:
    """Return (dataset, format, dropped, origin) of local files."""
    local, data_format = local_files(spec, task)
    origin = local.origin()
    # All that determines the examples is part of the key: a changed rule must not find the old
    # cache.
    suffixes = [file.suffixes for file in local.files.values()]
    rules = (spec.bad_examples, spec.mask_history, data_format.mapping, data_format.outputs)

    def examples() -> Iterator[Example]:
        for _, example in checked(
            islice(LocalReader(local), spec.limit), data_format, spec, task, spec.path
        ):
            is_valid = isinstance(example, dict)
            yield (
                example | {_REASON: None}
                if is_valid
                else dict.fromkeys(data_format.outputs) | {_REASON: example}
            )

    features = features_of(data_format.outputs, data_format.has_turns) | {_REASON: Value("string")}
    parts = (origin["sha256"], suffixes, task, spec.limit, *rules)
    dataset = cached_examples(parts, Features(features), examples)
    # The reasons lie beside the examples in the cache, so that a second start reports them too.
    reasons = dataset[_REASON][:]
    dataset = dataset.remove_columns(_REASON)
    if dropped := [reason for reason in reasons if reason is not None]:
        dataset = dataset.select([i for i, reason in enumerate(reasons) if reason is None])
    return dataset, data_format, count_alike(dropped), origin


def local_files(spec: DataSplit, task: TaskName) -> tuple[LocalFiles, Format]:
    """The files of a split, and their format.
    Raises UserError if there are none, or of different formats.
    """
    for key in ("revision", "name"):
        if value := getattr(spec, key):
            raise UserError(
                f"{spec.path}: {key} is '{value}', but only datasets of the hub have a {key};"
                f" remove {key}"
            )
    local = (
        StandardLibrary.of_split(spec.split) if spec.path == STDLIB else LocalFiles.at(spec.path)
    )
    # Each file is recognized by its own first records.
    (name, first), *others = [
        (n, format_of(s, spec, task, n)) for n, s in local.samples(SAMPLE_SIZE)
    ]
    # A folder of mixed kinds would otherwise be read by the format of its first file.
    for other, data_format in others:
        if (data_format.read, data_format.outputs[0]) != (first.read, first.outputs[0]):
            raise UserError(
                f"{name} has {first.description}, but {other} has {data_format.description}; write"
                " a pattern for files of one kind, such as train*.jsonl, or write several splits"
            )
    # Only some of the files may have tools, or a system column.
    all_formats = [first, *(data_format for _, data_format in others)]
    for field in ("inputs", "outputs", "unused", "unread_texts"):
        names = dict.fromkeys(name for one in all_formats for name in getattr(one, field))
        first = first._replace(**{field: tuple(names)})
    return local, first


def _from_hub(
    spec: DataSplit, task: TaskName
) -> tuple[Dataset, Format, dict[str, int], dict[str, Any]]:
    """Return (dataset, format, dropped, origin) of a hub dataset.
    Examples that are as TRL takes them are not copied.
    """
    place = (
        f"{spec.path} ({spec.split})"
        if spec.name is None
        else f"{spec.path} ({spec.name}, {spec.split})"
    )
    # The limit comes before all else, so that `limit: 100` of a large dataset checks 100 examples.
    dataset, revision = hub.fetch(spec.path, spec.split, spec.revision, spec.name)
    if spec.limit is not None:
        dataset = dataset.select(range(min(spec.limit, len(dataset))))
    data_format = format_of(examples_of(dataset), spec, task, place)
    # Columns that are not trained on are not decoded.
    dataset = dataset.select_columns(data_format.columns_read)
    numbered = (
        (f"{place} record {i}", example) for i, example in enumerate(examples_of(dataset), start=1)
    )
    is_changed, reasons, valid = data_format.columns_read != list(data_format.outputs), [], []
    # One pass checks every example and finds out whether any differs from what TRL takes. Most hub
    # datasets differ in none, and are used from `datasets`' own cache without a copy.
    for i, (record, example) in enumerate(checked(numbered, data_format, spec, task, place)):
        if isinstance(example, str):
            reasons.append(example)
        else:
            is_changed |= example != record
            valid.append(i)
    if reasons:
        dataset = dataset.select(valid)
    if is_changed:  # written once into the datasets cache
        unchanged = dataset
        dataset = cached_examples(
            (
                dataset._fingerprint,
                data_format.description,
                data_format.mapping,
                data_format.mask_history,
            ),
            features_of(data_format.outputs, data_format.has_turns),
            lambda: (
                formats.read_example(example, data_format) for example in examples_of(unchanged)
            ),
        )
    origin = {"split": spec.split, "revision": revision} | (
        {"name": spec.name} if spec.name else {}
    )
    return dataset, data_format, count_alike(reasons), origin


def format_of(examples: Iterable[Any], spec: DataSplit, task: TaskName, place: str) -> Format:
    """Recognized by the first object, or a later one without empty columns.
    Raises UserError if there is none.
    """
    mapping = ColumnMapping.of(spec.columns, spec.roles)
    objects = list(
        islice((example for example in examples if isinstance(example, dict)), SAMPLE_SIZE)
    )
    if not objects:
        return formats.recognize(dict.fromkeys(TASKS[task].columns), task, place)
    columns = {column: None for example in objects for column in example}
    for ours, theirs in mapping.columns.items():
        if theirs not in columns:
            hint = did_you_mean(theirs, columns, "write one of these columns")
            raise UserError(
                f"{place}: columns.{ours} is '{theirs}', but the data have the columns"
                f" {', '.join(columns)}{hint}"
            )
    # An example without empty columns shows the whole format.
    example = next((example for example in objects if None not in example.values()), objects[0])
    # Often only some examples have tools, and the first ones none.
    names: dict[str, str] = {**spec.columns}
    for column in (names.get(name, name) for name in (*formats.BESIDE, *formats.ALPACA)):
        value = next((other[column] for other in objects if other.get(column)), None)
        example = example if value is None or column in example else {**example, column: value}
    data_format = formats.recognize(
        example, task, place, mapping, spec.apply_chat_template is not False
    )
    return data_format._replace(mask_history=spec.mask_history)


def checked(
    numbered: Iterable[tuple[str, Any]],
    data_format: Format,
    spec: DataSplit,
    task: TaskName,
    place: str,
) -> Iterator[tuple[Any, Example | str]]:
    """Each record, and its example in TRL's columns; or, as text, why it cannot be trained on.

    At the end raises UserError if no example is valid, or one that is not is to be refused.
    numbered: (place, record) pairs.
    """
    # Errors are raised at the end: all examples are counted, so that the message has the number of
    # wrong ones, and not only the first.
    reported: list[str] = []
    num_examples = num_invalid = 0
    for record_place, record in numbered:
        num_examples += 1
        example = read(record, data_format)
        if isinstance(example, str):
            num_invalid += 1
            if num_invalid <= MAX_REPORTED:
                names = ""
                # A column is missing: it may have another name, so that those that are there are
                # listed.
                if example.startswith("no ") and isinstance(record, dict):
                    columns = ", ".join(
                        str(key) for key, value in record.items() if value is not None
                    )
                    names = f", but the columns {columns[:200]}" * bool(columns)
                reported.append(f"  {record_place}: {example}{names}")
        yield record, example
    if num_examples == 0:
        raise UserError(f"{place}: has no examples; name other data")
    if num_invalid == num_examples or (num_invalid > 0 and spec.bad_examples == "refuse"):
        more = (
            [f"  ... and {num_invalid - MAX_REPORTED} more examples"]
            if num_invalid > MAX_REPORTED
            else []
        )
        remedy = "fix these examples" + ", or add bad_examples: drop to this split" * (
            num_invalid < num_examples
        )
        head = (
            f"{place}: {num_invalid} of {num_examples} examples cannot be used for {task};"
            f" {remedy}:"
        )
        raise UserError(head, *reported, *more)


def read(record: Any, data_format: Format) -> Example | str:
    """The record in TRL's columns; or, as text, why it cannot be trained on."""
    return (
        record.reason
        if isinstance(record, InvalidRecord)
        else formats.read_example(record, data_format)
    )


def count_alike(reasons: Iterable[str]) -> dict[str, int]:
    """The number of invalid examples by reason; those that differ in indices of turns are one."""
    by_reason = Counter(reasons)
    # Indices are only a burden where several reasons differ in nothing else; a single one helps to
    # find it.
    alike = Counter(map(without_indices, by_reason))
    counts: Counter[str] = Counter()
    for reason, number in by_reason.items():
        counts[reason if alike[without_indices(reason)] == 1 else without_indices(reason)] += number
    return dict(counts.most_common())


def without_indices(reason: str) -> str:
    """`chosen[i] and chosen[i+1] are both ...` of a reason with any indices of turns."""
    letters = iter(("[i]", "[i+1]"))  # no reason has more than two indices, and two are neighbours
    return re.sub(r"\[\d+\]", lambda _: next(letters), reason)


def hold_out(
    splits: Sequence[LoadedSplit], fraction: float | None = None, examples: int | None = None
) -> tuple[list[LoadedSplit], LoadedSplit]:
    """(the splits without the held-out examples, these examples of all splits).

    They are chosen by a hash of each. The choice depends on an example's content alone: it is the
    same wherever the example stands, whatever the other examples and the seed are, and a larger
    fraction holds out the examples of a smaller one too. A number is the fraction that has so many
    examples: as the data grows, examples return to training, and none is held out that was trained
    on.
    fraction: of each split, about; or examples: of all, those first by `position`, fewer where
    equal ones would be on both sides. Raises UserError if no example is held out, or all are of one
    split.
    """
    refuse_other_kinds(splits)
    key, number = ("fraction", fraction) if fraction is not None else ("examples", examples)
    positions = [
        np.array([position(example) for example in examples_of(split.dataset)]) for split in splits
    ]
    total = sum(map(len, positions))
    if examples is not None and examples >= total:
        remedy = "write a smaller number"
        raise UserError(
            f"data.eval.examples: {examples} is not below the number of examples, {total}; {remedy}"
        )
    # A number becomes the fraction that holds so many: equal examples lie on one side, all or none.
    end = fraction if examples is None else np.sort(np.concatenate(positions))[examples]
    remaining, chosen = [], []
    for split, own in zip(splits, positions, strict=True):
        is_held_out = own < end
        num_held_out = int(is_held_out.sum())
        if is_held_out.all():
            remedy = "write a smaller number"
            raise UserError(
                f"data.eval.{key}: {number:g} holds out all examples of {split.name}; {remedy}"
            )
        chosen.append(split.dataset.select(np.flatnonzero(is_held_out)))
        dataset = split.dataset.select(np.flatnonzero(~is_held_out))
        source = {**split.source, "num_held_out": num_held_out}
        remaining.append(
            replace(
                split,
                dataset=dataset,
                num_examples=split.num_examples - num_held_out,
                source=source,
            )
        )
    dataset = concatenated(chosen)
    if len(dataset) == 0:
        reason = (
            ""
            if examples is None
            else ", because equal examples are held out together or not at all"
        )
        remedy = "write a larger number"
        raise UserError(
            f"data.eval.{key}: {number:g} holds out none of {total} examples{reason}; {remedy}"
        )
    names, layouts = (
        " + ".join(split.name for split in splits),
        dict.fromkeys(split.layout for split in splits),
    )
    source = {"path": names, "split": "held out", key: number, "num_examples": len(dataset)}
    return remaining, LoadedSplit(dataset, "; ".join(layouts), len(dataset), {}, source)


def position(example: Example) -> float:
    """A number in [0, 1), uniform over examples: the first 53 bits of the SHA-256 of an example in
    TRL's columns.
    """
    # No tools are as without the column.
    example = {column: value for column, value in example.items() if value is not None}
    # Sorted: datasets of the hub have the keys of their turns in another order than files, and the
    # same example must be held out from both.
    text = json.dumps(example, sort_keys=True, ensure_ascii=False)
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 11) / 2**53


def mix(splits: Sequence[LoadedSplit], configs: Sequence[TrainSplit], seed: int) -> LoadedSplit:
    """The examples of all sources, shuffled: each `weight` times, a fraction by sampling without
    replacement.

    configs: of `splits`. A single source of weight 1 is returned unchanged. Raises UserError if
    only some of the sources have turns, or texts have different columns, or a weight leaves no
    example of one.
    """
    if len(splits) == 1 and configs[0].weight == 1:
        return splits[0]
    refuse_other_kinds(splits)
    generator = np.random.default_rng(seed)
    samples = []  # of each split the indices of its examples
    for split, source in zip(splits, configs, strict=True):
        number, repeats = len(split.dataset), int(source.weight)
        # Whole repeats are exact: only the fraction of a weight is drawn.
        fraction = generator.permutation(number)[: round((source.weight - repeats) * number)]
        samples.append(np.concatenate([np.tile(np.arange(number), repeats), fraction]))
    for split, source, sample in zip(splits, configs, samples, strict=True):
        if len(sample) == 0:
            raise UserError(
                f"data.train: a weight of {source.weight:g} leaves no example of {split.name};"
                " write a larger weight, or remove this split"
            )
    # Indices into the sources one after another, then shuffled: no example is copied, and one
    # generator makes the order the same on every rank.
    starts = np.cumsum([0, *(len(split.dataset) for split in splits[:-1])])
    order = generator.permutation(sum(map(len, samples)))
    indices = np.concatenate(
        [start + sample for start, sample in zip(starts, samples, strict=True)]
    )[order]
    source_indices = np.repeat(np.arange(len(samples)), [len(sample) for sample in samples])[order]
    sources = [
        {
            **s.source,
            "layout": s.layout,
            "dropped": s.dropped,
            "weight": source.weight,
            "num_sampled": len(sample),
        }
        for source, s, sample in zip(configs, splits, samples, strict=True)
    ]
    source = {"seed": seed, "num_examples": len(indices), "sources": sources}
    whole = LoadedSplit(**joined(splits, source), source_indices=tuple(source_indices.tolist()))
    num_examples = len(indices) + sum(whole.dropped.values())
    return replace(whole, dataset=whole.dataset.select(indices), num_examples=num_examples)


def shuffled(split: LoadedSplit, seed: int) -> LoadedSplit:
    """The examples in another order."""
    order = np.random.default_rng(seed).permutation(len(split.dataset)).tolist()
    sources = tuple(split.source_indices[i] for i in order) if split.source_indices else ()
    return replace(split, dataset=split.dataset.select(order), source_indices=sources)


def joined(splits: Sequence[LoadedSplit], source: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `LoadedSplit` of all examples of the splits.
    source: its keys, `path` aside.
    """
    return {
        "dataset": concatenated([split.dataset for split in splits]),
        "layout": "; ".join(dict.fromkeys(split.layout for split in splits)),
        "num_examples": sum(split.num_examples for split in splits),
        "dropped": dict(sum((Counter(split.dropped) for split in splits), Counter())),
        "source": {"path": " + ".join(split.name for split in splits), **source},
        "notices": tuple(notice for split in splits for notice in split.notices),
    }


def refuse_other_kinds(splits: Sequence[LoadedSplit]) -> None:
    """Raise UserError if only some of the sources have turns, or texts have different columns."""
    columns = [", ".join(split.dataset.column_names) for split in splits]
    if other := next((i for i, split in enumerate(splits) if split.kind != splits[0].kind), None):
        raise UserError(
            f"data.train: {splits[0].name} has {splits[0].layout} ({columns[0]}), but"
            f" {splits[other].name} has {splits[other].layout} ({columns[other]}), and these two"
            " formats cannot be mixed; use splits of one format"
        )
