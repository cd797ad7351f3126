"""The forms that rows come in, told by their columns, and the columns of TRL's that each becomes.

Pure functions of a row. Whatever a dataset looks like, everything after this file sees one of TRL's own kinds of
columns: conversations (COLUMNS), prompts and completions as turns, or plain texts (PLAIN), which no template touches.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from ..errors import UserError
from .turns import conversation_problem, from_sharegpt, list_problem, pair_problem, text_problem

Task = Literal["sft", "dpo"]
Row = dict[str, Any]

COLUMNS: dict[Task, tuple[str, ...]] = {"sft": ("messages",), "dpo": ("chosen", "rejected")}
"""What TRL is given of conversations. With `prompt` beside them it would take another path and fail (TRL 1.16, both
paper datasets)."""
PLAIN: dict[Task, tuple[tuple[str, ...], ...]] = {
    "sft": (("prompt", "completion"), ("text",)),
    "dpo": (("prompt", "chosen", "rejected"),),
}
"""What TRL is given of texts: they are trained as they stand, with the eos at the end. And of prompts and completions
as turns, whose columns have the same names."""

_NEEDS: dict[Task, str] = {
    "sft": "'messages': a list of {role, content} turns (or 'conversations' as of ShareGPT, 'prompt' and 'completion', "
    "'text')",
    "dpo": "'chosen' and 'rejected': two whole conversations, lists of {role, content} turns (or two answers beside "
    "their 'prompt')",
}
_NATIVE: dict[Task, tuple[str, set[str]]] = {  # the paper's datasets, known by the columns beside ours
    "sft": ("ultrachat_200k", {"prompt", "prompt_id"}),
    "dpo": ("ultrafeedback_binarized", {"prompt"}),
}


class Layout(NamedTuple):
    """The form of a dataset's rows, and what becomes of its columns."""

    words: str
    """What was recognised: "ShareGPT conversations"."""
    reads: tuple[str, ...]
    """The dataset's columns that are looked at."""
    kept: tuple[str, ...]
    """TRL's columns that come out."""
    dropped: tuple[str, ...]
    read: Callable[[Row], Row | str]
    """A row's content in TRL's columns; or, as text, why it cannot be trained on."""

    @property
    def has_turns(self) -> bool:
        """Whether what comes out are lists of turns, and not texts."""
        return self.read not in (_plain_text, _plain_completion, _plain_pair)


def recognise(row: Row, task: Task, where: str) -> Layout:
    """The layout of a dataset that has rows like this one; UserError if the task can read none such."""
    columns = list(row)
    form = _form(row, task)
    if form is None:
        other: Task = "dpo" if task == "sft" else "sft"
        hint = f"; these columns are for {other}: `soren-align {other}`" if _form(row, other) else ""
        raise UserError(f"{where}: found the columns {', '.join(columns)}; {task} needs {_NEEDS[task]}{hint}")
    words, reads, kept, read = form
    name, beside = _NATIVE[task]
    if reads == kept == COLUMNS[task] and beside <= set(columns):
        words += f" ({name})"
    return Layout(words, reads, kept, tuple(c for c in columns if c not in reads), read)


def read_row(row: Row, layout: Layout) -> Row | str:
    """The row in TRL's columns; or, as text, why it cannot be trained on."""
    return layout.read(row)


def bare(row: Row) -> Row:
    """A good row with turns of {role, content} and nothing else."""
    return {column: _bare(said) if isinstance(said, list) else said for column, said in row.items()}


def _form(row: Row, task: Task) -> tuple[str, tuple[str, ...], tuple[str, ...], Callable[[Row], Row | str]] | None:
    """(words, columns read, columns given, reader) of rows like this one; None where no form fits."""
    has, chats = row.keys(), COLUMNS[task]
    if task == "sft":
        if "messages" in has:
            return "chat messages", chats, chats, _messages
        if "conversations" in has:
            return "ShareGPT conversations", ("conversations",), chats, _sharegpt
        if {"prompt", "completion"} <= has:
            both = ("prompt", "completion")
            if isinstance(row["prompt"], list) or isinstance(row["completion"], list):
                return "prompts and completions as turns", both, both, _completion
            return "plain prompts and completions, without a template", both, both, _plain_completion
        return ("plain text, without a template", ("text",), ("text",), _plain_text) if "text" in has else None
    if not {"chosen", "rejected"} <= has:
        return None
    pair = ("chosen", "rejected")
    if "conversations" in has and _speaks_sharegpt(row["chosen"]):
        return "ShareGPT preferences, joined to pairs", ("conversations", *pair), chats, _sharegpt_pair
    if "prompt" in has and isinstance(row["chosen"], str) and not isinstance(row["prompt"], list):
        plain = ("prompt", *pair)
        return "plain prompts and pairs of answers, without a template", plain, plain, _plain_pair
    if "prompt" in has and (isinstance(row["chosen"], str) or _is_answer(row["chosen"])):
        return "prompts and pairs of answers as turns, joined to pairs", ("prompt", *pair), chats, _joined_pair
    return "preference pairs", pair, chats, _pair


def _is_answer(turns: Any) -> bool:
    """Whether these turns go on from a prompt: whole conversations begin with the user, or a system turn."""
    return (
        isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and turns[0].get("role") == "assistant"
    )


def _speaks_sharegpt(said: Any) -> bool:
    turn = said[0] if isinstance(said, list) and said else said
    return isinstance(turn, dict) and "from" in turn


def _bare(turns: list[Row]) -> list[Row]:
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def _chat(turns: Any, name: str) -> Row | str:
    return conversation_problem(turns, name) or {"messages": _bare(turns)}


def _messages(row: Row) -> Row | str:
    return _chat(row.get("messages"), "messages")


def _sharegpt(row: Row) -> Row | str:
    turns = from_sharegpt(row.get("conversations"), "conversations")
    return turns if isinstance(turns, str) else _chat(turns, "conversations")


def _completion(row: Row) -> Row | str:
    for column in ("prompt", "completion"):
        if problem := list_problem(row.get(column), column, "{role, content}"):
            return problem
    problem = conversation_problem(row["prompt"] + row["completion"], "prompt + completion")
    return problem or {column: _bare(row[column]) for column in ("prompt", "completion")}


def _plain(row: Row, *columns: str) -> Row | str:
    problems = (text_problem(row.get(column), column) for column in columns)
    return next((p for p in problems if p), None) or {column: row[column] for column in columns}


def _plain_text(row: Row) -> Row | str:
    return _plain(row, "text")


def _plain_completion(row: Row) -> Row | str:
    return _plain(row, "prompt", "completion")


def _plain_pair(row: Row) -> Row | str:
    found = _plain(row, "prompt", "chosen", "rejected")
    return found if isinstance(found, str) else pair_problem(found["chosen"], found["rejected"]) or found


def _two(chosen: Any, rejected: Any, before: str = "") -> Row | str:
    for turns, name in ((chosen, f"{before}chosen"), (rejected, f"{before}rejected")):
        if problem := conversation_problem(turns, name):
            return problem
    return pair_problem(chosen, rejected) or {"chosen": _bare(chosen), "rejected": _bare(rejected)}


def _pair(row: Row) -> Row | str:
    return _two(row.get("chosen"), row.get("rejected"))


def _joined_pair(row: Row) -> Row | str:
    prompt = row.get("prompt")
    turns: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answers: list[Any] = [
        [{"role": "assistant", "content": said}] if isinstance(said, str) else said
        for said in (row.get("chosen"), row.get("rejected"))
    ]
    for part, name in zip([turns, *answers], ("prompt", "chosen", "rejected"), strict=True):
        if problem := list_problem(part, name, "{role, content}"):
            return problem
    return _two(turns + answers[0], turns + answers[1], "prompt + ")


def _sharegpt_pair(row: Row) -> Row | str:
    parts = []
    for column in ("conversations", "chosen", "rejected"):
        said = row.get(column)
        turns = from_sharegpt([said] if isinstance(said, dict) else said, column)
        if isinstance(turns, str):
            return turns
        parts.append(turns)
    return _two(parts[0] + parts[1], parts[0] + parts[2], "conversations + ")
