"""The forms that rows come in: each is known by its columns, and becomes what TRL takes."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from soren_align.data import load_split
from soren_align.errors import UserError
from tests.support.conversations import chat, split
from tests.support.published_data import ultrachat_200k, ultrafeedback_binarized

SPEAKERS = {"user": "human", "assistant": "gpt", "system": "system"}
CHAT = chat(3, turns=2, system=True)
ANSWERS = [{"role": "assistant", "content": "Hay."}, {"role": "assistant", "content": "No."}]
PROMPT = CHAT[:-1]


def spoken(turns):
    return [{"from": SPEAKERS[turn["role"]], "value": turn["content"]} for turn in turns]


PAIRED = {"chosen": [*PROMPT, ANSWERS[0]], "rejected": [*PROMPT, ANSWERS[1]]}
ASKED = {side: [{"role": "user", "content": "Why?"}, answer] for side, answer in zip(PAIRED, ANSWERS, strict=True)}
# form: (task, a row, what was recognised, what TRL is given of it)
FORMS = {
    "ShareGPT": ("sft", {"conversations": spoken(CHAT), "id": 1}, "ShareGPT conversations", {"messages": CHAT}),
    "ShareGPT, other words": (
        "sft",
        {"conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Ho"}]},
        "ShareGPT conversations",
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
    ),
    "turns and completion": (
        "sft",
        {"prompt": PROMPT, "completion": CHAT[-1:], "source": "zoo"},
        "prompts and completions as turns",
        {"prompt": PROMPT, "completion": CHAT[-1:]},
    ),
    "prompt and completion": (
        "sft",
        {"prompt": "The lynx ", "completion": "sleeps."},
        "plain prompts and completions, without a template",
        {"prompt": "The lynx ", "completion": "sleeps."},
    ),
    "text": ("sft", {"text": "A lynx.", "url": "x"}, "plain text, without a template", {"text": "A lynx."}),
    "prompt as turns, answers as turns": (
        "dpo",
        {"prompt": PROMPT, "chosen": ANSWERS[:1], "rejected": ANSWERS[1:]},
        "prompts and pairs of answers as turns, joined to pairs",
        PAIRED,
    ),
    "prompt as turns, answers as texts": (
        "dpo",
        {"prompt": PROMPT, "chosen": "Hay.", "rejected": "No."},
        "prompts and pairs of answers as turns, joined to pairs",
        PAIRED,
    ),
    "prompt as text, answers as turns": (
        "dpo",
        {"prompt": "Why?", "chosen": ANSWERS[:1], "rejected": ANSWERS[1:]},
        "prompts and pairs of answers as turns, joined to pairs",
        ASKED,
    ),
    "three texts": (
        "dpo",
        {"prompt": "Why? ", "chosen": "Hay.", "rejected": "No.", "score": 1.0},
        "plain prompts and pairs of answers, without a template",
        {"prompt": "Why? ", "chosen": "Hay.", "rejected": "No."},
    ),
    "ShareGPT preferences": (
        "dpo",
        {"conversations": spoken(PROMPT), "chosen": spoken(ANSWERS)[0], "rejected": spoken(ANSWERS)[1]},
        "ShareGPT preferences, joined to pairs",
        PAIRED,
    ),
    "ShareGPT preferences, as lists": (
        "dpo",
        {"conversations": spoken(PROMPT), "chosen": spoken(ANSWERS)[:1], "rejected": spoken(ANSWERS)[1:]},
        "ShareGPT preferences, joined to pairs",
        PAIRED,
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet", "the hub"])
def test_a_form_is_recognised_wherever_its_rows_are(tmp_path, monkeypatch, kind, form):
    task, row, words, given = FORMS[form]
    path = tmp_path / f"rows{kind}"
    if kind == "the hub":
        published = datasets.Dataset.from_list([row, row])
        monkeypatch.setattr("soren_align.data.hub.fetch", lambda *asked: (published, "c0ffee"))
        path = "owner/rows"
    elif kind == ".parquet":
        pq.write_table(pa.Table.from_pylist([row, row]), path)
    else:
        path.write_text(json.dumps([row, row]) if kind == ".json" else f"{json.dumps(row)}\n" * 2)
    loaded = load_split(split(path), task)
    assert loaded.layout == words
    assert list(loaded.dataset) == [given, given]
    beside = {"id", "source", "url", "score"} & row.keys()
    assert loaded.source["columns_dropped"] == list(beside)


def test_the_papers_datasets_stay_what_they_were(tmp_path):
    chats, pairs = ultrachat_200k(tmp_path), ultrafeedback_binarized(tmp_path)
    loaded = load_split(split(chats["train_sft"]), "sft")
    assert loaded.layout == "chat messages (like ultrachat_200k)"
    assert loaded.dataset.column_names == ["messages"]
    loaded = load_split(split(pairs["test_prefs"]), "dpo")
    assert loaded.layout == "preference pairs (like ultrafeedback_binarized)"
    assert loaded.dataset.column_names == ["chosen", "rejected"]
    assert (loaded.num_examples, len(loaded.dataset)) == (8, 8)


BAD = [
    (
        "ShareGPT",
        {"conversations": [{"from": "tool", "value": "x"}]},
        r"conversations\[0\] has the speaker 'tool'; wri",
    ),
    ("ShareGPT", {"conversations": [{"value": "x"}]}, r"conversations\[0\] has no 'from'; write human, gpt or system"),
    ("ShareGPT", {"conversations": ["x"]}, r"conversations\[0\] is text, not an object with from and value"),
    ("ShareGPT", {"conversations": []}, "conversations is an empty list"),
    ("ShareGPT", {"conversations": "x"}, "conversations is text, not a list of {from, value} turns"),
    ("ShareGPT", {"conversations": spoken(CHAT[:-1])}, "conversations ends with a user turn"),
    ("ShareGPT", {"conversations": [{"from": "gpt", "value": None}]}, r"conversations\[0\] has no content"),
    ("ShareGPT", {"conversations": [{"from": "gpt", "value": "x", "weight": 0}]}, "has weight beside role and content"),
    ("turns and completion", {"prompt": PROMPT, "completion": "x"}, "completion is text, not a list"),
    ("turns and completion", {"prompt": PROMPT, "completion": PROMPT[-1:]}, r"completion\[\d\] are both user turns"),
    ("prompt and completion", {"prompt": "x", "completion": " "}, "completion is empty"),
    ("prompt and completion", {"prompt": ["x"], "completion": "y"}, "prompt is a list, not text"),
    ("text", {"text": None}, "no 'text'"),
    ("text", '{"text": "\\ud800"}', "text has half of a surrogate pair"),
    ("three texts", {"prompt": "x", "chosen": "y", "rejected": "y"}, "chosen and rejected are identical"),
    ("three texts", {"prompt": "x", "chosen": "y"}, "no 'rejected'"),
    ("prompt as text, answers as turns", {"prompt": " ", **ASKED}, r"prompt \+ chosen\[0\] has empty content"),
    ("prompt as turns, answers as turns", {"prompt": PROMPT, "chosen": [], "rejected": []}, "chosen is an empty list"),
    ("ShareGPT preferences", {"conversations": spoken(PROMPT), "chosen": "x"}, "chosen is text, not a list"),
]


@pytest.mark.parametrize(("form", "row", "reason"), BAD)
def test_a_bad_row_of_any_form_is_named(write, form, row, reason):
    task, good, *_ = FORMS[form]
    path = write("rows.jsonl", [good, row, good])
    with pytest.raises(UserError, match=f"1 of 3 examples cannot be used .*\n.*rows.jsonl:2: .*{reason}"):
        load_split(split(path), task)
    loaded = load_split(split(path, bad_examples="drop"), task)
    assert (len(loaded.dataset), sum(loaded.dropped.values())) == (2, 1)


def test_an_empty_first_row_does_not_decide_the_form(write):
    rows = [{"prompt": None, "completion": None}, *({"prompt": PROMPT, "completion": CHAT[-1:]} for _ in range(2))]
    loaded = load_split(split(write("rows.jsonl", rows), bad_examples="drop"), "sft")
    assert loaded.dropped == {"no 'prompt'": 1}
    assert loaded.dataset[0] == {"prompt": PROMPT, "completion": CHAT[-1:]}


def test_two_texts_without_a_prompt_are_no_pair(write):
    path = write("rows.jsonl", [{"chosen": "x", "rejected": "y"}])
    with pytest.raises(UserError, match="chosen is text, not a list"):
        load_split(split(path), "dpo")
