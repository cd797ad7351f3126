"""Mixtures: each source as often as its weight says, in an order that the seed decides."""

from collections import Counter
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from soren_align.core.errors import UserError
from soren_align.data import dataset_stats, load_split, mix
from soren_align.data.encode import encode
from tests.support.conversations import animal_text, chat, pair_row, split


def source(path, weight=1.0, **how):
    return SimpleNamespace(**vars(split(path, **how)), weight=weight)


def load_mixture(sources, task, seed):
    return mix([load_split(each, task) for each in sources], sources, seed)


def chats(numbers):
    return [{"messages": chat(i)} for i in numbers]


def asked(dataset):
    return Counter(row["messages"][0]["content"] for row in dataset)


@pytest.fixture
def two(write):
    return write("a.jsonl", chats(range(8))), write("b.jsonl", chats(range(8, 28)))


def test_a_single_source_stands_as_it_is(two):
    loaded = load_mixture([source(two[0])], "sft", 42)
    assert [row["messages"] for row in loaded.dataset] == [chat(i) for i in range(8)]
    assert loaded.source_indices == ()
    assert "sources" not in loaded.source


def test_weights_say_how_often_rows_are_taken(two):
    loaded = load_mixture([source(two[0], 2.5), source(two[1], 0.25)], "sft", 42)
    often = asked(loaded.dataset)
    first = [often[chat(i)[0]["content"]] for i in range(8)]
    second = [often[chat(i)[0]["content"]] for i in range(8, 28)]
    assert sorted(first) == [2, 2, 2, 2, 3, 3, 3, 3]
    assert sorted(second) == [0] * 15 + [1] * 5
    assert len(loaded.dataset) == loaded.num_examples == 25
    assert Counter(loaded.source_indices) == {0: 20, 1: 5}
    for row, part in zip(loaded.dataset, loaded.source_indices, strict=True):
        assert (row["messages"] in [chat(i) for i in range(8)]) == (part == 0)
    assert loaded.source_indices[:5] != (0,) * 5 or loaded.source_indices[-5:] != (1,) * 5  # shuffled together
    sources = [(s["num_sampled"], s["num_examples"], s["weight"]) for s in loaded.source["sources"]]
    assert sources == [(20, 8, 2.5), (5, 20, 0.25)]
    assert all(len(s["sha256"]) == 64 for s in loaded.source["sources"])


def test_the_seed_decides_and_nothing_else(two):
    def order(seed):
        loaded = load_mixture([source(two[0], 0.5), source(two[1], 1.5)], "sft", seed)
        return [row["messages"][0]["content"] for row in loaded.dataset], loaded.dataset._fingerprint

    assert order(42) == order(42)
    assert order(42) != order(43)


def test_forms_that_come_to_the_same_mix_and_others_do_not(two, write, tmp_path):
    spoken = [{"conversations": [{"from": t["role"], "value": t["content"]} for t in chat(i)]} for i in range(30, 34)]
    flipped = pa.Table.from_pylist([{"messages": [{"content": t["content"], "role": t["role"]} for t in chat(40)]}])
    pq.write_table(flipped, tmp_path / "flipped.parquet")
    sources = [source(two[0]), source(write("s.jsonl", spoken)), source(tmp_path / "flipped.parquet")]
    loaded = load_mixture(sources, "sft", 1)
    assert loaded.layout == "chat messages; ShareGPT conversations"
    assert asked(loaded.dataset) == asked([{"messages": chat(i)} for i in (*range(8), *range(30, 34), 40)])
    text = write("t.jsonl", [{"text": "A lynx."}])
    message = r"a.jsonl \(all\) has chat messages \(messages\), but .*t.jsonl \(all\) has plain text"
    with pytest.raises(UserError, match=message):
        load_mixture([source(two[0]), source(text)], "sft", 1)
    parted = write("c.jsonl", [{"prompt": "A ", "completion": "lynx."}])
    turns = write("d.jsonl", [{"prompt": chat(1)[:-1], "completion": chat(1)[-1:]}])
    with pytest.raises(UserError, match="these two formats cannot be mixed; use splits of one format"):
        load_mixture([source(parted), source(turns)], "sft", 1)
    pairs = write("p.jsonl", [pair_row(1)])
    texts = write("q.jsonl", [{"prompt": "Why?", "chosen": "a", "rejected": "b"}])
    with pytest.raises(UserError, match="these two formats cannot be mixed; use splits of one format"):
        load_mixture([source(pairs), source(texts, apply_chat_template=False)], "dpo", 1)


@pytest.mark.parametrize("settings", [(True, True), (False, True), (False, False)])
def test_conversations_and_completions_have_the_tokens_and_masks_in_a_mixture_that_they_have_alone(
    write, make_tokenizer, settings
):
    weighted = chat(20, turns=2)
    weighted[1]["train"] = False
    tool = [{"type": "function", "function": {"name": "feed", "parameters": {"type": "object"}}}]
    sources = [
        source(write("chats.jsonl", [{"messages": weighted, "tools": tool}, *chats(range(80))])),
        source(write("alpaca.jsonl", [{"instruction": f"Feed {i}.", "output": animal_text(i)} for i in range(9)])),
        source(write("turns.jsonl", [{"prompt": chat(i, 2)[:-1], "completion": chat(i, 2)[-1:]} for i in range(70)])),
    ]
    tokenizer = make_tokenizer()

    def encoded(dataset):
        return [example.sides[0] for batch in dataset.iter(batch_size=64)
                for example in encode(batch, "sft", tokenizer, *settings)]  # fmt: skip

    alone = [encoded(load_split(each, "sft").dataset) for each in sources]
    mixed = load_mixture(sources, "sft", 3)
    assert mixed.source_indices[:5] != (0,) * 5  # shuffled together
    for part, expected in enumerate(alone):
        found = [t for t, i in zip(encoded(mixed.dataset), mixed.source_indices, strict=True) if i == part]
        assert sorted(found) == sorted(expected)


def test_rows_of_the_hub_with_their_turns_the_other_way_round_mix(two, monkeypatch):
    turns = [{"content": t["content"], "role": t["role"], "name": None} for t in chat(50)]
    table = pa.Table.from_pylist([{"messages": turns}])
    published = Dataset(datasets.table.InMemoryTable(table))
    monkeypatch.setattr("soren_align.data.hub.fetch", lambda *asked: (published, "c0ffee"))
    loaded = load_mixture([source(two[0]), source("owner/chats")], "sft", 1)
    assert chat(50) in list(loaded.dataset["messages"])
    assert loaded.source["sources"][1]["revision"] == "c0ffee"


def test_a_weight_that_leaves_nothing_is_refused(two):
    with pytest.raises(UserError, match=r"a weight of 0.01 leaves no example of .*a.jsonl"):
        load_mixture([source(two[0], 0.01), source(two[1])], "sft", 1)


def test_rows_kept_and_dropped_are_told_for_each_source(write, make_tokenizer):
    bad = write("bad.jsonl", [*chats(range(3)), {"messages": []}, {"messages": []}])
    long = [{"role": "user", "content": "long " * 200}, {"role": "assistant", "content": "x"}]
    other = write("other.jsonl", [*chats(range(4)), {"messages": long}, {"messages": []}])
    loaded = load_mixture([source(bad, bad_examples="drop"), source(other, 2.0, bad_examples="drop")], "sft", 1)
    assert loaded.dropped == {"messages is an empty list": 3}
    assert [s["dropped"] for s in loaded.source["sources"]] == [{"messages is an empty list": n} for n in (2, 1)]
    how = {"max_length": 120, "assistant_only_loss": True, "source_indices": loaded.source_indices}
    counted = dataset_stats(loaded.dataset, "sft", make_tokenizer(), **how)
    assert counted.num_kept_by_source == (3, 8)
    assert (counted.num_examples, counted.num_kept) == (13, 11)
