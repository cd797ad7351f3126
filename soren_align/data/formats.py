"""The formats of datasets, recognized by their columns, and their conversion to TRL's columns.

Pure functions of an example. Whatever the format of a dataset, all later code sees one of TRL's own
kinds of columns: conversations (a task's `columns`), prompts and completions as turns, or plain
texts, which no chat template changes. A new format is a record in FORMATS, and a function that
reads it if none of those here does; a column that no other format has is added to tasks.py.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

from ..core.errors import UserError
from ..recipe import columns_text, example_of_names
from ..tasks import OPTIONS, TASKS, TURN_KEYS, Column, TaskName, thumb
from .turns import (
    InvalidExample,
    Turn,
    check_conversation,
    check_list,
    check_pair,
    check_text,
    check_weights,
    from_dialogue,
    is_dialogue,
    options,
    parsed,
    plain_turns,
    with_known_keys,
)

Example = dict[str, Any]
Reader = Callable[[Example, tuple[str, ...]], Example]
"""Takes an example, by our names, and the columns to read; returns it in TRL's columns. Raises
InvalidExample if it cannot be trained on."""
PLAIN_PAIRS = "plain prompts and pairs of answers, as turns"
LABEL = "label"
PLAIN_LABELLED = "plain prompts and labelled answers, as turns"
_PAIR, _COMPLETION = ("chosen", "rejected"), ("prompt", "completion")
_LABELLED = (*_COMPLETION, "label")
ALPACA = ("input", "history")
"""Alpaca's optional column, and LLaMA-Factory's: earlier questions with their answers."""
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of which nothing is read: an example that has one is refused."""
BESIDE = ("system", *OPTIONS, "functions", *_MEDIA)
"""Columns that examples with turns may have beside them, whatever their format."""
_PUBLISHED = {
    ("messages",): ("ultrachat_200k", {"prompt", "prompt_id"}),
    _PAIR: ("ultrafeedback_binarized", {"prompt"}),
}
"""The paper's datasets: the columns that are trained on -> the name, and its other columns."""


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
        """Read a recipe's `columns`, which include the keys of turns, and its `roles`."""
        keys = {key: name for key, name in columns.items() if key in TURN_KEYS}
        return cls({key: name for key, name in columns.items() if key not in keys}, keys, roles)

    def known(self, example: Example) -> Example:
        """The example with our names, for a Reader. Values that are no turns are unchanged."""
        # Only the named columns are read: another column that happens to have one of our names is
        # not what was meant.
        if self.columns:
            example = {ours: example.get(theirs) for ours, theirs in self.columns.items()}
        elif example.get("functions") and not example.get("tools"):  # OpenAI's older name
            example = {**example, "tools": example["functions"]}
        return {
            column: (
                with_known_keys(value, self.keys, self.roles)
                if isinstance(value, list | dict) and column not in OPTIONS
                else value
            )
            for column, value in example.items()
        }


class Format(NamedTuple):
    """A format of datasets' examples, and their conversion."""

    description: str
    """The name of the format: "ShareGPT conversations"."""
    inputs: tuple[str, ...]
    """The columns that are read, by our names. An example of this format has them."""
    outputs: tuple[str, ...]
    """TRL's columns."""
    read: Reader
    fits: Callable[[Example], bool] = lambda example: True
    """Whether an example with these columns has the format: some formats differ in their values."""
    optional: tuple[str, ...] = ()
    """Columns that are also read where the first examples have them."""
    unused: tuple[str, ...] = ()
    """The dataset's other columns."""
    unread_texts: tuple[str, ...] = ()
    """Those of them whose text, or list, is in no column that is read."""
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
    data_format = _format(known, task)
    if data_format is None:
        raise UserError(f"{place}: {_no_format(example, known, task, mapping)}")
    # `apply_chat_template: false` has a meaning for these formats alone: their texts can be either
    # rendered already or not.
    if data_format.description in (PLAIN_PAIRS, PLAIN_LABELLED) and not apply_chat_template:
        description = data_format.description.replace("as turns", "without a template")
        data_format = data_format._replace(
            description=description, outputs=data_format.inputs, read=_texts
        )
    # The paper's datasets are named, so that a user sees that his file is one of them.
    name, additional = _PUBLISHED.get(TASKS[task].columns, ("", set()))
    if (
        data_format.inputs == data_format.outputs == TASKS[task].columns
        and additional <= known.keys()
        and name
    ):
        data_format = data_format._replace(description=f"{data_format.description} (like {name})")
    if data_format.has_turns:
        optional = (*data_format.optional, *BESIDE)
        own = mapping.columns or example
        data_format = data_format._replace(
            optional=optional,
            inputs=(*data_format.inputs, *(column for column in optional if column in own)),
            outputs=(*data_format.outputs, *(column for column in OPTIONS if column in known)),
        )
    data_format = data_format._replace(mapping=mapping)
    # A column that the recipe lists is meant to be trained on.
    unread = [column for column in mapping.columns if column not in data_format.inputs]
    unread += [] if data_format.has_turns else [*mapping.keys]
    if unread:
        raise UserError(
            f"{place}: data.train.columns lists {unread[0]}, which is not read, because the format"
            f" is {data_format.description}; remove {unread[0]} from `columns`, or list the columns"
            f" of a format that has it: {TASKS[task].required_columns}"
        )
    # Recorded in run.json as columns_dropped: a misspelt column shows there.
    unused = tuple(column for column in example if column not in data_format.columns_read)
    texts = () if mapping.columns else _unread_texts(example, unused, data_format)
    if task == "sft" and LABEL in unused and thumb(example[LABEL]) is not None:
        texts = (*texts, LABEL) if "completion" in data_format.outputs else texts
    return data_format._replace(unused=unused, unread_texts=texts)


def _unread_texts(
    example: Example, unused: tuple[str, ...], data_format: Format
) -> tuple[str, ...]:
    """The unused columns that may have been meant for the model: lists, objects, and texts of more
    than a word, unless a column that is read contains the same (ultrachat_200k's `prompt`)."""
    read = json.dumps([example.get(column) for column in data_format.columns_read], default=str)
    values = {c: value for c in unused if isinstance(value := example[c], str | list | dict)}
    return tuple(
        column
        for column, value in values.items()
        if (" " in str(value).strip() or not str(value).isascii())
        and json.dumps(value, default=str)[1:-1] not in read
    )


def _format(example: Example, task: str) -> Format | None:
    """The first format that fits an example, by our names; None if none does."""
    for data_format in FORMATS[TASKS[task].data]:
        if example.keys() >= {*data_format.inputs} and data_format.fits(example):
            return data_format
    return None


def _no_format(example: Example, known: Example, task: TaskName, mapping: ColumnMapping) -> str:
    """The columns that there are and the needed ones, with a proposal where there is one."""
    # The likeliest slip is the other command on the right file.
    others = (name for name in TASKS if TASKS[name].data == name != task and _format(known, name))
    other = next(others, None)
    hint = f"; for these columns run `soren-align {other}`" if other else ""
    hint = hint or example_of_names(known, task)
    text = f"has the columns {', '.join(known)}"
    if mapping.columns:
        unread = [column for column in example if column not in mapping.columns.values()]
        names = f" ({', '.join(unread)})" if unread else ""
        text = f"`columns` lists {', '.join(known)}, so that no other columns{names} are read"
        complete: dict[str, str] = {**mapping.columns}
        complete |= {column: column for column in unread if column in get_args(Column)}
        if _format({ours: example.get(theirs) for ours, theirs in complete.items()}, task):
            hint = f". Write {columns_text(complete)}"
    return f"{text}, but {task} needs {TASKS[task].required_columns}{hint}"


def read_example(example: Example, data_format: Format) -> Example | str:
    """The example in TRL's columns; or, as text, why it cannot be trained on."""
    known = data_format.mapping.known(example)
    beside = [column for column in OPTIONS if column in data_format.outputs]
    if media := [column for column in _MEDIA if data_format.optional and known.get(column)]:
        return (
            f"has {media[0]}, but only text is trained; to train without, list the columns of text "
            "in `columns`"
        )
    # The columns were chosen by the first examples: a key of later ones would be dropped in
    # silence.
    read = (*data_format.inputs, *beside)
    if unread := [key for key in data_format.optional if known.get(key) and key not in read]:
        return (
            f"has the key {unread[0]}, which none of the first examples has; move this example to "
            "the beginning of the data"
        )
    # Errors become texts: what is to happen to an example that is not valid is decided for the
    # whole split (`bad_examples`), not here.
    try:
        result = data_format.read(known, data_format.inputs)
        if data_format.has_turns:
            result = _after_system(result, known.get("system"))
        if data_format.mask_history and "messages" in result:
            # mask_history by weights of turns: one way to leave turns out of the loss, whoever asks
            # for it.
            for turn in result["messages"][:-1]:
                turn |= {"weight": 0} if turn["role"] == "assistant" else {}
        texts = options({column: known.get(column) for column in beside})
    except InvalidExample as error:
        return str(error)
    return result | dict.fromkeys(beside) | texts


def _after_system(result: Example, text: Any) -> Example:
    """The example with the column `system` as the first turn of its prompt."""
    if text in (None, ""):
        return result
    check_text(text, "system")
    system = {"role": "system", "content": text}
    for name in result.keys() - {"completion", "label"}:
        if result[name][0]["role"] != "system":
            result[name] = [system, *result[name]]
        elif result[name][0] != system:
            raise InvalidExample(
                f"{name}[0] is a system turn, but the column system has another text; remove one,"
                " or list the columns to read in `columns`"
            )
    return result


def _conversation(example: Example, inputs: tuple[str, ...]) -> Example:
    """Read a conversation."""
    turns: Any = example.get(inputs[0])
    check_conversation(turns, inputs[0])
    return {"messages": plain_turns(turns)}


def _dialogues(example: Example, inputs: tuple[str, ...]) -> Example:
    """Read a dialogue as text, or two of them: a pair."""
    names = _PAIR if "chosen" in inputs else inputs[:1]
    turns = {name: from_dialogue(example.get(name), name) for name in names}
    return _pair(turns) if "chosen" in inputs else _conversation(turns, inputs)


def _texts(example: Example, inputs: tuple[str, ...]) -> Example:
    """Read a text, a prompt and its completion, or a prompt and two answers, without a template."""
    texts = {name: example.get(name) for name in inputs if name != "label"}
    for name, text in texts.items():
        check_text(text, name)
    if "chosen" in inputs:
        check_pair(example["chosen"], example["rejected"])
    return texts | ({"label": _label(example)} if "label" in inputs else {})


def _completion(example: Example, inputs: tuple[str, ...]) -> Example:
    """Read a prompt and its completion, as turns."""
    for name in _COMPLETION:
        check_list(example.get(name), name, "{role, content}")
    # The whole is checked, so that the roles alternate across the border of the two as well.
    check_conversation(example["prompt"] + example["completion"], "prompt + completion")
    check_weights(example["completion"], "completion")
    return {name: plain_turns(example[name]) for name in _COMPLETION}


def _alpaca(example: Example, inputs: tuple[str, ...]) -> Example:
    """Read Alpaca's instruction, input and output as a prompt and its completion."""
    prompt, output = _instruction(example), example.get("output")
    check_text(output, "output")
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": output}]}


def _instruction(example: Example) -> list[Turn]:
    """The turns of an Alpaca prompt."""
    texts = {column: example.get(column) or "" for column in ("instruction", "input")}
    for column, text in texts.items():
        if text or column == "instruction":
            check_text(text, column)
    # As LLaMA-Factory joins them, which trains Alpaca's files with chat templates.
    request = "\n".join(text for text in texts.values() if text)
    turns: list[Turn] = []
    history = parsed(example.get("history")) or []
    for pair in history if isinstance(history, list) else [None]:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise InvalidExample("history is no list of [question, answer] pairs")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            check_text(text, "history")
            turns.append({"role": role, "content": text})
    return [*turns, {"role": "user", "content": request}]


def _labelled(example: Example, inputs: tuple[str, ...]) -> Example:
    """Read a labelled answer: the last turn of a conversation, Alpaca's, or turns or texts."""
    if "prompt" in inputs:
        turns = {}
        for name, role in zip(_COMPLETION, ("user", "assistant"), strict=True):
            turns[name] = example.get(name)
            if isinstance(turns[name], str):
                check_text(turns[name], name)
                turns[name] = [{"role": role, "content": turns[name]}]
        result = _completion(turns, inputs)
    elif "instruction" in inputs:
        result = _alpaca(example, inputs)
    else:
        *prompt, answer = _conversation(example, inputs)["messages"]
        result = {"prompt": prompt, "completion": [answer]}
    if any("weight" in turn for turn in result["completion"]):
        raise InvalidExample("the labelled answer has a weight; remove this key")
    return result | {"label": _label(example)}


def _label(example: Example) -> bool:
    """Whether the answer is good. Raises InvalidExample if the label is none of THUMBS."""
    value = example.get("label")
    if value is None:
        raise InvalidExample("no 'label'")
    if (good := thumb(value)) is None:
        raise InvalidExample(
            f"label is {repr(value)[:60]}; write true for a good answer, false for a bad one"
        )
    return good


def _pair(example: Example, inputs: tuple[str, ...] = (), prefix: str = "") -> Example:
    """Read two whole conversations. prefix: of their names, for messages."""
    for answer in _PAIR:
        turns, name = example.get(answer), f"{prefix}{answer}"
        check_conversation(turns, name)
        for i, turn in enumerate(turns or []):
            if "weight" in turn:
                raise InvalidExample(
                    f"{name}[{i}] has a weight, but only the last turns of a preference pair are "
                    "trained; remove this key"
                )
    check_pair(example["chosen"], example["rejected"])
    return {answer: plain_turns(example[answer]) for answer in _PAIR}


def _joined_pair(example: Example, inputs: tuple[str, ...]) -> Example:
    """Read a prompt and two answers: ShareGPT's conversation and two turns, Alpaca's, or turns or
    texts.
    """
    is_sharegpt = "conversations" in inputs
    name = "conversations" if is_sharegpt else "prompt"
    keys = "{from, value}" if is_sharegpt else "{role, content}"
    prompt = _instruction(example) if "instruction" in inputs else example.get(name)
    parts = {name: prompt, **{answer: example.get(answer) for answer in _PAIR}}
    for part, value in parts.items():
        if isinstance(value, str) and not is_sharegpt:
            parts[part] = [{"role": "user" if part == name else "assistant", "content": value}]
        elif isinstance(value, dict) and is_sharegpt:
            parts[part] = [value]
        check_list(parts[part], part, keys)
    pair = {answer: parts[name] + parts[answer] for answer in _PAIR}
    return _pair(pair, prefix=f"{name} + ")


def _is_answer(example: Example) -> bool:
    """Whether `chosen` is an answer, and not a whole conversation, which starts with the user or a
    system turn.
    """
    return isinstance(example["chosen"], str) or _is_answer_turn(example)


def _is_answer_turn(example: Example) -> bool:
    chosen = example["chosen"]
    turn = chosen[0] if isinstance(chosen, list) and chosen else chosen
    return isinstance(turn, dict) and turn.get("role") == "assistant"


def _are_texts(example: Example) -> bool:
    return isinstance(example["chosen"], str) and not isinstance(example["prompt"], list)


# The first that fits is taken: a format stands before those whose columns it has as well.
FORMATS: dict[str, tuple[Format, ...]] = {
    "sft": (
        Format("chat messages", ("messages",), ("messages",), _conversation),
        Format("ShareGPT conversations", ("conversations",), ("messages",), _conversation),
        Format(
            "prompts and completions as turns",
            _COMPLETION,
            _COMPLETION,
            _completion,
            lambda example: any(isinstance(example[name], list) for name in _COMPLETION),
        ),
        Format(
            "plain prompts and completions, without a template", _COMPLETION, _COMPLETION, _texts
        ),
        Format(
            "Alpaca instructions and outputs, as turns",
            ("instruction", "output"),
            _COMPLETION,
            _alpaca,
            optional=ALPACA,
        ),
        Format(
            "dialogues as text, split into turns",
            ("text",),
            ("messages",),
            _dialogues,
            lambda example: is_dialogue(example["text"]),
        ),
        Format("plain text, without a template", ("text",), ("text",), _texts),
    ),
    "dpo": (
        Format(
            "ShareGPT preferences, joined to pairs",
            ("conversations", *_PAIR),
            _PAIR,
            _joined_pair,
            _is_answer_turn,
        ),
        Format(
            "pairs of dialogues as text, split into turns",
            _PAIR,
            _PAIR,
            _dialogues,
            lambda example: is_dialogue(example["chosen"]),
        ),
        Format(PLAIN_PAIRS, ("prompt", *_PAIR), _PAIR, _joined_pair, _are_texts),
        Format(
            "prompts and pairs of answers as turns, joined to pairs",
            ("prompt", *_PAIR),
            _PAIR,
            _joined_pair,
            _is_answer,
        ),
        Format(
            "Alpaca instructions and pairs of answers, as turns",
            ("instruction", *_PAIR),
            _PAIR,
            _joined_pair,
            _is_answer,
            optional=ALPACA,
        ),
        Format("preference pairs", _PAIR, _PAIR, _pair),
    ),
    "kto": (
        Format(
            PLAIN_LABELLED,
            _LABELLED,
            _LABELLED,
            _labelled,
            lambda example: all(isinstance(example[name], str) for name in _COMPLETION),
        ),
        Format("prompts and labelled answers as turns", _LABELLED, _LABELLED, _labelled),
        Format(
            "Alpaca instructions and labelled outputs, as turns",
            ("instruction", "output", "label"),
            _LABELLED,
            _labelled,
            optional=ALPACA,
        ),
        Format(
            "conversations whose last answer is labelled",
            ("messages", "label"),
            _LABELLED,
            _labelled,
        ),
        Format(
            "ShareGPT conversations whose last answer is labelled",
            ("conversations", "label"),
            _LABELLED,
            _labelled,
        ),
    ),
}
