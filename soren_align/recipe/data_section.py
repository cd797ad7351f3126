"""The data section of a recipe: what is trained on, and what is held out."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from ..core.document import Section
from ..tasks import Column
from .optimizer import Positive


class DataSplit(Section):
    """A set of examples."""

    main_keys: ClassVar[dict[type, str]] = {str: "path"}
    other_names: ClassVar[dict[str, str]] = {"dataset": "path"}

    path: Annotated[str, Field(min_length=1)]
    """The dataset: a file (.jsonl, .json, .csv or .txt, each also compressed as .gz, or .parquet);
    a folder of such files; a pattern, such as `data/*.jsonl`; a dataset on the Hugging Face hub; or
    `python:stdlib`, the text of Python's standard library, with the splits `train` and
    `validation`. `shipped:PATH` is a file that comes with soren-align, such as
    `shipped:recipes/quickstart/data/chat_train.jsonl`."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """The configuration of a hub dataset, such as `SFT`. null: the dataset's default
    configuration."""
    split: str = "train"
    """The split of a hub dataset, or a part of a split: `train_sft[:10%]`. Files have no splits and
    are always read whole."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only the first `limit` examples."""
    revision: str | None = None
    """The branch, tag or commit of a hub dataset."""
    bad_examples: Literal["refuse", "drop"] = "refuse"
    """What to do with examples that cannot be trained on (an empty answer, two equal answers, ...).
    `refuse`: stop with an error. `drop`: drop these examples and count them, for data that you
    cannot fix, such as a hub dataset."""
    columns: dict[Column, str] = {}
    """The dataset's column names, if they are not the usual ones: `{instruction: question, output:
    answer}`. Only the listed columns are then read. `role`, `content` and `weight` name the keys of
    a turn."""
    roles: dict[str, Literal["system", "user", "assistant", "tool", "tool_call"]] = {}
    """The roles of the turns, if your dataset has unusual names for them: `{student: user, teacher:
    assistant}`. Common names, such as ShareGPT's `human` and `gpt`, need not be listed. The role
    `tool_call` is for an assistant's turn whose content is tool calls as JSON text."""
    mask_history: bool = False
    """For SFT: compute the loss only on the last answer of each conversation."""
    apply_chat_template: bool | None = None
    """For DPO with pairs whose `prompt`, `chosen` and `rejected` are plain texts: whether to render
    them with the model's chat template. The prompt is then a user's turn, and each answer an
    assistant's turn. true: render them.
    null: render them and print a notice. false: train on the texts as they are; use this for texts
    that are already rendered, and for models without a chat template."""


class TrainSplit(DataSplit):
    """Examples to train on."""

    hints: ClassVar[dict[str, str]] = {
        "streaming": "is a key of `data`, not of one split; write `data: {streaming: true}`"
    }

    weight: Positive = 1.0
    """The weight of this split in a mixture. With weight 2, each example is used twice. With weight
    0.25, a random quarter of the examples is used, which `trainer.seed` selects. With
    `data.streaming`, the weights are relative
    frequencies: with weights 3 and 1, three of four examples come from the first split."""
    train_on_test: bool = False
    """true: allow training on a split with a name such as `test`. Scores on that test are then
    meaningless."""


class HeldOut(Section):
    """A fraction of the training examples is held out: the model is not trained on it."""

    main_keys: ClassVar[dict[type, str]] = {float: "fraction"}

    fraction: Annotated[float, Field(gt=0, lt=1)]
    """The fraction of every training split that is held out. A hash of each example decides whether
    this example is held out, not its position, the other examples or the seed. If you add examples
    to the data, the old held-out examples are therefore still held out, and the old training
    examples are still trained on. Equal examples are either all held out or all trained on."""


class HeldOutNumber(Section):
    """A number of training examples are held out: the model is not trained on them."""

    main_keys: ClassVar[dict[type, str]] = {int: "examples"}

    examples: Annotated[int, Field(ge=1)]
    """The number of held-out examples of all training splits together. The examples with the
    smallest hashes are held out. If you add examples to the data, a new example can replace a
    held-out example. The replaced example is then trained on. A training example never becomes a
    held-out example."""


class Streaming(Section):
    """Read the training examples during training, for data that are larger than the memory or the
    disk. With streaming, the number of examples is unknown, so `trainer.max_steps` must set the end
    of the training."""

    shuffle_buffer: Annotated[int, Field(ge=1)] = 10_000
    """The number of examples that are read into memory and shuffled together, by `trainer.seed`. 1:
    no shuffling."""


ONE, SEVERAL, SPLIT, PART, NUMBER = "<one>", "<several>", "a split", "a fraction", "a number"
"""Tags of the unions in `data.train` and `data.eval`; messages name the latter three."""


def kind_of_eval(evaluation: Any) -> str:
    """The tag of a value of `data.eval`."""
    # A raw section is a dict; a validated one has the keys that were set.
    keys = (
        evaluation if isinstance(evaluation, dict) else getattr(evaluation, "model_fields_set", ())
    )
    return PART if "fraction" in keys else NUMBER if "examples" in keys else SPLIT


class Data(Section):
    """The training data.
    soren-align recognizes the format of a dataset by its columns: conversations (`messages`, or
    ShareGPT's `conversations`), Alpaca's instructions and outputs, prompts with completions,
    preference pairs, or plain texts. If the columns have other names, set `columns`."""

    main_keys: ClassVar[dict[type, str]] = {str: "train.path"}
    hints: ClassVar[dict[str, str]] = {
        "eval": "write one section: only data.train may be a list of splits"
    }

    train: Annotated[
        Annotated[TrainSplit, Tag(ONE)]
        | Annotated[Annotated[list[TrainSplit], Field(min_length=1)], Tag(SEVERAL)],
        # By the value's type alone, so that errors are about the one that was meant.
        Discriminator(lambda train: SEVERAL if isinstance(train, list | tuple) else ONE),
    ]
    """One split, or a list of splits that are shuffled together (by `trainer.seed`)."""
    eval: (
        Annotated[
            Annotated[DataSplit, Tag(SPLIT)]
            | Annotated[HeldOut, Tag(PART)]
            | Annotated[HeldOutNumber, Tag(NUMBER)],
            Discriminator(kind_of_eval),
        ]
        | None
    ) = None
    """Held-out examples on which the loss is measured during training: a split, a fraction of the
    training examples (`{fraction: 0.05}`) or a number of them (`{examples: 500}`).
    `trainer.eval_strategy` sets when the loss is measured. Without `trainer.eval_strategy`, the
    loss is measured after every epoch."""

    eval_tokens: Annotated[int, Field(ge=1)] | None = None
    """Measure the held-out loss only on the first held-out examples that together have this number
    of tokens. null: on all held-out examples."""
    eval_part: Literal["search", "verdict"] | None = None
    """A study (`soren-align compare`) sets this key; do not set it yourself. `search`: use every
    second held-out example, beginning with the first; the study selects its settings by these
    examples. `verdict`: use the other held-out examples, and write the loss of each example into
    held_out.json. null: use all."""
    retention: DataSplit | None = None
    """Examples of abilities that the model should not forget. The file has one of the formats that
    `task: sft` reads, in a DPO recipe too. Every evaluation writes `retention_loss`, the loss on
    the answers of up to 64 of these examples, into metrics.jsonl. The model is not trained on these
    examples."""
    streaming: Annotated[
        Streaming | None,
        BeforeValidator(
            lambda value: ({} if value else None) if isinstance(value, bool) else value
        ),
    ] = None
    """`true`: read the training examples during training. After the last example, the data are read
    again. Streaming requires `trainer.max_steps`. docs/data.md lists the differences between
    streamed data and other data."""

    cache: bool = True
    """true: cache the tokenized examples in the user's cache folder ($SOREN_ALIGN_CACHE), for the
    next plan, run or resume. false: store them in a temporary folder."""

    @property
    def sources(self) -> list[TrainSplit]:
        """The training splits, as a list."""
        return self.train if isinstance(self.train, list) else [self.train]
