"""The files of a `path` in the data section: one file, a folder or a pattern."""

import csv
import glob
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, get_args

from ..core import extras
from ..core.errors import MissingError, UserError, did_you_mean, in_one_line
from ..core.files import resolve_path
from ..tasks import OPTIONS, TASKS, TURN_KEYS, Column, thumb

SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet")
"""Suffixes of data files. All but .parquet may be followed by .gz."""
PYTHON = "python:"
SPREADSHEET = ".xlsx"
"""Read by `new` alone, which makes .jsonl of it."""
STDLIB = f"{PYTHON}stdlib"
"""The path of the standard library's text: see data.files."""
STDLIB_SPLITS = ("train", "validation")
FILE_KINDS = ".jsonl, .json, .csv, .txt (each also as .gz) or .parquet"
MAX_ENTRIES = 100_000
"""The most entries of a folder or a pattern, data files or not."""
_TEST = re.compile(
    r"(?<![a-z])(tests?|val|valid|validation|eval|evaluation|dev|held_?out)(?![a-z])"
)


def data_suffix(file: Path) -> str:
    """The suffix of a file's format: .jsonl of a.jsonl and of a.jsonl.gz."""
    inner = Path(file.stem).suffix
    return inner if file.suffix == ".gz" and inner != ".parquet" else file.suffix


def has_wildcards(path: str) -> bool:
    """Whether a path has wildcards, which the hub's names never have.
    A file's name may have them too.
    """
    return any(character in path for character in "*?[")


def data_files(path: str, suffixes: Sequence[str] = SUFFIXES) -> dict[str, Path]:
    """The data files that a path names, in alphabetical order, by their names for messages.

    Of a folder, all data files at any depth. Hidden files and folders, and links to folders, are
    left out. Raises UserError if there is no file, if a single one is of no kind that can be read,
    or if there are too many.
    """
    place = resolve_path(path)
    # An existing file wins: its name may have brackets.
    is_pattern = has_wildcards(path) and not place.exists()
    if not is_pattern and not place.is_dir():
        if not place.exists():
            names: Iterable[str] = os.listdir(place.parent) if place.parent.is_dir() else ()
            raise MissingError(
                f"no file {path}{did_you_mean(place.name, names, 'correct the path')}"
            )
        if not place.is_file():
            raise UserError(
                f"{path} is no regular file; name a file of one of these kinds: {FILE_KINDS}"
            )
        if data_suffix(place) not in suffixes:
            kinds = FILE_KINDS if suffixes is SUFFIXES else " or ".join(suffixes)
            raise UserError(
                f"{path}: '{place.suffix}' files cannot be read; convert the file to one of {kinds}"
            )
        return {path: place}
    # A slip such as `path: /` must not walk over a whole disk.
    if not is_pattern and place.resolve() in (Path("~").expanduser().resolve(), Path("/")):
        raise UserError(f"{path}: is a whole home folder or disk; name a folder of data")
    if "**" in path:
        raise UserError(
            f"{path}: '**' is not supported; name the folder, whose data files are all read"
        )
    # One entry more than allowed is enough to refuse a folder, however large it is.
    entries = list(islice(glob.iglob(str(place)) if is_pattern else _walk(place), MAX_ENTRIES + 1))
    if len(entries) > MAX_ENTRIES:
        raise UserError(
            f"{path}: holds more than {MAX_ENTRIES:,} files and folders; name a smaller folder"
        )
    files = [
        file for name in entries if data_suffix(file := Path(name)) in suffixes and file.is_file()
    ]
    if not files:
        raise UserError(
            f"{path}: has no data file; name a folder with files of one of these kinds:"
            f" {FILE_KINDS}"
        )
    root = _root(path)
    start = root if is_pattern else Path(path)
    return {str(start / file.relative_to(root)): file for file in sorted(files)}


def is_test_split(split: str) -> bool:
    """Whether a split's name is that of a held-out split: test_sft, validation, eval."""
    return _TEST.search(split.lower()) is not None


def _root(path: str) -> Path:
    """The folder itself, or the part of a pattern that has no wildcard."""
    place = resolve_path(path)
    if not has_wildcards(path) or place.exists():
        return place
    return next(parent for parent in place.parents if not has_wildcards(str(parent)))


def _walk(folder: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        # In place: os.walk then does not enter hidden folders, such as a checkout's .git.
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield parent
        yield from (os.path.join(parent, name) for name in names if not name.startswith("."))


# The first lines of .jsonl and .csv files, checked before torch is loaded: records, with columns
# that can be read.  All examples are checked later, by data/split.py; this saves the wait for a
# file that cannot be read at all.

NUM_LINES, NUM_FILES = 50, 3
MAX_ROWS = 100_000
"""The most rows of a file that is read whole without torch."""
MAX_LINE = 1 << 20
"""Bytes; a file with a longer line is left to the later checks."""


def refuse_unusable_data(
    path: str, split: dict[str, Any], task: str | None, *, may_be_test: bool, reads_data: bool
) -> None:
    """Raise UserError for files at `path` that cannot be trained on, by their names and by the
    first records of .jsonl and .csv files; MissingError if there are none.

    split, task: of the raw recipe. may_be_test: whether a file of a folder may be a test split's.
    reads_data: whether records are read.
    """
    if path.startswith(PYTHON):
        if path != STDLIB:
            raise UserError(
                f"found {path!r}; write {STDLIB}, the only dataset that begins with python:"
            )
        return
    files = data_files(path)
    if path in files:
        if files[path].stat().st_size == 0:
            raise UserError(f"{path} is empty; name a file with examples")
    # By file names alone, before anything is read: scores on training data are meaningless.
    elif not may_be_test:
        root = _root(path)
        tests = (name for name, file in files.items() if is_test_split(str(file.relative_to(root))))
        if name := next(tests, None):
            raise UserError(
                f"the file {name} has the name of a test split, and scores on training data are "
                "meaningless; write a pattern that leaves this file out, such as train*.jsonl, "
                "or add train_on_test: true to this section"
            )
    names: Any = split.get("columns")
    names = names if isinstance(names, dict) else {}
    # All other files are left to the later checks, which read them anyway.
    readable = (
        [(name, file) for name, file in files.items() if file.suffix in (".jsonl", ".csv")]
        if reads_data
        else []
    )
    # A few files: all of them would take as long as the preparation itself.
    for name, file in readable[:NUM_FILES]:
        records = first_records(name, file, split)
        columns = {column: None for record in records for column in record}
        head = f"the columns {', '.join(columns)}"
        for ours, theirs in names.items() if columns else ():  # keys of turns are not columns
            if ours not in TURN_KEYS and isinstance(theirs, str) and theirs not in columns:
                hint = did_you_mean(theirs, columns, "write one of these columns")
                raise UserError(
                    f"{name}: columns.{ours} is '{theirs}', but the file has {head}{hint}"
                )
        # None of the columns is one of ours: a file of other columns may still be right, if it has
        # some of ours beside them.
        if columns and not names and task in TASKS and not columns.keys() & {*get_args(Column)}:
            hint = example_of_names(records[0], task)
            raise UserError(
                f"{name}: has {head}, but {task} needs {TASKS[task].required_columns}{hint}"
            )


_QUESTION = (
    "question questions instruction prompt query ask frage fragen pregunta preguntas domanda"
    " domande pergunta perguntas vraag vragen pytanie soru вопрос 问题 質問 질문 term begriff"
    " betreff anfrage problem"
)
_ANSWER = (
    "answer answers output completion response reply antwort antworten réponse réponses reponse"
    " respuesta respuestas risposta risposte resposta respostas antwoord odpowiedź odpowiedz cevap"
    " ответ 答案 回答 답변 definition meaning erklärung"
    " rückmeldung lösung solution"
)
_TEXT = "text message review sentence comment nachricht kommentar satz"
_LABEL = "label class category sentiment kategorie klasse catégorie categoría"
_CHOSEN = "chosen preferred good better accepted gut gute bessere bonne buena buona"
_REJECTED = "rejected bad worse schlecht schlechte schlechtere mauvaise mala cattiva"
_RATING = "thumb thumbs feedback rating vote liked daumen bewertung pouce pulgar"
_THUMBS = f"{_RATING} label kto_tag"
"""Words of column names, in ten languages."""
_ASKS = re.compile(r"[?？؟]")
_KNOWN = (("instruction", "output"), ("prompt", "completion"), ("question", "answer"))
Records = Sequence[Mapping[str, Any]]


def question_columns(
    path: str,
    question: str | None = None,
    answer: str | None = None,
    records: Records | None = None,
) -> dict[str, str]:
    """`columns` for a file of questions and answers: these two, or those that names or question
    marks distinguish.

    records: the file's; None: its first ones are read, and the result is empty if a recipe needs no
    `columns` for them, or if they cannot be read. Of given records it also has `chosen` and
    `rejected` in place of `output`, where two columns have these names. Raises UserError if a
    column does not exist, or if the file has several that may be the questions.
    """
    if (question is None) != (answer is None):
        option = "--question" if question is None else "--answer"
        raise UserError(f"{option}: is missing; write --question COLUMN and --answer COLUMN")
    columns = {"instruction": question, "output": answer} if question and answer else {}
    is_first = records is None
    if records is None:
        records = _first_of(path, NUM_LINES)
    names = column_names(records)
    if missing := next((column for column in columns.values() if column not in names), None):
        hint = did_you_mean(missing, names, "write one of these columns")
        raise UserError(
            f"--data: {path}: has the columns {', '.join(names)}, but no column '{missing}'{hint}"
        )
    if columns or not records:
        return columns
    if is_first and ({*names} & {*get_args(Column)} or len(longest_texts(records[0])) < 2):
        return columns
    if not is_first and (pair := _named(names, _CHOSEN, _REJECTED)):
        prompts = [name for name in names if _has_word(name, _QUESTION) and name not in pair]
        if len(prompts) == 1:
            return {"instruction": prompts[0], "chosen": pair[0], "rejected": pair[1]}
    known = next(([*pair] for pair in _KNOWN if {*pair} <= {*names}), None)
    if pair := (
        known
        or _named(names, _QUESTION, _ANSWER)
        or _of_two(names, records)
        or _named(names, _TEXT, _LABEL)
    ):
        return dict(zip(("instruction", "output"), pair, strict=True))
    # A guess would train something silently: row numbers, or answers as questions.
    finding = f"found the columns {', '.join(names)}; {_columns_remedy(names, records[0])}"
    if len(names) == 1:
        finding = (
            f"has only the column {names[0]}; name a file with a column of questions and one of"
            " answers"
        )
    elif not is_first:
        finding += ", or name the columns of preference pairs prompt, chosen and rejected"
    raise UserError(f"--data: {path}: {finding}")


def column_names(records: Records) -> list[str]:
    """The columns of all records, in the order in which they occur."""
    return list(dict.fromkeys(column for record in records for column in record))


def label_column(records: Records, *, by_name: bool = True) -> str | None:
    """The one column that has thumbs, up and down; None if there is none, or several.

    by_name: only a column with such a name: "active: yes" is no thumb. A tenth of its cells may
    have other words, such as n/a.
    """
    names, columns = column_names(records), []
    for name in names if len(names) > 2 else ():  # beside a question and an answer
        cells = [value for record in records if (value := record.get(name)) not in (None, "")]
        labels = Counter(map(thumb, cells))
        others = labels.pop(None, 0)
        is_meant = _has_word(name, _THUMBS) and others <= len(cells) / 10 if by_name else not others
        if len(labels) == 2 and is_meant:
            columns.append(name)
    return columns[0] if len(columns) == 1 else None


def refuse_other_ratings(path: str, records: Records) -> None:
    """Raise UserError if a column is a rating by its name and has few values, but no thumbs of both
    kinds: bad answers would be trained like good ones.
    """
    names = column_names(records)
    for name in names if len(names) > 2 else ():
        cells = Counter(str(record.get(name) or "").strip() for record in records)
        if _has_word(name, _RATING) and len(cells) <= 10 and not all(map(thumb, cells)):
            values = ", ".join(repr(value) for value, _ in cells.most_common(5))
            raise UserError(
                f"--data: {path}: column '{name}' looks like a rating, but has {values}; write up"
                " or down into it (an empty cell leaves its record out), or remove the column to train"
                " all answers"
            )


def thumbs_of(path: str) -> str | None:
    """The column of a file that has thumbs, by its name and its values; None if there is none."""
    return label_column(_first_of(path))


def _first_of(path: str, most: int = MAX_ROWS) -> Records:
    """The first records of the first of the files; none if they cannot be read."""
    try:
        name, file = next(iter(data_files(path).items()))
        return first_records(name, file, {}, most)
    except (UserError, OSError):
        return ()


def labelled_columns(
    path: str, question: str | None = None, answer: str | None = None
) -> dict[str, str]:
    """`columns` for a file of questions, answers and labels, or {} if a recipe needs none for them;
    otherwise as `question_columns`.
    """
    records = _first_of(path)
    names = column_names(records)
    if "label" in names and ({"messages", "conversations", "completion"} & {*names}):
        return {}
    label = "label" if "label" in names else label_column(records, by_name=False)
    if label is None:
        if named := [name for name in names if _has_word(name, _THUMBS)]:
            values = dict.fromkeys(str(record.get(named[0])) for record in records)
            raise UserError(
                f"--data: {path}: column '{named[0]}' has {', '.join(values)[:60]}, but kto needs"
                " labels of both kinds: true for good answers, false for bad ones; change this"
                " column"
            )
        return {}
    rest = [{key: value for key, value in record.items() if key != label} for record in records]
    return {**question_columns(path, question, answer, rest), "label": label}


def _columns_remedy(names: Sequence[str], record: Mapping[str, Any]) -> str:
    """The options that name the columns, with two columns that may be meant."""
    texts = {key: value for key, value in record.items() if not str(value).strip().isdecimal()}
    pair = longest_texts(texts)
    if asking := [name for name in names if _has_word(name, _QUESTION)]:
        pair = [asking[0], *(name for name in names if name != asking[0])][:2]
    words = ("--question", pair[0], "--answer", pair[1]) if len(pair) == 2 else ()
    return "add --question COLUMN --answer COLUMN" + f", such as {shlex.join(words)}" * bool(words)


def _has_word(name: str, words: str) -> bool:
    return not {*words.split()}.isdisjoint(re.findall(r"[^\W\d_]+", name.casefold()))


def _named(names: Sequence[str], first: str, second: str) -> list[str] | None:
    """The one column with a word of `first`, and the one with a word of `second`."""
    others = [name for name in names if _has_word(name, second)]
    firsts = [name for name in names if _has_word(name, first) and name not in others]
    return [*firsts, *others] if len(firsts) == len(others) == 1 else None


def _of_two(names: Sequence[str], records: Records) -> list[str] | None:
    """The two columns, if there are no others, both have texts, and a name or the question marks
    show which is which."""
    texts = {name: [str(record.get(name) or "").strip() for record in records] for name in names}
    if len(names) != 2 or any(
        all(map(str.isdecimal, filter(None, each))) for each in texts.values()
    ):
        return None
    for name, other in (names, names[::-1]):
        if _has_word(name, _QUESTION) or _has_word(other, _ANSWER):
            return [name, other]
    shares = [
        sum(bool(_ASKS.search(text)) for text in texts[name]) / len(records) for name in names
    ]
    if abs(shares[0] - shares[1]) < 0.3:
        return None
    return [*names] if shares[0] > shares[1] else [*names[::-1]]


def first_records(
    name: str, file: Path, split: dict[str, Any], most: int = NUM_LINES, *, is_whole: bool = False
) -> list[dict[str, Any]]:
    """The first records that are objects.
    Raises UserError for a file or a line that cannot be read.

    is_whole: no other reader of the file follows, so that rows with another number of columns are
    refused here.
    """
    limit = split.get("limit")
    num_lines = min(limit, most) if isinstance(limit, int) else most
    try:
        with file.open("rb") as stream:
            if stream.read(4) == b"PK\3\4":  # a zip archive
                raise UserError(
                    f"{name}: is no text, but perhaps a spreadsheet; rename the file to"
                    f" {file.stem}{SPREADSHEET}, or save it as CSV in UTF-8"
                )
            stream.seek(0)
            refuse_wide_characters(name, stream.read(4))
            if file.suffix == ".json" and is_whole:
                return _array(name, file)
            if file.suffix == ".csv":
                return _first_rows(name, file, num_lines, is_whole)
            stream.seek(0)
            lines = list(islice(_lines(stream), num_lines))
    except OSError as error:
        raise UserError(
            f"{name}: cannot be read: {error.strerror}; check the path and its permissions"
        ) from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as error:
            # With `drop` a broken line is counted and left out later, where all lines are read.
            if split.get("bad_examples", "refuse") == "refuse":
                reason = (
                    f"not JSON: {error.msg} at column {error.colno}; write one JSON object per line"
                )
                raise UserError(f"{name}:{number}: {reason}") from None
        except (ValueError, RecursionError):
            return []  # reported in full later
        else:
            records += [record] if isinstance(record, dict) and record else []
    return records


def _array(name: str, file: Path) -> list[dict[str, Any]]:
    try:
        records = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: is not JSON: {in_one_line(error, 100)}; correct it") from None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise UserError(
            f"{name}: is no list of objects; write [{{...}}, ...], or one per line in .jsonl"
        )
    return records


def spreadsheet(name: str, file: Path, least: int) -> tuple[list[dict[str, Any]], str]:
    """The rows of the only sheet that has any, or at least `least` of them, and which it is if
    others have rows, too; the first row names the columns.
    Raises UserError if no sheet or several are meant, or if the file cannot be read.
    """
    extras.require("openpyxl", name, "save the sheet as CSV in UTF-8")
    import openpyxl

    try:
        with file.open("rb") as stream:
            book = openpyxl.load_workbook(stream, read_only=True, data_only=True)
            sheets = {
                sheet.title: [row for row in islice(sheet.values, MAX_ROWS + 1) if any(row)]
                for sheet in book.worksheets
            }
    # Of a damaged file it raises what zip, XML and its own readers raise.
    except Exception as error:
        raise UserError(
            f"{name}: is no spreadsheet that can be read: {in_one_line(error, 100)}; save it again"
            " as .xlsx, or as CSV in UTF-8"
        ) from None
    full = {title: rows for title, rows in sheets.items() if rows}
    meant = {title: rows for title, rows in full.items() if len(rows) > least} or full
    if len(meant) != 1:
        finding = f"{len(full)} sheets with rows" + f": {', '.join(full)}" * bool(full)
        raise UserError(f"{name}: has {finding}; save the one to be read as a file of its own")
    title, (header, *rows) = meant.popitem()
    del full[title]
    others = f"read sheet '{title}'; not read: {', '.join(full)}" if full else ""
    width = max((i for i, cell in enumerate(header, 1) if cell is not None), default=0)
    names = ["" if cell is None else str(cell).strip() for cell in header[:width]]
    refuse_repeated_names(name, names)
    cells = (["" if cell is None else str(cell) for cell in row[:width]] for row in rows)
    return [dict(zip(names, row, strict=False)) for row in cells if any(row)], others


def _first_rows(name: str, file: Path, num_lines: int, is_whole: bool) -> list[dict[str, Any]]:
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        # utf-8-sig: spreadsheets write a byte order mark, which would be a part of the first
        # column's name.
        names, delimiter = csv_columns(name, stream.readline(MAX_LINE))
        rows: list[list[str]] = []
        with suppress(csv.Error):  # reported later, with its line
            rows.extend(islice(csv.reader(_lines(stream), delimiter=delimiter), num_lines))
    for number, row in enumerate(rows if is_whole else (), 1):
        if row and len(row) != len(names):
            finding = f"record {number} has {len(row)} columns, but the header has {len(names)}"
            remedy = f"put a text that contains {delimiter!r} in quotes"
            if len(row) < len(names):
                remedy = "complete it with empty cells, such as by saving the file in a spreadsheet"
            raise UserError(f"{name}: {finding}; {remedy}")
    records = [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]
    return records or [dict.fromkeys(names, "")]


def csv_columns(name: str, head: str) -> tuple[list[str], str]:
    """The columns that the first line of a .csv file names, and the delimiter.
    Raises UserError if they are no names.

    name: the file's, for messages.
    """
    # Spreadsheets export semicolons where the comma is the decimal sign.
    delimiter = max(",;\t", key=head.count)
    names = next(csv.reader([head], delimiter=delimiter), [])
    refuse_repeated_names(name, names)
    return names, delimiter


def refuse_repeated_names(name: str, columns: Sequence[str]) -> None:
    """Raise UserError if the columns of a file have no names, or two the same."""
    if len(columns) != len(set(columns)) or "" in columns:
        listed = ", ".join(columns)[:200]
        raise UserError(
            f"{name}:1: a column's name is empty or occurs twice in: {listed}; write each name once"
        )


def refuse_wide_characters(name: str, start: bytes) -> None:
    """Raise UserError if a text file is not UTF-8 by its first bytes: a byte order mark, or a
    NUL.
    """
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start:
        raise UserError(
            f"{name}: is in UTF-16 or UTF-32; convert the file to UTF-8: iconv -f UTF-16 -t UTF-8"
        )


def columns_text(names: Mapping[str, str]) -> str:
    """The value of `columns` in YAML. names: ours -> the dataset's."""
    return f"{{{', '.join(f'{ours}: {theirs}' for ours, theirs in names.items())}}}"


def example_of_names(example: dict[str, Any], task: str) -> str:
    """A proposal for `columns`, where an SFT dataset has a column of turns, or two of text."""
    if task != "sft":
        return ""
    lists = {
        column: value
        for column, value in example.items()
        if isinstance(value, list) and column not in OPTIONS
    }
    turns = [column for column, value in lists.items() if value and isinstance(value[0], dict)]
    if turns:
        return f", such as {columns_text({'messages': turns[0]})}"
    pair = longest_texts(example)
    return (
        f", such as {columns_text({'instruction': pair[0], 'output': pair[1]})}"
        if len(pair) == 2
        else ""
    )


def longest_texts(example: Mapping[str, Any]) -> list[str]:
    """The two columns with the longest texts, in the example's order: an id is shorter.
    None beside turns.
    """
    if any(
        isinstance(value, list) and value and isinstance(value[0], dict)
        for value in example.values()
    ):
        return []
    texts = {column: len(value) for column, value in example.items() if isinstance(value, str)}
    longest = sorted(texts, key=lambda column: -texts[column])[:2]
    return [column for column in texts if column in longest]


def _lines(stream: Any) -> Iterator[Any]:
    """The lines up to the first that is too long."""
    return takewhile(
        lambda line: 0 < len(line) < MAX_LINE, iter(lambda: stream.readline(MAX_LINE), None)
    )
