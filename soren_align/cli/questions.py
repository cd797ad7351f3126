"""Read a file of questions and answers, and split it into examples and held-out questions."""

import json
import random
import re
from collections import Counter
from pathlib import Path

from ..core.errors import UserError, did_you_mean

HELD_OUT_SHARE, MAX_HELD_OUT, NUM_CHOICES = 0.2, 100, 4
"""The share of the examples of `new --data` that becomes questions, their largest number, and the
choices of each."""
ENOUGH, MOST_SHARE = 20, 0.35
"""Questions from which a table has intervals; a small file holds out so many, but at most this
share."""
KNOWN_PAIRS = (("instruction", "output"), ("prompt", "completion"), ("question", "answer"))
MIN_PAIRS = 20
"""Examples of which some can be held out."""
MAX_ALIKE = 5
"""Questions with one answer that are taken for variants of one question. The answer of more of them
is a label."""
MOST_LABELS = 1 / 3
"""Different answers per question of a file up to which the answers may be labels."""
Pairs = list[tuple[str, str]]


def read_pairs(data: str, question: str | None, answer: str | None) -> tuple[Pairs, list[str]]:
    """Return the distinct questions of a file with their answers, and what was left out.

    Raises UserError if they cannot be read.
    """
    from ..core.text import count
    from ..recipe.data_files import MAX_ROWS, data_files, first_records, question_columns

    name, file = next(iter(data_files(data).items()))
    if file.suffix not in (".csv", ".jsonl"):
        raise UserError(
            f"{name}: is no .csv or .jsonl file; name a .csv or .jsonl file with questions and"
            " answers"
        )
    if not (rows := first_records(name, file, {}, MAX_ROWS, is_whole=True)):
        raise UserError(f"{name}: has no records; name a file with questions and answers")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    known = next((pair for pair in KNOWN_PAIRS if {*pair} <= {*columns}), KNOWN_PAIRS[0])
    names = (*question_columns(data, question, answer).values(),) or known
    if missing := [column for column in names if column not in columns]:
        hint = did_you_mean(missing[0], columns)
        finding = f"has the columns {', '.join(columns)}, but no column '{missing[0]}'{hint}"
        raise UserError(f"--data: {data}: {finding}; add --question COLUMN and --answer COLUMN")
    pairs, incomplete = {}, []
    for number, row in enumerate(rows, 1):
        prompt, reply = (str(row.get(column) or "").strip() for column in names)
        # Bytes that are no UTF-8.
        if any("\ud800" <= letter <= "\udfff" for letter in prompt + reply):
            remedy = "save the file as UTF-8, or convert the file: iconv -f WINDOWS-1252 -t UTF-8"
            raise UserError(f"--data: {data}: record {number} is not UTF-8; {remedy}")
        if prompt and reply:
            pairs.setdefault(prompt, reply)
        else:
            incomplete.append(str(number))
    notices = []
    if incomplete:
        more = f" and {len(incomplete) - 5} more" if len(incomplete) > 5 else ""
        notices.append(
            "left out, because question or answer is empty: record"
            f" {', '.join(incomplete[:5])}{more}"
        )
    if repeated := len(rows) - len(incomplete) - len(pairs):
        notices.append(f"left out, because the question occurs before: {count(repeated, 'record')}")
    if len(pairs) < MIN_PAIRS:
        raise UserError(
            f"--data: {data}: has only {len(pairs)} questions; write at least {MIN_PAIRS} questions"
        )
    return [*pairs.items()], notices


def _variants(pairs: Pairs) -> list[Pairs]:
    """Return the pairs in groups that stay on one side of the split: equal words in a question, or
    one answer.

    A model that was trained on a variant of a held-out question knows its answer.
    """
    numbers = Counter(_words(reply) for _, reply in pairs)
    # The parents of questions and answers, by their words (union-find).
    parents: dict[tuple[str, ...], tuple[str, ...]] = {}

    def root(key: tuple[str, ...]) -> tuple[str, ...]:
        while parents.setdefault(key, key) != key:
            key = parents[key]
        return key

    groups: dict[tuple[str, ...], Pairs] = {}
    for prompt, reply in pairs:
        # The answer of many questions is a label: joining by it would put all of them on one side.
        if numbers[_words(reply)] <= MAX_ALIKE:
            parents[root(("question", *_words(prompt)))] = root(("answer", *_words(reply)))
    for prompt, reply in pairs:
        groups.setdefault(root(("question", *_words(prompt))), []).append((prompt, reply))
    return [*groups.values()]


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.casefold()))


def write_questions(target: Path, pairs: Pairs) -> tuple[int, list[str]]:
    """Write the examples to train on, and those held out as questions of both kinds.

    The choices of a question are its answer and answers to others. Returns the number of held-out
    questions, and what to know about them.
    """
    # A fixed seed: the same file gives the same folder.
    draw, groups = random.Random(0), _variants(pairs)
    draw.shuffle(groups)
    num = max(round(HELD_OUT_SHARE * len(pairs)), min(ENOUGH, round(MOST_SHARE * len(pairs))))
    held_out: Pairs = []
    train: Pairs = []
    for group in groups:
        # Whole groups, as long as they fit.
        side = held_out if len(held_out) + len(group) <= min(MAX_HELD_OUT, num) else train
        side += group
    # One answer of each wording: a variant is no wrong choice.
    answers = {_words(reply): reply for _, reply in reversed(pairs)}
    choices, exact = [], []
    for prompt, reply in held_out:
        wrong = [other for words, other in answers.items() if words != _words(reply)]
        others = draw.sample(wrong, min(NUM_CHOICES - 1, len(wrong)))
        mixed = draw.sample([reply, *others], len(others) + 1)
        choices.append({"question": prompt, "choices": mixed, "answer": reply})
        exact.append({"question": prompt, "answer": reply})
    examples = [{"instruction": prompt, "output": reply} for prompt, reply in train]
    files = {
        "chat.jsonl": examples,
        "questions/choice/test.jsonl": choices,
        "questions/exact/test.jsonl": exact,
    }
    for name, records in files.items():
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        (target / name).write_text("".join(lines), encoding="utf-8")
    numbers, trained = (
        Counter(_words(reply) for _, reply in pairs),
        {_words(reply) for _, reply in train},
    )
    untrained = sum(
        numbers[_words(reply)] > 1 and _words(reply) not in trained for _, reply in held_out
    )
    notices = []
    if untrained and len(numbers) <= MOST_LABELS * len(pairs):
        notices.append(
            f"{untrained} of {len(held_out)} held-out questions have an answer that no training"
            " example has, because questions with the same answer are held out together. If your"
            " answers are labels, divide the file yourself"
        )
    if len(held_out) < ENOUGH:
        notices.append(
            f"{len(held_out)} held-out questions are too few for confidence intervals, which need"
            f" {ENOUGH}"
        )
    return len(held_out), notices
