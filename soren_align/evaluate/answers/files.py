"""Read anybody's evaluation results: the question, score and cluster of each answer.
Neither torch nor lm-eval.

A file is recognized by its content, not by its name: samples of lm-eval, and tables (.csv, .jsonl,
.parquet) with a column of ids and one of scores. Of each record only these columns stay in memory.
"""

import codecs
import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.errors import UserError, did_you_mean, in_one_line
from ...core.files import read_json
from ...core.text import join_words
from ...recipe.data_files import csv_columns, refuse_wide_characters

if TYPE_CHECKING:
    import pandas as pd

MAX_ENTRIES = 100_000
PREFERRED = ("acc_norm", "acc", "exact_match", "score", "correct", "is_correct", "accuracy", "em")
PREFERRED += ("passed", "resolved")
"""Metrics, the best first: the choice of our suites, then usual names of columns."""
IDS = ("id", "doc_id", "question_id", "sample_id", "instance_id", "example_id", "task_id", "qid")
IDS += ("idx", "index")
TASKS = ("task", "task_name", "benchmark")
WORDS = {"true": 1.0, "yes": 1.0, "correct": 1.0, "false": 0.0, "no": 0.0, "incorrect": 0.0}
SAMPLES = re.compile(r"samples_(.+)_\d{4}-\d\d-\d\dT[\d.:-]+\.jsonl")
"""Names of lm-eval's files; the group is the task."""
SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet", ".json")
LM_EVAL_KEYS = {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter"}
LM_EVAL_KEYS |= {"metrics", "task", "doc_hash", "prompt_hash", "target_hash"}
KNOWN = "lm-eval samples, CSV, JSONL or Parquet"


@dataclass(frozen=True)
class Columns:
    """The options that name metrics and columns; None: as recognized.
    A name with dots is a key within a record.
    """

    metrics: tuple[str, ...] = ()
    id: str | None = None
    score: str | None = None
    task: str | None = None
    cluster: str | None = None
    max_score: float = 1.0
    """Scores are divided by it."""


@dataclass
class Scores:
    """The scores of one model on one task."""

    metric: str
    source: str
    """The file or folder, for messages."""
    table: "pd.DataFrame"
    """The rows by the id of a question: `points` in [0, 1], and `content`, `prompt` and `cluster`,
    which are texts or None."""
    digest: str = ""
    """The hash of an evaluation of our own, of all questions and prompts, in place of
    `content`."""
    score: dict[str, Any] | None = None
    """The score in results.json of an evaluation of our own."""
    has_average: bool = False
    """Whether the suite of an evaluation of our own compares averages too."""


class _Answer(NamedTuple):
    """A record of either format."""

    id: Any
    scores: dict[str, Any]
    """The values by metric, which may be no numbers."""
    task: Any
    content: Any
    prompt: Any
    filter: str
    cluster: Any


def read_scores(path: Path, columns: Columns) -> dict[str, Scores]:
    """Return the scores of the model whose results are this file or folder, by task; "" for a task
    without a name.

    Raises UserError with the place of the first record that cannot be used.
    """
    tasks: dict[str, Scores] = {}
    for file in [path] if path.is_file() else _files(path):
        match = SAMPLES.fullmatch(file.name)
        # the task of records that name none
        default = match[1] if match else "" if file == path else file.stem
        for task, scores in _read_file(file, default, columns).items():
            if task in tasks:
                finding = f"has the task {task or scores.metric}, as {tasks[task].source}"
                raise UserError(f"{file}: {finding}; name one of the two files")
            tasks[task] = scores
    return tasks


def _files(folder: Path) -> list[Path]:
    """Return the files of one model in a folder."""
    entries = [*islice(folder.rglob("*"), MAX_ENTRIES + 1)]
    if len(entries) > MAX_ENTRIES:
        raise UserError(f"{folder}: holds more than {MAX_ENTRIES:,} files; name a smaller folder")
    regular = sorted(entry for entry in entries if entry.is_file())
    files = [file for file in regular if SAMPLES.fullmatch(file.name)]
    files = files or [file for file in regular if file.suffix in SUFFIXES]
    parents = list(dict.fromkeys(str(file.parent) for file in files))
    if len(parents) > 1:
        finding = f"has results in {len(parents)} folders, such as {join_words(parents[:3])}"
        raise UserError(f"{folder}: {finding}; name one folder per model")
    if not files:
        raise UserError(f"{folder}: has no file of results; name a folder with {KNOWN}")
    return files


def _read_file(file: Path, default: str, columns: Columns) -> dict[str, Scores]:
    """Return the scores of one file by task.

    Raises UserError with the place of a record that has no id or no score, or whose id occurs
    twice, or if no record has a score.
    """
    import pandas as pd

    rows: dict[str, dict[str, tuple[Any, ...]]] = {}
    metrics: dict[str, tuple[str, str]] = {}
    """The metric and the filter by task."""
    filters: set[str] = set()
    is_samples: bool | None = None
    # One pass: a file of 5 GB is read record by record, and of each only four values stay.
    for place, record in _records(file, columns):
        if not isinstance(record, dict):
            raise UserError(f"{place}: is not an object with keys; name a file of {KNOWN}")
        if is_samples is None:  # the first record shows the file's format
            is_samples = {"doc_id", "filtered_resps"} <= record.keys()
        answer = _answer(record, is_samples, columns, place)
        if answer.id in (None, ""):
            finding = f"has no id of the question, only {', '.join(map(str, record))[:200]}"
            raise UserError(f"{place}: {finding}; name its column: --id COLUMN")
        task = str(answer.task) if answer.task not in (None, "") else default
        # lm-eval scores the answers with several filters; the first one that has the metric counts.
        if task not in metrics:
            filters.add(answer.filter)
            if (metric := _choose(answer, is_samples, columns, place)) is None:
                continue
            metrics[task] = metric, answer.filter
        metric, filter_name = metrics[task]
        if answer.filter != filter_name:
            continue
        points, key = _points(answer.scores.get(metric), metric, columns, place), str(answer.id)
        others = rows.setdefault(task, {})
        if key in others:
            remedy = "remove one of them, or name the column that differs: --id COLUMN"
            raise UserError(f"{place}: the question {key[:60]} occurs a second time; {remedy}")
        texts = (answer.content, answer.prompt, answer.cluster)
        others[key] = (points, *(None if text is None else str(text) for text in texts))
        if (answer.cluster is None) != (next(iter(others.values()))[-1] is None):
            finding = "has no cluster, but other questions have one, or the other way round"
            raise UserError(f"{place}: {finding}; write one into each record")
    if not metrics:
        wanted = f" of {', '.join(columns.metrics)}" if columns.metrics else ""
        listed = ", ".join(sorted(filters))
        remedy = f"write one of the filters {listed}" if listed else f"name a file of {KNOWN}"
        raise UserError(f"{file}: has no scores{wanted}; {remedy}")
    names = ["points", "content", "prompt", "cluster"]
    return {
        task: Scores(
            metrics[task][0], str(file), pd.DataFrame.from_dict(own, orient="index", columns=names)
        )
        for task, own in rows.items()
    }


def _answer(record: dict[str, Any], is_samples: bool, columns: Columns, place: str) -> _Answer:
    """Return a record's answer; the options name where parts of it stand."""
    key, scores = next((record[n] for n in IDS if record.get(n) not in (None, "")), None), record
    task = next((record[n] for n in TASKS if record.get(n) not in (None, "")), None)
    content, prompt, filter_name = record.get("question"), None, ""
    if is_samples:
        # lm-eval lists a record's metrics; older versions only have them as keys.
        names = record.get("metrics")
        if not isinstance(names, list):
            names = [name for name in record if name not in LM_EVAL_KEYS]
        scores = {str(name): record[str(name)] for name in names if str(name) in record}
        # Our samples of a group name the subtask, whose doc_ids begin at 0.
        key = f"{task}/{record.get('doc_id')}" if task is not None else record.get("doc_id")
        task, content = None, record.get("doc_hash") or record.get("doc")
        prompt, filter_name = record.get("prompt_hash"), str(record.get("filter") or "none")
    answer = _Answer(key, scores, task, content, prompt, filter_name, record.get("cluster"))
    for name in ("id", "task", "cluster"):
        if path := getattr(columns, name):
            answer = answer._replace(**{name: _lookup(record, path, f"--{name}", place)})
    if columns.score:
        score = _lookup(record, columns.score, "--score", place)
        answer = answer._replace(scores={columns.score: score})
    return answer


def _lookup(record: dict[str, Any], path: str, option: str, place: str) -> Any:
    value: Any = record
    for key in [path] if path in record else path.split("."):
        if not isinstance(value, dict) or key not in value:
            names = list(map(str, value)) if isinstance(value, dict) else []
            remedy = did_you_mean(key, names, f"correct {option}")
            raise UserError(f"{place}: has no field {path}{remedy}")
        value = value[key]
    return value


def _choose(answer: _Answer, is_samples: bool, columns: Columns, place: str) -> str | None:
    """Return the metric of a task by its first answer; None if --metric names another filter."""
    if columns.score:
        return columns.score
    scores = answer.scores
    names = [n for n, value in scores.items() if n in PREFERRED or _number(value) is not None]
    listed = ", ".join(map(str, scores))[:200]
    for metric in columns.metrics:
        name, _, wanted = metric.partition(",")
        if name in names:
            return name if wanted in ("", answer.filter) else None
    if columns.metrics:
        finding = f"has no metric {' or '.join(columns.metrics)}, but {listed or 'no metric'}"
        raise UserError(f"{place}: {finding}; correct --metric")
    best = next((name for name in PREFERRED if name in names), None)
    # The first number in a table may be anything; in samples it is a metric.
    if best is None and (not names or not is_samples):
        finding = f"has no column of scores, only {listed}"
        raise UserError(f"{place}: {finding}; name it: --score COLUMN")
    return best or names[0]


def _number(value: Any) -> float | None:
    """Return a score as a number, which may be NaN; None if it is none."""
    if isinstance(value, str):
        value = WORDS.get(value.strip().lower(), value)
    try:
        return float(value) if isinstance(value, bool | int | float | str) else None
    except (ValueError, OverflowError):
        return None


def _points(value: Any, metric: str, columns: Columns, place: str) -> float:
    number = _number(value)
    if number is None or not isfinite(number):
        finding = f"{metric} is {str(value)[:40]!r}, which is not a number"
        raise UserError(f"{place}: {finding}; evaluate it again, or remove it from all files")
    if not 0 <= number <= columns.max_score:
        remedy = "name the largest possible score, such as --max-score 10"
        remedy = "choose another --metric" if number < 0 else remedy
        finding = f"{metric} is {number:g}, but scores are from 0 to {columns.max_score:g}"
        raise UserError(f"{place}: {finding}; {remedy}")
    return number / columns.max_score


def _records(file: Path, columns: Columns) -> Iterator[tuple[str, Any]]:
    """Yield the records of a file, each with its place."""
    with file.open("rb") as stream:
        start = stream.read(4)
    if not start:
        raise UserError(f"{file}: is empty; name a file of {KNOWN}")
    if start == b"PAR1":
        yield from _parquet(file, columns)
        return
    refuse_wide_characters(str(file), start)
    is_json = start.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"[")
    yield from (_json if is_json else _csv)(file)


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of a JSONL file, or of an array."""
    is_first = True
    with file.open(encoding="utf-8-sig", errors="surrogateescape") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if is_first and line.rstrip()[-1:] in ("{", "[", ","):
                    break  # the first line of an indented document
                reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
                remedy = "the file may have been cut off; write or download it again"
                raise UserError(f"{file}:{number}: is not JSON: {reason}; {remedy}") from None
            if is_first and isinstance(record, list):
                break
            is_first = False
            yield f"{file}:{number}", record
        else:
            return
    document = read_json(file, max_bytes=1 << 28)
    if not isinstance(document, list):
        raise UserError(f"{file}: has no answers to single questions; name a file of {KNOWN}")
    yield from ((f"{file} record {number}", record) for number, record in enumerate(document, 1))


def _parquet(file: Path, columns: Columns) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    named = (columns.id, columns.score, columns.task, columns.cluster)
    needed = {*IDS, *TASKS, *PREFERRED, "question", "cluster", *columns.metrics}
    needed |= {part for name in named if name for part in (name, name.partition(".")[0])}
    try:
        with pq.ParquetFile(file) as table:
            # The texts of the answers are most of a file.
            names = [name for name in table.schema_arrow.names if name in needed]
            number = 0
            for batch in table.iter_batches(batch_size=1000, columns=names or None):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{file} record {number}", record
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        reason = in_one_line(error)
        raise UserError(
            f"{file}: is no valid Parquet file: {reason}; write or copy the file again"
        ) from None


def _csv(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            names, delimiter = csv_columns(str(file), stream.readline())
            rows = csv.reader(stream, delimiter=delimiter, strict=True)
            for row in rows:
                place = f"{file}:{rows.line_num + 1}"
                if row and len(row) != len(names):
                    finding = f"has {len(row)} fields, but the header has {len(names)}"
                    remedy = "put texts in quotes, or write or download the file again"
                    raise UserError(f"{place}: {finding}; {remedy}")
                if row:
                    yield place, dict(zip(names, row, strict=True))
    except csv.Error as error:
        remedy = "write or download the file again"
        raise UserError(f"{file}: is no valid CSV: {error}; {remedy}") from None
    except UnicodeDecodeError:
        finding = "is neither text in UTF-8 nor another known format"
        raise UserError(f"{file}: {finding}; name a file of {KNOWN}") from None
