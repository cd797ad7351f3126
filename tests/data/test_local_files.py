"""Local data: CSV, text and compressed files, folders and patterns are the same examples as one JSONL file."""

import csv
import gzip
import hashlib
import json
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.data import files as records
from soren_align.data import load_split
from tests.support.conversations import chat_row, refused, split

ROWS = [{"prompt": f'Question {i}, with "quotes", {"commas, " * i}ü:\nand lines ', "completion": f"; answer\t{i}"}
        for i in range(5)]  # fmt: skip


def write_as(path, rows):
    """The rows as a file of the path's suffix, by the standard library and pyarrow alone."""
    suffix = path.name.partition(".")[2].removesuffix(".gz")
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return
    opened = gzip.open if path.name.endswith(".gz") else open
    with opened(path, "wt", encoding="utf-8-sig" if suffix == "csv" else "utf-8", newline="") as stream:
        if suffix == "json":
            json.dump(rows, stream)
        elif suffix == "jsonl":
            stream.writelines(json.dumps(row) + "\n" for row in rows)
        elif suffix == "txt":
            stream.writelines(row["text"] + "\r\n\r\n" for row in rows)
        else:
            writer = csv.DictWriter(stream, rows[0])
            writer.writeheader()
            writer.writerows(rows)


@pytest.mark.parametrize("suffix", ["csv", "jsonl.gz", "json.gz", "csv.gz", "txt", "txt.gz"])
def test_a_file_of_any_kind_has_the_rows_that_were_written(tmp_path, suffix):
    """Of a text file every line that is not blank."""
    rows = [{"text": "The lynx sleeps. ü"}, {"text": "  The bear does not."}] if "txt" in suffix else ROWS
    write_as(path := tmp_path / f"rows.{suffix}", rows)
    loaded = load_split(split(path), "sft")
    assert list(loaded.dataset) == rows
    assert loaded.source["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_the_separator_of_a_csv_file_is_that_of_its_first_line(tmp_path, delimiter):
    path = tmp_path / "rows.csv"
    path.write_text(delimiter.join(["instruction", "input", "output"]) + "\n" + delimiter.join(["a", "", "b"]) + "\n")
    loaded = load_split(split(path), "sft")
    assert loaded.dataset[0]["completion"] == [{"role": "assistant", "content": "b"}]


LATIN = "; if the file is in Latin-1, convert the file: iconv -f LATIN1 -t UTF-8"
BAD_FILES = {  # name: (content, what is said)
    "fields.csv": (b"text,id\na,1\nb\n", "fields.csv:3: has 1 fields, but the file has 2 columns"),
    "names.csv": (b"text,text\na,1\n", "names.csv:1: a column's name is empty or occurs twice in: text, text; write"),
    "blank.csv": (b"text,\na,1\n", "blank.csv:1: a column's name is empty or occurs twice in: "),
    "quote.csv": (b'text\n"a\n\n"\n"never ends\n', "quote.csv:5: is no valid CSV: unexpected end of data"),
    "latin.csv": (b"text\na\n\xfc\n", f"latin.csv:3: is not UTF-8{LATIN}"),
    "latin.txt": (b"a\n\xfc\n", f"latin.txt:2: is not UTF-8 at byte 1 of the line{LATIN}"),
    "empty.csv": (b"", "empty.csv: has no examples"),
    "head.csv": (b"text\n", "head.csv: has no examples"),
    "plain.jsonl.gz": (b"{}", "plain.jsonl.gz: cannot be decompressed: Not a gzipped file"),
    "plain.json.gz": (b"[]", "plain.json.gz: cannot be decompressed: Not a gzipped file"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 99)[:-9], "cut.jsonl.gz: cannot be decompressed"),
    "damaged.txt.gz": (gzip.compress(b"a" * 99)[:14] + b"\0" * 20, "damaged.txt.gz: cannot be decompressed"),
    "rows.parquet.gz": (b"PAR1", "'.gz' files cannot be read"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_damaged_file_is_refused_in_a_sentence(tmp_path, name):
    content, words = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    message = refused(split(tmp_path / name))
    assert words in message
    assert str(tmp_path / name) in message


ENCODED = '{"text": "für"}\n{"text": "b"}\n'


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.csv", "a.jsonl.gz"])
def test_a_file_in_utf_16_is_refused_as_a_whole(tmp_path, name, encoding):
    content = ENCODED.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    message = rf"{name}: is in UTF-16 or UTF-32; convert the file to UTF-8: iconv -f UTF-16 -t UTF-8"
    with pytest.raises(UserError, match=message):
        list(records.read_records(tmp_path / name))


@pytest.fixture
def folder(tmp_path):
    """ROWS in files of several kinds, in alphabetical order, with others beside them."""
    (tmp_path / "data" / "part").mkdir(parents=True)
    for i, name in enumerate(["a.csv", "b.parquet", "c.json", "part/d.jsonl", "z.jsonl.gz"]):
        write_as(tmp_path / "data" / name, [ROWS[i]])
    (tmp_path / "data" / ".hidden").mkdir()
    for name in ("README.md", ".notes.jsonl", ".hidden/x.jsonl"):
        (tmp_path / "data" / name).write_text("no data")
    return tmp_path / "data"


def test_a_folder_is_its_data_files_in_alphabetical_order(folder, monkeypatch):
    loaded = load_split(split(folder), "sft")
    assert list(loaded.dataset) == ROWS
    files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("a.csv", "part/d.jsonl")}
    recorded = {file["path"]: file["sha256"] for file in loaded.source["files"]}
    assert [os.path.relpath(name, folder) for name in recorded] == [
        "a.csv", "b.parquet", "c.json", "part/d.jsonl", "z.jsonl.gz",
    ]  # fmt: skip
    assert {name: recorded[str(folder / name)] for name in files} == files
    assert json.dumps(loaded.source)
    monkeypatch.chdir(folder.parent)
    assert load_split(split("data"), "sft").source["sha256"] == loaded.source["sha256"]
    assert list(load_split(split("data", limit=2), "sft").dataset) == ROWS[:2]


def test_a_change_of_one_file_or_of_their_order_is_another_dataset(folder):
    before = load_split(split(folder), "sft")
    (folder / "part" / "d.jsonl").rename(folder / "aa.jsonl")
    reordered = load_split(split(folder), "sft")
    assert list(reordered.dataset) == [ROWS[i] for i in (0, 3, 1, 2, 4)]
    write_as(folder / "aa.jsonl", [{**ROWS[3], "completion": "another"}])
    changed = load_split(split(folder), "sft")
    assert changed.dataset[1]["completion"] == "another"
    assert len({loaded.source["sha256"] for loaded in (before, reordered, changed)}) == 3


def test_a_pattern_is_the_files_that_it_matches(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert list(load_split(split("data/[ab].*"), "sft").dataset) == ROWS[:2]
    assert list(load_split(split("data/*/*"), "sft").dataset) == ROWS[3:4]
    assert load_split(split("data/?.*"), "sft").source["files"][0]["path"] == "data/a.csv"
    assert "data/*.tsv: has no data file" in refused(split("data/*.tsv"))
    assert "data/**/*.json: '**' is not supported; name the folder" in refused(split("data/**/*.json"))


def test_a_bad_example_of_a_folder_is_named_with_its_file_and_line(folder):
    write_as(folder / "part" / "d.jsonl", [ROWS[3], {"prompt": "x", "completion": " "}])
    assert f"{folder}/part/d.jsonl:2: completion is empty" in refused(split(folder))
    assert load_split(split(folder, bad_examples="drop"), "sft").dropped == {"completion is empty": 1}


def test_files_of_different_kinds_do_not_mix(folder):
    write_as(folder / "LICENSE.txt", [{"text": "All rights reserved."}])
    message = refused(split(folder))
    assert f"{folder}/LICENSE.txt has plain text, without a template, but {folder}/a.csv has plain prompts" in message
    assert "write a pattern for files of one kind" in message


def test_links_to_files_are_read_and_links_to_folders_are_not(folder, tmp_path):
    outside = tmp_path / "outside"
    shutil.copytree(folder, outside)
    (folder / "folder").symlink_to(outside)
    (folder / "circle").symlink_to(folder)
    assert len(load_split(split(folder), "sft").dataset) == 5
    (folder / "link.jsonl").symlink_to(outside / "part" / "d.jsonl")  # as in the hub's cache
    os.mkfifo(folder / "pipe.jsonl")
    assert len(load_split(split(folder), "sft").dataset) == 6


def problems(path, more=""):
    settings = [f"data.train={{path: '{path}'{more}}}", "data.eval=null", "trainer.eval_strategy=no"]
    try:
        recipe.load("quickstart/sft", settings)
    except UserError as error:
        return str(error)
    return ""


def test_a_test_file_of_a_folder_is_not_trained_on(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert problems("data") == ""
    write_as(folder / "part" / "test-00.jsonl", ROWS)
    assert "data.train.path: the file data/part/test-00.jsonl has the name of a test split" in problems("data")
    assert "has the name of a test split" in problems("data/part/*.jsonl")
    assert problems("data/part/d*.jsonl") == ""
    assert problems("data", ", train_on_test: true") == ""
    write_as(folder / "test.jsonl", [chat_row()])
    assert problems("data/test.jsonl") == ""  # named on purpose
    assert recipe.load("quickstart/sft", ["data.eval={path: data}"]).data.eval.path == "data"
