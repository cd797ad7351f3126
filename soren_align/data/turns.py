"""Problems of conversations, preference pairs and texts, as messages. Pure functions."""

from typing import Any

ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""ShareGPT's `from` -> role."""


def conversation_problem(turns: Any, name: str) -> str | None:
    """Why `turns` is no conversation that ends with the assistant's answer; None if it is one."""
    if problem := list_problem(turns, name, "{role, content}"):
        return problem
    for i, turn in enumerate(turns):
        if problem := _turn_problem(turn):
            return f"{name}[{i}] {problem}"
    return _order_problem([turn["role"] for turn in turns], name)


def list_problem(turns: Any, name: str, keys: str) -> str | None:
    """Why `turns` is no list; None if it is one, whatever its elements. keys: of a turn, for the message."""
    if turns is None:
        return f"no '{name}'"
    if not isinstance(turns, list):
        return f"{name} is {_kind(turns)}, not a list of {keys} turns"
    return None if turns else f"{name} is an empty list"


def text_problem(text: Any, name: str) -> str | None:
    """Why `text` cannot be trained on; None if it can."""
    if not isinstance(text, str):
        return f"no '{name}'" if text is None else f"{name} is {_kind(text)}, not text"
    if not text.strip():
        return f"{name} is empty"
    return f"{name} has half of a surrogate pair, which is not valid text" if _is_broken(text) else None


def from_sharegpt(turns: Any, name: str) -> list[Any] | str:
    """ShareGPT's {from, value} turns as {role, content}; or, as text, why they are not valid."""
    if problem := list_problem(turns, name, "{from, value}"):
        return problem
    converted = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict):
            return f"{name}[{i}] is {_kind(turn)}, not an object with from and value"
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            finding = "no 'from'" if speaker is None else f"the speaker {repr(speaker)[:60]}"
            return f"{name}[{i}] has {finding}; write human, gpt or system"
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        converted.append({"role": SHAREGPT_ROLES[speaker], "content": turn.get("value"), **others})
    return converted


def _turn_problem(turn: Any) -> str | None:
    if not isinstance(turn, dict):
        return f"is {_kind(turn)}, not an object with role and content"
    # Tool calls, weights and train flags change what is learned: ignoring them silently would be wrong.
    others = [key for key, value in turn.items() if key not in ("role", "content") and value is not None]
    if others:
        return f"has {', '.join(map(str, others))[:60]} beside role and content; leave them out"
    role, content = turn.get("role"), turn.get("content")
    if role not in ROLES:
        finding = "has no role" if role is None else f"has the role {repr(role)[:60]}"
        return f"{finding}; write system, user or assistant"
    if not isinstance(content, str):
        return "has no content" if content is None else f"has {_kind(content)} as content; write text"
    if not content.strip():
        return f"has empty content (role {role})"
    return "has content with half of a surrogate pair, which is not valid text" if _is_broken(content) else None


def _is_broken(text: str) -> bool:
    try:
        return not text.isascii() and not text.encode()
    except UnicodeEncodeError:
        return True


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


def pair_problem(chosen: Any, rejected: Any) -> str | None:
    """Why two valid conversations, or two texts after one prompt, are no preference pair; None if they are one."""
    if chosen == rejected:
        return "chosen and rejected are identical"
    if isinstance(chosen, str) or chosen[:-1] == rejected[:-1]:
        return None
    first = next((i for i, (c, r) in enumerate(zip(chosen, rejected, strict=False)) if c != r), None)
    where = f"they differ at turn [{first}]" if first is not None else "one is longer"
    return f"chosen and rejected do not share a prompt: {where}; only their last turns may differ"


def _kind(value: Any) -> str:
    names = {str: "text", bool: "a boolean", int: "a number", float: "a number", dict: "an object"}
    return {**names, list: "a list", type(None): "null"}.get(type(value), type(value).__name__)
