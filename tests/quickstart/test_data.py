"""The quickstart's data are those of their script, nothing leaked, and a preference has no shortcut."""

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


def answer(messages: list[dict]) -> str:
    return messages[-1]["content"]


def tone(text: str) -> str:
    """Of a question: its last mark; of an answer: its first words."""
    if text.endswith("please?") or text.startswith(POLITE):
        return "polite"
    return "curt" if text.endswith("now!") or text.startswith(CURT) else "none"


@pytest.fixture(scope="module")
def make():
    return script("recipes/quickstart/make.py")


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
