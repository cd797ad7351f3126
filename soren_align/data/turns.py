"""Turns of conversations: read from their many forms, checked, and rendered. Pure functions.

A turn has OpenAI's form: role, content, and some have tool_calls, name and tool_call_id, reasoning,
or a weight. Arguments of calls and tools are JSON texts here, in which any schema fits one Arrow
column and every number is exact; `for_template` parses them, as chat templates expect objects. A
problem is a message; None where there is none.
"""

import json
import re
from collections.abc import Mapping
from inspect import signature
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..core.files import is_text
from ..tasks import OPTIONS

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
}
ALIASES |= {"model": "assistant", "ai": "assistant", "developer": "system"}
ALIASES |= {"observation": "tool", "function": "tool", "ipython": "tool", "tool_response": "tool"}
ALIASES |= {"function_call": "tool_call"}
"""Other names of the roles; tool_call: the assistant's calls as text, see `with_known_keys`."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's reasoning. transformers gives a template whichever it reads."""
EMPTY_ANSWER = "all of an answer"
"""The kind of `left_out` parts that leave nothing of a trained answer."""
_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
"""Starts a turn of hh-rlhf's plain dialogues."""
_RESERVED = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
Turn = dict[str, Any]


def conversation_problem(turns: Any, name: str) -> str | None:
    """Why `turns` is no conversation that ends with the assistant's answer; None if it is one."""
    if problem := list_problem(turns, name, "{role, content}"):
        return problem
    for i, turn in enumerate(turns):
        if problem := _turn_problem(turn):
            return f"{name}[{i}] {problem}"
    roles = [turn["role"] for turn in turns]
    start = 1 if roles[0] == "system" else 0
    if "assistant" not in roles:
        return f"{name} has no assistant turn to learn from"
    if roles[start] != "user" and roles[start] != "system":
        role = {"assistant": "an assistant"}.get(roles[start], f"a {roles[start]}")
        return f"{name} starts with {role} turn, not with a user or system turn"
    for i in range(start, len(roles)):
        if roles[i] == "system":
            return f"{name}[{i}] is a system turn, but only the first turn may be one"
        if i > start and roles[i] == roles[i - 1] != "tool":
            return f"{name}[{i - 1}] and {name}[{i}] are both {roles[i]} turns; user and assistant turns must alternate"
        if i > start and {roles[i - 1], roles[i]} == {"user", "tool"}:
            return f"{name}[{i}] is a {roles[i]} turn after a {roles[i - 1]} turn, without an assistant turn between them"
    if roles[-1] != "assistant":
        return f"{name} ends with a {roles[-1]} turn, not with an assistant turn"
    if problem := weight_problem(turns, name):
        return problem
    ids: set[Any] = set()  # of the calls that a tool's turn may answer
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            ids = {call.get("id") for call in turn.get("tool_calls", [])} - {None}
        elif (
            turn["role"] == "tool"
            and ids
            and (answered := turn.get("tool_call_id"))
            and answered not in ids
        ):
            return f"{name}[{i}] has the tool_call_id {answered[:60]!r}, which the assistant turn before does not have"
    return None


def _turn_problem(turn: Any) -> str | None:
    if not isinstance(turn, dict):
        return f"is {_kind(turn)}, not an object with role and content (or from and value)"
    role, content = turn.get("role"), turn.get("content")
    if role not in ROLES:
        finding = "has no role (or from)" if role is None else f"has the role {repr(role)[:60]}"
        return f"{finding}; write system, user, assistant or tool, or list this role in `roles`"
    of_role = {"assistant": ("tool_calls", *REASONING), "tool": ("name", "tool_call_id")}
    known = (*of_role.get(role, ()), "role", "content", "weight")
    if others := [key for key in turn if key not in known]:
        # They may change what is learned: ignoring them silently would be wrong.
        return f"has {', '.join(map(str, others))[:60]} beside role and content (role {role}); remove these keys"
    texts = (*REASONING, "name", "tool_call_id")
    if other := next((key for key in texts if not isinstance(turn.get(key, ""), str)), None):
        return f"has a {other} that is not text"
    if (weight := turn.get("weight", 0)) not in (0, 1):
        return f"has the weight {repr(weight)[:60]}; write 0 (not trained) or 1"
    if weight == 1 and role != "assistant":
        return f"has weight 1, or train: true, with the role {role}, but only assistant turns are trained"
    calls = turn.get("tool_calls", [])
    if not isinstance(calls, list):
        return "has tool_calls that are not a list"
    for call in calls:
        if not isinstance(call, dict):
            return "has a tool call that is no object with name and arguments"
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not (isinstance(name, str) and name.strip()):
            return "has a tool call without a name"
        if not isinstance(arguments, str) or not isinstance(_parsed(arguments), dict):
            return f"has a call of {name[:60]!r} whose arguments are no JSON object"
    kinds = (
        [part.get("type") for part in content if isinstance(part, dict)]
        if isinstance(content, list)
        else []
    )
    if other := next((kind for kind in kinds if kind not in (None, "text")), None):
        return f"has a part of type {repr(other)[:60]} in its content, but only text is trained"
    if not isinstance(content, str):
        return (
            "has no content" if content is None else f"has {_kind(content)} as content; write text"
        )
    if not content.strip() and role != "tool" and "tool_calls" not in turn:
        return f"has empty content (role {role})"
    if not is_text(content):
        return "has content with half of a surrogate pair, which is not valid text"
    others = (value for key, value in turn.items() if key != "content")
    texts = (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in others
    )
    return (
        "has half of a surrogate pair, which is not valid text"
        if not all(map(is_text, texts))
        else None
    )


def weight_problem(turns: list[Turn], name: str) -> str | None:
    """Why no turn is trained; None if one is."""
    is_trained = (turn.get("weight", 1) for turn in turns if turn["role"] == "assistant")
    return (
        None
        if any(is_trained)
        else f"{name} has weight 0 for every assistant turn, so nothing is trained"
    )


def list_problem(turns: Any, name: str, keys: str) -> str | None:
    """Why `turns` is no list; None if it is one, whatever its elements.
    keys: of a turn, for the message.
    """
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
    return (
        None if is_text(text) else f"{name} has half of a surrogate pair, which is not valid text"
    )


def pair_problem(chosen: Any, rejected: Any) -> str | None:
    """Why two valid conversations, or two texts after one prompt, are no preference pair; None if
    they are one.
    """
    if chosen == rejected:
        return "chosen and rejected are equal"
    if isinstance(chosen, str) or chosen[:-1] == rejected[:-1]:
        return None
    first = next(
        (i for i, (c, r) in enumerate(zip(chosen, rejected, strict=False)) if c != r), None
    )
    where = f"they differ at turn [{first}]" if first is not None else "one of them has more turns"
    return (
        f"chosen and rejected do not share a prompt: {where}, but only their last turns may differ"
    )


def _kind(value: Any) -> str:
    names = {str: "text", bool: "a boolean", int: "a number", float: "a number", dict: "an object"}
    return {**names, list: "a list", type(None): "null"}.get(type(value), type(value).__name__)


def with_known_keys(turns: Any, keys: Mapping[str, str], roles: Mapping[str, str]) -> Any:
    """A turn, or a list of turns, with OpenAI's keys, the names in ROLES and weights of 0 or 1; any
    other value unchanged.

    keys: the dataset's names of role, content and weight, if they are neither these nor ShareGPT's
    from and value.
    roles: the dataset's name of a role -> the role; beside ALIASES.
    """
    if isinstance(turns, list):
        return [with_known_keys(turn, keys, roles) for turn in turns]
    if not isinstance(turns, dict):
        return turns
    turn = dict(turns)
    for key, other in {"role": "from", "content": "value", "weight": "weight", **keys}.items():
        if other in turn and turn.get(key) is None:
            turn[key] = turn.pop(other)
    content, role = turn.get("content"), turn.get("role")
    parts = content if isinstance(content, list) else []
    texts: list[Any] = [
        part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"
    ]
    if parts and len(texts) == len(parts) and all(isinstance(text, str) for text in texts):
        content = "".join(texts)  # as templates join them
    turn["content"] = content
    if isinstance(role, str):
        turn["role"] = roles.get(role) or ALIASES.get(role.lower(), role)
    turn = {
        key: value for key, value in turn.items() if value is not None or key in ("role", "content")
    }
    # ShareGPT's function_call: the assistant's, with the calls as text
    if turn.get("role") == "tool_call":
        calls = _parsed(content)
        turn = {
            **turn,
            "role": "assistant",
            "content": "",
            "tool_calls": calls if isinstance(calls, list) else [calls],
        }
    elif "function_call" in turn and "tool_calls" not in turn:
        turn["tool_calls"] = [turn.pop("function_call")]
    if turn.get("tool_calls") == []:
        del turn["tool_calls"]
    if isinstance(calls := turn.get("tool_calls"), list):
        turn["tool_calls"] = [_call(call) for call in calls]
        turn["content"] = turn.get("content") or ""
    if isinstance(turn.get("train"), bool) and "weight" not in turn:
        turn["weight"] = turn.pop("train")
    weight: Any = turn.get("weight")
    if weight in (0, 1):
        turn["weight"] = int(weight)
    return turn


def _call(call: Any) -> Any:
    """A call in OpenAI's form, {type, function: {name, arguments}}, with arguments as text."""
    if not isinstance(call, dict):
        return call
    function = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = function.get("arguments", function.get("parameters"))
    arguments = {} if arguments in (None, "") else _parsed(arguments)
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {
        **identity,
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _parsed(value: Any) -> Any:
    """The JSON in a text; any other value, or a text that is no JSON, unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def is_dialogue(text: Any) -> bool:
    """Whether a text is a dialogue as in hh-rlhf: "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    return isinstance(text, str) and [match[1] for match in _SPEAKER.finditer(text)][:2] == [
        "Human",
        "Assistant",
    ]


def from_dialogue(text: Any, name: str) -> list[dict[str, str]] | str:
    """The turns of a dialogue's text; or, as text, why it is none."""
    if problem := text_problem(text, name):
        return problem
    before, *parts = _SPEAKER.split(text)
    if before or not parts:
        return f"{name} does not start with 'Human:'"
    speakers, contents = parts[::2], parts[1::2]
    return [
        {"role": ALIASES.get(speaker.lower(), speaker.lower()), "content": content.strip()}
        for speaker, content in zip(speakers, contents, strict=True)
    ]


def options(example: Mapping[str, Any]) -> dict[str, str] | str:
    """The values of OPTIONS as JSON texts, tools in OpenAI's form; or, as text, why they are not
    valid.
    """
    texts = {}
    for column in OPTIONS:
        value = example.get(column)
        value = _parsed(value) if isinstance(value, str) and value.strip() else value
        if value in (None, "", [], {}):
            continue
        if column == "tools":
            # LLaMA-Factory's tool is the function alone.
            value = [
                {"type": "function", "function": tool}
                if isinstance(tool, dict) and "function" not in tool and "name" in tool
                else tool
                for tool in (value if isinstance(value, list) else [None])
            ]
            functions = [tool.get("function") if isinstance(tool, dict) else None for tool in value]
            if not all(isinstance(f, dict) and isinstance(f.get("name"), str) for f in functions):
                return "tools is no list of functions, each an object with name, description and parameters"
        elif not isinstance(value, dict):
            return f"{column} is no object of the template's variables"
        elif reserved := _RESERVED & value.keys():
            return f"{column} has {', '.join(sorted(reserved))}, which the template must not get from the data"
        texts[column] = json.dumps(value, ensure_ascii=False)
    return texts


def plain_turns(turns: list[Turn]) -> list[Turn]:
    """Valid turns without their null keys, role and content first."""
    first = ("role", "content")
    return [
        {key: turn[key] for key in first}
        | {k: v for k, v in sorted(turn.items()) if k not in first and v is not None}
        for turn in turns
    ]


def for_template(turns: list[Turn]) -> list[Turn]:
    """The turns as chat templates expect them: arguments as objects, and no weights."""
    ready = []
    for turn in turns:
        turn = without(turn, "weight")
        if calls := turn.get("tool_calls"):
            functions = [
                call["function"] | {"arguments": json.loads(call["function"]["arguments"])}
                for call in calls
            ]
            turn["tool_calls"] = [
                {**call, "function": f} for call, f in zip(calls, functions, strict=True)
            ]
        ready.append(turn)
    return ready


def template_options(example: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of apply_chat_template for an example in TRL's columns."""
    texts = {column: text for column in OPTIONS if (text := example.get(column))}
    variables = json.loads(texts.pop("chat_template_kwargs", "{}"))
    return variables | {column: json.loads(text) for column, text in texts.items()}


def without(turn: Turn, *keys: str) -> Turn:
    """The turn without some keys."""
    return {key: value for key, value in turn.items() if key not in keys}
