"""Read anybody's evaluation results: the question, score and cluster of each answer.
Neither torch nor lm-eval.

A file is recognized by its content, not by its name: samples of lm-eval, predictions of olmo-eval,
logs of inspect-ai, details of lighteval, and tables (.csv, .jsonl, .parquet) with a column of ids
and one of scores. Records are read one at a time, and memory holds a few bytes of each (`Scores`).
Files are data: nothing is unpickled, imported or executed.
"""

import codecs
import csv
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ...core.errors import UserError, did_you_mean, in_one_line
from ...core.files import parse_json, read_json
from ...core.text import join_words
from ...recipe.data_files import csv_columns, refuse_wide_characters
from .scores import Scores, first_repeat, hash_bits, numbers

MAX_LINE = 1 << 24
"""Bytes of a line. A few-shot sample of four choices with 16k tokens is 256 kB."""
MAX_DOCUMENT = 1 << 28
"""Bytes of a file that is one JSON value, which is read whole."""
MAX_DEPTH = 200
MAX_QUESTIONS = 50_000_000
"""Of a model on a task: 9 to 25 bytes of memory each."""
MAX_ENTRIES = 100_000
PREFERRED = (
    "acc_norm",
    "acc",
    "exact_match",
    "score",
    "correct",
    "is_correct",
    "accuracy",
    "em",
    "passed",
    "resolved",
)
"""Metrics, the best first: the choice of our suites, then usual names of columns."""
IDS = (
    "id",
    "doc_id",
    "question_id",
    "sample_id",
    "instance_id",
    "example_id",
    "task_id",
    "qid",
    "idx",
    "index",
)
TASKS = ("task", "task_name", "benchmark")
WORDS = {"true": 1.0, "yes": 1.0, "correct": 1.0, "false": 0.0, "no": 0.0, "incorrect": 0.0}
GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""Of inspect-ai: correct, partial, incorrect, no answer."""
FILE_NAMES = (
    re.compile(r"samples_(.+)_\d{4}-\d\d-\d\dT[\d.:-]+\.jsonl"),
    re.compile(r"(.+?)(?:_[0-9a-f]{6})?-predictions\.jsonl"),
    re.compile(r"details_(.+)_\d{4}-\d\d-\d\dT.+\.parquet"),
)
"""Of lm-eval, olmo-eval and lighteval; the group is the task."""
SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet", ".eval", ".json")
LM_EVAL_KEYS = {
    "doc_id",
    "doc",
    "target",
    "arguments",
    "resps",
    "filtered_resps",
    "filter",
    "metrics",
}
KNOWN = "lm-eval samples, olmo-eval predictions, inspect-ai logs, lighteval details, CSV or JSONL"


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


class Answer(NamedTuple):
    """A record of any format."""

    id: Any
    scores: Mapping[str, Any]
    """By metric; not yet numbers."""
    task: Any = None
    content: Any = None
    prompt: Any = None
    filter: str = ""
    cluster: Any = None
    is_table: bool = False
    """Whether `scores` are all columns of a table, few of which are scores."""


def read_scores(path: Path, columns: Columns) -> dict[str, Scores]:
    """Return the scores of the model whose results are this file or folder, by task; "" for a task
    without a name.

    Raises UserError with the place of the first record that cannot be used.
    """
    files = [path] if path.is_file() else _files(path)
    tasks: dict[str, Scores] = {}
    for file in files:
        match = next(filter(None, (pattern.fullmatch(file.name) for pattern in FILE_NAMES)), None)
        # the task of records that name none
        default = match[1] if match else "" if file == path else file.stem
        own: dict[str, Scores] = {}
        for place, task, metric, answer in _answers(file, default, columns):
            if (scores := own.get(task)) is None:
                scores = own[task] = Scores(
                    metric, str(file), partial(_find_answer, file, default, columns, task)
                )
            point = _point(answer.scores.get(metric), metric, columns.max_score, place)
            scores.add(str(answer.id), point, answer.content, answer.prompt)
            if answer.cluster is not None:
                scores.clusters.append(hash_bits(str(answer.cluster), 8))
            if len(scores.clusters) not in (0, len(scores.ids)):
                raise UserError(
                    f"{place}: has no cluster, but other questions have one; write one into each record"
                )
            if len(scores.ids) > MAX_QUESTIONS:
                raise UserError(
                    f"{place}: has more than {MAX_QUESTIONS:,} questions; split the file by task"
                )
        for task, scores in own.items():
            if (repeat := first_repeat(numbers(scores.ids))) is not None:
                place, key = _find_answer(file, default, columns, task, repeat)
                remedy = "remove one of them, or name the column that differs: --id COLUMN"
                raise UserError(f"{place}: the question {key[:60]} occurs a second time; {remedy}")
            if task in tasks:
                raise UserError(
                    f"{file}: has the task {task or scores.metric}, as {tasks[task].source}; name one of the two files"
                )
            tasks[task] = scores
    return tasks


def _files(folder: Path) -> list[Path]:
    """Return the files of one model in a folder."""
    entries = [*islice(folder.rglob("*"), MAX_ENTRIES + 1)]
    if len(entries) > MAX_ENTRIES:
        raise UserError(f"{folder}: holds more than {MAX_ENTRIES:,} files; name a smaller folder")
    regular = sorted(entry for entry in entries if entry.is_file())
    files = [
        file for file in regular if any(pattern.fullmatch(file.name) for pattern in FILE_NAMES)
    ]
    files = files or [file for file in regular if file.suffix in SUFFIXES]
    parents = list(dict.fromkeys(file.parent for file in files))
    if len(parents) > 1:
        names = join_words([str(parent) for parent in parents[:3]])
        raise UserError(
            f"{folder}: has results in {len(parents)} folders, such as {names}; name one folder per model"
        )
    if not files:
        raise UserError(f"{folder}: has no file of results; name a folder with {KNOWN}")
    return files


def _find_answer(
    file: Path, default: str, columns: Columns, task: str, number: int
) -> tuple[str, str]:
    """Return the place and the id of a question of a task, by its number from 0: the file is read
    again.
    """
    answers = (answer for answer in _answers(file, default, columns) if answer[1] == task)
    place, _, _, answer = next(islice(answers, number, None))
    return place, str(answer.id)


def _answers(file: Path, default: str, columns: Columns) -> Iterator[tuple[str, str, str, Answer]]:
    """Yield the place, the task, its metric, and the answer of each question of a file.

    Raises UserError with the place of a record that has no id or no score, or if no record has a
    score.
    """
    metrics: dict[str, tuple[str, str]] = {}
    """The metric and the filter by task."""
    filter_names: set[str] = set()
    convert: Callable[[dict[str, Any]], Answer] | None = None
    # by options
    named = {name: path for name in ("id", "task", "cluster") if (path := getattr(columns, name))}
    for place, record in _records(file):
        if not isinstance(record, dict):
            raise UserError(f"{place}: is not an object with keys; name a file of {KNOWN}")
        if convert is None:  # the first record shows the file's format
            convert = next((reader for keys, reader in FORMATS if keys <= record.keys()), _table)
        answer = convert(record)
        if named:
            values = {
                name: _lookup(record, path, f"--{name}", place) for name, path in named.items()
            }
            answer = answer._replace(**values)
        if columns.score:
            answer = answer._replace(
                scores={columns.score: _lookup(record, columns.score, "--score", place)}
            )
        if answer.id in (None, ""):
            names = ", ".join(map(str, record))[:200]
            raise UserError(
                f"{place}: has no id of the question, only {names}; name its column: --id COLUMN"
            )
        task = str(answer.task) if answer.task not in (None, "") else default
        if task not in metrics:
            filter_names.add(answer.filter)
            metric = _choose(answer, columns, place)
            if metric is None:
                continue
            metrics[task] = metric, answer.filter
        metric, filter_name = metrics[task]
        if answer.filter == filter_name:
            yield place, task, metric, answer
    if not metrics and any(filter_names):
        listed = ", ".join(sorted(filter_names))
        raise UserError(
            f"{file}: has no scores of {', '.join(columns.metrics)}; write one of the filters {listed}"
        )
    if not metrics:
        raise UserError(f"{file}: has no scores; name a file of {KNOWN}")


def _lookup(record: dict[str, Any], path: str, option: str, place: str) -> Any:
    if path in record:
        return record[path]
    value: Any = record
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            names = list(map(str, value)) if isinstance(value, dict) else []
            raise UserError(
                f"{place}: has no field {path}{did_you_mean(key, names, f'correct {option}')}"
            )
        value = value[key]
    return value


def _choose(answer: Answer, columns: Columns, place: str) -> str | None:
    """Return the metric of a task by its first answer; None if --metric names another filter."""
    if columns.score:
        return columns.score
    names = [
        name
        for name, value in answer.scores.items()
        if name in PREFERRED or _number(value) is not None
    ]
    for metric in columns.metrics:
        name, _, wanted = metric.partition(",")
        if name in names and wanted not in ("", answer.filter):
            return None
        if name in names:
            return name
    if columns.metrics:
        listed = ", ".join(map(str, answer.scores)) or "no metric"
        raise UserError(
            f"{place}: has no metric {' or '.join(columns.metrics)}, but {listed[:200]}; correct --metric"
        )
    best = next((name for name in PREFERRED if name in names), None)
    if not names or (answer.is_table and best is None):
        listed = ", ".join(map(str, answer.scores))[:200]
        raise UserError(
            f"{place}: has no column of scores{', only ' * bool(listed)}{listed}; name it: --score COLUMN"
        )
    return best or names[0]


def _number(value: Any) -> float | None:
    """Return a score as a number, which may be NaN; None if it is none."""
    if type(value) is float or type(value) is bool:
        return float(value)
    if isinstance(value, str):
        value = WORDS.get(value.strip().lower(), value)
    try:
        return float(value) if isinstance(value, bool | int | float | str) else None
    except (ValueError, OverflowError):
        return None


def _point(value: Any, metric: str, max_score: float, place: str) -> float:
    number = _number(value)
    if number is None or not isfinite(number):
        raise UserError(
            f"{place}: {metric} is {str(value)[:40]!r}, which is not a number; evaluate this question again, or remove"
            " it from all files"
        )
    if not 0 <= number <= max_score:
        remedy = (
            "choose another --metric"
            if number < 0
            else "name the largest possible score, such as --max-score 10"
        )
        raise UserError(
            f"{place}: {metric} is {number:g}, but scores are from 0 to {max_score:g}; {remedy}"
        )
    return number / max_score


# The formats. Each function converts a record.


def _lm_eval(record: dict[str, Any]) -> Answer:
    names = record.get("metrics") or [
        key for key in record if key not in LM_EVAL_KEYS and not key.endswith("_hash")
    ]
    scores = {str(name): record[name] for name in names if name in record}
    # Our samples of a group name the subtask, whose doc_ids begin at 0.
    key = f"{record['task']}/{record['doc_id']}" if "task" in record else record["doc_id"]
    content = record.get("doc_hash") or record.get("doc")
    return Answer(
        key, scores, None, content, record.get("prompt_hash"), str(record.get("filter") or "none")
    )


def _olmo_eval(record: dict[str, Any]) -> Answer:
    """Convert {metric: {scorer: value}}; the metric has the scorer's name unless there are
    several.
    """
    scores: dict[str, Any] = {}
    for metric, values in (record["instance_metrics"] or {}).items():
        for scorer, value in values.items() if isinstance(values, dict) else [(metric, values)]:
            scores[metric if scorer == metric else f"{metric}.{scorer}"] = value
    return Answer(record["native_id"], scores, content=record.get("label"))


def _inspect(record: dict[str, Any]) -> Answer:
    """Convert a sample; several epochs of a sample are questions of one cluster."""
    scores: dict[str, Any] = {}
    for scorer, score in (record["scores"] or {}).items():
        value = score.get("value") if isinstance(score, dict) else score
        for key, part in value.items() if isinstance(value, dict) else [("", value)]:
            scores[f"{scorer}.{key}" if key else scorer] = (
                GRADES.get(part, part) if isinstance(part, str) else part
            )
    epochs = record.get("epochs") or 1
    key = f"{record['id']} epoch {record['epoch']}" if epochs > 1 else record["id"]
    content = [record.get("input"), record.get("target")]
    return Answer(
        key, scores, record.get("task"), content, cluster=record["id"] if epochs > 1 else None
    )


def _lighteval(record: dict[str, Any]) -> Answer:
    doc = record["doc"] or {}
    return Answer(
        doc.get("id"), record["metric"] or {}, content=[doc.get("query"), doc.get("choices")]
    )


def _table(record: dict[str, Any]) -> Answer:
    key = task = None
    for name in IDS:
        if (key := record.get(name)) not in (None, ""):
            break
    for name in TASKS:
        if (task := record.get(name)) not in (None, ""):
            break
    return Answer(
        key, record, task, record.get("question"), cluster=record.get("cluster"), is_table=True
    )


FORMATS: list[tuple[set[str], Callable[[dict[str, Any]], Answer]]] = [
    ({"doc_id", "filtered_resps"}, _lm_eval),
    ({"native_id", "instance_metrics"}, _olmo_eval),
    ({"doc", "metric"}, _lighteval),
    ({"id", "epoch", "scores"}, _inspect),
]
"""The keys by which a record is recognized."""


# The records of a file, each with its place.


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as stream:
        start = stream.read(4)
    if not start:
        raise UserError(f"{file}: is empty; name a file of {KNOWN}")
    if start == b"PAR1":
        yield from _parquet(file)
    elif start[:2] == b"PK":
        yield from _eval_log(file)
    else:
        refuse_wide_characters(str(file), start)
        is_json = start.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"[")
        yield from (_json if is_json else _csv)(file)


def _lines(file: Path, stream: BinaryIO | io.TextIOBase) -> Iterator[tuple[int, Any]]:
    number = 0
    while line := stream.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise UserError(
                f"{file}:{number}: is longer than {MAX_LINE:,} bytes; write one record per line"
            )
        yield number, line


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of a JSONL file, of an array, or of a log of inspect-ai."""
    is_first, name = True, str(file)
    with file.open("rb") as stream:
        for number, line in _lines(file, stream):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode(errors="surrogatepass"))  # bytes take 1 µs longer
            except (ValueError, RecursionError) as error:
                if is_first and line.rstrip()[-1:] in (b"{", b"[", b","):
                    break  # the first line of an indented document
                reason = str(error).partition(": line ")[0]
                remedy = "the file may have been cut off; write or download it again"
                raise UserError(f"{file}:{number}: is not JSON: {reason}; {remedy}") from None
            if is_first and (isinstance(record, list) or "samples" in record):
                break
            is_first = False
            yield f"{name}:{number}", record
        else:
            return
    document = read_json(file, max_bytes=MAX_DOCUMENT, max_depth=MAX_DEPTH)
    if isinstance(document, list):
        yield from (
            (f"{file} record {number}", record) for number, record in enumerate(document, 1)
        )
    elif isinstance(document, dict) and "eval" in document:
        yield from _inspect_samples(file, document, document.get("samples"))
    else:
        raise UserError(f"{file}: has no answers to single questions; name a file of {KNOWN}")


def _inspect_samples(file: Path, log: dict[str, Any], samples: Any) -> Iterator[tuple[str, Any]]:
    spec = log["eval"] if isinstance(log["eval"], dict) else {}
    samples = [
        sample
        for sample in samples or ()
        if isinstance(sample, dict) and {"id", "epoch"} <= sample.keys()
    ]
    if not samples:
        raise UserError(f"{file}: has no samples; name a log that was written with its samples")
    epochs = max(sample["epoch"] if isinstance(sample["epoch"], int) else 1 for sample in samples)
    for sample in samples:
        place = f"{file} sample {sample['id']}"
        if not isinstance(sample.get("scores"), dict) or not sample["scores"]:
            status = log.get("status", "unknown")
            raise UserError(
                f"{place}: has no score (status of the log: {status}); run `inspect eval-retry {file}`"
            )
        fields = {
            key: sample.get(key) for key in ("id", "epoch", "input", "target", "scores", "metadata")
        }
        yield place, fields | {"task": spec.get("task"), "epochs": epochs}


def _eval_log(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the samples of a log in inspect-ai's own format: a ZIP file of JSON files."""

    def member(name: str) -> Any:
        with log.open(name) as stream:
            content = stream.read(MAX_DOCUMENT + 1)
        if len(content) > MAX_DOCUMENT:
            raise UserError(
                f"{file}: {name} is larger than {MAX_DOCUMENT:,} bytes; evaluate fewer samples per log"
            )
        return parse_json(content.decode("utf-8", "replace"), f"{file}: {name}", MAX_DEPTH)

    try:
        with zipfile.ZipFile(file) as log:
            if not {"header.json", "summaries.json"} <= {*log.namelist()}:
                remedy = f"finish it with `inspect eval-retry`, or name a file of {KNOWN}"
                raise UserError(f"{file}: is no complete log of inspect-ai; {remedy}")
            header, samples = member("header.json"), member("summaries.json")
    except NotImplementedError:  # zstd, which Python's zipfile reads from 3.14 on
        raise UserError(
            f"{file}: is compressed with zstd; convert it: `inspect log convert {file} --to json --output-dir DIR`"
        ) from None
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, zipfile.zlib.error) as error:  # pyright: ignore[reportAttributeAccessIssue]
        raise UserError(
            f"{file}: is no valid log of inspect-ai: {error}; copy the file again"
        ) from None
    if not isinstance(header, dict) or "eval" not in header or not isinstance(samples, list):
        raise UserError(f"{file}: is no log of inspect-ai; name a file of {KNOWN}")
    yield from _inspect_samples(file, header, samples)


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            # The responses of lighteval, with all their tokens, are most of its files.
            names = [name for name in table.schema_arrow.names if name != "model_response"]
            number = 0
            for batch in table.iter_batches(batch_size=200, columns=names):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{file} record {number}", record
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"{file}: is no valid Parquet file: {in_one_line(error)}; write or copy the file again"
        ) from None


def _csv(file: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(MAX_LINE)
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            lines = _lines(file, stream)
            names, delimiter = csv_columns(str(file), next(lines)[1])
            rows = csv.reader((line for _, line in lines), delimiter=delimiter, strict=True)
            for row in rows:
                place = f"{file}:{rows.line_num + 1}"
                if row and len(row) != len(names):
                    remedy = "put texts in quotes, or write or download the file again"
                    raise UserError(
                        f"{place}: has {len(row)} fields, but the header has {len(names)}; {remedy}"
                    )
                if row:
                    yield place, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise UserError(
            f"{file}: is no valid CSV: {error}; write or download the file again"
        ) from None
    except UnicodeDecodeError:
        raise UserError(
            f"{file}: is neither text in UTF-8 nor another known format; name a file of {KNOWN}"
        ) from None
