"""Read a user's file, recognize its kind, and make examples and questions that judge a training.

The questions follow the file's kind. Facts, such as a FAQ's, are known from training or not at all:
all are trained, and asked again, as well as other wordings in the file.
Behaviour (labels, extraction, style) shows on examples that were not trained on: some are held out.
"""

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal

from ..core.errors import UserError
from ..core.figures import short
from ..core.text import count
from ..tasks import ROLE_ALIASES, TURN_KEY_ALIASES, thumb

Kind = Literal["facts", "behaviour"]
Pair = tuple[str, str]
"""A question and its answer."""
Record = dict[str, Any]
HELD_OUT_SHARE, MAX_QUESTIONS, NUM_CHOICES = 0.2, 100, 4
"""The share of the examples that is held out, the most questions of a column, and the choices of
each."""
MAX_TRAINED = 50
"""The trained questions that are asked: each costs an answer per model."""
ENOUGH, MOST_SHARE = 20, 0.35
"""Questions from which a table has intervals; of a small file so many are held out, but at most
this share."""
MIN_EXAMPLES = 20
"""Examples that a file must have."""
MIN_REPHRASED = 5
"""Variants in a file from which they are asked instead of trained: fewer show nothing."""
REPHRASED = ("rephrased", "other wording", "umformuliert", "reformulée", "reformulada")
"""Names of a column with other wordings, which are asked and not trained."""
MAX_ALIKE = 5
"""Questions with one answer that may be variants of one question. The answer of more of them is a
label."""
MIN_COPIED = 0.6
"""The share of an answer's words that stand in its question, from which it is an extraction."""
POOL = 2000
"""Answers among which wrong choices are looked for."""
WAITING = "  # "
"""Before the line of a column that waits for the user's questions."""


@dataclass(frozen=True)
class OwnData:
    """What a file has."""

    name: str
    read_as: str
    """The columns, and what each is read as."""
    pairs: list[Pair] = field(default_factory=list)
    """Distinct questions with their answers."""
    chats: list[Record] = field(default_factory=list)
    """All conversations, as they stand in the file; then `pairs` are their first questions."""
    systems: dict[str, str] = field(default_factory=dict)
    """The system prompt of each question of `pairs`, if conversations have any."""
    rephrased: list[Pair] = field(default_factory=list)
    """Other wordings, of a column of their own, each with its question."""
    rejected: dict[str, list[Pair]] = field(default_factory=dict)
    """Preferred and rejected answers by prompt; then `pairs` are prompts and preferred answers."""
    thumbs: dict[str, list[tuple[str, bool]]] = field(default_factory=dict)
    """Answers by prompt, and whether each is good; then `pairs` are prompts and good answers."""
    notices: list[str] = field(default_factory=list)


def read_data(data: str, question: str | None, answer: str | None) -> OwnData:
    """Return what a .csv, .xlsx, .jsonl or .json file has.
    Raises UserError if it cannot be read, or has too little.
    """
    # Here: `show` and `runs` need no recipes.
    from ..recipe.data_files import (
        MAX_ROWS,
        SPREADSHEET,
        column_names,
        data_files,
        first_records,
        label_column,
        question_columns,
        refuse_other_ratings,
        spreadsheet,
    )

    name, file = next(iter(data_files(data, (".csv", ".jsonl", ".json", SPREADSHEET)).items()))
    if not file.stat().st_size:
        raise UserError(f"{name}: is empty; name a file with questions and answers")
    sheets = ""
    if file.suffix == SPREADSHEET:
        rows, sheets = spreadsheet(name, file, MIN_EXAMPLES)
    else:
        rows = first_records(name, file, {}, MAX_ROWS, is_whole=True)
    if not rows:
        raise UserError(f"{name}: has no records; name a file with questions and answers")
    rows, notices = _decoded(data, rows)
    notices += [sheets] * bool(sheets)
    columns, label = column_names(rows), label_column(rows)
    for column in ("messages", "conversations"):
        if column in columns and label:
            raise UserError(
                f"--data: {data}: has conversations with thumbs in '{label}', of which no questions"
                " can be made; run `soren-align kto --model MODEL --data FILE --output RUN`"
            )
        if column in columns and question is None:
            return _conversations(data, rows, column)
    unlabelled = [{k: v for k, v in row.items() if k != label} for row in rows]
    if label is None:
        refuse_other_ratings(data, rows)
    try:
        names = question_columns(data, question, answer, unlabelled)
    except UserError as error:
        thumbs_read = f" ('{label}' is read as thumbs)" if label else ""
        raise UserError(f"{error}{thumbs_read}") from None
    chosen, rejected = (names.get(key, "") for key in ("chosen", "rejected"))
    keys = [names["instruction"], *([chosen, rejected] if chosen else [names["output"]])]
    # Alpaca's optional column, joined as in a training on the file itself.
    context = "input" if keys[0] == "instruction" and "input" in columns else ""
    texts, incomplete = [], []
    # Pairs have no rephrased column in their test.
    others = [column for column in columns if column not in (*keys, context, label)]
    unread = [] if chosen or label else others
    other = next((column for column in unread if column.strip().lower() in REPHRASED), "")
    rephrased: list[Pair] = []
    thumbs: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for number, row in enumerate(rows, 1):
        place = f"--data: {data}: record {number}"
        cells = [_text(row.get(key), f"{place}, '{key}'") for key in keys]
        if context and row.get(context):
            cells[0] += f"\n{row[context]}"
        good = thumb(row.get(label)) if label else True
        if all(cells) and good is not None:
            if label:
                thumbs[cells[0]].append((cells[1], good))
            if good:
                texts.append(cells)
            if other and (wording := _text(row.get(other), f"{place}, '{other}'")):
                rephrased.append((wording, cells[0]))
        else:
            incomplete.append(str(number))
    if incomplete:
        more = f" and {len(incomplete) - 5} more" if len(incomplete) > 5 else ""
        reason = "a cell is empty or no thumb" if label else "a cell is empty"
        notices.append(f"left out, because {reason}: record {', '.join(incomplete[:5])}{more}")
    pairs: dict[str, str] = {}
    by_prompt: dict[str, list[Pair]] = defaultdict(list)
    for prompt, reply, *worse in texts:
        pairs.setdefault(prompt, reply)
        if worse and reply != worse[0]:
            by_prompt[prompt].append((reply, worse[0]))
    if not (chosen or label) and (repeated := len(texts) - len(pairs)):
        notices.append(f"left out, because the question occurs before: {count(repeated, 'record')}")
    if chosen and (equal := len(texts) - sum(map(len, by_prompt.values()))):
        notices.append(f"left out, because both answers are equal: {count(equal, 'record')}")
    read_as = f"column '{keys[0]}' as the question, '{keys[1]}' as the answer"
    if chosen:
        read_as = (
            f"column '{keys[0]}' as the prompt, '{chosen}' as the preferred answer, '{rejected}'"
            " as the rejected one"
        )
    if label:
        read_as += f", '{label}' as thumbs up or down"
    if rephrased:
        read_as += f", '{other}' as other wordings"
    ignored = [column for column in others if column != other]
    read_as += f"; not read: {', '.join(ignored)}" if ignored else ""
    own = OwnData(
        name,
        read_as,
        [*pairs.items()],
        rephrased=rephrased,
        rejected=dict(by_prompt),
        thumbs=dict(thumbs),
        notices=notices,
    )
    number = len(by_prompt) if chosen else len(thumbs) if label else len(pairs)
    _refuse_few(data, number, "prompts" if chosen or label else "questions")
    if len({reply for _, reply in own.pairs}) == 1:
        raise UserError(f"--data: {data}: all answers are equal; name a file with several answers")
    return own


def _decoded(data: str, rows: list[Record]) -> tuple[list[Record], list[str]]:
    """Return the rows of a file that is not UTF-8 as Windows-1252, which spreadsheets write, with a
    notice."""

    def decode(text: Any) -> Any:
        if not isinstance(text, str) or text.isascii():
            return text
        try:
            return text.encode("utf-8", "surrogateescape").decode()
        except UnicodeDecodeError:
            examples.append(text.encode("utf-8", "surrogateescape").decode("cp1252"))
            return examples[-1]

    examples: list[str] = []
    try:
        rows = [{decode(key): decode(value) for key, value in row.items()} for row in rows]
    except UnicodeError:
        raise UserError(
            f"--data: {data}: is neither UTF-8 nor Windows-1252; save the file as UTF-8"
        ) from None
    example = next((text for text in examples if text.strip()), "")
    notice = f"not UTF-8: read as Windows-1252, such as {short(example, 60)!r}"
    return rows, [notice] if examples else []


def _text(cell: Any, place: str) -> str:
    """Return a cell's text; of one question and its answer, as turns, the last one's."""
    if isinstance(cell, list) and len(cell) in (1, 2) and isinstance(cell[-1], dict):
        cell = cell[-1].get("content")
    if isinstance(cell, list | dict):
        raise UserError(
            f"{place}: is no text, nor one question and its answer; name this file in a recipe's"
            " data section, and write questions of your own: `soren-align new FOLDER` shows how"
        )
    return "" if cell is None else str(cell).strip()


def _refuse_few(data: str, num: int, noun: str) -> None:
    if num < MIN_EXAMPLES:
        raise UserError(
            f"--data: {data}: has only {num} {noun}; write at least {MIN_EXAMPLES} {noun}"
        )


def _conversations(data: str, rows: list[Record], column: str) -> OwnData:
    """Return conversations; the test asks their first questions, after their system prompt.

    Later turns answer earlier ones, which a question alone does not have.
    """
    pairs: dict[str, str] = {}
    systems: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        turns = row.get(column)
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            names = TURN_KEY_ALIASES.values() if column == "conversations" else TURN_KEY_ALIASES
            example = ", ".join(f'"{name}": "..."' for name in names)
            raise UserError(
                f"--data: {data}: record {number}, '{column}': is no list of turns; write"
                f" [{{{example}}}, ...]"
            )
        roles, texts = (
            [turn.get(key, turn.get(other)) for turn in turns]
            for key, other in TURN_KEY_ALIASES.items()
        )
        speakers = [ROLE_ALIASES.get(str(role).lower(), role) for role in roles]
        first = int(speakers[:1] == ["system"])
        first_texts = texts[: first + 2]
        if speakers[first : first + 2] != ["user", "assistant"]:
            continue
        if all(isinstance(text, str) and text.strip() for text in first_texts):
            *system, question, answer = (text.strip() for text in first_texts)
            if question not in pairs:
                pairs[question], systems[question] = answer, "".join(system)
    _refuse_few(data, len(rows), "conversations")
    if not pairs:
        raise UserError(
            f"--data: {data}: no conversation begins with a question and its answer as texts, which"
            " the test could ask; write questions of your own: `soren-align new FOLDER` shows how"
        )
    read_as = f"conversations in '{column}'; the test asks the first question of a conversation"
    systems = systems if any(systems.values()) else {}
    return OwnData(data, read_as, [*pairs.items()], chats=rows, systems=systems)


def kind_of(pairs: Sequence[Pair]) -> tuple[Kind, str]:
    """Return what question-answer pairs are, and by what it is seen."""
    if _are_labels(pairs):
        return "behaviour", "most answers are labels, which many questions have"
    if sum(reply.lstrip().startswith(("{", "[{")) for _, reply in pairs) >= len(pairs) / 2:
        return "behaviour", "most answers are JSON, as of an extraction"
    copied = sum(
        len({*_words(reply)} & {*_words(prompt)}) >= MIN_COPIED * len({*_words(reply)}) > 0
        for prompt, reply in pairs
    )
    if copied >= len(pairs) / 2:
        return "behaviour", "most answers consist of words of their questions"
    return "facts", "most answers are neither labels nor words of their questions"


def _are_labels(pairs: Sequence[Pair]) -> bool:
    numbers = Counter(_words(reply) for _, reply in pairs)
    return sum(numbers[_words(reply)] > MAX_ALIKE for _, reply in pairs) >= len(pairs) / 2


def write_questions(
    target: Path, own: OwnData, kind: Kind, *, is_pretrained: bool
) -> tuple[list[str], list[str]]:
    """Write the examples to train on, and the questions and pairs of each column of the suite.

    Returns what the files have, and notices.
    """
    # A fixed seed: the same file gives the same folder.
    draw = random.Random(0)
    train, columns, notices = _divide(own, kind, draw)
    judged = columns.pop("thumbs", [])
    for record in columns["trained"] if own.systems else ():
        record["system"] = own.systems[record["question"]]
    waiting: dict[str, list[Record]] = {}
    if kind == "facts" and not (own.rejected or own.thumbs) and "rephrased" not in columns:
        waiting["rephrased"] = [
            {**record, "question": None, "original": record["question"]}
            for record in columns["trained"][:ENOUGH]
        ]
        column = (
            f"add a column '{REPHRASED[0]}' to {own.name} with another wording of some questions,"
            " and run this command for a new folder; or "
        ) * (not own.chats)
        notices.append(
            f"other wordings are not tested. To test them, {column}write them into"
            f" {target}/questions/rephrased/test.jsonl, and remove the # before rephrased in"
            " suite.yaml"
        )
    files = {f"questions/{name}/test.jsonl": each for name, each in (columns | waiting).items()}
    if own.thumbs:
        held_out = {record["prompt"] for record in judged}
        rest = [record for record in _answers(own) if record["prompt"] not in held_out]
        files |= {"thumbs.jsonl": rest, "thumbs_test.jsonl": judged}
        # All good answers, not one for each prompt.
        good = ((record["prompt"], record["completion"]) for record in rest if record["label"])
        train = [*dict.fromkeys(good)]
    files["chat.jsonl"] = own.chats or [{"instruction": q, "output": a} for q, a in train]
    lines = [f"chat.jsonl: {count(len(files['chat.jsonl']), 'example')} of {own.name}"]
    if own.rejected:
        held_out = {record["prompt"] for record in columns["preference"]}
        files["pairs.jsonl"] = [
            {"instruction": prompt, "chosen": better, "rejected": worse}
            for prompt, each in own.rejected.items()
            if prompt not in held_out
            for better, worse in each
        ]
        lines.append(f"pairs.jsonl: {count(len(files['pairs.jsonl']), 'pair')} of {own.name}")
    if own.thumbs:
        lines.append(
            f"thumbs.jsonl: {count(len(files['thumbs.jsonl']), 'answer')} of {own.name};"
            f" thumbs_test.jsonl: {len(judged)} others, to test"
        )
    # A sample's pairs would be trained beside the user's own data.
    unused = [*["kto.yaml"] * (not own.thumbs), *["pairs.jsonl", "dpo.yaml"] * (not own.rejected)]
    for name in unused:
        (target / name).unlink(missing_ok=True)
    for name, records in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (target / name).write_text(text, encoding="utf-8")
    questions = target / "questions"
    sizes = {column: len(records) for column, records in columns.items()}
    if is_pretrained:  # random weights know nothing that could be lost
        general = questions / "general/test.jsonl"
        sizes["general"] = len(general.read_text(encoding="utf-8").splitlines())
    keep_columns(questions, sizes, waiting)
    # Without a tokenizer: a token of the tiny model is a byte, and of others at least two.
    longest = max(len(reply.encode()) for _, reply in own.pairs)
    num = longest // (2 if is_pretrained else 1) + 32
    file = questions / "trained.yaml"
    text = file.read_text(encoding="utf-8").replace("max_gen_toks: 200", f"max_gen_toks: {num}")
    if own.systems:
        text += 'description: "{{system}}"   # the system prompt\n'
    file.write_text(text, encoding="utf-8")
    lines.append(f"questions/: {', '.join(f'{column} {num}' for column, num in sizes.items())}")
    notices += [
        f"{column}: {num} questions are too few for confidence intervals, which need {ENOUGH}"
        for column, num in sizes.items()
        if num < ENOUGH
    ]
    return lines, notices


def keep_columns(questions: Path, names: Iterable[str], waiting: Iterable[str] = ()) -> None:
    """Remove the other columns of the suite in `questions`; comment out the `waiting` ones."""
    suite, waiting = questions / "suite.yaml", {*waiting}
    columns = {*names} | waiting
    lines = []
    for line in suite.read_text(encoding="utf-8").splitlines():
        task = match[1] if (match := re.match(r"  - \{task: ([\w-]+)", line)) else ""
        if not task or task in columns:
            lines.append(WAITING + line.strip() if task in waiting else line)
    suite.write_text("\n".join(lines) + "\n", encoding="utf-8")
    included = {"trained", "choice"}  # by the other tasks' files
    for file in questions.glob("*.yaml"):
        if file != suite and file.stem not in columns | included:
            file.unlink()
    for file in questions.glob("*/test.jsonl"):
        if file.parent.name not in columns:
            file.unlink()
            file.parent.rmdir()


def _divide(
    own: OwnData, kind: Kind, draw: random.Random
) -> tuple[list[Pair], dict[str, list[Record]], list[str]]:
    """Return the pairs to train on, the records of each column, and notices."""
    columns: dict[str, list[Record]] = {}
    train, notices = own.pairs, []
    if prompts := [*(own.rejected or own.thumbs)]:
        held_out = {*draw.sample(prompts, _num_held_out(len(prompts)))}
        train = [pair for pair in train if pair[0] not in held_out]
        if own.rejected:
            columns["preference"] = [
                {"prompt": prompt, "chosen": better, "rejected": worse}
                for prompt in prompts
                if prompt in held_out
                for better, worse in own.rejected[prompt][:1]
            ]
        else:
            judged = (record for record in _answers(own) if record["prompt"] in held_out)
            columns["thumbs"] = [*judged]
            # Of several good answers, which are all trained, another than the asked one is right too.
            good = Counter(prompt for prompt, each in own.thumbs.items() for _ in _good(each))
            train = [pair for pair in train if good[pair[0]] == 1] or train
    elif own.chats:
        pass  # turns of several conversations may depend on each other's facts: all are trained
    elif kind == "facts":
        others, rephrased = _rephrased(train)
        if len(rephrased) >= MIN_REPHRASED and not own.rephrased:
            train = others
            columns["rephrased"] = _questions(rephrased)
            (prompt, _), trained = next(iter(rephrased.items()))
            notices.append(
                f"rephrased: {count(len(rephrased), 'question')} with the answer of another one,"
                f" asked and not trained, such as {short(prompt, 80)!r}, as {short(trained, 80)!r}"
                " is trained"
            )
    else:
        train, held_out = _held_out(train, draw)
        columns["held-out"] = _questions(held_out)
        if not _are_labels(own.pairs):
            columns["choice"] = _choices(held_out, own.pairs, draw)
    # Of trained questions alone, and none that is trained itself.
    answers = dict(train)
    wordings = [(w, answers[q]) for w, q in own.rephrased if q in answers and w not in answers]
    if wordings:
        columns["rephrased"] = _questions(wordings[:MAX_QUESTIONS])
    chosen = sorted(draw.sample(range(len(train)), min(len(train), MAX_TRAINED)))
    return train, {"trained": _questions([train[i] for i in chosen])} | columns, notices


def _good(answers: Iterable[tuple[str, bool]]) -> set[str]:
    return {reply for reply, good in answers if good}


def _answers(own: OwnData) -> list[Record]:
    """Return all labelled answers, in the order of their prompts."""
    return [
        {"prompt": prompt, "completion": reply, "label": good}
        for prompt, each in own.thumbs.items()
        for reply, good in each
    ]


def _questions(pairs: Iterable[Pair]) -> list[Record]:
    return [{"question": prompt, "answer": reply} for prompt, reply in pairs]


def _num_held_out(num: int) -> int:
    return min(
        MAX_QUESTIONS, max(round(HELD_OUT_SHARE * num), min(ENOUGH, round(MOST_SHARE * num)))
    )


def _rephrased(pairs: Sequence[Pair]) -> tuple[list[Pair], dict[Pair, str]]:
    """Return the pairs to train on, and those to be asked with the trained question that each
    rephrases: the last of each group of variants."""
    groups: dict[tuple[str, ...], list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[_words(pair[1])].append(pair)
    variants: dict[Pair, str] = {}
    for reply, (*others, last) in groups.items():
        if len(others) < MAX_ALIKE:
            for other, _ in others:
                if _are_variants(last[0], other, is_short=len(reply) < 4):
                    variants[last] = other
    return [pair for pair in pairs if pair not in variants], variants


def _are_variants(one: str, other: str, *, is_short: bool) -> bool:
    """Return whether two questions with one answer are two wordings of one question.

    "What colour is the Primo?" and "What colour is the Duo?" are not: they differ in one place. A
    short answer ("Yes.") may belong to two questions by chance.
    """
    words = _words(one), _words(other)
    changes = [code for code in SequenceMatcher(None, *words).get_opcodes() if code[0] != "equal"]
    return len(changes) > 1 and (not is_short or _likeness(one, other) >= 0.4)


def _held_out(pairs: Sequence[Pair], draw: random.Random) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs to train on and those held out; questions of equal words, and variants of
    one question, stay on one side."""
    are_labels = _are_labels(pairs)
    groups: dict[Any, list[Pair]] = defaultdict(list)
    for prompt, reply in pairs:
        groups[_words(prompt) if are_labels else _words(reply)].append((prompt, reply))
    shuffled, num = [*groups.values()], _num_held_out(len(pairs))
    draw.shuffle(shuffled)
    if are_labels:
        # Evenly spaced over the labels, so that each has its share; the others follow.
        shuffled.sort(key=lambda group: _words(group[0][1]))
        spaced = [len(shuffled) * (2 * i + 1) // (2 * num) for i in range(min(num, len(shuffled)))]
        shuffled = [shuffled[i] for i in spaced]
    held_out: list[Pair] = []
    for group in shuffled:
        if len(held_out) + len(group) <= num:
            held_out += group
    prompts = {prompt for prompt, _ in held_out}
    return [pair for pair in pairs if pair[0] not in prompts], held_out


def _choices(held_out: Sequence[Pair], pairs: Sequence[Pair], draw: random.Random) -> list[Record]:
    """Return the questions with their answer among those to the most similar questions.

    Answers to unlike questions are wrong at a glance, and answers of other lengths by their length.
    """
    pool = draw.sample(pairs, min(len(pairs), POOL))
    records = []
    for prompt, reply in held_out:
        others = {_words(other): (question, other) for question, other in pool}
        others.pop(_words(reply), None)

        def nearness(pair: Pair, prompt: str = prompt, reply: str = reply) -> float:
            shorter, longer = sorted((len(reply), len(pair[1])))
            return _likeness(prompt, pair[0]) + shorter / longer

        wrong = sorted(others.values(), key=nearness, reverse=True)[: NUM_CHOICES - 1]
        mixed = draw.sample([reply, *(other for _, other in wrong)], len(wrong) + 1)
        records.append({"question": prompt, "choices": mixed, "answer": reply})
    return records


def _likeness(one: str, other: str) -> float:
    """Return the share of common words of two texts among the words of both."""
    a, b = {*_words(one)}, {*_words(other)}
    return len(a & b) / len(a | b) if a | b else 1.0


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.casefold()))
