"""The formats of datasets, recognized by their columns, and their conversion to TRL's columns.

Pure functions of an example. Whatever the format of a dataset, all later code sees one of TRL's own kinds of columns:
conversations (COLUMNS), prompts and completions as turns, or plain texts, which no chat template changes.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

from ..errors import UserError
from ..recipe import REQUIRED_COLUMNS, Column, columns_text, example_of_names
from . import readers
from .own_names import Names
from .readers import Example
from .tool_calls import OPTIONS, options
from .turns import is_dialogue

Task = Literal["sft", "dpo"]
Reader = Callable[[Example], Example | str]
"""Returns an example in TRL's columns; or, as text, why it cannot be trained on."""

COLUMNS: dict[Task, tuple[str, ...]] = {"sft": ("messages",), "dpo": ("chosen", "rejected")}
"""TRL's columns of conversations. With `prompt` beside them TRL would take another path and fail (TRL 1.16, both paper
datasets)."""

ALPACA = ("system", "instruction", "input", "output")
"""Alpaca's columns, and LLaMA-Factory's `system` beside them."""
_NATIVE: dict[Task, tuple[str, set[str]]] = {  # the paper's datasets, recognized by their additional columns
    "sft": ("ultrachat_200k", {"prompt", "prompt_id"}),
    "dpo": ("ultrafeedback_binarized", {"prompt"}),
}


class Layout(NamedTuple):
    """The format of a dataset's examples, and their conversion."""

    description: str
    """As "ShareGPT conversations"."""
    inputs: tuple[str, ...]
    """The columns that are read, by our names."""
    outputs: tuple[str, ...]
    """TRL's columns."""
    read: Reader
    unused: tuple[str, ...] = ()
    """The dataset's other columns."""
    names: Names = Names()
    mask_history: bool = False
    """Whether only the last answer is trained."""

    @property
    def columns_read(self) -> list[str]:
        """The columns that are read, by the dataset's names."""
        return [self.names.columns.get(column, column) for column in self.inputs]

    @property
    def has_turns(self) -> bool:
        """Whether the outputs are lists of turns, and not texts."""
        return self.read not in (readers.plain_text, readers.plain_completion, readers.plain_pair)

    @property
    def is_renamed(self) -> bool:
        """Whether the outputs are other columns than the dataset's."""
        return self.columns_read != list(self.outputs)


def recognize(example: Example, task: Task, place: str, names: Names = Names()) -> Layout:  # noqa: B008 (immutable)
    """The layout of a dataset with such examples. Raises UserError, starting with `place`, if the task has none."""
    known = names.known(example)
    layout = _layout(known, task)
    if layout is None:
        raise UserError(f"{place}: {_missing_columns(example, task, names)}")
    name, additional = _NATIVE[task]
    if layout.inputs == layout.outputs == COLUMNS[task] and additional <= known.keys():
        layout = layout._replace(description=f"{layout.description} (like {name})")
    if "system" in names.columns and layout.outputs == COLUMNS["sft"]:
        layout = layout._replace(inputs=(*layout.inputs, "system"))
    if layout.has_turns:
        beside = tuple(column for column in OPTIONS if column in known)
        layout = layout._replace(inputs=layout.inputs + beside, outputs=layout.outputs + beside)
    layout = layout._replace(names=names)
    return layout._replace(unused=tuple(c for c in example if c not in layout.columns_read))


def _missing_columns(example: Example, task: Task, names: Names) -> str:
    """The columns that were found and the needed ones, with a proposal for `columns` where there is one."""
    known = names.known(example)
    other: Task = "dpo" if task == "sft" else "sft"
    hint = f"; these columns are for {other}: `soren-align {other}`" if _layout(known, other) else ""
    hint = hint or example_of_names(known, task)
    text = f"found the columns {', '.join(known)}"
    if names.columns:
        unread = [column for column in example if column not in names.columns.values()]
        texts = f" ({', '.join(unread)})" * bool(unread)
        text = f"`columns` names {', '.join(known)}, and no others are then read{texts}"
        complete: dict[str, str] = {**names.columns} | {each: each for each in unread if each in get_args(Column)}
        if _layout({ours: example.get(theirs) for ours, theirs in complete.items()}, task):
            hint = f". Write {columns_text(complete)}"
    return f"{text}; {task} needs {REQUIRED_COLUMNS[task]}{hint}"


def read_example(example: Example, layout: Layout) -> Example | str:
    """The example in TRL's columns; or, as text, why it cannot be trained on."""
    known = layout.names.known(example)
    if "system" in layout.inputs and layout.outputs[:1] == COLUMNS["sft"]:
        known = readers.with_system(known, layout.inputs[0])
    result = layout.read(known)
    if layout.mask_history and isinstance(result, dict) and "messages" in result:
        result = {**result, "messages": readers.last_alone(result["messages"])}
    beside = [column for column in OPTIONS if column in layout.outputs]
    unread = [column for column in OPTIONS if known.get(column) and column not in beside]
    if unread and layout.has_turns:
        return f"has {unread[0]}, which none of the first examples has; put an example that has it first"
    if isinstance(result, str) or not beside:
        return result
    texts = options({column: known.get(column) for column in beside})
    return texts if isinstance(texts, str) else result | dict.fromkeys(beside) | texts


def without_null_keys(example: Example) -> Example:
    """A valid example whose turns have no keys that are null, in the order of a Reader's."""
    return {
        column: readers.plain_turns(value) if isinstance(value, list) else value for column, value in example.items()
    }


def _layout(example: Example, task: Task) -> Layout | None:
    """None where no format fits."""
    return _sft_layout(example) if task == "sft" else _dpo_layout(example)


def _sft_layout(example: Example) -> Layout | None:
    columns, chats = example.keys(), COLUMNS["sft"]
    both = ("prompt", "completion")
    if "messages" in columns:
        return Layout("chat messages", chats, chats, readers.messages)
    if "conversations" in columns:
        return Layout("ShareGPT conversations", ("conversations",), chats, readers.sharegpt)
    if columns >= {*both}:
        if isinstance(example["prompt"], list) or isinstance(example["completion"], list):
            return Layout("prompts and completions as turns", both, both, readers.completion)
        return Layout("plain prompts and completions, without a template", both, both, readers.plain_completion)
    if {"instruction", "output"} <= columns:
        inputs = tuple(column for column in ALPACA if column in columns)
        return Layout("Alpaca instructions and outputs, as turns", inputs, both, readers.alpaca)
    if "text" in columns and is_dialogue(example["text"]):
        return Layout("dialogues as text, split into turns", ("text",), chats, readers.dialogue)
    if "text" in columns:
        return Layout("plain text, without a template", ("text",), ("text",), readers.plain_text)
    return None


def _dpo_layout(example: Example) -> Layout | None:
    columns, pair = example.keys(), COLUMNS["dpo"]
    if not {"chosen", "rejected"} <= columns:
        return None
    chosen = example["chosen"]
    if "conversations" in columns and _is_answer(chosen):
        return Layout("ShareGPT preferences, joined to pairs", ("conversations", *pair), pair, readers.sharegpt_pair)
    if is_dialogue(chosen):
        return Layout("pairs of dialogues as text, split into turns", pair, pair, readers.dialogue_pair)
    if "prompt" in columns and isinstance(chosen, str) and not isinstance(example["prompt"], list):
        plain = ("prompt", *pair)
        return Layout("plain prompts and pairs of answers, without a template", plain, plain, readers.plain_pair)
    is_answer = isinstance(chosen, str) or _is_answer(chosen)
    if "prompt" in columns and is_answer:
        description = "prompts and pairs of answers as turns, joined to pairs"
        return Layout(description, ("prompt", *pair), pair, readers.joined_pair)
    if "instruction" in columns and is_answer:
        inputs = tuple(column for column in ALPACA if column in columns and column != "output")
        return Layout("Alpaca instructions and pairs of answers, as turns", (*inputs, *pair), pair, readers.alpaca_pair)
    return Layout("preference pairs", pair, pair, readers.pair)


def _is_answer(turns: Any) -> bool:
    """Whether these turns continue a prompt: whole conversations start with the user, or a system turn."""
    turn = turns[0] if isinstance(turns, list) and turns else turns
    return isinstance(turn, dict) and turn.get("role") == "assistant"
