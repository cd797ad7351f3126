"""One split, from a local file or from the hub, converted to TRL's columns and validated example by example.

Nothing that cannot be trained on passes: all invalid examples are counted and the first few are reported.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol

from datasets import Dataset, config
from datasets.exceptions import DatasetGenerationError

from ..core.errors import UserError
from ..core.silence import quiet_libraries
from ..recipe import STDLIB, is_local
from ..tasks import TASKS, TaskName
from . import files, formats, hub
from .arrow import cache_key, examples_of, features_of, has_turns
from .files import LocalFiles
from .formats import Example, Layout, Names
from .stdlib import StandardLibrary
from .tool_calls import OPTIONS

MAX_REPORTED = 5
"""Invalid examples that an error message lists; the others are counted."""
SAMPLE_SIZE = 50
"""First examples, among which one is taken to recognize the format."""


class SplitConfig(Protocol):
    """The source of examples; soren_align.recipe.DataSplit is one."""

    path: str
    name: str | None
    split: str
    limit: int | None
    revision: str | None
    bad_examples: Literal["refuse", "drop"]
    mask_history: bool

    @property
    def columns(self) -> Mapping[Any, str]:
        """Our names -> the dataset's."""
        ...

    @property
    def roles(self) -> Mapping[str, str]:
        """The dataset's roles -> ours."""
        ...


@dataclass(frozen=True)
class LoadedSplit:
    """Examples ready for TRL, and their origin."""

    dataset: Dataset
    """With TRL's columns only: see data.columns."""
    layout: str
    """Description of the format: "chat messages (like ultrachat_200k)"."""
    num_examples: int
    """As read, including dropped ones."""
    dropped: dict[str, int]
    """Number of invalid examples by reason; empty unless `bad_examples` is drop."""
    source: dict[str, Any]
    """For run.json: path, split, sha256 of a file or revision of a hub dataset, columns dropped; of a mixture all of
    this for each of its `sources`."""
    notices: tuple[str, ...] = ()
    source_indices: tuple[int, ...] = ()
    """Of a mixture: for each example the index of its source."""

    @property
    def name(self) -> str:
        """Path and split, for messages."""
        return f"{self.source['path']} ({self.source['split']})"

    @property
    def kind(self) -> frozenset[str] | None:
        """Equal for datasets of one task that can be concatenated: None for turns, the columns of plain texts."""
        return None if has_turns(self.dataset) else frozenset(self.dataset.column_names)


def load_split(spec: SplitConfig, task: TaskName) -> LoadedSplit:
    """The examples of `spec` for `task`. Raises UserError with all problems if there are invalid ones.

    A local file needs no network. It is converted once into the datasets cache, under its content's hash, and
    memory-mapped from there, so that several ranks share it and a changed file is read again.
    """
    if spec.limit is not None and spec.limit < 1:
        raise UserError(f"{spec.path}: limit is {spec.limit}; write 1 or more, or leave it out for all examples")
    with quiet_libraries():
        load = _from_file if is_local(spec.path) else _from_hub
        dataset, layout, dropped, origin = load(spec, task)
    num_examples = len(dataset) + sum(dropped.values())
    notices = ()
    if spec.limit is not None and num_examples < spec.limit:
        notices = (f"{spec.path}: limit is {spec.limit}, but there are only {num_examples} examples; all are used",)
    source = source_record(spec, origin, layout) | {"num_examples": num_examples}
    return LoadedSplit(dataset, layout.description, num_examples, dropped, source, notices)


def source_record(spec: SplitConfig, origin: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """`LoadedSplit.source` without the number of examples."""
    names = {key: dict(value) for key in ("columns", "roles") if (value := getattr(spec, key))}
    return {"path": spec.path, **origin, **names, "columns_dropped": list(layout.unused)}


def _from_file(spec: SplitConfig, task: TaskName) -> tuple[Dataset, Layout, dict[str, int], dict[str, Any]]:
    """(dataset, layout, dropped, origin)."""
    local, layout = local_files(spec, task)
    origin = local.origin()
    numbered = partial(local.numbered, spec.limit)
    suffixes = [file.suffixes for file in local.files.values()]
    rules = (spec.bad_examples, spec.mask_history, layout.names)
    key = cache_key(origin["sha256"], suffixes, task, spec.limit, *rules)
    try:
        examples = partial(_examples, numbered, layout, task, spec.path, spec.bad_examples)
        features = features_of(layout.outputs, layout.has_turns)
        dataset = Dataset.from_generator(examples, features=features, fingerprint=key)
    except (DatasetGenerationError, OSError) as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        if isinstance(cause, UserError):
            raise cause from None
        if not isinstance(cause, OSError):
            raise
        folder = config.HF_DATASETS_CACHE
        raise UserError(f"{spec.path}: cannot be cached in {folder} (HF_DATASETS_CACHE): {cause}") from None
    return dataset, layout, count_dropped(numbered(), layout, spec), origin


def local_files(spec: SplitConfig, task: TaskName) -> tuple[LocalFiles, Layout]:
    """The files of a split, and their layout. Raises UserError if there are none, or of different layouts."""
    for key in ("revision", "name"):
        if value := getattr(spec, key):
            raise UserError(f"{spec.path}: is no dataset of the hub and has no {key} '{value}'; leave {key} out")
    local = StandardLibrary.of_split(spec.split) if spec.path == STDLIB else LocalFiles.at(spec.path)
    return local, _common_layout({n: layout_of(s, spec, task, n) for n, s in local.samples(SAMPLE_SIZE)})


def _common_layout(layouts: Mapping[str, Layout]) -> Layout:
    """The layout of all files. Raises UserError if they have different ones."""
    (name, first), *others = layouts.items()
    for other, layout in others:
        if (layout.read, layout.outputs) != (first.read, first.outputs):
            raise UserError(
                f"{name} has {first.description}, {other} {layout.description}: name the files of one kind, such as "
                "train*.jsonl, or write several splits"
            )
    unused = dict.fromkeys(column for layout in layouts.values() for column in layout.unused)
    return first._replace(unused=tuple(unused))


def _from_hub(spec: SplitConfig, task: TaskName) -> tuple[Dataset, Layout, dict[str, int], dict[str, Any]]:
    """(dataset, layout, dropped, origin)."""
    place = f"{spec.path} ({spec.split})" if spec.name is None else f"{spec.path} ({spec.name}, {spec.split})"
    dataset, revision = hub.fetch(spec.path, spec.split, spec.revision, spec.name)
    if spec.limit is not None:
        dataset = dataset.select(range(min(spec.limit, len(dataset))))
    first = dataset.select(range(min(SAMPLE_SIZE, len(dataset))))
    layout = layout_of(examples_of(first), spec, task, place)
    dataset = dataset.select_columns(layout.columns_read)

    def numbered() -> Iterator[tuple[str, Any]]:
        for number, example in enumerate(examples_of(dataset), start=1):
            yield f"{place} record {number}", example

    valid = valid_examples(numbered, layout, task, place, spec.bad_examples)
    num_changed = sum(converted != record for record, converted in valid)
    dropped = count_dropped(numbered(), layout, spec)
    origin = {"split": spec.split, "revision": revision} | ({"name": spec.name} if spec.name else {})
    if dropped:
        indices = [i for i, (_, example) in enumerate(numbered()) if not isinstance(read(example, layout), str)]
        dataset = dataset.select(indices)
    is_unchanged = num_changed == 0 and not layout.is_renamed
    return dataset if is_unchanged else _converted(dataset, layout), layout, dropped, origin


def layout_of(examples: Iterable[Any], spec: SplitConfig, task: TaskName, place: str) -> Layout:
    """Recognized by the first object, or a later one without empty columns. Raises UserError if there is none."""
    names = Names.of(spec.columns, spec.roles)
    objects = list(islice((example for example in examples if isinstance(example, dict)), SAMPLE_SIZE))
    if not objects:
        return formats.recognize(dict.fromkeys(TASKS[task].columns), task, place)
    names.refuse_missing({column: None for example in objects for column in example}, place)
    complete = (example for example in objects if None not in example.values())
    example = next(complete, objects[0])
    for column in (spec.columns.get(name, name) for name in OPTIONS):  # often only some examples have tools
        value = next((other[column] for other in objects if other.get(column)), None)
        example = example if value is None or column in example else {**example, column: value}
    layout = formats.recognize(example, task, place, names)
    return layout._replace(mask_history=spec.mask_history)


def valid_examples(
    numbered: Callable[[], Iterable[tuple[str, Any]]], layout: Layout, task: TaskName, place: str, bad_examples: str
) -> Iterator[tuple[Any, Example]]:
    """Every valid record, and its example in TRL's columns.

    At the end raises UserError if there is none, or an invalid one to refuse.

    numbered: returns (place, record) pairs.
    """
    reported: list[str] = []
    num_examples = num_invalid = 0
    for record_place, record in numbered():
        num_examples += 1
        example = read(record, layout)
        if not isinstance(example, str):
            yield record, example
        else:
            num_invalid += 1
            if num_invalid <= MAX_REPORTED:
                reported.append(f"  {record_place}: {example}{_columns_of(record) * example.startswith('no ')}")
    if num_examples == 0:
        raise UserError(f"{place}: has no examples")
    if num_invalid == num_examples or (num_invalid > 0 and bad_examples == "refuse"):
        more = [f"  and {num_invalid - MAX_REPORTED} more"] if num_invalid > MAX_REPORTED else []
        remedy = " (fix them, or write bad_examples: drop beside the path)" if num_invalid < num_examples else ""
        head = f"{place}: {num_invalid} of {num_examples} examples cannot be used for {task}{remedy}:"
        raise UserError(head, *reported, *more)


def _columns_of(record: Any) -> str:
    """The columns of a record that lacks one, which may be there by another name."""
    columns = [str(key) for key, value in record.items() if value is not None] if isinstance(record, dict) else []
    return f"; found {', '.join(columns)[:200]}" if columns else ""


def _examples(*args: Any) -> Iterator[Example]:
    return (example for _, example in valid_examples(*args))


def read(record: Any, layout: Layout) -> Example | str:
    """The record in TRL's columns; or, as text, why it cannot be trained on."""
    return record.reason if isinstance(record, files.InvalidRecord) else formats.read_example(record, layout)


def count_dropped(numbered: Iterable[tuple[str, Any]], layout: Layout, spec: SplitConfig) -> dict[str, int]:
    """The number of invalid examples by reason; counted again for each load, as a cached dataset has no such record."""
    if spec.bad_examples == "refuse":
        return {}
    results = (read(record, layout) for _, record in numbered)
    reasons = Counter(result for result in results if isinstance(result, str))
    alike = Counter(map(without_indices, reasons))
    counts: Counter[str] = Counter()
    for reason, number in reasons.items():
        counts[reason if alike[without_indices(reason)] == 1 else without_indices(reason)] += number
    return dict(counts.most_common())


def without_indices(reason: str) -> str:
    """`chosen[i] and chosen[i+1] are both ...` of a reason with any indices of turns."""
    letters = iter(("[i]", "[i+1]"))  # no reason has more than two indices, and two are neighbours
    return re.sub(r"\[\d+\]", lambda _: next(letters), reason)


def _converted(dataset: Dataset, layout: Layout) -> Dataset:
    """The valid examples of a hub dataset in TRL's columns; written once into the datasets cache."""
    return dataset.map(
        partial(formats.read_example, layout=layout),
        remove_columns=dataset.column_names,
        features=features_of(layout.outputs, layout.has_turns),
        new_fingerprint=cache_key(dataset._fingerprint, layout.description, layout.names, layout.mask_history),
        load_from_cache_file=True,
    )
