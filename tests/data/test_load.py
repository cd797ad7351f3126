"""load_split: files and hub datasets, reduced and checked."""

import json
import socket

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from soren_align.core.errors import OutOfReach, UserError
from soren_align.data import hub, load_split
from tests.support.conversations import chat, chat_row, pair_row, refused, split
from tests.support.edited_files import edit

U, A, S = ({"role": role, "content": "words"} for role in ("user", "assistant", "system"))


@pytest.mark.parametrize(("task", "make_row", "columns", "words"), [
    ("sft", chat_row, ["messages"], "chat messages (like ultrachat_200k)"),
    ("dpo", pair_row, ["chosen", "rejected"], "preference pairs (like ultrafeedback_binarized)"),
    ("sft", lambda i: {"messages": chat(i)}, ["messages"], "chat messages"),
])  # fmt: skip
@pytest.mark.parametrize("suffix", [".jsonl", ".json", "lines.json", ".parquet"])
def test_a_file_is_reduced_to_what_trl_needs(tmp_path, suffix, task, make_row, columns, words):
    rows = [make_row(i) for i in range(7)]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if suffix == ".json" else "\n".join(json.dumps(row) for row in rows))
    loaded = load_split(split(path), task)
    assert loaded.dataset.column_names == columns
    assert loaded.dataset[3] == {column: rows[3][column] for column in columns}
    assert (loaded.num_examples, loaded.layout, loaded.notices) == (7, words, ())
    assert loaded.source["columns_dropped"] == [column for column in rows[0] if column not in columns]
    assert len(loaded.source["sha256"]) == 64
    assert json.dumps(loaded.source)  # it goes into run.json


def test_columns_of_the_other_task_are_named_with_the_command_for_them(write):
    path = write("pairs.jsonl", [{k: v for k, v in pair_row().items() if k != "messages"}])
    message = refused(split(path), "sft")
    assert "has the columns prompt, prompt_id, chosen, rejected" in message
    assert "sft needs 'messages'" in message
    assert "`soren-align dpo`" in message
    assert "`soren-align sft`" in refused(split(write("chats.jsonl", [chat_row()])), "dpo")


def test_columns_of_no_task_are_named(write):
    message = refused(split(write("text.jsonl", [{"story": "hello", "id": 1}])))
    assert "has the columns story, id, but sft needs 'messages', a list of {role, content} turns (or " in message
    for row, names in (({"id": "1", "answer": "Hay for it.", "q": "What?"}, "such as {instruction: answer, output: q}"),
                       ({"id": 1, "talk": [{"who": "a", "says": "b"}]}, "such as {messages: talk}")):  # fmt: skip
        assert refused(split(write("text.jsonl", [row]))).endswith(names)


SFT_ROWS = {
    "is not JSON: Expecting value at column 14": '{"messages": }',
    "is [1], not a JSON object": "[1]",
    "no 'messages'": {"text": "x"},
    "messages is text, not a list": {"messages": "hello"},
    "messages is an empty list": {"messages": []},
    "messages[0] is text, not an object": {"messages": ["hello"]},
    "messages[1] has the role 'poet'; write system, user, assistant or tool": {"messages": [U, {**A, "role": "poet"}]},
    "messages[0] has no role": {"messages": [{"content": "words"}, A]},
    "messages[1] has no content": {"messages": [U, {"role": "assistant", "content": None}]},
    "messages[1] has a list as content": {"messages": [U, {**A, "content": ["x"]}]},
    "messages[0] has empty content (role user)": {"messages": [{**U, "content": " \n"}, A]},
    "messages[1] has content with half of a surrogate pair": '{"messages": [{"role": "user", "content": "x"}, '
    '{"role": "assistant", "content": "\\ud800"}]}',
    "messages[1] has score beside role and content": {"messages": [U, {**A, "score": 0}]},
    "messages has no assistant turn": {"messages": [S, U]},
    "messages has no assistant turn to learn from": {"messages": [S]},
    "messages starts with an assistant turn": {"messages": [A, U, A]},
    "messages[2] is a system turn, but only the first": {"messages": [U, A, S, U, A]},
    "messages[1] and messages[2] are both user turns": {"messages": [S, U, U, A]},
    "messages ends with a user turn": {"messages": [U, A, U]},
}
DPO_ROWS = {
    "chosen is an empty list": {"chosen": [], "rejected": [U, A]},
    "no 'rejected'": {"chosen": [U, A]},
    "rejected is text": {"chosen": [U, A], "rejected": "no"},
    "chosen and rejected are equal": {"chosen": [U, A], "rejected": [U, A]},
    "do not share a prompt: they differ at turn [0]": {"chosen": [U, A], "rejected": [{**U, "content": "other"}, A]},
    "do not share a prompt: one of them has more turns": {"chosen": [U, A, U, A], "rejected": [U, A]},
    "rejected ends with a user turn": {"chosen": [U, A], "rejected": [U, A, U]},
    "chosen starts with an assistant turn, not with a user or system turn": {"chosen": [A], "rejected": [A]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("task", "reason", "row"),
    [("sft", *case) for case in SFT_ROWS.items()] + [("dpo", *case) for case in DPO_ROWS.items()],
)
def test_a_bad_row_is_refused_with_its_line_and_reason(write, task, reason, row):
    good = chat_row() if task == "sft" else pair_row()
    path = write("rows.jsonl", [good, "", row, good])  # the blank line counts as a line, not as a row
    head, line = refused(split(path), task).splitlines()
    assert head.startswith(f"{path}: 1 of 3 examples cannot be used for {task}")
    assert line.startswith(f"  {path}:3: ")
    assert reason in line
    assert line.endswith(f", but the columns {', '.join(row)}") == reason.startswith("no '")


def test_every_bad_row_is_counted_and_the_first_are_named(write):
    path = write("rows.jsonl", [chat_row(), *[{"messages": []}] * 8, chat_row()])
    lines = refused(split(path)).splitlines()
    assert "8 of 10 examples cannot be used for sft" in lines[0]
    assert [line.split(": ")[0] for line in lines[1:6]] == [f"  {path}:{n}" for n in (2, 3, 4, 5, 6)]
    assert lines[6:] == ["  ... and 3 more examples"]


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(json.dumps(chat_row()).encode() + b'\n{"messages": "\xfc"}\n')
    assert f"{path}:2: is not UTF-8 at byte 15 of the line" in refused(split(path))


def test_a_broken_json_array_is_named_with_its_line(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[\n{"messages": []},\n{"messages": ]}]')
    assert refused(split(path)) == f"{path}:3: is not JSON: Expecting value at column 14; correct this line"


def test_a_bad_parquet_row_is_named_with_its_number(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([chat_row(), {**chat_row(), "messages": [U]}]), path)
    assert f"{path} record 2: messages has no assistant turn" in refused(split(path))


UNREADABLE = {  # name: (content, the message)
    "rows.jsonl": (None, "no file "), "shipped:no/such.jsonl": (None, "no file shipped:no/such.jsonl"),
    "*.arrow": (None, "has no data file; name a folder with files of one of these kinds: .jsonl, .json, "),
    "rows.arrow": ("a,b", "'.arrow' files cannot be read; convert the file to one of .jsonl, .json, .csv"),
    "rows.parquet": ("no parquet", "is no valid Parquet file"),
    "zero.jsonl": ("", "zero.jsonl: has no examples; name other data"),
    "blank.jsonl": ("\n\n", "blank.jsonl: has no examples; name other data"),
    "none.json": ("[]", "none.json: has no examples; name other data"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_that_cannot_be_read_are_refused(tmp_path, name):
    content, message = UNREADABLE[name]
    if content is not None:
        (tmp_path / name).write_text(content)
    assert message in refused(split(name if name.startswith("shipped:") else tmp_path / name))


def test_a_folder_without_data_and_a_revision_of_a_file_are_refused(tmp_path, write):
    assert UNREADABLE["*.arrow"][1] in refused(split(tmp_path))
    assert "revision is 'main', but only" in refused(split(write("ok.jsonl", [chat_row()]), revision="main"))


def test_limit_takes_the_first_rows_and_says_so_when_there_are_fewer(write):
    path = write("rows.jsonl", [chat_row(i) for i in range(5)] + ["broken beyond the limit"])
    loaded = load_split(split(path, limit=3), "sft")
    assert loaded.num_examples == len(loaded.dataset) == 3
    assert loaded.dataset[2]["messages"] == chat(2)
    loaded = load_split(split(write("few.jsonl", [chat_row()]), limit=9), "sft")
    assert loaded.num_examples == 1
    assert "limit is 9, but there are only 1" in loaded.notices[0]
    assert "limit is 0; write 1 or more" in refused(split(path, limit=0))


def test_a_changed_file_is_read_anew_and_an_unchanged_one_is_not(write, monkeypatch):
    path = write("rows.jsonl", [chat_row(1)])
    first = load_split(split(path), "sft")
    write("rows.jsonl", [chat_row(2)])  # as long as before, and perhaps within the clock's resolution
    second = load_split(split(path), "sft")
    assert second.dataset[0]["messages"] == chat(2)
    assert second.source["sha256"] != first.source["sha256"]
    assert second.dataset._fingerprint != first.dataset._fingerprint  # TRL's own caches hang on it

    checked = []
    monkeypatch.setattr("soren_align.data.formats.read_example", lambda row, layout: checked.append(row))
    third = load_split(split(path), "sft")
    assert third.dataset[0] == second.dataset[0]
    assert third.dataset._fingerprint == second.dataset._fingerprint
    assert checked == []


def test_a_local_file_touches_no_network_and_prints_nothing(write, monkeypatch, capfd):
    def no_network(*address):
        raise AssertionError(f"connects to {address}")

    datasets.enable_progress_bars()
    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    load_split(split(write("rows.jsonl", [pair_row()])), "dpo")
    refused(split(write("bad.jsonl", [{"messages": []}])))
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()  # and the libraries' settings are as they were


# The hub: a copy in the cache, laid out as `datasets` leaves it after a download.

COMMIT = "8049631c405ae6576f93f445c6b8166f76f5505a"


@pytest.fixture
def hub_dataset(cache, tmp_path):
    """owner/replica in the cache, as if downloaded; its splits are train_prefs and test_prefs."""
    return add_configuration(cache, tmp_path, "default", range(6))


def add_configuration(cache, tmp_path, name, numbers):
    files = {}
    for split_name, rows in (("train_prefs", numbers), ("test_prefs", numbers[:2])):
        files[split_name] = str(tmp_path / f"{name}-{split_name}.parquet")
        pq.write_table(pa.Table.from_pylist([pair_row(i) for i in rows]), files[split_name])
    datasets.disable_progress_bars()
    datasets.load_dataset("parquet", data_files=files, cache_dir=cache)
    datasets.enable_progress_bars()
    (made,) = cache.glob("parquet/*/0.0.0/*/")
    target = cache / "owner___replica" / name / "0.0.0" / COMMIT
    target.parent.mkdir(parents=True)
    made.rename(target)
    for arrow in target.glob("*.arrow"):
        arrow.rename(arrow.with_name(arrow.name.replace("parquet-", "replica-")))
    edit(target / "dataset_info.json", config_name=name, dataset_name="replica", builder_name="parquet")
    return "owner/replica"


def test_a_cached_hub_dataset_loads_offline_with_its_commit(hub_dataset, capfd):
    loaded = load_split(split(hub_dataset, "train_prefs", limit=4), "dpo")
    assert loaded.dataset.column_names == ["chosen", "rejected"]
    assert loaded.num_examples == 4
    assert loaded.layout == "preference pairs (like ultrafeedback_binarized)"
    assert loaded.source["revision"] == COMMIT
    assert loaded.source["split"] == "train_prefs"
    assert load_split(split(hub_dataset, "test_prefs", revision=COMMIT), "dpo").num_examples == 2
    assert capfd.readouterr() == ("", "")


def test_a_split_of_the_hub_is_streamed_without_a_download(hub_dataset):
    dataset, revision = hub.stream(hub_dataset, "train_prefs", None)
    assert revision == COMMIT
    reader = hub.StreamReader(dataset, "place")
    (_, first), (place, second), *others = reader
    assert (first["prompt_id"], second["prompt_id"], place, len(others)) == ("0", "1", "place record 2", 4)
    with pytest.raises(UserError, match=r"owner/replica: .*train.*test_prefs"):
        hub.stream(hub_dataset, "train", None)
    with pytest.raises(OutOfReach, match="owner/other: is neither a file"):
        hub.stream("owner/other", "train", None)


def test_a_configuration_is_loaded_by_its_name_and_recorded(hub_dataset, cache, tmp_path):
    add_configuration(cache, tmp_path, "other", range(10, 13))
    for name, first in (("default", 0), ("other", 10)):
        loaded = load_split(split(hub_dataset, "train_prefs", name=name), "dpo")
        assert loaded.dataset[0]["chosen"] == pair_row(first)["chosen"]
        assert loaded.source["name"] == name
    unnamed = refused(split(hub_dataset, "train_prefs"), "dpo")
    unknown = refused(split(hub_dataset, "train_prefs", name="third"), "dpo")
    for message in (unnamed, unknown):
        assert message.startswith("owner/replica: ")
        assert "other" in message
        assert message.endswith("; add the key `name` with one of these configurations")
    assert "\n" not in unnamed + unknown


def test_a_file_has_no_configuration(write):
    message = refused(split(write("ok.jsonl", [chat_row()]), name="SFT"))
    assert "name is 'SFT', but only datasets of the hub have a name; remove name" in message


def test_a_part_of_a_split_is_taken_and_recorded(hub_dataset):
    loaded = load_split(split(hub_dataset, "train_prefs[50%:]"), "dpo")
    assert loaded.dataset[0]["chosen"] == pair_row(3)["chosen"]
    assert (loaded.num_examples, loaded.source["split"]) == (3, "train_prefs[50%:]")
    assert load_split(split(hub_dataset, "train_prefs+test_prefs[:1]"), "dpo").num_examples == 7
    assert "has no split 'train'; write one of" in refused(split(hub_dataset, "train[:10%]"), "dpo")
    assert "'train_prefs[:x]' is no valid part of a split" in refused(split(hub_dataset, "train_prefs[:x]"), "dpo")


def test_a_missing_split_is_named_with_those_there_are(hub_dataset):
    message = refused(split(hub_dataset), "dpo")
    assert message == "owner/replica: has no split 'train'; write one of train_prefs, test_prefs"


def test_another_revision_than_the_cached_one_is_refused_offline(hub_dataset):
    message = refused(split(hub_dataset, "test_prefs", revision="v2"), "dpo")
    assert f"the cached copy is revision {COMMIT}, not 'v2'" in message


def test_a_hub_dataset_out_of_reach_is_refused_with_the_remedy():
    message = refused(split("owner/never-seen"))
    assert message.startswith("owner/never-seen: is neither a file nor a cached dataset")
    assert "Write the path of a file (.jsonl, .json, .csv, .txt (each also as .gz) or .parquet), or con" in message
    assert "\n" not in message


def test_bad_examples_are_dropped_and_counted_when_asked(write):
    rows = [chat_row(), {"messages": []}, chat_row(), {"messages": []}, {"messages": "x"}]
    for _ in range(2):  # the second time from the cache
        loaded = load_split(split(write("mixed.jsonl", rows), bad_examples="drop"), "sft")
        assert (loaded.num_examples, len(loaded.dataset)) == (5, 2)
        text = "messages is text, not a list of {role, content} turns"
        assert loaded.dropped == {"messages is an empty list": 2, text: 1}
    assert "3 of 5 examples cannot be used" in refused(split(write("mixed.jsonl", rows)))
    assert "2 of 2 examples" in refused(split(write("bad.jsonl", rows[3:]), bad_examples="drop"))


def test_bad_examples_of_the_hub_are_dropped_and_counted_when_asked(monkeypatch):
    good, equal = pair_row(0), {**pair_row(1), "rejected": pair_row(1)["chosen"]}
    published = datasets.Dataset.from_list([good, equal, pair_row(2)])
    monkeypatch.setattr("soren_align.data.hub.fetch", lambda path, split, revision, name: (published, COMMIT))
    assert "owner/replica (train) record 2: chosen and rejected are equal" in refused(split("owner/replica"), "dpo")
    loaded = load_split(split("owner/replica", bad_examples="drop"), "dpo")
    assert (loaded.num_examples, loaded.dropped) == (3, {"chosen and rejected are equal": 1})
    assert [row["chosen"] for row in loaded.dataset] == [good["chosen"], pair_row(2)["chosen"]]
