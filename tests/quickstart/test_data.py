"""The quickstart's data: two real layouts, nothing leaked, and a preference without a shortcut."""

import json

import pytest
from soren_align.core import shipped
from tests.support.pages import script
from tokenizers import Tokenizer

QUICKSTART = shipped.ROOT / "recipes" / "quickstart"
BASE = QUICKSTART / "base"
POLITE, CURT = "My pleasure", "Listen well"


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (QUICKSTART / "data" / name).read_text().splitlines()]


def asked(row: dict) -> str:
    return row["messages"][0]["content"]


def answer(messages: list[dict]) -> str:
    return messages[-1]["content"]


def tone(text: str) -> str:
    """Of a question: its last mark; of an answer: its first words."""
    if text.endswith("please?") or text.startswith(POLITE):
        return "polite"
    return "curt" if text.endswith("now!") or text.startswith(CURT) else "none"


def fact(question: str, facts: set[tuple[str, str]]) -> tuple[str, str]:
    words = set(question.replace("?", " ").replace(",", " ").replace(".", " ").replace(":", " ").split())
    (found,) = [f for f in facts if set(f) <= words]
    return found


@pytest.fixture(scope="module")
def make():
    return script("recipes/quickstart/make.py")


@pytest.fixture(scope="module")
def facts(make):
    return {(animal, attribute) for animal in make.ANIMALS for attribute in make.VALUES}


def test_the_script_makes_the_shipped_bytes_again(make, tmp_path):
    make.main(tmp_path)
    made = {f.relative_to(tmp_path): f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    shipped_files = {f.relative_to(QUICKSTART): f.read_bytes() for folder in ("data", "base")
                     for f in (QUICKSTART / folder).rglob("*") if f.is_file()}  # fmt: skip
    assert made.keys() == shipped_files.keys()
    assert [f for f in made if made[f] != shipped_files[f]] == []


def test_no_test_question_was_trained_on():
    trained = {row["prompt"] for row in rows("chat_train.jsonl") + rows("pairs_train.jsonl")}
    tested = [row["prompt"] for row in rows("chat_test.jsonl") + rows("zoo_pairs/test.jsonl")]
    tested += [row["question"] for row in rows("zoo_questions/test.jsonl")]
    assert [question for question in tested if question in trained] == []


def test_every_fact_is_asked_once_in_the_test_and_five_times_plainly_in_training(facts):
    tested = [fact(row["question"], facts) for row in rows("zoo_questions/test.jsonl")]
    trained = [fact(asked(r), facts) for r in rows("chat_train.jsonl") if tone(asked(r)) == "none"]
    assert sorted(tested) == sorted(facts)
    assert {f: trained.count(f) for f in facts} == dict.fromkeys(facts, 5)


def test_facts_of_the_held_out_pairs_were_never_asked_about_in_a_tone(facts):
    before = rows("chat_train.jsonl") + rows("pairs_train.jsonl")
    toned = {fact(row["prompt"], facts) for row in before if tone(row["prompt"]) != "none"}
    held_out = {fact(row["prompt"], facts) for row in rows("zoo_pairs/test.jsonl")}
    assert len(held_out) == 30
    assert toned & held_out == set()


def test_the_tone_of_an_answer_in_the_chats_says_nothing_about_its_question():
    counts = {}
    for row in rows("chat_train.jsonl"):
        key = tone(asked(row)), tone(answer(row["messages"]))
        counts[key] = counts.get(key, 0) + 1
    assert set(counts) == {("none", "none"), *((q, a) for q in ("polite", "curt") for a in ("polite", "curt"))}
    assert len({n for (question, _), n in counts.items() if question != "none"}) == 1


@pytest.mark.parametrize("name", ["pairs_train.jsonl", "zoo_pairs/test.jsonl"])
def test_a_preference_is_about_tone_alone(name):
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    pairs = [(row["prompt"], answer(row["chosen"]), answer(row["rejected"])) for row in rows(name)]
    for prompt, chosen, rejected in pairs:
        assert tone(prompt) == tone(chosen) != tone(rejected)
        assert chosen.split(",")[1] == rejected.split(",")[1]  # the same fact
        assert len(tokenizer.encode(chosen).ids) == len(tokenizer.encode(rejected).ids)
    assert sum(tone(chosen) == "polite" for _, chosen, _ in pairs) == len(pairs) / 2
    assert len(pairs) >= 120
