"""The formats of datasets, recognized by their columns, and their conversion to TRL's columns.

Pure functions of an example. Whatever the format of a dataset, all later code sees one of TRL's own kinds of columns:
conversations (a task's `columns`), prompts and completions as turns, or plain texts, which no chat template changes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

from ..core.errors import UserError, did_you_mean
from ..recipe import columns_text, example_of_names
from ..tasks import OPTIONS, TASKS, Column, TaskName
from .tool_calls import options
from .turns import (
    conversation_problem,
    from_dialogue,
    is_dialogue,
    list_problem,
    pair_problem,
    text_problem,
    weight_problem,
    with_known_keys,
)

# ---
# A dataset's own names of columns, keys and roles, replaced by ours.


class Names(NamedTuple):
    """A dataset's own names of columns, of the keys of turns, and of roles."""

    columns: Mapping[str, str] = {}
    """Our column -> the dataset's, whose other columns are then not read."""
    keys: Mapping[str, str] = {}
    """role, content and weight -> the dataset's keys of a turn."""
    roles: Mapping[str, str] = {}
    """The dataset's role -> ours."""

    @classmethod
    def of(cls, columns: Mapping[Any, str], roles: Mapping[str, str]) -> "Names":
        """From a recipe's `columns`, which include the keys of turns, and its `roles`."""
        keys = {key: name for key, name in columns.items() if key in ("role", "content", "weight")}
        return cls({key: name for key, name in columns.items() if key not in keys}, keys, roles)

    def known(self, example: dict[str, Any]) -> dict[str, Any]:
        """The example with our names, for a Reader. Values that are no turns are unchanged."""
        if self.columns:
            example = {ours: example.get(theirs) for ours, theirs in self.columns.items()}
        return {
            column: with_known_keys(value, self.keys, self.roles)
            if isinstance(value, list | dict) and column not in OPTIONS
            else value
            for column, value in example.items()
        }

    def refuse_missing(self, columns: Mapping[str, Any], place: str) -> None:
        """Raise UserError if the dataset has none of a name's column. columns: the dataset's."""
        for ours, theirs in self.columns.items():
            if theirs not in columns:
                hint = did_you_mean(theirs, columns)
                raise UserError(
                    f"{place}: columns.{ours} is '{theirs}', and the columns are {', '.join(columns)}{hint}"
                )


# ---
# Examples of each format in TRL's columns; or, as text, why they cannot be trained on. Pure functions.

Example = dict[str, Any]


def with_system(example: Example, column: str) -> Example:
    """The example with the text of its column `system` as the first turn of another column."""
    turns, text = example.get(column), example.get("system")
    if not (isinstance(turns, list) and isinstance(text, str) and text):
        return example
    return {**example, column: [{"role": "system", "content": text}, *turns]}


def last_alone(turns: list[Example]) -> list[Example]:
    """The turns with weight 0 for every assistant's turn but the last."""
    earlier = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in turns[:-1]]
    return [*earlier, turns[-1]]


def plain_turns(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Valid turns without their null keys, role and content first."""
    first = ("role", "content")
    others = [{key: value for key, value in turn.items() if key not in first and value is not None} for turn in turns]
    return [
        {key: turn[key] for key in first} | dict(sorted(other.items()))
        for turn, other in zip(turns, others, strict=True)
    ]


def _chat(turns: Any, name: str) -> Example | str:
    return conversation_problem(turns, name) or {"messages": plain_turns(turns)}


def messages(example: Example) -> Example | str:
    """A conversation under `messages`."""
    return _chat(example.get("messages"), "messages")


def sharegpt(example: Example) -> Example | str:
    """ShareGPT's conversation."""
    return _chat(example.get("conversations"), "conversations")


def dialogue(example: Example) -> Example | str:
    """A dialogue as text."""
    turns = from_dialogue(example.get("text"), "text")
    return turns if isinstance(turns, str) else _chat(turns, "text")


def _instructed(example: Example) -> list[dict[str, str]] | str:
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


def alpaca(example: Example) -> Example | str:
    """Alpaca's instruction, input and output."""
    prompt = _instructed(example)
    if isinstance(prompt, str):
        return prompt
    output = example.get("output")
    return text_problem(output, "output") or {
        "prompt": prompt,
        "completion": [{"role": "assistant", "content": output}],
    }


def alpaca_pair(example: Example) -> Example | str:
    """Alpaca's instruction and input with two answers."""
    prompt = _instructed(example)
    return prompt if isinstance(prompt, str) else joined_pair({**example, "prompt": prompt})


def completion(example: Example) -> Example | str:
    """A prompt and its completion, as turns."""
    for column in ("prompt", "completion"):
        if problem := list_problem(example.get(column), column, "{role, content}"):
            return problem
    problem = conversation_problem(example["prompt"] + example["completion"], "prompt + completion")
    problem = problem or weight_problem(example["completion"], "completion")
    return problem or {column: plain_turns(example[column]) for column in ("prompt", "completion")}


def _plain(example: Example, *columns: str) -> Example | str:
    problems = (text_problem(example.get(column), column) for column in columns)
    return next((p for p in problems if p), None) or {column: example[column] for column in columns}


def plain_text(example: Example) -> Example | str:
    """A text."""
    return _plain(example, "text")


def plain_completion(example: Example) -> Example | str:
    """A prompt and its completion, as texts."""
    return _plain(example, "prompt", "completion")


def plain_pair(example: Example) -> Example | str:
    """A prompt and two answers, as texts."""
    pair = _plain(example, "prompt", "chosen", "rejected")
    return pair if isinstance(pair, str) else pair_problem(pair["chosen"], pair["rejected"]) or pair


def _conversation_pair(chosen: Any, rejected: Any, prefix: str = "") -> Example | str:
    for turns, name in ((chosen, f"{prefix}chosen"), (rejected, f"{prefix}rejected")):
        if problem := conversation_problem(turns, name):
            return problem
        if weighted := next((i for i, turn in enumerate(turns) if "weight" in turn), None):
            return f"{name}[{weighted}] has a weight; of a pair the last turns are trained, and no others: leave it out"
    return pair_problem(chosen, rejected) or {"chosen": plain_turns(chosen), "rejected": plain_turns(rejected)}


def pair(example: Example) -> Example | str:
    """Two whole conversations."""
    return _conversation_pair(example.get("chosen"), example.get("rejected"))


def joined_pair(example: Example) -> Example | str:
    """A prompt and two answers, as turns or texts."""
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


def dialogue_pair(example: Example) -> Example | str:
    """Two dialogues as text."""
    chosen, rejected = (from_dialogue(example.get(column), column) for column in ("chosen", "rejected"))
    if problem := next((part for part in (chosen, rejected) if isinstance(part, str)), None):
        return problem
    return _conversation_pair(chosen, rejected)


def sharegpt_pair(example: Example) -> Example | str:
    """ShareGPT's conversation with two last turns."""
    parts = []
    for column in ("conversations", "chosen", "rejected"):
        value = example.get(column)
        turns = [value] if isinstance(value, dict) else value
        if problem := list_problem(turns, column, "{from, value}"):
            return problem
        parts.append(turns)
    return _conversation_pair(parts[0] + parts[1], parts[0] + parts[2], "conversations + ")


Reader = Callable[[Example], Example | str]
"""Returns an example in TRL's columns; or, as text, why it cannot be trained on."""

ALPACA = ("system", "instruction", "input", "output")
"""Alpaca's columns, and LLaMA-Factory's `system` beside them."""
_NATIVE: dict[TaskName, tuple[str, set[str]]] = {  # the paper's datasets, recognized by their additional columns
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
        return self.read not in (plain_text, plain_completion, plain_pair)

    @property
    def is_renamed(self) -> bool:
        """Whether the outputs are other columns than the dataset's."""
        return self.columns_read != list(self.outputs)


def recognize(example: Example, task: TaskName, place: str, names: Names = Names()) -> Layout:  # noqa: B008 (immutable)
    """The layout of a dataset with such examples. Raises UserError, starting with `place`, if the task has none."""
    known = names.known(example)
    layout = _layout(known, task)
    if layout is None:
        raise UserError(f"{place}: {_missing_columns(example, task, names)}")
    name, additional = _NATIVE[task]
    if layout.inputs == layout.outputs == TASKS[task].columns and additional <= known.keys():
        layout = layout._replace(description=f"{layout.description} (like {name})")
    if "system" in names.columns and layout.outputs == TASKS["sft"].columns:
        layout = layout._replace(inputs=(*layout.inputs, "system"))
    if layout.has_turns:
        beside = tuple(column for column in OPTIONS if column in known)
        layout = layout._replace(inputs=layout.inputs + beside, outputs=layout.outputs + beside)
    layout = layout._replace(names=names)
    return layout._replace(unused=tuple(c for c in example if c not in layout.columns_read))


def _missing_columns(example: Example, task: TaskName, names: Names) -> str:
    """The columns that were found and the needed ones, with a proposal for `columns` where there is one."""
    known = names.known(example)
    other = next((name for name in TASKS if TASKS[name].data == name != task and _layout(known, name)), None)
    hint = f"; these columns are for {other}: `soren-align {other}`" if other else example_of_names(known, task)
    text = f"found the columns {', '.join(known)}"
    if names.columns:
        unread = [column for column in example if column not in names.columns.values()]
        texts = f" ({', '.join(unread)})" * bool(unread)
        text = f"`columns` names {', '.join(known)}, and no others are then read{texts}"
        complete: dict[str, str] = {**names.columns} | {each: each for each in unread if each in get_args(Column)}
        if _layout({ours: example.get(theirs) for ours, theirs in complete.items()}, task):
            hint = f". Write {columns_text(complete)}"
    return f"{text}; {task} needs {TASKS[task].required_columns}{hint}"


def read_example(example: Example, layout: Layout) -> Example | str:
    """The example in TRL's columns; or, as text, why it cannot be trained on."""
    known = layout.names.known(example)
    if "system" in layout.inputs and layout.outputs[:1] == TASKS["sft"].columns:
        known = with_system(known, layout.inputs[0])
    result = layout.read(known)
    if layout.mask_history and isinstance(result, dict) and "messages" in result:
        result = {**result, "messages": last_alone(result["messages"])}
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
    return {column: plain_turns(value) if isinstance(value, list) else value for column, value in example.items()}


def _layout(example: Example, task: str) -> Layout | None:
    """None where no format fits."""
    return _sft_layout(example) if task == "sft" else _dpo_layout(example)


def _sft_layout(example: Example) -> Layout | None:
    columns, chats = example.keys(), TASKS["sft"].columns
    both = ("prompt", "completion")
    if "messages" in columns:
        return Layout("chat messages", chats, chats, messages)
    if "conversations" in columns:
        return Layout("ShareGPT conversations", ("conversations",), chats, sharegpt)
    if columns >= {*both}:
        if isinstance(example["prompt"], list) or isinstance(example["completion"], list):
            return Layout("prompts and completions as turns", both, both, completion)
        return Layout("plain prompts and completions, without a template", both, both, plain_completion)
    if {"instruction", "output"} <= columns:
        inputs = tuple(column for column in ALPACA if column in columns)
        return Layout("Alpaca instructions and outputs, as turns", inputs, both, alpaca)
    if "text" in columns and is_dialogue(example["text"]):
        return Layout("dialogues as text, split into turns", ("text",), chats, dialogue)
    if "text" in columns:
        return Layout("plain text, without a template", ("text",), ("text",), plain_text)
    return None


def _dpo_layout(example: Example) -> Layout | None:
    columns, answers = example.keys(), TASKS["dpo"].columns
    if not {"chosen", "rejected"} <= columns:
        return None
    chosen = example["chosen"]
    if "conversations" in columns and _is_answer(chosen):
        return Layout("ShareGPT preferences, joined to pairs", ("conversations", *answers), answers, sharegpt_pair)
    if is_dialogue(chosen):
        return Layout("pairs of dialogues as text, split into turns", answers, answers, dialogue_pair)
    if "prompt" in columns and isinstance(chosen, str) and not isinstance(example["prompt"], list):
        plain = ("prompt", *answers)
        return Layout("plain prompts and pairs of answers, without a template", plain, plain, plain_pair)
    is_answer = isinstance(chosen, str) or _is_answer(chosen)
    if "prompt" in columns and is_answer:
        description = "prompts and pairs of answers as turns, joined to pairs"
        return Layout(description, ("prompt", *answers), answers, joined_pair)
    if "instruction" in columns and is_answer:
        inputs = tuple(column for column in ALPACA if column in columns and column != "output")
        return Layout("Alpaca instructions and pairs of answers, as turns", (*inputs, *answers), answers, alpaca_pair)
    return Layout("preference pairs", answers, answers, pair)


def _is_answer(turns: Any) -> bool:
    """Whether these turns continue a prompt: whole conversations start with the user, or a system turn."""
    turn = turns[0] if isinstance(turns, list) and turns else turns
    return isinstance(turn, dict) and turn.get("role") == "assistant"
