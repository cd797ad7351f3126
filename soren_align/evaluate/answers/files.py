"""Read anybody's evaluation results: the question, score and cluster of each answer.
Neither torch nor lm-eval.

A file is samples of lm-eval, or a table (.csv, .tsv, .jsonl, .json, .parquet) with a column of ids
and one of scores.
"""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ...core.errors import UserError, did_you_mean, in_one_line, printable
from ...core.text import join_words
from ...recipe.data_files import csv_columns

if TYPE_CHECKING:
    import pandas as pd

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
KNOWN = "lm-eval samples, CSV, JSONL or Parquet"
CUT_OFF = "the file may have been cut off; write or download it again"


@dataclass(frozen=True)
class Columns:
    """The options that name metrics and columns; None: as recognized.
    A name with dots is a key within a record.
    """

    metrics: tuple[str, ...] = ()
    id: str | None = None
    score: str | None = None
    cluster: str | None = None


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
    regular = sorted(entry for entry in folder.rglob("*") if entry.is_file())
    # Samples first: lm-eval writes its results.json beside them, which has no answers.
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
    for place, record in _records(file):
        if not isinstance(record, dict):
            raise UserError(f"{place}: is not an object with keys; name a file of {KNOWN}")
        answer = _answer(record, columns, place)
        if answer.id in (None, ""):
            finding = f"has no id of the question, only {', '.join(map(str, record))[:200]}"
            raise UserError(f"{place}: {finding}; name its column: --id COLUMN")
        task = printable(answer.task) if answer.task not in (None, "") else default
        # lm-eval scores the answers with several filters; the first one that has the metric counts.
        if task not in metrics:
            if (metric := _choose(answer, columns, place)) is None:
                continue
            metrics[task] = metric, answer.filter
        metric, filter_name = metrics[task]
        if answer.filter != filter_name:
            continue
        # A column of numbers with a gap is one of floats in Parquet and pandas: 1.0 is 1.
        number = answer.id
        number = int(number) if isinstance(number, float) and number.is_integer() else number
        points, key = _points(answer.scores.get(metric), metric, place), printable(number)
        others = rows.setdefault(task, {})
        # A question that counts twice would make every difference look more certain.
        if key in others:
            remedy = "remove one of them, or name the column that differs: --id COLUMN"
            raise UserError(f"{place}: the question {key[:60]} occurs a second time; {remedy}")
        texts = (answer.content, answer.prompt, answer.cluster)
        others[key] = (points, *(None if text is None else printable(text) for text in texts))
        if (answer.cluster is None) != (next(iter(others.values()))[-1] is None):
            finding = "has no cluster, but other questions have one, or the other way round"
            raise UserError(f"{place}: {finding}; write one into each record")
    if not metrics:
        wanted = f" of {', '.join(columns.metrics)}" if columns.metrics else ""
        raise UserError(f"{file}: has no scores{wanted}; name a file of {KNOWN}")
    names = ["points", "content", "prompt", "cluster"]
    return {
        task: Scores(
            metrics[task][0], str(file), pd.DataFrame.from_dict(own, orient="index", columns=names)
        )
        for task, own in rows.items()
    }


def _answer(record: dict[str, Any], columns: Columns, place: str) -> _Answer:
    """Return a record's answer; the options name where parts of it stand."""
    key, scores = next((record[n] for n in IDS if record.get(n) not in (None, "")), None), record
    task = next((record[n] for n in TASKS if record.get(n) not in (None, "")), None)
    content, prompt, filter_name = record.get("question"), None, ""
    if {"doc_id", "filtered_resps", "metrics"} <= record.keys():  # a sample of lm-eval
        names = record["metrics"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            finding = f"metrics is {json.dumps(names)[:60]}, not a list of names"
            raise UserError(f"{place}: {finding}; {CUT_OFF}")
        scores = {name: record[name] for name in names if name in record}
        # Our samples of a group name the subtask, whose doc_ids begin at 0.
        key = f"{task}/{record['doc_id']}" if task is not None else record["doc_id"]
        task, content = None, record.get("doc_hash") or record.get("doc")
        prompt, filter_name = record.get("prompt_hash"), str(record.get("filter") or "none")
    answer = _Answer(key, scores, task, content, prompt, filter_name, record.get("cluster"))
    for name in ("id", "cluster"):
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


def _choose(answer: _Answer, columns: Columns, place: str) -> str | None:
    """Return the metric of a task by its first answer; None if --metric names another filter."""
    if columns.score:
        return columns.score
    listed = ", ".join(map(str, answer.scores))[:200]
    for metric in columns.metrics:
        name, _, wanted = metric.partition(",")
        if name in answer.scores:
            return name if wanted in ("", answer.filter) else None
    if columns.metrics:
        finding = f"has no metric {' or '.join(columns.metrics)}, but {listed or 'no metric'}"
        raise UserError(f"{place}: {finding}; correct --metric")
    best = next((name for name in PREFERRED if name in answer.scores), None)
    # The first number in a table may be anything; in samples, which name a filter, it is a metric.
    if best is None and (not answer.filter or not answer.scores):
        finding = f"has no column of scores, only {listed}"
        raise UserError(f"{place}: {finding}; name it: --score COLUMN")
    return best or next(iter(answer.scores))


def _points(value: Any, metric: str, place: str) -> float:
    """Return a score in [0, 1]; raises UserError for anything else."""
    try:
        number = float(cast(Any, WORDS.get(str(value).strip().lower(), value)))
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not isfinite(number):
        finding = f"{metric} is {str(value)[:40]!r}, which is not a number"
        raise UserError(f"{place}: {finding}; evaluate it again, or remove it from all files")
    if not 0 <= number <= 1:
        finding = f"{metric} is {number:g}, but scores are from 0 to 1"
        raise UserError(f"{place}: {finding}; divide the scores, or choose another --metric")
    return number


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of a file, each with its place."""
    with file.open("rb") as stream:
        start = stream.read(4)
    if not start:
        raise UserError(f"{file}: is empty; name a file of {KNOWN}")
    # By content: tools write JSON lines under many names.
    is_json = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[")
    reader = _parquet if start == b"PAR1" else _json if is_json else _csv
    try:
        yield from reader(file)
    except UnicodeDecodeError:
        finding = "is neither text in UTF-8 nor another known format"
        raise UserError(f"{file}: {finding}; name a file of {KNOWN}") from None
    except csv.Error as error:
        raise UserError(f"{file}: is no valid CSV: {error}; {CUT_OFF}") from None


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of a JSONL file, or of an array."""
    # Line by line: samples of lm-eval hold whole prompts, of which four values stay in memory.
    with file.open(encoding="utf-8-sig", newline="\n") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            if line.lstrip().startswith("["):
                break
            # Such as lm-eval's results.json: an indented document, of which a line is no record.
            if line.strip() == "{":
                raise UserError(
                    f"{file}: has no answers to single questions; name a file of {KNOWN}"
                )
            yield f"{file}:{number}", _parsed(line, f"{file}:{number}")
        else:
            return
    records = _parsed(file.read_text(encoding="utf-8-sig"), str(file))
    yield from ((f"{file} record {number}", record) for number, record in enumerate(records, 1))


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: is not JSON: {error}; {CUT_OFF}") from None


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            batches = (batch.to_pylist() for batch in table.iter_batches(batch_size=1000))
            for number, record in enumerate(chain.from_iterable(batches), 1):
                yield f"{file} record {number}", record
    except (pa.ArrowException, OSError) as error:
        reason = in_one_line(error)
        raise UserError(
            f"{file}: is no valid Parquet file: {reason}; write or copy the file again"
        ) from None


def _csv(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        names, delimiter = csv_columns(str(file), stream.readline())
        rows = csv.reader(stream, delimiter=delimiter, strict=True)
        for row in filter(None, rows):
            place = f"{file}:{rows.line_num + 1}"
            if len(row) != len(names):
                finding = f"has {len(row)} fields, but the header has {len(names)}"
                remedy = "put texts in quotes, or write or download the file again"
                raise UserError(f"{place}: {finding}; {remedy}")
            yield place, dict(zip(names, row, strict=True))
