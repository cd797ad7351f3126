"""Streams: their blocks hold the examples of the splits, without end, and one block is enough to resume."""

import gzip
import json
import os
from itertools import islice
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from soren_align.core import files
from soren_align.core.errors import UserError
from soren_align.data import files as local_files
from soren_align.data import load_split, open_stream
from soren_align.data import stream as streams
from tests.support.conversations import chat_row, pair_row, split

TEXTS = [{"text": f"Text number {i}.", "url": f"http://{i}", "timestamp": "2019"} for i in range(100)]


def source(path, weight=1.0, **keys):
    return split(path, weight=weight, **keys)


def opened(*sources, block_size=8, seed=1, fraction=None, task="sft"):
    return open_stream(sources, task, block_size, seed, fraction)


def blocks(preview, num_blocks, start=None):
    iterator = preview.stream.blocks(start or preview.stream.start)
    return [next(iterator) for _ in range(num_blocks)]


def texts(taken):
    return [example["text"] for block in taken for example in block.examples]


@pytest.fixture
def folder(tmp_path):
    """100 texts in C4's layout: a folder of .json.gz files with three columns."""
    place = tmp_path / "c4"
    place.mkdir()
    for number in range(4):
        with gzip.open(place / f"c4-train.{number:05d}-of-00004.json.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in TEXTS[number * 25 : number * 25 + 25])
    return str(place)


def test_a_pass_has_every_example_once_and_the_next_one_has_another_order(folder):
    preview, held_out = opened(source(folder))
    taken = blocks(preview, 26)  # two passes of 12 blocks of 8 and one of 4
    assert [len(block.examples) for block in taken] == ([8] * 12 + [4]) * 2
    first, second = texts(taken[:13]), texts(taken[13:])
    expected = [row["text"] for row in TEXTS]
    assert sorted(first) == sorted(second) == sorted(expected)
    assert first != second
    assert first[:8] != expected[:8]  # shuffled
    assert sorted(first[:8]) == sorted(expected[:8])  # a block at a time
    assert taken[-1].end["splits"] == [{"passes": 2, "num_read": 0, "position": [0, 0]}]
    assert taken[-1].end["num_read"] == 200
    assert texts(blocks(opened(source(folder), block_size=1)[0], 100)) == expected
    assert texts(blocks(opened(source(folder), seed=2)[0], 13)) != first
    assert held_out is None


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "txt", "parquet"])
def test_every_kind_of_file_is_streamed_and_resumed(tmp_path, suffix):
    rows = [{"text": row["text"]} for row in TEXTS]
    path = tmp_path / f"texts.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        lines = [row["text"] if suffix != "jsonl" else json.dumps(row) for row in rows]
        path.write_text("text\n" * (suffix == "csv") + "".join(line + "\n" for line in lines))
    preview, _ = opened(source(path))
    taken = blocks(preview, 20)
    assert sorted(texts(taken[:13])) == sorted(row["text"] for row in rows)
    assert texts(blocks(preview, 13, taken[7].start)) == texts(taken[7:])


def test_a_stream_resumes_at_every_block_in_every_source(folder, write):
    chosen = [{"text": f"other {i}"} for i in range(7)]  # a short source, which is read many times
    bad = [*chosen[:3], {"text": ""}, *chosen[3:]]
    for sources in ([source(folder)], [source(folder, limit=30)],
                    [source(folder, weight=3), source(write("other.jsonl", bad), bad_examples="drop")]):  # fmt: skip
        preview, _ = opened(*sources, fraction=0.1)
        taken = blocks(preview, 30)
        for number in (0, 1, 12, 29):
            start = json.loads(json.dumps(taken[number].start))  # as in a checkpoint
            assert blocks(preview, 30 - number, start) == taken[number:]


def test_files_that_change_in_a_pass_are_refused_at_the_next_one(write):
    path = Path(write("texts.jsonl", TEXTS))
    stream = opened(source(path))[0].stream
    iterator = stream.blocks(stream.start)
    next(iterator)
    other = path.with_name("other")  # as an editor or a copy replaces it: here of the same size and time
    other.write_bytes(path.read_bytes().replace(b"number 9", b"number 8"))
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)
    with pytest.raises(UserError, match=r"texts.jsonl: the file has changed while this command read it; restore"):
        list(islice(iterator, 13))


def test_a_mixture_draws_from_each_source_by_its_weight(folder, write):
    other = write("other.jsonl", [{"text": f"other {i}"} for i in range(7)])
    preview, _ = opened(source(folder, weight=3), source(other), block_size=400)
    drawn = texts(blocks(preview, 10))
    share = sum(text.startswith("other") for text in drawn) / len(drawn)
    assert len(drawn) == 4000
    assert abs(share - 0.25) < 0.028  # four standard deviations
    assert set(drawn) == {row["text"] for row in TEXTS} | {f"other {i}" for i in range(7)}
    assert [part["weight"] for part in preview.source["sources"]] == [3, 1]
    assert preview.num_examples == 107


def test_held_out_examples_are_those_of_a_whole_dataset_and_are_not_in_the_stream(folder, write, monkeypatch):
    monkeypatch.setattr(streams, "NUM_SEARCHED", 40)
    preview, held_out = opened(source(folder), fraction=0.2)
    position = streams.position
    expected = [row["text"] for row in TEXTS if position({"text": row["text"]}) < 0.2]
    seen = texts(blocks(preview, 13))
    assert 0 < len(expected) < 40
    assert set(seen).isdisjoint(expected)
    assert {*seen, *expected} == {row["text"] for row in TEXTS}
    assert held_out.dataset["text"] == [text for text in expected if int(text.split()[2].strip(".")) < 40]
    assert held_out.source["num_searched"] == 40
    assert not {*preview.dataset["text"]} & {*expected}


@pytest.mark.parametrize(("task", "make_row"), [("sft", chat_row), ("dpo", pair_row)])
def test_examples_are_those_of_the_whole_dataset(write, task, make_row):
    rows = [make_row(i, turns=1 + i % 3) for i in range(20)]
    config = source(write("rows.jsonl", rows))
    whole = load_split(config, task)
    preview, _ = opened(config, task=task, block_size=1)
    assert [block.examples[0] for block in blocks(preview, 20)] == list(whole.dataset)
    assert list(preview.dataset) == list(whole.dataset)
    assert preview.kind == whole.kind
    assert preview.source.keys() - whole.source.keys() == {
        "num_files", "num_bytes", "tree_sha256", "sampled", "streaming",
    }  # fmt: skip


def test_streamed_files_with_other_content_are_other_data(write, monkeypatch):
    """A checkpoint's origin has this record: files that were exchanged between a kill and its resume are refused."""
    path = write("texts.jsonl", [{"text": f"Text {i:02}."} for i in range(40)])
    content = Path(path).read_bytes()

    def record(changed=content, modified=1):
        Path(path).write_bytes(changed)
        os.utime(path, ns=(modified, modified))
        return opened(source(path))[0].source

    whole = record()
    assert whole["sampled"] is False
    assert record(modified=2) == whole
    assert record(content.replace(b"Text 20", b"Test 20")) != whole

    monkeypatch.setattr(local_files, "MAX_HASHED", 2)  # more than that is read at its first and last chunk
    for module in (local_files, files):
        monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    monkeypatch.setattr(files, "_BLOCK_BYTES", 1)
    sampled = record()
    assert sampled["sampled"] is True
    assert record() == sampled
    assert record(content[:-1] + b" ") != sampled
    assert record(content.replace(b"Text 20", b"Test 20")) == sampled
    assert record(content.replace(b"Text 20", b"Test 20"), modified=2) != sampled


def test_an_invalid_example_ends_the_run_or_is_counted(write):
    rows = [*TEXTS[:30], {"text": ""}, "no JSON", *TEXTS[30:60]]
    path = write("texts.jsonl", rows)
    with pytest.raises(UserError, match="2 of 62 examples cannot be used for sft"):
        opened(source(path))
    preview, _ = opened(source(path, bad_examples="drop"), block_size=10)
    assert preview.dropped == {"text is empty": 1, "is not JSON: Expecting value at column 1": 1}
    taken = blocks(preview, 6)
    assert taken[5].end["dropped"] == preview.dropped
    assert taken[2].end["dropped"] == {}
    assert sorted(texts(taken)) == sorted(row["text"] for row in TEXTS[:60])


def test_an_invalid_example_after_the_first_ones_names_the_remedy(write, monkeypatch):
    monkeypatch.setattr(streams, "NUM_PREVIEWED", 20)
    path = write("texts.jsonl", [*TEXTS[:30], {"text": ""}])
    preview, _ = opened(source(path))
    message = r"texts.jsonl:31: cannot be used for sft: text is empty; fix this example, or add bad_examples: "
    with pytest.raises(UserError, match=message):
        blocks(preview, 10)


def test_splits_of_different_kinds_do_not_mix(folder, write):
    with pytest.raises(UserError, match="these two formats cannot be mixed"):
        opened(source(folder), source(write("chats.jsonl", [chat_row()])))


@pytest.fixture
def hub_stream(monkeypatch, tmp_path):
    """owner/texts on the hub: three Parquet files of 30 texts, read as `datasets` streams them."""
    for number in range(3):
        rows = TEXTS[number * 30 : number * 30 + 30]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{number}.parquet", row_group_size=7)

    def stream(path, split, revision, name):
        files = str(tmp_path / "*.parquet")
        return datasets.load_dataset("parquet", data_files={split: files}, split=split, streaming=True), "c0ffee"

    monkeypatch.setattr("soren_align.data.hub.stream", stream)
    return "owner/texts"


def test_a_hub_dataset_is_streamed_and_resumed(hub_stream):
    preview, _ = opened(source(hub_stream, bad_examples="drop"), fraction=0.1)
    assert preview.source["revision"] == "c0ffee"
    taken = blocks(preview, 25)
    passed = [block for block in taken if block.end["splits"][0]["passes"] == 0]
    assert 8 <= len(passed) < 12
    for number in (0, 3, 9, 24):
        start = json.loads(json.dumps(taken[number].start))
        again = blocks(preview, 25 - number, start)
        assert [block.examples for block in again] == [block.examples for block in taken[number:]]


def test_an_error_of_the_hub_is_one_sentence(hub_stream, tmp_path):
    preview, _ = opened(source(hub_stream))
    (tmp_path / "1.parquet").write_bytes(b"damaged")
    message = r"owner/texts \(train\): after 30 records the hub could no longer be read: .*; rerun"
    with pytest.raises(UserError, match=message):
        blocks(preview, 12)
