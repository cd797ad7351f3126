"""What a row must look like: which columns each task reads, and what is wrong with a row.

Pure functions of column names and of single rows. A later layout (ShareGPT, prompt-completion, plain text) becomes
another way to reach these same columns, so that everything after this file sees only them.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from ..recipe import UserError

Task = Literal["sft", "dpo"]

COLUMNS: dict[Task, tuple[str, ...]] = {"sft": ("messages",), "dpo": ("chosen", "rejected")}
"""What TRL is given. With `prompt` beside them it would take another path and fail (TRL 1.16, both paper datasets)."""

_NEEDS: dict[Task, str] = {
    "sft": "'messages': a list of {role, content} turns",
    "dpo": "'chosen' and 'rejected': two whole conversations, lists of {role, content} turns",
}
_WORDS: dict[Task, str] = {"sft": "chat messages", "dpo": "preference pairs"}
_NATIVE: dict[Task, tuple[str, set[str]]] = {  # the paper's datasets, known by the columns beside ours
    "sft": ("ultrachat_200k", {"prompt", "prompt_id"}),
    "dpo": ("ultrafeedback_binarized", {"prompt"}),
}
_ROLES = ("system", "user", "assistant")


class Layout(NamedTuple):
    """Which columns a dataset has and what becomes of them."""

    words: str
    kept: tuple[str, ...]
    dropped: tuple[str, ...]


def recognise(columns: Sequence[str], task: Task, where: str) -> Layout:
    """The layout of a dataset with these columns; UserError if the task cannot read them."""
    kept = COLUMNS[task]
    if not set(kept) <= set(columns):
        other: Task = "dpo" if task == "sft" else "sft"
        fits = set(COLUMNS[other]) <= set(columns)
        hint = f"; these columns are for {other}: `soren-align {other}`" if fits else ""
        raise UserError(f"{where}: found the columns {', '.join(columns)}; {task} needs {_NEEDS[task]}{hint}")
    name, beside = _NATIVE[task]
    words = _WORDS[task] + (f" ({name})" if beside <= set(columns) else "")
    return Layout(words, kept, tuple(c for c in columns if c not in kept))


def row_problem(row: dict[str, Any], task: Task) -> str | None:
    """Why this row cannot be trained on, in words; None if it can."""
    for column in COLUMNS[task]:
        if problem := _conversation_problem(row.get(column), column):
            return problem
    return _pair_problem(row["chosen"], row["rejected"]) if task == "dpo" else None


def _conversation_problem(turns: Any, name: str) -> str | None:
    if turns is None:
        return f"no '{name}'"
    if not isinstance(turns, list):
        return f"{name} is {_kind(turns)}, not a list of {{role, content}} turns"
    if not turns:
        return f"{name} is an empty list"
    for i, turn in enumerate(turns):
        if problem := _turn_problem(turn):
            return f"{name}[{i}] {problem}"
    return _order_problem([turn["role"] for turn in turns], name)


def _turn_problem(turn: Any) -> str | None:
    if not isinstance(turn, dict):
        return f"is {_kind(turn)}, not an object with role and content"
    # Tool calls, weights and train flags change what is learned: not to be passed over in silence.
    more = [key for key, value in turn.items() if key not in ("role", "content") and value is not None]
    if more:
        return f"has {', '.join(more)} beside role and content; leave them out"
    role, content = turn.get("role"), turn.get("content")
    if role not in _ROLES:
        found = "has no role" if role is None else f"has the role {role!r}"
        return f"{found}; write system, user or assistant"
    if not isinstance(content, str):
        return "has no content" if content is None else f"has {_kind(content)} as content; write text"
    if not content.strip():
        return f"has empty content (role {role})"
    if not content.isascii():
        try:
            content.encode()
        except UnicodeEncodeError:
            return "has content with half of a surrogate pair, which is no text"
    return None


def _order_problem(roles: list[str], name: str) -> str | None:
    start = 1 if roles[0] == "system" else 0
    if "assistant" not in roles:
        return f"{name} has no assistant turn: nothing to learn"
    if roles[start] == "assistant":
        return f"{name} starts with the assistant; it must be the whole conversation, with the user's turn first"
    for i in range(start, len(roles)):
        if roles[i] == "system":
            return f"{name}[{i}] is a system turn; only the first turn may be"
        if i > start and roles[i] == roles[i - 1]:
            return f"{name}[{i - 1}] and {name}[{i}] are both {roles[i]} turns; user and assistant must alternate"
    return None if roles[-1] == "assistant" else f"{name} ends with a {roles[-1]} turn, not the assistant's"


def _pair_problem(chosen: list[dict[str, str]], rejected: list[dict[str, str]]) -> str | None:
    if chosen == rejected:
        return "chosen and rejected are identical"
    if chosen[:-1] == rejected[:-1]:
        return None
    apart = next((i for i, (c, r) in enumerate(zip(chosen, rejected, strict=False)) if c != r), None)
    where = f"they part at turn [{apart}]" if apart is not None else "one is longer"
    return f"chosen and rejected do not share a prompt: {where}; only their last turns may differ"


def _kind(value: Any) -> str:
    names = {str: "text", bool: "a truth value", int: "a number", float: "a number", dict: "an object"}
    return {**names, list: "a list", type(None): "null"}.get(type(value), type(value).__name__)
