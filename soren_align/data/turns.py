"""Problems of conversations, preference pairs and texts, as messages. Pure functions."""

import json
import re
from collections.abc import Mapping
from typing import Any

from .tool_calls import call_problem, id_problem, with_calls

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {"human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
ALIASES |= {"model": "assistant", "ai": "assistant", "developer": "system"}
ALIASES |= {"observation": "tool", "function": "tool", "ipython": "tool", "tool_response": "tool"}
ALIASES |= {"function_call": "tool_call"}
"""Other names of the roles; tool_call: the assistant's calls as text, see `tool_calls.with_calls`."""
SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
"""Starts a turn of hh-rlhf's plain dialogues."""


def conversation_problem(turns: Any, name: str) -> str | None:
    """Why `turns` is no conversation that ends with the assistant's answer; None if it is one."""
    if problem := list_problem(turns, name, "{role, content}"):
        return problem
    for i, turn in enumerate(turns):
        if problem := _turn_problem(turn):
            return f"{name}[{i}] {problem}"
    problem = _order_problem([turn["role"] for turn in turns], name)
    return problem or weight_problem(turns, name) or id_problem(turns, name)


def weight_problem(turns: list[dict[str, Any]], name: str) -> str | None:
    """Why no turn is trained; None if one is."""
    is_trained = (turn.get("weight", 1) for turn in turns if turn["role"] == "assistant")
    return None if any(is_trained) else f"{name} has weight 0 for every assistant turn: nothing to learn"


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


def with_known_keys(turns: Any, keys: Mapping[str, str], roles: Mapping[str, str]) -> Any:
    """A turn, or a list of turns, with the keys role and content and the names in ROLES; any other value unchanged.

    keys: the dataset's names of role, content and weight, if they are neither these nor ShareGPT's from and value.
    roles: the dataset's name of a role -> the role; beside ALIASES.
    """
    if isinstance(turns, list):
        return [with_known_keys(turn, keys, roles) for turn in turns]
    if not isinstance(turns, dict):
        return turns
    known = dict(turns)
    others = {"role": "from", "content": "value", "weight": "weight", **keys}
    for key, other in others.items():
        if other in known and known.get(key) is None:
            known[key] = known.pop(other)
    known["content"] = _joined_texts(known.get("content"))
    role = known.get("role")
    if isinstance(role, str):
        known["role"] = roles.get(role) or ALIASES.get(role.lower(), role)
    return with_calls(known)


def _joined_texts(content: Any) -> Any:
    """The text of a list of text parts, {"type": "text", "text": ...}, as templates join them; others unchanged."""
    if not (isinstance(content, list) and content and all(map(_is_text_part, content))):
        return content
    return "".join(part["text"] for part in content)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def is_dialogue(text: Any) -> bool:
    """Whether a text is a dialogue as in hh-rlhf: "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    return isinstance(text, str) and [match[1] for match in SPEAKER.finditer(text)][:2] == ["Human", "Assistant"]


def from_dialogue(text: Any, name: str) -> list[dict[str, str]] | str:
    """The turns of a dialogue's text; or, as text, why it is none."""
    if problem := text_problem(text, name):
        return problem
    before, *parts = SPEAKER.split(text)
    if before or not parts:
        return f"{name} does not start with 'Human:'"
    speakers, contents = parts[::2], parts[1::2]
    return [
        {"role": ALIASES.get(speaker.lower(), speaker.lower()), "content": content.strip()}
        for speaker, content in zip(speakers, contents, strict=True)
    ]


def _turn_problem(turn: Any) -> str | None:
    if not isinstance(turn, dict):
        return f"is {_kind(turn)}, not an object with role and content (or from and value)"
    role, content = turn.get("role"), turn.get("content")
    if role not in ROLES:
        finding = "has no role (or from)" if role is None else f"has the role {repr(role)[:60]}"
        return f"{finding}; write system, user, assistant or tool, or name it under `roles`"
    if problem := call_problem(turn):
        return problem
    kinds = [part.get("type") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if other := next((kind for kind in kinds if kind not in (None, "text")), None):
        return f"has a part of type {repr(other)[:60]} in its content; only text is trained"
    if not isinstance(content, str):
        return "has no content" if content is None else f"has {_kind(content)} as content; write text"
    if not content.strip() and role != "tool" and "tool_calls" not in turn:
        return f"has empty content (role {role})"
    if _is_broken(content):
        return "has content with half of a surrogate pair, which is not valid text"
    others = [value for key, value in turn.items() if key != "content"]
    return "has half of a surrogate pair, which is not valid text" if any(map(_is_broken_inside, others)) else None


def _is_broken_inside(value: Any) -> bool:
    return _is_broken(value) if isinstance(value, str) else _is_broken(json.dumps(value, ensure_ascii=False))


def _is_broken(text: str) -> bool:
    try:
        return not text.isascii() and not text.encode()
    except UnicodeEncodeError:
        return True


def _order_problem(roles: list[str], name: str) -> str | None:
    start = 1 if roles[0] == "system" else 0
    if "assistant" not in roles:
        return f"{name} has no assistant turn: nothing to learn"
    if roles[start] != "user" and roles[start] != "system":
        role = {"assistant": "the assistant"}.get(roles[start], f"a {roles[start]}")
        return f"{name} starts with {role}; it must be the whole conversation, with the user's turn first"
    for i in range(start, len(roles)):
        if roles[i] == "system":
            return f"{name}[{i}] is a system turn; only the first turn may be"
        if i > start and roles[i] == roles[i - 1] != "tool":
            return f"{name}[{i - 1}] and {name}[{i}] are both {roles[i]} turns; user and assistant must alternate"
        if i > start and {roles[i - 1], roles[i]} == {"user", "tool"}:
            return f"{name}[{i}] is a {roles[i]} turn after a {roles[i - 1]} turn; the assistant's must stand between"
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
