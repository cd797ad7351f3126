"""Tools, tool calls and weights of turns, in OpenAI's form: from other forms of them, their problems, their rendering.

Arguments and tools are JSON texts here, in which any schema fits one Arrow column and every number is exact.
`for_template` parses them: chat templates expect objects. Pure functions.
"""

import json
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..tasks import OPTIONS

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's reasoning. transformers gives a template whichever it reads."""
EMPTY_ANSWER = "all of an answer"
"""The kind of `left_out` parts that leave nothing of a trained answer."""
_RESERVED = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
Turn = dict[str, Any]


def with_calls(turn: Turn) -> Turn:
    """The turn with `tool_calls` in OpenAI's form and `weight` as 0 or 1; values in no known form are unchanged.

    turn: with our role and content. The role `tool_call` is ShareGPT's function_call: the assistant's, with the calls
    as text.
    """
    turn = {key: value for key, value in turn.items() if value is not None or key in ("role", "content")}
    if turn.get("role") == "tool_call":
        calls = _parsed(turn.get("content"))
        turn = {**turn, "role": "assistant", "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    elif "function_call" in turn and "tool_calls" not in turn:
        turn["tool_calls"] = [turn.pop("function_call")]
    if turn.get("tool_calls") == []:
        del turn["tool_calls"]
    if isinstance(calls := turn.get("tool_calls"), list):
        turn["tool_calls"] = [_call(call) for call in calls]
        turn["content"] = turn.get("content") or ""
    if isinstance(turn.get("train"), bool) and "weight" not in turn:
        turn["weight"] = turn.pop("train")
    if turn.get("weight") in (0, 1):
        turn["weight"] = int(turn["weight"])
    return turn


def call_problem(turn: Turn) -> str | None:
    """Why the keys of a turn beside role and content are not valid; None if they are."""
    role = turn["role"]
    of_role = {"assistant": ("tool_calls", *REASONING), "tool": ("name", "tool_call_id")}
    known = (*of_role.get(role, ()), "role", "content", "weight")
    if others := [key for key in turn if key not in known]:
        # They may change what is learned: ignoring them silently would be wrong.
        return f"has {', '.join(map(str, others))[:60]} beside role and content (role {role}); leave them out"
    if other := next(
        (key for key in (*REASONING, "name", "tool_call_id") if not isinstance(turn.get(key, ""), str)), None
    ):
        return f"has a {other} that is not text"
    if "weight" in turn and (problem := _weight_problem(turn["weight"], role)):
        return problem
    calls = turn.get("tool_calls", [])
    if not isinstance(calls, list):
        return "has tool_calls that are not a list"
    return next((problem for call in calls if (problem := _one_call_problem(call))), None)


def id_problem(turns: list[Turn], name: str) -> str | None:
    """Why a tool's turn answers no call of the turn before it; None if each does, or has no tool_call_id."""
    ids: set[Any] = set()
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            ids = {call.get("id") for call in turn.get("tool_calls", [])} - {None}
        elif turn["role"] == "tool" and ids and (answered := turn.get("tool_call_id")) and answered not in ids:
            return f"{name}[{i}] has the tool_call_id {answered[:60]!r}, which the assistant's turn before it lacks"
    return None


def options(example: Mapping[str, Any]) -> dict[str, str] | str:
    """The values of OPTIONS as JSON texts, tools in OpenAI's form; or, as text, why they are not valid."""
    texts = {}
    for column in OPTIONS:
        value = example.get(column)
        value = _parsed(value) if isinstance(value, str) and value.strip() else value
        if value in (None, "", [], {}):
            continue
        if column == "tools":
            value = [_tool(tool) for tool in value] if isinstance(value, list) else value
            if not (isinstance(value, list) and all(map(_is_tool, value))):
                return "tools is no list of functions, each an object with name, description and parameters"
        elif not isinstance(value, dict):
            return f"{column} is no object of the template's variables"
        elif reserved := _RESERVED & value.keys():
            return f"{column} has {', '.join(sorted(reserved))}, which is no variable of a template"
        texts[column] = json.dumps(value, ensure_ascii=False)
    return texts


def for_template(turns: list[Turn]) -> list[Turn]:
    """The turns as chat templates expect them: arguments as objects, and no weights."""
    return [_for_template(turn) if turn.keys() - {"role", "content"} else turn for turn in turns]


def template_options(example: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of apply_chat_template for an example in TRL's columns."""
    texts = {column: text for column in OPTIONS if (text := example.get(column))}
    variables = json.loads(texts.pop("chat_template_kwargs", "{}"))
    return variables | {column: json.loads(text) for column, text in texts.items()}


def left_out(turns: list[Turn], tools: list[Any], render: Callable[[list[Turn], list[Any]], str]) -> list[str]:
    """The kinds of an example's parts without which its rendering is the same: the chat template ignores them.

    render: of turns and tools.
    """
    last_user = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=0)
    parts: dict[str, tuple[range, Callable[[Turn], Turn]]] = {
        "tool calls": (range(len(turns)), lambda turn: _without(turn, "tool_calls")),
        "tool results": (range(len(turns)), lambda turn: turn | {"content": ""} if turn["role"] == "tool" else turn),
        "reasoning": (range(last_user, len(turns)), lambda turn: _without(turn, *REASONING)),
        "the reasoning of earlier answers": (range(last_user), lambda turn: _without(turn, *REASONING)),
    }
    text = render(turns, tools)
    kinds = ["tools"] if tools and _is_same(text, turns, [], render) else []
    for kind, (indices, without) in parts.items():
        others = [without(turn) if i in indices else turn for i, turn in enumerate(turns)]
        if others != turns and _is_same(text, others, tools, render):
            kinds.append(kind)
    return kinds


def prints_nothing(turns: list[Turn], kinds: list[str]) -> bool:
    """Whether one of these turns is an answer made of tool calls alone, or with reasoning, none of which is printed.

    kinds: of `left_out`, of the whole conversation.
    """
    prints_reasoning = not any("reasoning" in kind for kind in kinds)
    return "tool calls" in kinds and any(
        turn["role"] == "assistant"
        and not turn["content"].strip()
        and not (prints_reasoning and any(turn.get(key) for key in REASONING))
        for turn in turns
    )


def _is_same(text: str, turns: list[Turn], tools: list[Any], render: Callable[[list[Turn], list[Any]], str]) -> bool:
    try:
        return render(turns, tools) == text
    except Exception:  # a template may need the part
        return False


def _without(turn: Turn, *keys: str) -> Turn:
    return {key: value for key, value in turn.items() if key not in keys}


def _for_template(turn: Turn) -> Turn:
    turn = _without(turn, "weight")
    if calls := turn.get("tool_calls"):
        functions = [{**call["function"], "arguments": json.loads(call["function"]["arguments"])} for call in calls]
        turn["tool_calls"] = [{**call, "function": f} for call, f in zip(calls, functions, strict=True)]
    return turn


def _parsed(value: Any) -> Any:
    """The JSON in a text; any other value, or a text that is no JSON, unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


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
    return {**identity, "type": "function", "function": {"name": function.get("name"), "arguments": arguments}}


def _one_call_problem(call: Any) -> str | None:
    if not isinstance(call, dict):
        return "has a tool call that is no object with name and arguments"
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if not (isinstance(name, str) and name.strip()):
        return "has a tool call without a name"
    if not isinstance(arguments, str) or not isinstance(_parsed(arguments), dict):
        return f"has a call of {name[:60]!r} whose arguments are no JSON object"
    return None


def _weight_problem(weight: Any, role: str) -> str | None:
    if weight not in (0, 1):
        return f"has the weight {repr(weight)[:60]}; write 0 (not trained) or 1"
    if weight == 1 and role != "assistant":
        return f"has weight 1, or train: true, with the role {role}; only the assistant's turns may"
    return None


def _tool(tool: Any) -> Any:
    """A tool in OpenAI's form, {type, function}; LLaMA-Factory's is the function alone."""
    if isinstance(tool, dict) and "function" not in tool and "name" in tool:
        return {"type": "function", "function": tool}
    return tool


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
