"""The tasks SFT, DPO, KTO and pre-training, with one record for each.

A recipe's `task` is the name of a record. Nothing here imports torch or TRL: their classes stand
here by name, and are loaded where they are used. A trainer of TRL is added by a record, a class in
training/trainer.py, the reading of its examples in data/formats.py, and a command.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

TaskName = Literal["sft", "dpo", "kto", "pretrain"]
Column = Literal[
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "prompt",
    "completion",
    "text",
    "chosen",
    "rejected",
    "label",
    "tools",
    "chat_template_kwargs",
    "role",
    "content",
    "weight",
]
"""Names of a dataset's columns, and of the keys of turns, that are recognized: a recipe's `columns`
maps others to them. data/formats.py reads them."""
OPTIONS = ("tools", "chat_template_kwargs")
"""Columns of an example beside its turns: the tools that its template lists, and other variables of
the template."""
TURN_KEYS = ("role", "content", "weight")
TURN_KEY_ALIASES = {"role": "from", "content": "value"}
"""OpenAI's keys of a turn -> ShareGPT's."""
ROLE_ALIASES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "ai"), "assistant"),
    **dict.fromkeys(("observation", "function", "ipython", "tool_response"), "tool"),
    "developer": "system",
    "function_call": "tool_call",
}
"""Other names of the roles; tool_call: the assistant's calls as text, see data/turns.py."""
THUMBS = {
    **dict.fromkeys(
        ("true", "1", "+1", "up", "thumbs up", "👍", "yes", "good", "like", "positive"), True
    ),
    **dict.fromkeys(
        ("false", "0", "-1", "down", "thumbs down", "👎", "no", "bad", "dislike", "negative"), False
    ),
}
"""Labels of answers, in lower case -> whether the answer is good."""


def thumb(label: object) -> bool | None:
    """Whether a labelled answer is good; None if the label is none of THUMBS."""
    whole = int(label) if isinstance(label, bool | float) and label in (-1, 0, 1) else label
    # without the tones of skin, and the selector of emoji
    text = re.sub("[\U0001f3fb-\U0001f3ff\ufe0f]", "", str(whole)).replace("_", " ")
    return THUMBS.get(text.strip().lower())


@dataclass(frozen=True)
class Task:
    """A way to train, by one of TRL's trainers."""

    name: TaskName
    """The command, and the recipe's `task`."""
    title: str
    trainer: str
    """The class in training/trainer.py."""
    config: str
    """TRL's class of the recipe's `trainer` section."""
    data: TaskName
    """The task whose examples it takes: its own, or another's."""
    columns: tuple[str, ...]
    """TRL's columns of conversations. With `prompt` beside those of DPO, TRL would take another
    path and fail (TRL 1.16, both paper datasets)."""
    token_columns: tuple[str, ...]
    """TRL's columns of tokenized examples."""
    required_columns: str
    """The columns of a dataset, for messages."""
    metrics: tuple[str, ...]
    """The values of an evaluation during training. tests/training/test_early_stopping.py
    compares."""
    shown: Mapping[str, str]
    """Logged values that are shown, those of an evaluation too, whose names start with eval_ ->
    their format."""
    higher_is_better: Mapping[str, bool]
    """The held-out metrics that a study's trials may be selected by, and their direction."""
    passed_on: Mapping[str, str] = field(default_factory=dict)
    """Columns that the trainer takes beside the tokens, as the examples have them -> their type in
    Arrow."""
    answers: tuple[str, ...] = ()
    """The columns of an example's answers to one prompt, each a sequence to train on; none where it
    is one sequence."""
    num_forwards: int = 0
    """Forward passes of an example beside the trained one: of the starting model, the reference of
    the loss, and of mismatched answers."""
    keeps_order: bool = False
    """Whether batches are those of the dataset's order, which is drawn once."""

    @property
    def has_reference(self) -> bool:
        """Whether the starting model also runs at each step, as the reference of the loss."""
        return self.num_forwards > 0

    @property
    def num_sides(self) -> int:
        """Sequences of an example: of a preference pair both answers, each with the prompt."""
        return max(1, len(self.answers))


SFT = Task(
    name="sft",
    title="SFT",
    trainer="SorenSFTTrainer",
    config="SFTConfig",
    data="sft",
    columns=("messages",),
    token_columns=("input_ids", "labels"),
    required_columns=(
        "'messages', a list of {role, content} turns (or ShareGPT's 'conversations', or"
        " 'instruction' and 'output', or 'prompt' and 'completion', or 'text'); list columns of"
        " other names under `columns`"
    ),
    metrics=("loss", "mean_token_accuracy", "entropy"),
    shown={"loss": "loss {:.4f}", "mean_token_accuracy": "token accuracy {:.1%}"},
    higher_is_better={"eval_loss": False, "eval_mean_token_accuracy": True},
)
DPO = Task(
    name="dpo",
    title="DPO",
    trainer="SorenDPOTrainer",
    config="DPOConfig",
    data="dpo",
    columns=("chosen", "rejected"),
    token_columns=("prompt_ids", "chosen_ids", "rejected_ids"),
    required_columns=(
        "'chosen' and 'rejected', two whole conversations as lists of {role, content} turns (or two"
        " answers beside a 'prompt' or 'instruction'); list columns of other names under `columns`"
    ),
    metrics=(
        *SFT.metrics,
        *("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"),
        *("logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected"),
    ),
    shown={
        "loss": "loss {:.4f}",
        "rewards/margins": "margin {:.3f}",
        "rewards/accuracies": "accuracy {:.1%}",
    },
    higher_is_better={
        "eval_loss": False,
        "eval_rewards/margins": True,
        "eval_rewards/accuracies": True,
    },
    answers=("chosen", "rejected"),
    num_forwards=1,
)
KTO = Task(
    name="kto",
    title="KTO",
    trainer="SorenKTOTrainer",
    config="KTOConfig",
    data="kto",
    columns=("prompt", "completion"),
    token_columns=("prompt_ids", "completion_ids"),
    required_columns=(
        "'prompt', 'completion' and 'label', true for a good answer and false for a bad one (or"
        " 'messages' and 'label'); list columns of other names under `columns`"
    ),
    metrics=(
        *("loss", "entropy", "kl", "thumbs_accuracy", "rewards/margins", "rewards/chosen"),
        *("rewards/rejected", "logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected"),
    ),
    shown={
        "loss": "loss {:.4f}",
        "rewards/margins": "margin {:.3f}",
        "kl": "KL {:.3f}",
        "thumbs_accuracy": "thumbs {:.1%}",
    },
    higher_is_better={"eval_loss": False},
    passed_on={"label": "bool"},
    num_forwards=3,  # the reference's, and both models' of answers to other prompts
    keeps_order=True,
)
# SFT of plain texts, but for its metrics: TRL's accuracy and entropy are means over batches, and a
# perplexity needs the mean over tokens.
PRETRAIN = replace(
    SFT,  # whose plain texts it takes
    name="pretrain",
    title="pre-training",
    trainer="SorenPretrainer",
    required_columns="'text', plain texts; list a column of another name under `columns`",
    metrics=("loss",),
    shown={"loss": "loss {:.4f}", "perplexity": "perplexity {:.2f}"},
    higher_is_better={"eval_loss": False},
)
TASKS: dict[str, Task] = {task.name: task for task in (SFT, DPO, KTO, PRETRAIN)}
