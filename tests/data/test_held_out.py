"""A held-out fraction: chosen by a hash of each example, and by nothing else."""

import hashlib
import json
import random
import re
from types import SimpleNamespace

import datasets
import pytest
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.data import hold_out, load_split
from soren_align.data.split import position
from soren_align.recipe import HeldOut, HeldOutNumber, training_part
from soren_align.recipe.loader import parse
from soren_align.training.setup import load_splits
from tests.support.conversations import chat, pair_row, split

TEXTS = [{"text": f"The animal with number {i} sleeps. ü"} for i in range(400)]


def reference(example, fraction):
    """Whether an example is held out, with integers instead of the fraction of floats."""
    digest = hashlib.sha256(json.dumps(example, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
    return int(digest, 16) >> 203 < fraction * (1 << 53)


def parts(write, rows, fraction, task="sft", name="rows.jsonl", **keys):
    (remaining,), held_out = hold_out([load_split(split(write(name, rows), **keys), task)], fraction)
    return remaining, held_out


def test_the_hash_of_an_example_decides(write):
    remaining, held_out = parts(write, TEXTS, 0.25)
    assert list(held_out.dataset) == [row for row in TEXTS if reference(row, 0.25)]
    assert list(remaining.dataset) == [row for row in TEXTS if not reference(row, 0.25)]
    assert 70 < len(held_out.dataset) < 130  # 100 with a standard deviation of 8.7
    assert remaining.num_examples == len(remaining.dataset)
    assert remaining.source["num_held_out"] == held_out.num_examples == len(held_out.dataset)
    assert remaining.source["num_examples"] == 400
    assert held_out.source["fraction"] == 0.25


def test_an_example_stays_on_its_side_as_the_file_grows_and_is_reordered(write):
    _, before = parts(write, TEXTS[:200], 0.1)
    shuffled = TEXTS.copy()
    random.Random(1).shuffle(shuffled)
    _, after = parts(write, shuffled, 0.1)
    held_out = {row["text"] for row in after.dataset}
    assert {row["text"] for row in before.dataset} == held_out & {row["text"] for row in TEXTS[:200]}
    _, larger = parts(write, shuffled, 0.2)
    assert held_out < {row["text"] for row in larger.dataset}


def test_a_number_is_the_first_examples_by_their_hash_and_shrinks_to_none_that_was_trained(write):
    def held_out(rows, number):
        (remaining,), part = hold_out([load_split(split(write("rows.jsonl", rows)), "sft")], examples=number)
        assert len(remaining.dataset) + len(part.dataset) == len(rows)
        return [row["text"] for row in part.dataset]

    ordered = sorted(TEXTS, key=lambda row: position(row))
    assert set(held_out(TEXTS, 50)) == {row["text"] for row in ordered[:50]}
    before, after = set(held_out(TEXTS[:200], 50)), set(held_out(TEXTS, 50))
    assert len(before) == len(after) == 50
    old = {row["text"] for row in TEXTS[:200]}
    assert after & old < before  # what was trained on before is trained on still
    assert set(held_out([*TEXTS, ordered[49], ordered[49]], 50)) == {row["text"] for row in ordered[:49]}
    sentence = r"examples: 3 holds out none of 9 examples, because equal examples are held out together"
    with pytest.raises(UserError, match=sentence):
        held_out(TEXTS[:1] * 9, 3)
    of_all = "400 is not below the number of examples, 400; write a smaller number"
    for number, message in ((400, of_all), (401, "401 is not below")):
        with pytest.raises(UserError, match=f"data.eval.examples: {message}"):
            held_out(TEXTS, number)


def test_a_number_is_of_all_splits_together(write):
    files = {"a.jsonl": TEXTS[:100], "b.jsonl": TEXTS[100:]}
    _, held_out = hold_out([load_split(split(write(*file)), "sft") for file in files.items()], examples=40)
    first = sorted(TEXTS, key=position)[:40]
    assert {row["text"] for row in held_out.dataset} == {row["text"] for row in first}
    assert held_out.source["examples"] == held_out.num_examples == 40


def test_equal_examples_are_on_one_side_wherever_they_come_from(write, monkeypatch):
    rows = [{"messages": chat(i)} for i in range(40)]
    turns = [[{"content": t["content"], "role": t["role"]} for t in chat(i)] for i in range(40)]
    published = datasets.Dataset.from_list([{"messages": chat_turns} for chat_turns in turns])
    monkeypatch.setattr("soren_align.data.hub.fetch", lambda *asked: (published, "c0ffee"))
    spoken = [{"conversations": [{"from": t["role"], "value": t["content"]} for t in row["messages"]]} for row in rows]
    sources = [split(write("a.jsonl", rows * 2)), split("owner/chats"), split(write("b.jsonl", spoken))]
    remaining, held_out = hold_out([load_split(source, "sft") for source in sources], 0.3)
    sides = [{json.dumps(row["messages"][0]["content"]) for row in side.dataset} for side in remaining]
    chosen = {json.dumps(row["messages"][0]["content"]) for row in held_out.dataset}
    assert sides[0] == sides[1] == sides[2]
    assert sides[0].isdisjoint(chosen)
    assert len(held_out.dataset) == sum(side.source["num_held_out"] for side in remaining)
    assert len(held_out.dataset) % 4 == 0  # twice in the first file, once in each other


def test_a_fraction_that_leaves_nothing_is_refused(write):
    with pytest.raises(UserError, match=r"data.eval.fraction: 1e-09 holds out none of 400 examples; write a larger"):
        parts(write, TEXTS, 1e-9)
    with pytest.raises(UserError, match=r"data.eval.fraction: 0.999999 holds out all examples of .*rows.jsonl"):
        parts(write, TEXTS[:3], 0.999999)


def config(sources, seed=1, task="sft", fraction=0.25):
    sources = [SimpleNamespace(**vars(source), weight=weight) for source, weight in sources]
    data = SimpleNamespace(sources=sources, eval=HeldOut(fraction=fraction), streaming=None)
    return SimpleNamespace(task=task, data_task=task, data=data, trainer={"seed": seed})


def test_weights_and_the_seed_do_not_change_what_is_held_out(write):
    first, second = split(write("a.jsonl", TEXTS[:150])), split(write("b.jsonl", TEXTS[150:]))
    for weights, seed in (((1, 1), 1), ((2.5, 0.5), 7)):
        loaded = load_splits(config(zip((first, second), weights, strict=True), seed))
        assert list(loaded.eval.dataset) == [row for row in TEXTS if reference(row, 0.25)]
        assert not any(reference(row, 0.25) for row in loaded.train.dataset)


def test_bad_examples_are_counted_and_never_held_out(write):
    rows = [pair_row(i) for i in range(30)] + [{**pair_row(1), "rejected": pair_row(1)["chosen"]}] * 3
    remaining, held_out = parts(write, rows, 0.5, "dpo", bad_examples="drop")
    assert remaining.dropped == {"chosen and rejected are equal": 3}
    assert remaining.num_examples == len(remaining.dataset) + 3
    assert len(remaining.dataset) + len(held_out.dataset) == 30


def test_a_recipe_with_held_out_examples_evaluates_on_them():
    def strategy(evaluation, **trainer):
        raw = parse(recipe.find("quickstart/sft").read_text(), "sft").content
        for key in ("eval_strategy", "eval_steps"):
            raw["trainer"].pop(key, None)
        raw["trainer"] |= trainer
        raw["data"]["eval"] = evaluation
        loaded = recipe.load_text(json.dumps(raw))
        assert recipe.load_text(recipe.to_yaml(loaded)) == loaded
        return loaded.trainer.get("eval_strategy")

    split_of_its_own = {"path": "shipped:recipes/quickstart/data/chat_test.jsonl"}
    assert strategy({"fraction": 0.1}) == strategy(split_of_its_own) == "epoch"
    assert strategy({"fraction": 0.1}, eval_steps=5) == "steps"
    assert strategy({"fraction": 0.1}, eval_strategy="no") == "no"  # written on purpose
    assert strategy(None) is None


def test_another_fraction_is_another_training_and_another_eval_file_is_not():
    def part(evaluation):
        return training_part(recipe.load("quickstart/sft", [f"data.eval={evaluation}", "trainer.eval_strategy=no"]))

    shipped = "shipped:recipes/quickstart/data"
    assert part(f"{{path: '{shipped}/chat_test.jsonl'}}") == part(f"{{path: '{shipped}/chat_train.jsonl'}}")
    assert part("{fraction: 0.1}") != part("{fraction: 0.2}") != part("null")
    assert part("{examples: 10}") != part("{examples: 20}") != part("null")


def test_a_fraction_replaces_the_split_of_an_extended_recipe(tmp_path):
    (tmp_path / "my.yaml").write_text("extends: quickstart/sft\ndata: {eval: {fraction: 0.1}}\n")
    assert recipe.load(str(tmp_path / "my.yaml")).data.eval == HeldOut(fraction=0.1)
    (tmp_path / "next.yaml").write_text("extends: my.yaml\ndata: {eval: {examples: 5}}\n")
    assert recipe.load(str(tmp_path / "next.yaml")).data.eval == HeldOutNumber(examples=5)


@pytest.mark.parametrize(("evaluation", "message"), [
    ("{fraction: 0}", "data.eval.fraction: found 0; write a number above 0"),
    ("{fraction: 1.0}", "data.eval.fraction: found 1.0; write a number below 1"),
    ("{fraction: 0.1, path: a.jsonl}", "data.eval.path: unknown key for a fraction; remove this key, or write a split"),
    ("{examples: 0}", "data.eval.examples: found 0; write a number of at least 1"),
    ("{fractoin: 0.1}", "data.eval.path: is required"),
    ("[{fraction: 0.1}]", "found a list; write one section: only data.train"),
])  # fmt: skip
def test_mistakes_are_told(evaluation, message):
    with pytest.raises(UserError, match=re.escape(message)):
        recipe.load("quickstart/sft", [f"data.eval={evaluation}"])
