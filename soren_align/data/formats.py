"""The formats of datasets, recognized by their columns, and their conversion to TRL's columns.

Pure functions of an example. Whatever the format of a dataset, all later code sees one of TRL's own
kinds of columns: conversations (a task's `columns`), prompts and completions as turns, or plain
texts, which no chat template changes. A new format is a line of `_format`, the function that reads
it, and its columns in tasks.py.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

from ..core.errors import UserError
from ..recipe import columns_text, example_of_names
from ..tasks import OPTIONS, TASKS, TURN_KEYS, Column, TaskName
from .turns import (
    Turn,
    conversation_problem,
    from_dialogue,
    is_dialogue,
    list_problem,
    options,
    pair_problem,
    plain_turns,
    text_problem,
    weight_problem,
    with_known_keys,
)

Example = dict[str, Any]
Reader = Callable[[Example, tuple[str, ...]], Example | str]
"""Takes an example, by our names, and the columns to read; returns it in TRL's columns; or, as
text, why it cannot be trained on."""
_ALPACA = ("system", "instruction", "input", "output")
"""Alpaca's columns, and LLaMA-Factory's `system` beside them."""
PLAIN_PAIRS = "plain prompts and pairs of answers, as turns"
# the paper's datasets, recognized by their additional columns
_NATIVE: dict[str, tuple[str, set[str]]] = {
    "sft": ("ultrachat_200k", {"prompt", "prompt_id"}),
    "dpo": ("ultrafeedback_binarized", {"prompt"}),
}


class ColumnMapping(NamedTuple):
    """A dataset's own names of columns, of the keys of turns, and of roles."""

    columns: Mapping[str, str] = {}
    """Our column -> the dataset's, whose other columns are then not read."""
    keys: Mapping[str, str] = {}
    """role, content and weight -> the dataset's keys of a turn."""
    roles: Mapping[str, str] = {}
    """The dataset's role -> ours."""

    @classmethod
    def of(cls, columns: Mapping[Any, str], roles: Mapping[str, str]) -> "ColumnMapping":
        """From a recipe's `columns`, which include the keys of turns, and its `roles`."""
        keys = {key: name for key, name in columns.items() if key in TURN_KEYS}
        return cls({key: name for key, name in columns.items() if key not in keys}, keys, roles)

    def known(self, example: Example) -> Example:
        """The example with our names, for a Reader. Values that are no turns are unchanged."""
        if self.columns:
            example = {ours: example.get(theirs) for ours, theirs in self.columns.items()}
        return {
            column: with_known_keys(value, self.keys, self.roles)
            if isinstance(value, list | dict) and column not in OPTIONS
            else value
            for column, value in example.items()
        }


class Format(NamedTuple):
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
    mapping: ColumnMapping = ColumnMapping()
    mask_history: bool = False
    """Whether only the last answer is trained."""

    @property
    def columns_read(self) -> list[str]:
        """The columns that are read, by the dataset's names."""
        return [self.mapping.columns.get(column, column) for column in self.inputs]

    @property
    def has_turns(self) -> bool:
        """Whether the outputs are lists of turns, and not texts."""
        return self.read is not _texts


def recognize(
    example: Example,
    task: TaskName,
    place: str,
    mapping: ColumnMapping = ColumnMapping(),
    apply_chat_template: bool = True,
) -> Format:
    """The format of a dataset with such examples.
    Raises UserError, starting with `place`, if the task has none.

    apply_chat_template: to prompts and pairs of answers that are texts, which become turns.
    """
    known = mapping.known(example)
    form = _format(known, task, apply_chat_template)
    if form is None:
        # The columns that there are and the needed ones, with a proposal for `columns` where there
        # is one.
        other = next(
            (name for name in TASKS if TASKS[name].data == name != task and _format(known, name)),
            None,
        )
        hint = (
            f"; for these columns run `soren-align {other}`"
            if other
            else example_of_names(known, task)
        )
        text = f"has the columns {', '.join(known)}"
        if mapping.columns:
            unread = [column for column in example if column not in mapping.columns.values()]
            texts = f" ({', '.join(unread)})" * bool(unread)
            text = f"`columns` lists {', '.join(known)}, so that no other columns{texts} are read"
            complete: dict[str, str] = {**mapping.columns}
            complete |= {column: column for column in unread if column in get_args(Column)}
            if _format({ours: example.get(theirs) for ours, theirs in complete.items()}, task):
                hint = f". Write {columns_text(complete)}"
        raise UserError(f"{place}: {text}, but {task} needs {TASKS[task].required_columns}{hint}")
    name, additional = _NATIVE.get(task, ("", set()))
    if name and form.inputs == form.outputs == TASKS[task].columns and additional <= known.keys():
        form = form._replace(description=f"{form.description} (like {name})")
    if "system" in mapping.columns and form.outputs == ("messages",):
        form = form._replace(inputs=(*form.inputs, "system"))
    if form.has_turns:
        beside = tuple(column for column in OPTIONS if column in known)
        form = form._replace(inputs=form.inputs + beside, outputs=form.outputs + beside)
    form = form._replace(mapping=mapping)
    return form._replace(
        unused=tuple(column for column in example if column not in form.columns_read)
    )


def _format(example: Example, task: str, apply_chat_template: bool = True) -> Format | None:
    """The format by an example's columns, by our names; None where none fits."""
    columns, native = example.keys(), TASKS[task].columns
    if TASKS[task].answers:
        if not {*native} <= columns:
            return None
        chosen = example["chosen"]
        turn = chosen[0] if isinstance(chosen, list) and chosen else chosen
        # A whole conversation starts with the user, or a system turn; an answer continues a prompt.
        is_turn = isinstance(turn, dict) and turn.get("role") == "assistant"
        is_answer = isinstance(chosen, str) or is_turn
        if "conversations" in columns and is_turn:
            inputs = ("conversations", *native)
            return Format("ShareGPT preferences, joined to pairs", inputs, native, _joined_pair)
        if is_dialogue(chosen):
            return Format(
                "pairs of dialogues as text, split into turns", native, native, _dialogues
            )
        inputs = ("prompt", *native)
        if (
            "prompt" in columns
            and isinstance(chosen, str)
            and not isinstance(example["prompt"], list)
        ):
            if apply_chat_template:
                return Format(PLAIN_PAIRS, inputs, native, _joined_pair)
            return Format(
                "plain prompts and pairs of answers, without a template", inputs, inputs, _texts
            )
        if "prompt" in columns and is_answer:
            return Format(
                "prompts and pairs of answers as turns, joined to pairs",
                inputs,
                native,
                _joined_pair,
            )
        if "instruction" in columns and is_answer:
            inputs = (
                *(column for column in _ALPACA if column in columns and column != "output"),
                *native,
            )
            return Format(
                "Alpaca instructions and pairs of answers, as turns", inputs, native, _joined_pair
            )
        return Format("preference pairs", native, native, _pair)
    both = ("prompt", "completion")
    if "messages" in columns:
        return Format("chat messages", native, native, _conversation)
    if "conversations" in columns:
        return Format("ShareGPT conversations", ("conversations",), native, _conversation)
    if columns >= {*both}:
        if isinstance(example["prompt"], list) or isinstance(example["completion"], list):
            return Format("prompts and completions as turns", both, both, _completion)
        return Format("plain prompts and completions, without a template", both, both, _texts)
    if {"instruction", "output"} <= columns:
        inputs = tuple(column for column in _ALPACA if column in columns)
        return Format("Alpaca instructions and outputs, as turns", inputs, both, _alpaca)
    if "text" in columns and is_dialogue(example["text"]):
        return Format("dialogues as text, split into turns", ("text",), native, _dialogues)
    return (
        Format("plain text, without a template", ("text",), ("text",), _texts)
        if "text" in columns
        else None
    )


def read_example(example: Example, form: Format) -> Example | str:
    """The example in TRL's columns; or, as text, why it cannot be trained on."""
    known = form.mapping.known(example)
    if "system" in form.inputs and form.outputs[:1] == ("messages",):
        column, system = form.inputs[0], known.get("system")
        if isinstance(known.get(column), list) and isinstance(system, str) and system:
            known = {**known, column: [{"role": "system", "content": system}, *known[column]]}
    result = form.read(known, form.inputs)
    if form.mask_history and isinstance(result, dict) and "messages" in result:
        *earlier, last = result["messages"]
        earlier = [
            {**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in earlier
        ]
        result = {**result, "messages": [*earlier, last]}
    beside = [column for column in OPTIONS if column in form.outputs]
    unread = [column for column in OPTIONS if known.get(column) and column not in beside]
    if unread and form.has_turns:
        return (
            f"has the key {unread[0]}, which none of the first examples has; move this example to the beginning of the"
            " data"
        )
    if isinstance(result, str) or not beside:
        return result
    texts = options({column: known.get(column) for column in beside})
    return texts if isinstance(texts, str) else result | dict.fromkeys(beside) | texts


def _conversation(example: Example, inputs: tuple[str, ...]) -> Example | str:
    """A conversation."""
    turns: Any = example.get(inputs[0])
    return conversation_problem(turns, inputs[0]) or {"messages": plain_turns(turns)}


def _dialogues(example: Example, inputs: tuple[str, ...]) -> Example | str:
    """A dialogue as text, or two: a pair."""
    names = ("chosen", "rejected") if "chosen" in inputs else inputs[:1]
    turns = {name: from_dialogue(example.get(name), name) for name in names}
    problem = next((value for value in turns.values() if isinstance(value, str)), None)
    return problem or (_pair(turns) if "chosen" in inputs else _conversation(turns, inputs))


def _texts(example: Example, inputs: tuple[str, ...]) -> Example | str:
    """A text, a prompt and its completion, or a prompt and two answers, without a template."""
    if problem := next(
        (problem for name in inputs if (problem := text_problem(example.get(name), name))), None
    ):
        return problem
    is_pair = "chosen" in inputs
    problem = pair_problem(example["chosen"], example["rejected"]) if is_pair else None
    return problem or {name: example[name] for name in inputs}


def _completion(example: Example, inputs: tuple[str, ...]) -> Example | str:
    """A prompt and its completion, as turns."""
    for name in inputs[:2]:
        if problem := list_problem(example.get(name), name, "{role, content}"):
            return problem
    problem = conversation_problem(example["prompt"] + example["completion"], "prompt + completion")
    problem = problem or weight_problem(example["completion"], "completion")
    return problem or {name: plain_turns(example[name]) for name in inputs[:2]}


def _instruction(example: Example) -> list[Turn] | str:
    """The turns of an Alpaca prompt; or, as text, why they are not valid."""
    texts = {column: example.get(column) or "" for column in ("system", "instruction", "input")}
    for column, text in texts.items():
        problem = text_problem(text, column)
        if problem and (column == "instruction" or text):
            return problem
    # As LLaMA-Factory joins them, which trains Alpaca's files with chat templates.
    request = "\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    return [*system, {"role": "user", "content": request}]


def _alpaca(example: Example, _: tuple[str, ...]) -> Example | str:
    """Alpaca's instruction, input and output."""
    prompt, output = _instruction(example), example.get("output")
    if isinstance(prompt, str):
        return prompt
    answer = [{"role": "assistant", "content": output}]
    return text_problem(output, "output") or {"prompt": prompt, "completion": answer}


def _pair(example: Example, _: tuple[str, ...] = (), prefix: str = "") -> Example | str:
    """Two whole conversations. prefix: of their names, for messages."""
    chosen: Any = example.get("chosen")
    rejected: Any = example.get("rejected")
    for turns, name in ((chosen, f"{prefix}chosen"), (rejected, f"{prefix}rejected")):
        if problem := conversation_problem(turns, name):
            return problem
        weighted = next((i for i, turn in enumerate(turns) if "weight" in turn), None)
        if weighted is not None:
            return (
                f"{name}[{weighted}] has a weight, but only the last turns of a preference pair are trained; remove "
                "this key"
            )
    return pair_problem(chosen, rejected) or {
        "chosen": plain_turns(chosen),
        "rejected": plain_turns(rejected),
    }


def _joined_pair(example: Example, inputs: tuple[str, ...]) -> Example | str:
    """A prompt and two answers: ShareGPT's conversation and two turns, Alpaca's, or turns or
    texts.
    """
    is_sharegpt = "conversations" in inputs
    name, keys = (
        ("conversations", "{from, value}") if is_sharegpt else ("prompt", "{role, content}")
    )
    prompt = _instruction(example) if "instruction" in inputs else example.get(name)
    if "instruction" in inputs and isinstance(prompt, str):
        return prompt
    parts: dict[str, Any] = {
        name: prompt,
        "chosen": example.get("chosen"),
        "rejected": example.get("rejected"),
    }
    for part, value in parts.items():
        if isinstance(value, str) and not is_sharegpt:
            parts[part] = [{"role": "user" if part == name else "assistant", "content": value}]
        elif isinstance(value, dict) and is_sharegpt:
            parts[part] = [value]
        if problem := list_problem(parts[part], part, keys):
            return problem
    pair = {answer: parts[name] + parts[answer] for answer in ("chosen", "rejected")}
    return _pair(pair, prefix=f"{name} + ")
