"""Turns of conversations: read from their many formats, checked, and prepared for chat templates.
Pure functions.

A turn has OpenAI's format: role, content, and some have tool_calls, name and tool_call_id,
reasoning, or a weight. Arguments of calls and tools are JSON texts here, in which any schema fits
one Arrow column and every number is exact; `for_template` parses them, as chat templates expect
objects.
"""

import json
import re
from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..core.files import is_text
from ..tasks import OPTIONS, ROLE_ALIASES, TURN_KEY_ALIASES

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's reasoning. transformers gives a template whichever it reads."""
ROLES: dict[str, tuple[str, ...]] = {
    "system": (),
    "user": (),
    "assistant": ("tool_calls", *REASONING),
    "tool": ("name", "tool_call_id"),
}
"""The roles -> the keys of their turns beside role, content and weight."""
EMPTY_ANSWER = "an answer has only tool calls, which the chat template does not print"
"""The kind of `left_out` parts that leave nothing of a trained answer. Training on such an example
would teach silence. It is dropped, and not only its answer: what follows would be trained as an
answer without the call and its result."""
CUT_ANSWER = "the chat template leaves out a part of the last answer, such as its reasoning"
"""Another such kind: training would teach another answer than the data have."""
_KINDS = {str: "text", bool: "a boolean", int: "a number", float: "a number", dict: "an object"}
_KINDS |= {list: "a list", type(None): "null"}
_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
"""Starts a turn of hh-rlhf's plain dialogues."""
_RESERVED = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
Turn = dict[str, Any]


class InvalidExample(ValueError):
    """An example that cannot be trained on. The message is the reason."""


def check_conversation(turns: Any, name: str) -> None:
    """Raise InvalidExample if `turns` is no conversation that ends with the assistant's answer."""
    check_list(turns, name, "{role, content}")
    for i, turn in enumerate(turns):
        if problem := _turn_problem(turn):
            raise InvalidExample(f"{name}[{i}] {problem}")

    # The order of the roles: templates render others too, but as text that no model has seen.
    roles = [turn["role"] for turn in turns]
    start = 1 if roles[0] == "system" else 0
    if "assistant" not in roles:
        raise InvalidExample(f"{name} has no assistant turn to learn from")
    if roles[start] in ("assistant", "tool"):
        article = "an" if roles[start] == "assistant" else "a"
        raise InvalidExample(
            f"{name} starts with {article} {roles[start]} turn, not with a user or system turn"
        )
    for i, (before, role) in enumerate(zip(["", *roles], roles, strict=False)):
        if role == "system" and i > 0:
            raise InvalidExample(
                f"{name}[{i}] is a system turn, but only the first turn may be one"
            )
        if before == role != "tool":
            raise InvalidExample(
                f"{name}[{i - 1}] and {name}[{i}] are both {role} turns; user and assistant turns "
                "must alternate"
            )
        if {before, role} == {"user", "tool"}:
            raise InvalidExample(
                f"{name}[{i}] is a {role} turn after a {before} turn, without an assistant turn "
                "between them"
            )
    if roles[-1] != "assistant":
        raise InvalidExample(f"{name} ends with a {roles[-1]} turn, not with an assistant turn")
    check_weights(turns, name)

    # The tools' results: of calls with ids, each must answer one.
    ids: set[Any] = set()
    for i, turn in enumerate(turns):
        answered = turn.get("tool_call_id")
        if turn["role"] == "assistant":
            ids = {call.get("id") for call in turn.get("tool_calls", [])} - {None}
        elif turn["role"] == "tool" and ids and answered and answered not in ids:
            raise InvalidExample(
                f"{name}[{i}] has the tool_call_id {answered[:60]!r}, which the assistant turn "
                "before does not have"
            )


def _turn_problem(turn: Any) -> str | None:
    if not isinstance(turn, dict):
        return f"is {_kind(turn)}, not an object with role and content (or from and value)"
    role, content, weight = turn.get("role"), turn.get("content"), turn.get("weight", 0)
    calls = turn.get("tool_calls", [])
    if not isinstance(role, str) or role not in ROLES:
        finding = "has no role (or from)" if role is None else f"has the role {repr(role)[:60]}"
        return f"{finding}; write system, user, assistant or tool, or list this role in `roles`"
    # Unknown keys may change what is learned: ignoring them silently would be wrong.
    if unknown := [key for key in turn if key not in (*ROLES[role], "role", "content", "weight")]:
        return (
            f"has {', '.join(map(str, unknown))[:60]} beside role and content (role {role}); "
            "remove these keys"
        )
    texts = (*REASONING, "name", "tool_call_id")
    if other := next((key for key in texts if not isinstance(turn.get(key, ""), str)), None):
        return f"has a {other} that is not text"
    if weight not in (0, 1):
        return f"has the weight {repr(weight)[:60]}; write 0 (not trained) or 1"
    if weight == 1 and role != "assistant":
        return (
            f"has weight 1, or train: true, with the role {role}, but only assistant turns are "
            "trained"
        )
    if not isinstance(calls, list):
        return "has tool_calls that are not a list"
    if problem := next(filter(None, map(_call_problem, calls)), None):
        return problem
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict) and part.get("type") not in (None, "text"):
            kind = repr(part["type"])[:60]
            return f"has a part of type {kind} in its content, but only text is trained"
    if not isinstance(content, str):
        kind = _kind(content)
        return "has no content" if content is None else f"has {kind} as content; write text"
    if not content.strip() and role != "tool" and "tool_calls" not in turn:
        return f"has empty content (role {role})"
    if not is_text(content):
        return "has content with half of a surrogate pair, which is not valid text"
    if not is_text(json.dumps(without(turn, "content"), ensure_ascii=False)):
        return "has half of a surrogate pair, which is not valid text"
    return None


def _call_problem(call: Any) -> str | None:
    if not isinstance(call, dict):
        return "has a tool call that is no object with name and arguments"
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if not (isinstance(name, str) and name.strip()):
        return "has a tool call without a name"
    if not isinstance(arguments, str) or not isinstance(parsed(arguments), dict):
        return f"has a call of {name[:60]!r} whose arguments are no JSON object"
    return None


def check_weights(turns: list[Turn], name: str) -> None:
    """Raise InvalidExample if no turn is trained."""
    if not any(turn.get("weight", 1) for turn in turns if turn["role"] == "assistant"):
        raise InvalidExample(f"{name} has weight 0 for every assistant turn, so nothing is trained")


def check_list(turns: Any, name: str, keys: str) -> None:
    """Raise InvalidExample if `turns` is no list, whatever its elements.
    keys: of a turn, for the message.
    """
    if turns is None:
        raise InvalidExample(f"no '{name}'")
    if not isinstance(turns, list):
        raise InvalidExample(f"{name} is {_kind(turns)}, not a list of {keys} turns")
    if not turns:
        raise InvalidExample(f"{name} is an empty list")


def check_text(text: Any, name: str) -> None:
    """Raise InvalidExample if `text` cannot be trained on."""
    if text is None:
        raise InvalidExample(f"no '{name}'")
    if not isinstance(text, str):
        raise InvalidExample(f"{name} is {_kind(text)}, not text")
    if not text.strip():
        raise InvalidExample(f"{name} is empty")
    if not is_text(text):
        raise InvalidExample(f"{name} has half of a surrogate pair, which is not valid text")


def check_pair(chosen: Any, rejected: Any) -> None:
    """Raise InvalidExample if two valid conversations, or two texts after one prompt, are no
    preference pair.
    """
    if chosen == rejected:
        raise InvalidExample("chosen and rejected are equal")
    # DPO compares two answers to one prompt: TRL takes the shared beginning as the prompt, and
    # all that follows on each side would be scored as its answer.
    if isinstance(chosen, str) or chosen[:-1] == rejected[:-1]:
        return
    pairs = enumerate(zip(chosen, rejected, strict=False))
    first = next((i for i, (c, r) in pairs if c != r), None)
    where = f"they differ at turn [{first}]" if first is not None else "one of them has more turns"
    raise InvalidExample(
        f"chosen and rejected do not share a prompt: {where}, but only their last turns may differ"
    )


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def without_nulls(value: Any) -> Any:
    """A value whose objects, at any depth, have no null: Arrow gives each the keys of all others in
    its column, with null.
    """
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def with_known_keys(turns: Any, keys: Mapping[str, str], roles: Mapping[str, str]) -> Any:
    """A turn, or a list of turns, with OpenAI's keys, the names in ROLES and weights of 0 or 1; any
    other value unchanged.

    keys: the dataset's names of role, content and weight, if they are neither these nor ShareGPT's
    from and value.
    roles: the dataset's name of a role -> the role; beside ROLE_ALIASES.
    """
    if isinstance(turns, list):
        return [with_known_keys(turn, keys, roles) for turn in turns]
    if not isinstance(turns, dict):
        return turns
    # Names first: the dataset's keys and roles become OpenAI's. Values that are wrong are left for
    # `check_conversation`, whose messages then need one set of names.
    turn = dict(turns)
    for key, other in {**TURN_KEY_ALIASES, "weight": "weight", **keys}.items():
        if other in turn and turn.get(key) is None:
            turn[key] = turn.pop(other)
    role, content = turn.get("role"), _joined(turn.get("content"))
    if isinstance(role, str):
        role = roles.get(role) or ROLE_ALIASES.get(role.lower(), role)
        turn["role"] = role
    # Arrow fills the keys that other turns have with null.
    turn = {key: value for key, value in turn.items() if value is not None or key == "role"}
    turn["content"] = content

    # Tool calls: ShareGPT's function_call has them as text, OpenAI's first format as one object.
    if role == "tool_call":
        calls = parsed(content)
        turn |= {"role": "assistant", "content": ""}
        turn["tool_calls"] = calls if isinstance(calls, list) else [calls]
    elif "function_call" in turn and "tool_calls" not in turn:
        turn["tool_calls"] = [turn.pop("function_call")]
    calls = turn.get("tool_calls")
    if calls == []:
        del turn["tool_calls"]
    elif isinstance(calls, list):
        turn["tool_calls"] = [_call(call) for call in calls]
        turn["content"] = turn["content"] or ""

    # Weights: OpenAI's 0 or 1, or Axolotl's train: false or true.
    if isinstance(turn.get("train"), bool) and "weight" not in turn:
        turn["weight"] = turn.pop("train")
    weight: Any = turn.get("weight")
    if weight in (0, 1):
        turn["weight"] = int(weight)
    return turn


def _joined(content: Any) -> Any:
    """The text of a content in parts, as templates join them; any other content unchanged."""
    parts = content if isinstance(content, list) else []
    texts: list[Any] = [
        part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"
    ]
    are_texts = len(texts) == len(parts) > 0 and all(isinstance(text, str) for text in texts)
    return "".join(texts) if are_texts else content


def _call(call: Any) -> Any:
    """A call in OpenAI's format, {type, function: {name, arguments}}, with arguments as text."""
    if not isinstance(call, dict):
        return call
    function = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = function.get("arguments", function.get("parameters"))
    arguments = {} if arguments in (None, "") else parsed(arguments)
    # As text: objects of unlike keys do not fit one Arrow column, and numbers would lose their
    # form.
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    made = {"type": "function", "function": {"name": function.get("name"), "arguments": arguments}}
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made


def parsed(value: Any) -> Any:
    """The JSON in a text; any other value, or a text that is no JSON, unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def is_dialogue(text: Any) -> bool:
    """Whether a text is a dialogue as in hh-rlhf: "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    speakers = [match[1] for match in _SPEAKER.finditer(text)] if isinstance(text, str) else []
    return speakers[:2] == ["Human", "Assistant"]


def from_dialogue(text: Any, name: str) -> list[dict[str, str]]:
    """The turns of a dialogue's text. Raises InvalidExample if it is none."""
    check_text(text, name)
    before, *parts = _SPEAKER.split(text)
    if before or not parts:
        raise InvalidExample(f"{name} does not start with 'Human:'")
    speakers, contents = parts[::2], parts[1::2]
    return [
        {"role": ROLE_ALIASES.get(speaker.lower(), speaker.lower()), "content": content.strip()}
        for speaker, content in zip(speakers, contents, strict=True)
    ]


def options(example: Mapping[str, Any]) -> dict[str, str]:
    """The values of OPTIONS as JSON texts, tools in OpenAI's format.
    Raises InvalidExample if they are not valid.
    """
    texts = {}
    for column in OPTIONS:
        value = example.get(column)
        value = parsed(value) if isinstance(value, str) and value.strip() else value
        if value in (None, "", [], {}):
            continue
        if column == "tools":
            value = [_tool(tool) for tool in (value if isinstance(value, list) else [None])]
        elif not isinstance(value, dict):
            raise InvalidExample(f"{column} is no object of the template's variables")
        # They become keywords of apply_chat_template: a dataset could otherwise set `tokenize` or
        # `chat_template`.
        elif reserved := _RESERVED & value.keys():
            names = ", ".join(sorted(reserved))
            raise InvalidExample(
                f"{column} has {names}, which the template must not get from the data"
            )
        texts[column] = json.dumps(value, ensure_ascii=False)
    return texts


def _tool(tool: Any) -> Any:
    """A tool in OpenAI's format; LLaMA-Factory's is the function alone."""
    if isinstance(tool, dict) and "function" not in tool and "name" in tool:
        tool = {"type": "function", "function": tool}
    function = tool.get("function") if isinstance(tool, dict) else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise InvalidExample(
            "tools is no list of functions, each an object with name, description and parameters"
        )
    return tool


def plain_turns(turns: Iterable[Turn]) -> list[Turn]:
    """Valid turns without their null keys, role and content first."""
    return [
        {"role": turn["role"], "content": turn["content"]}
        | {key: value for key, value in sorted(turn.items()) if value is not None}
        for turn in turns
    ]


def for_template(turns: Iterable[Turn]) -> list[Turn]:
    """The turns as chat templates expect them: arguments as objects, and no weights."""
    ready = []
    for turn in turns:
        turn = without(turn, "weight")
        if turn.get("tool_calls"):
            turn["tool_calls"] = [
                call | {"function": function | {"arguments": json.loads(function["arguments"])}}
                for call in turn["tool_calls"]
                for function in (call["function"],)
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
