"""What training will see, counted and shown: rows kept and dropped, tokens trained, one example to look at."""

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import ceil

from datasets import Dataset
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ..errors import printable
from .columns import Task
from .tokens import BATCH, Row, encode, ends_in_trained_stop, pieces


@dataclass(frozen=True)
class Account:
    """What becomes of a dataset's rows and tokens."""

    task: Task
    num_rows: int
    num_kept: int
    dropped: dict[str, int]
    """Reason -> number of rows."""
    num_truncated: int
    """Rows kept that lose their end."""
    lengths: dict[str, int]
    """Tokens of a row before truncation (of a pair: its longer side): p50, p90, p99 and max."""
    num_tokens: int
    """Of the rows kept, after truncation; a pair counts both sides, each with its prompt."""
    num_trained_tokens: int
    trained_share: float
    example: list[tuple[str, bool]]
    """(text, trained) pieces of the first row kept; for DPO exactly prompt, chosen, rejected."""
    stop_token_trained: bool
    """Whether any row kept ends in a trained eos. If none does, the model never learns to stop."""
    kept_of_parts: tuple[int, ...] = ()
    """Of a mixture: the rows kept of each source."""


def account(
    dataset: Dataset,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    assistant_only_loss: bool = False,
    completion_only_loss: bool = True,
    parts: Sequence[int] = (),
    on_rows: Callable[[int], object] | None = None,
) -> Account:
    """What TRL will make of a dataset from `load_split`, without a model.

    tokenizer: as the trainer will have it (its template and eos); not modified.
    max_length: TRL's, None for no truncation. With packing pass None: TRL then neither cuts nor drops rows.
    completion_only_loss: of prompts and completions; whole conversations know no such thing.
    parts: of a mixture, the number of each row's source.
    on_rows: called with the number of rows just done, for a progress bar.
    """
    tokenizer = deepcopy(tokenizer)
    # Rows beyond the model's reach are counted below; the tokenizer's own warning about the first says less.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    tally = _Tally(task, tokenizer, max_length)
    for batch in dataset.iter(batch_size=BATCH):
        assert isinstance(batch, dict)
        before = len(tally.lengths)
        for row in encode(batch, task, tokenizer, assistant_only_loss, completion_only_loss):
            part = parts[len(tally.lengths)] if parts else 0
            tally.kept[part] += tally.add(row)
        if on_rows is not None:
            on_rows(len(tally.lengths) - before)
    counted = tally.account()
    return replace(counted, kept_of_parts=tuple(tally.kept[i] for i in range(max(parts) + 1))) if parts else counted


class _Tally:
    """Adds rows up."""

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase, max_length: int | None):
        self.task: Task = task
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.lengths: list[int] = []
        self.dropped: Counter[str] = Counter()
        self.kept: Counter[int] = Counter()
        self.num_truncated = self.num_tokens = self.num_trained = 0
        self.example: list[tuple[str, bool]] = []
        self.stops = False

    def add(self, row: Row) -> bool:
        """Whether the row is kept."""
        self.lengths.append(row.length)
        if why := row.why_dropped(self.task, self.max_length):
            self.dropped[why] += 1
            return False
        cut = [side.cut(self.max_length) for side in row.sides]
        self.num_truncated += self.max_length is not None and row.length > self.max_length
        self.num_tokens += sum(len(side.ids) for side in cut)
        self.num_trained += sum(sum(side.trained) for side in cut)
        whole = len(cut[0].ids) == len(row.sides[0].ids)
        self.stops = self.stops or (whole and ends_in_trained_stop(cut[0], self.tokenizer))
        if not self.example:
            self.example = pieces(cut, row.num_prompt, self.tokenizer)
        return True

    def account(self) -> Account:
        ordered = sorted(self.lengths) or [0]
        lengths = {f"p{p}": ordered[max(0, ceil(len(ordered) * p / 100) - 1)] for p in (50, 90, 99)}
        return Account(
            task=self.task,
            num_rows=len(self.lengths),
            num_kept=len(self.lengths) - self.dropped.total(),
            dropped=dict(self.dropped),
            num_truncated=self.num_truncated,
            lengths={**lengths, "max": ordered[-1]},
            num_tokens=self.num_tokens,
            num_trained_tokens=self.num_trained,
            trained_share=self.num_trained / max(1, self.num_tokens),
            example=self.example,
            stop_token_trained=self.stops,
        )


def show_example(account: Account, color: bool = True) -> Text:
    """The example for the terminal: trained text green, or in [[double brackets]] where there is no colour."""
    shown = Text()
    names = ("prompt", "chosen", "rejected") if account.task == "dpo" else ()
    for i, (text, trained) in enumerate(account.example):
        if names:
            shown.append(("\n" if i else "") + names[i] + "\n", style="bold")
        text = _clip(printable(text))
        shown.append(f"[[{text}]]" if trained and not color else text, style="green" if trained else "dim")
    return shown


def _clip(text: str, head: int = 600, tail: int = 200) -> str:
    if len(text) <= head + tail:
        return text
    return f"{text[:head]} ... {len(text) - head - tail} characters ... {text[-tail:]}"
