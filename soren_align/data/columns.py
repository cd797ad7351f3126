"""The formats of datasets, recognized by their columns, and their conversion to TRL's columns.

Pure functions of an example. Whatever the format of a dataset, all later code sees one of TRL's own kinds of columns:
conversations (COLUMNS), prompts and completions as turns, or plain texts, which no chat template changes.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from ..errors import UserError
from .turns import conversation_problem, from_sharegpt, list_problem, pair_problem, text_problem

Task = Literal["sft", "dpo"]
Example = dict[str, Any]
Reader = Callable[[Example], Example | str]
"""Returns an example in TRL's columns; or, as text, why it cannot be trained on."""

COLUMNS: dict[Task, tuple[str, ...]] = {"sft": ("messages",), "dpo": ("chosen", "rejected")}
"""TRL's columns of conversations. With `prompt` beside them TRL would take another path and fail (TRL 1.16, both paper
datasets)."""

_REQUIRED: dict[Task, str] = {
    "sft": "'messages': a list of {role, content} turns (or 'conversations' as of ShareGPT, 'prompt' and 'completion', "
    "'text')",
    "dpo": "'chosen' and 'rejected': two whole conversations, lists of {role, content} turns (or two answers beside "
    "their 'prompt')",
}
_NATIVE: dict[Task, tuple[str, set[str]]] = {  # the paper's datasets, recognized by their additional columns
    "sft": ("ultrachat_200k", {"prompt", "prompt_id"}),
    "dpo": ("ultrafeedback_binarized", {"prompt"}),
}


class Layout(NamedTuple):
    """The format of a dataset's examples, and their conversion."""

    description: str
    """As "ShareGPT conversations"."""
    inputs: tuple[str, ...]
    """The dataset's columns that are read."""
    outputs: tuple[str, ...]
    """TRL's columns."""
    read: Reader
    unused: tuple[str, ...] = ()
    """The dataset's other columns."""

    @property
    def has_turns(self) -> bool:
        """Whether the outputs are lists of turns, and not texts."""
        return self.read not in (_plain_text, _plain_completion, _plain_pair)


def recognize(example: Example, task: Task, place: str) -> Layout:
    """The layout of a dataset with such examples. Raises UserError, starting with `place`, if the task has none."""
    columns = list(example)
    layout = _layout(example, task)
    if layout is None:
        other: Task = "dpo" if task == "sft" else "sft"
        hint = f"; these columns are for {other}: `soren-align {other}`" if _layout(example, other) else ""
        raise UserError(f"{place}: found the columns {', '.join(columns)}; {task} needs {_REQUIRED[task]}{hint}")
    name, additional = _NATIVE[task]
    if layout.inputs == layout.outputs == COLUMNS[task] and additional <= set(columns):
        layout = layout._replace(description=f"{layout.description} (like {name})")
    return layout._replace(unused=tuple(c for c in columns if c not in layout.inputs))


def read_example(example: Example, layout: Layout) -> Example | str:
    """The example in TRL's columns; or, as text, why it cannot be trained on."""
    return layout.read(example)


def without_extra_keys(example: Example) -> Example:
    """A valid example whose turns have the keys role and content only."""
    return {column: _turns(value) if isinstance(value, list) else value for column, value in example.items()}


def _layout(example: Example, task: Task) -> Layout | None:
    """None where no format fits."""
    return _sft_layout(example) if task == "sft" else _dpo_layout(example)


def _sft_layout(example: Example) -> Layout | None:
    columns, chats = example.keys(), COLUMNS["sft"]
    if "messages" in columns:
        return Layout("chat messages", chats, chats, _messages)
    if "conversations" in columns:
        return Layout("ShareGPT conversations", ("conversations",), chats, _sharegpt)
    if {"prompt", "completion"} <= columns:
        both = ("prompt", "completion")
        if isinstance(example["prompt"], list) or isinstance(example["completion"], list):
            return Layout("prompts and completions as turns", both, both, _completion)
        return Layout("plain prompts and completions, without a template", both, both, _plain_completion)
    if "text" in columns:
        return Layout("plain text, without a template", ("text",), ("text",), _plain_text)
    return None


def _dpo_layout(example: Example) -> Layout | None:
    columns, pair = example.keys(), COLUMNS["dpo"]
    if not {"chosen", "rejected"} <= columns:
        return None
    if "conversations" in columns and _is_sharegpt(example["chosen"]):
        return Layout("ShareGPT preferences, joined to pairs", ("conversations", *pair), pair, _sharegpt_pair)
    if "prompt" in columns and isinstance(example["chosen"], str) and not isinstance(example["prompt"], list):
        plain = ("prompt", *pair)
        return Layout("plain prompts and pairs of answers, without a template", plain, plain, _plain_pair)
    if "prompt" in columns and (isinstance(example["chosen"], str) or _is_answer(example["chosen"])):
        description = "prompts and pairs of answers as turns, joined to pairs"
        return Layout(description, ("prompt", *pair), pair, _joined_pair)
    return Layout("preference pairs", pair, pair, _pair)


def _is_answer(turns: Any) -> bool:
    """Whether these turns continue a prompt: whole conversations start with the user, or a system turn."""
    return (
        isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and turns[0].get("role") == "assistant"
    )


def _is_sharegpt(turns: Any) -> bool:
    turn = turns[0] if isinstance(turns, list) and turns else turns
    return isinstance(turn, dict) and "from" in turn


def _turns(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def _chat(turns: Any, name: str) -> Example | str:
    return conversation_problem(turns, name) or {"messages": _turns(turns)}


def _messages(example: Example) -> Example | str:
    return _chat(example.get("messages"), "messages")


def _sharegpt(example: Example) -> Example | str:
    turns = from_sharegpt(example.get("conversations"), "conversations")
    return turns if isinstance(turns, str) else _chat(turns, "conversations")


def _completion(example: Example) -> Example | str:
    for column in ("prompt", "completion"):
        if problem := list_problem(example.get(column), column, "{role, content}"):
            return problem
    problem = conversation_problem(example["prompt"] + example["completion"], "prompt + completion")
    return problem or {column: _turns(example[column]) for column in ("prompt", "completion")}


def _plain(example: Example, *columns: str) -> Example | str:
    problems = (text_problem(example.get(column), column) for column in columns)
    return next((p for p in problems if p), None) or {column: example[column] for column in columns}


def _plain_text(example: Example) -> Example | str:
    return _plain(example, "text")


def _plain_completion(example: Example) -> Example | str:
    return _plain(example, "prompt", "completion")


def _plain_pair(example: Example) -> Example | str:
    pair = _plain(example, "prompt", "chosen", "rejected")
    return pair if isinstance(pair, str) else pair_problem(pair["chosen"], pair["rejected"]) or pair


def _conversation_pair(chosen: Any, rejected: Any, prefix: str = "") -> Example | str:
    for turns, name in ((chosen, f"{prefix}chosen"), (rejected, f"{prefix}rejected")):
        if problem := conversation_problem(turns, name):
            return problem
    return pair_problem(chosen, rejected) or {"chosen": _turns(chosen), "rejected": _turns(rejected)}


def _pair(example: Example) -> Example | str:
    return _conversation_pair(example.get("chosen"), example.get("rejected"))


def _joined_pair(example: Example) -> Example | str:
    prompt = example.get("prompt")
    turns: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answers: list[Any] = [
        [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        for answer in (example.get("chosen"), example.get("rejected"))
    ]
    for part, name in zip([turns, *answers], ("prompt", "chosen", "rejected"), strict=True):
        if problem := list_problem(part, name, "{role, content}"):
            return problem
    return _conversation_pair(turns + answers[0], turns + answers[1], "prompt + ")


def _sharegpt_pair(example: Example) -> Example | str:
    parts = []
    for column in ("conversations", "chosen", "rejected"):
        value = example.get(column)
        turns = from_sharegpt([value] if isinstance(value, dict) else value, column)
        if isinstance(turns, str):
            return turns
        parts.append(turns)
    return _conversation_pair(parts[0] + parts[1], parts[0] + parts[2], "conversations + ")
