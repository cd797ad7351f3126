"""Invented questions, one example of a benchmark each, with the columns and oddities of the real ones."""

import random
from collections.abc import Callable
from typing import Any

WORDS = {
    "people": "Amina, Bo, Chloé, Dmitri, Esther, Farid, Greta, Hiroshi, Ines, Jonas, Kofi, Lena, Mateo, Nour, Olga",
    "things": "candle, river, magnet, spider, glacier, kettle, violin, potato, lantern, pendulum, mushroom, harbour",
    "kinds": "red, frozen, wooden, heavy, hollow, round, bright, salty, narrow, sleepy, noisy, borrowed",
    "doings": "melts, attracts, follows, absorbs, carries, hides, warms, repeats, measures, loses, reflects, needs",
    "places": "in the garden, on the moon, under a bridge, near the equator, in deep water, at night, above 40 °C",
    "reasons": "it is dark, nobody looks, the wind turns, the pressure drops, salt is added, the clock stops",
}
PEOPLE, THINGS, KINDS, DOINGS, PLACES, REASONS = (words.split(", ") for words in WORDS.values())

Row = dict[str, Any]


def arc(rng: random.Random) -> Row:
    """Mostly four choices A to D; now and then 1 to 4, or three or five."""
    count = rng.choice((3, 4, 4, 4, 5))
    choices = _labels(_choices(rng, count), rng.choice(("ABCDE", "ABCDE", "12345")))
    question = f"If {_clause(rng)} while {rng.choice(REASONS)}, which of these would change first?"
    return {"id": f"Mercury_{_identity(rng)}", "question": question, "choices": choices,
            "answerKey": rng.choice(choices["label"])}  # fmt: skip


def hellaswag(rng: random.Random) -> Row:
    """ActivityNet's sentences, or WikiHow's with their brackets and an empty ctx_b."""
    who, wiki = rng.choice(PEOPLE), rng.random() < 0.5
    first = f"{who} shows how {_clause(rng)}."
    if wiki:
        first = f"[header] How to keep a {_thing(rng)} [title] Wait until {rng.choice(REASONS)}. [step] {first}"
    second = "" if wiki else rng.choice(("then he", "she", "the camera", "they"))
    return {
        "ind": rng.randrange(50_000),
        "activity_label": rng.choice(("Baking cookies", "Home and Garden", "Playing the violin", "Canoeing")),
        "ctx_a": first,
        "ctx_b": second,
        "ctx": f"{first} {second}".strip(),
        "endings": _choices(rng, 4, lambda rng: f"sees that {_clause(rng)}.{' [substeps] Stop.' if wiki else ''}"),
        "source_id": f"wikihow~{rng.randrange(80_000)}" if wiki else f"activitynet~v_{_identity(rng)}",
        "split": "train",
        "split_type": rng.choice(("indomain", "zeroshot")),
        "label": str(rng.randrange(4)),
    }


def mmlu(rng: random.Random) -> Row:
    number = rng.random() < 0.3
    blank = rng.choice(("", "", " ", "\n"))
    return {"question": f"Often {_clause(rng)}.\nWhat follows when {rng.choice(REASONS)}?{blank}",
            "choices": _choices(rng, 4, (lambda rng: str(rng.randrange(1000))) if number else _thing),
            "answer": rng.randrange(4)}  # fmt: skip


def truthfulqa(rng: random.Random) -> Row:
    """Several true answers and several false ones; of mc1's only the first is true."""
    true, false = rng.randint(1, 4), rng.randint(2, 5)
    answers = _choices(rng, true + false, lambda rng: f"{_clause(rng).capitalize()}")
    return {"question": f"Is it true that {_clause(rng)} when {rng.choice(REASONS)}?",
            "mc1_targets": {"choices": [answers[0], *answers[true:]], "labels": [1] + [0] * false},
            "mc2_targets": {"choices": answers, "labels": [1] * true + [0] * false}}  # fmt: skip


def winogrande(rng: random.Random) -> Row:
    one, other = rng.sample(PEOPLE, 2)
    sentence = f"{one} lent {other} a {_thing(rng)} because _ knew that {_clause(rng)} when {rng.choice(REASONS)}."
    return {"sentence": sentence, "option1": one, "option2": other, "answer": rng.choice("12")}


def gsm8k(rng: random.Random) -> Row:
    who, what, (a, b, c) = rng.choice(PEOPLE), rng.choice(THINGS), (rng.randint(2, 90) for _ in range(3))
    question = f"{who} has {a} {what}s and buys {b} boxes of {c} {what}s each. How many {what}s does {who} have then?"
    bought = f"The boxes hold {b}*{c}=<<{b}*{c}={b * c}>>{b * c} {what}s."
    total = f"{who} has {a}+{b * c}=<<{a}+{b * c}={a + b * c}>>{a + b * c} {what}s."
    return {"question": question, "answer": f"{bought}\n{total}\n#### {a + b * c:,}"}


def piqa(rng: random.Random) -> Row:
    one, other = _choices(rng, 2, lambda rng: f"Make sure that {_clause(rng)}.")
    return {"goal": f"To keep a {_thing(rng)} from breaking when {rng.choice(REASONS)},", "sol1": one, "sol2": other,
            "label": rng.randrange(2)}  # fmt: skip


def openbookqa(rng: random.Random) -> Row:
    choices = _labels(_choices(rng, 4))
    stem = f"When {rng.choice(REASONS)}, {_clause(rng)}, much like"
    return {
        "id": f"7-{rng.randrange(2000)}", "question_stem": stem, "choices": choices, "answerKey": rng.choice("ABCD"),
    }  # fmt: skip


def _thing(rng: random.Random) -> str:
    words = [rng.choice(KINDS), rng.choice(THINGS), rng.choice(PLACES)]
    return " ".join(words[rng.randrange(2) : rng.choice((2, 2, 3))])  # lengths differ, so acc and acc_norm do


def _clause(rng: random.Random) -> str:
    return f"a {_thing(rng)} {rng.choice(DOINGS)} the {rng.choice(KINDS)} {rng.choice(THINGS)}"


def _choices(rng: random.Random, count: int, make: Callable[[random.Random], str] = _thing) -> list[str]:
    """Different ones."""
    found: list[str] = []
    while len(found) < count:
        found += {make(rng)} - set(found)
    return found


def _labels(texts: list[str], alphabet: str = "ABCDE") -> dict[str, list[str]]:
    return {"text": texts, "label": [*alphabet[: len(texts)]]}


def _identity(rng: random.Random) -> str:
    return f"{rng.getrandbits(48):012x}"
