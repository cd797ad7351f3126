"""The data section of a recipe: training splits, held-out examples, and the names that their columns have."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from .base import Positive, Section

Column = Literal[
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "system",
    "prompt",
    "completion",
    "text",
    "chosen",
    "rejected",
    "tools",
    "chat_template_kwargs",
    "role",
    "content",
    "weight",
]


class DataSplit(Section):
    """Examples to train or evaluate on."""

    path: Annotated[str, Field(min_length=1)]
    """A .jsonl, .json, .csv or .txt file, each also as .gz, or a .parquet file; a folder of such files, or a pattern,
    `data/*.jsonl` (`shipped:...` for shipped ones); a dataset on the Hugging Face hub; or `python:stdlib`, the
    text of Python's own standard library (splits `train` and `validation`)."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """The hub dataset's configuration (`SFT`). null: its default one."""
    split: str = "train"
    """The hub dataset's split, or a part of one (`train_sft[:10%]`); files are always taken
    whole."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Take only the first `limit` examples."""
    revision: str | None = None
    """The hub's branch, tag or commit."""
    bad_examples: Literal["refuse", "drop"] = "refuse"
    """Whether examples that cannot be trained on (empty answers, equal pairs, ...) are an error, or are dropped and
    counted. `drop` is for data that you cannot fix, such as the hub's."""
    columns: dict[Column, str] = {}
    """The dataset's own names: `{instruction: question, output: answer}`. Its other columns are then not read. `role`,
    `content` and `weight` name the keys of a turn."""
    roles: dict[str, Literal["system", "user", "assistant", "tool", "tool_call"]] = {}
    """The dataset's names of roles: `{student: user, teacher: assistant}`. Usual ones, as ShareGPT's human and gpt, are
    known. `tool_call` is an assistant's turn whose content is the calls as JSON text."""
    mask_history: bool = False
    """Whether only the last answer of each conversation is trained, as if the others had weight 0; for SFT."""


class TrainSplit(DataSplit):
    """Examples to train on, and how often."""

    weight: Positive = 1.0
    """Multiple of the examples: 2 takes each twice, 0.25 a quarter of them, drawn by trainer.seed. With
    `data.streaming`, the relative number of examples from each split: of 3 and 1, three quarters and one."""
    train_on_test: bool = False
    """Train on a split whose name is that of a test split, although its scores are then meaningless."""


class HeldOut(Section):
    """Part of the training examples, which is then not trained on."""

    fraction: Annotated[float, Field(gt=0, lt=1)]
    """Of the examples of every training split. An example is chosen by a hash of itself alone: not by its place, other
    examples, or a seed, so that it stays where it is as the data grows, and equal ones are all on one side."""


class HeldOutNumber(Section):
    """A number of the training examples, which are then not trained on."""

    examples: Annotated[int, Field(ge=1)]
    """Of all training splits together: those with the smallest hashes, in the order of `fraction`. As the data grows,
    new examples take the place of some of them, which are then trained on; none that was trained on is held out."""


class Streaming(Section):
    """Training examples that are read while the model trains, for data larger than memory or disk: their number is
    unknown, and `trainer.max_steps` ends the training."""

    shuffle_buffer: Annotated[int, Field(ge=1)] = 10_000
    """Examples that are in memory, and shuffled with each other by trainer.seed, before the next ones are read. 1: in
    the order of the data."""


def _as_streaming(value: Any) -> Any:
    """`true` as a section of defaults, `false` as null; anything else unchanged."""
    return ({} if value else None) if isinstance(value, bool) else value


ONE, SEVERAL, SPLIT, PART, NUMBER = "<one>", "<several>", "a split", "a fraction", "a number"
"""Tags of the unions in `data.train` and `data.eval`; messages name the latter three."""


def _number_of_splits(train: Any) -> str:
    return SEVERAL if isinstance(train, list | tuple) else ONE


def kind_of_eval(evaluation: Any) -> str:
    """The tag of a value of `data.eval`."""
    keys = evaluation if isinstance(evaluation, dict) else getattr(evaluation, "model_fields_set", ())
    return PART if "fraction" in keys else NUMBER if "examples" in keys else SPLIT


class Data(Section):
    """The training data. Columns are recognised: conversations (`messages`, ShareGPT's `conversations`), Alpaca's
    instructions and outputs, prompts with completions or with two answers, plain text; others are named under
    `columns`."""

    train: Annotated[
        Annotated[TrainSplit, Tag(ONE)] | Annotated[Annotated[list[TrainSplit], Field(min_length=1)], Tag(SEVERAL)],
        Discriminator(_number_of_splits),
    ]
    """One split, or a list of several that are shuffled together by trainer.seed."""
    eval: (
        Annotated[
            Annotated[DataSplit, Tag(SPLIT)] | Annotated[HeldOut, Tag(PART)] | Annotated[HeldOutNumber, Tag(NUMBER)],
            Discriminator(kind_of_eval),
        ]
        | None
    ) = None
    """Held-out examples for a loss during training: a split, or a part of the training examples, `{fraction: 0.05}` or
    `{examples: 500}`. `trainer.eval_strategy` sets when; without it, after every epoch."""

    eval_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of the evaluation loss: it is of the first held-out examples that have so many. null: all."""
    retention: DataSplit | None = None
    """Examples of what the model must not forget, in the forms of SFT also for DPO: at every evaluation metrics.jsonl
    gets `retention_loss`, of the answers of up to 64 of them. They are not trained on."""
    streaming: Annotated[Streaming | None, BeforeValidator(_as_streaming)] = None
    """`true`: read the training examples while training, again from the start when they end; docs/data.md has the
    differences. Needs trainer.max_steps."""

    cache: bool = True
    """Whether the tokens are cached in the user's cache folder ($SOREN_ALIGN_CACHE), for the next plan, run or resume.
    false: in a temporary folder."""

    @property
    def sources(self) -> list[TrainSplit]:
        """The training splits, as a list."""
        return self.train if isinstance(self.train, list) else [self.train]
