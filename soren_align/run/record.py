"""The keys of run.json that are read again, with their types.

A run folder may come from anyone, or from another version: a key of the wrong type is reported when the file is read.
Other keys are for people.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ..core.document import dotted
from ..core.errors import UserError
from ..core.files import CHANGED, digest

FORMAT_VERSION = 2
"""1 (without this key) until November 2026: other keys, and a flat `optimizer` section in recipe.yaml."""
SURVIVAL_THRESHOLD = 0.5
"""Share of a change, or of the entries to be changed, below which more is lost to rounding than survives. Good settings
are far above, bad ones far below: in its first step, Soren at the paper's 1e-6 changes 0.98 of float32 weights and less
than 0.01 of bfloat16 ones."""
PEAK, RECOVERED = 1.5, 0.9
"""A training diverged if a loss rose to more than PEAK times the held-out loss of the start, and at the end neither the
training loss nor the held-out loss is below RECOVERED times it. One that learns its training examples by heart did not:
its training loss is low. With a learning rate of 100 weights overflow to equal probabilities, and the loss ends a
little below that of random weights. Where the start was not evaluated, all losses that were logged in the second half
have to be above PEAK times the first one, which is of few examples."""
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0)]


class Source(TypedDict):
    """A dataset, identified by the hub's commit or a file's sha256."""

    path: str
    split: str
    revision: NotRequired[str | None]
    sha256: NotRequired[str]
    num_files: NotRequired[Count]
    num_bytes: NotRequired[Count]
    weight: NotRequired[float]


class Mixture(TypedDict):
    """Several datasets."""

    sources: list[Source]


class Counted(TypedDict):
    """The number of examples trained on, and the numbers of dropped examples by reason."""

    num_kept: Count
    dropped: dict[str, Count]
    num_read: NotRequired[Count]
    """Of a stream."""


class Data(TypedDict):
    """The training data: Counted, and a Source or a Mixture."""

    train: Counted


class EarlierRun(TypedDict):
    """A run whose model a later one started from."""

    task: Literal["sft", "dpo", "pretrain"]
    steps: Count


class Start(TypedDict):
    """The checkpoint that training started from, and the runs that trained it, the first one first."""

    path: str
    sha256_or_revision: str | None
    after: NotRequired[list[EarlierRun]]


class Parameters(TypedDict):
    """The model's parameters."""

    dtype: list[str]
    total: Count
    trainable: Count
    spectral_share: NotRequired[float]


class Survived(TypedDict):
    """The shares of a change that the saved model contains."""

    fraction_changed: float
    projection: float


class Survival(TypedDict):
    """The survival of each parameter group's change."""

    dtype: str
    matrices: NotRequired[Survived]


class BestEvaluation(TypedDict):
    """The best evaluation of a training, by its metric."""

    metric: str
    value: float | None
    step: Count | None


class EarlyStop(TypedDict):
    """Why training ended before its last step."""

    max_steps: Count
    patience: Count
    threshold: float
    best: BestEvaluation


class Validation(TypedDict):
    """The held-out tokens of a pre-training: loss in nats per token, and its exponential."""

    loss: float
    perplexity: float
    num_tokens: Count


class Evaluation(TypedDict):
    """A held-out loss at a step."""

    step: Count
    loss: float


class HeldOutLoss(TypedDict):
    """The first held-out loss, and that of the saved model: one evaluation if these are the same."""

    num_examples: Count
    evaluations: Annotated[list[Evaluation], Field(min_length=1, max_length=2)]


class Preferences(TypedDict):
    """The share of pairs whose chosen answer the model prefers, and the mean margin of the rewards."""

    share: float
    margin: float
    num_pairs: Count
    held_out: bool
    """Otherwise the pairs are those of the last training log."""


class Training(TypedDict):
    """The result of training."""

    steps: Count
    first_loss: float | None
    last_loss: float | None
    examples_per_log: NotRequired[Annotated[list[Count], Field(min_length=2, max_length=2)]]
    """The number of examples that first_loss and last_loss average. Fewer where an epoch's last batch is smaller, and
    in the first log after resuming."""
    held_out: NotRequired[HeldOutLoss]
    preferences: NotRequired[Preferences]
    relative_change: NotRequired[float]
    aux_relative_change: NotRequired[float]
    change_after_saving: NotRequired[Survival]
    stopped_early: NotRequired[EarlyStop]
    best_model: NotRequired[BestEvaluation]
    validation: NotRequired[Validation]
    diverged: NotRequired[str]


class Identity(TypedDict):
    """What must be equal for runs that are compared at one seed; see training/reference.py."""

    starting_weights: str
    data: str
    recipe: str
    precision: dict[str, Any]
    processes: Annotated[int, Field(ge=1)]
    global_batch_size: Count
    versions: dict[str, str]
    device: str
    batches: NotRequired[str | None]
    num_batches: NotRequired[Count]


Optimizer = TypedDict("Optimizer", {"class": NotRequired[str], "num_matrices": NotRequired[Count]})


class Manifest(TypedDict):
    """The content of run.json."""

    format_version: Literal[2]
    status: Literal["training", "trained", "finished", "diverged"]
    task: Literal["sft", "dpo", "pretrain"]
    versions: dict[str, str]
    extends: NotRequired[list[str]]
    processes: NotRequired[Annotated[int, Field(ge=1)] | None]
    previous_processes: NotRequired[list[int | None]]
    resumed_from_steps: NotRequired[list[int]]
    parallel_config: NotRequired[dict[str, Any]]
    started: NotRequired[str]
    commit: NotRequired[str | None]
    last_error: NotRequired[str | None]
    diverged: NotRequired[bool]
    resumable: NotRequired[bool]
    defect: NotRequired[str | None]
    optimizer: NotRequired[Optimizer]
    start: NotRequired[Start]
    data: NotRequired[Data]
    parallel: NotRequired[str]
    global_batch_size: NotRequired[Count]
    seeds: NotRequired[dict[str, int | None]]
    device: NotRequired[str]
    parameters: NotRequired[Parameters]
    training: NotRequired[Training]
    identity: NotRequired[Identity]


TRAINED = ("start", "data", "parallel", "global_batch_size", "seeds", "device", "parameters", "training")
"""The keys of every run that has a model."""
_MANIFEST, _SOURCE, _MIXTURE = TypeAdapter(Manifest), TypeAdapter(Source), TypeAdapter(Mixture)


def to_text(record: Mapping[str, Any]) -> str:
    """Return the text of a run.json: the record, and as `record_sha256` a hash of it."""
    plain = json.loads(json.dumps(record))
    return json.dumps({**plain, "record_sha256": digest(plain)}, indent=2) + "\n"


def checked(record: Any, file: Path, required: Iterable[str] = ()) -> dict[str, Any]:
    """Return `record`, the content of `file`, without its hash.

    Raises UserError if it is not a run.json, lacks a required key, or is another one than was written; one without a
    hash, made by hand, is not verified.
    """
    versions = record.get("versions") if isinstance(record, dict) else None
    if not isinstance(versions, dict) or "soren-align" not in versions:
        raise UserError(f"{file}: was not written by soren-align; choose another folder")
    if "format_version" not in record:
        commit = f" (commit {record['commit']})" if record.get("commit") else ""
        raise UserError(
            f"{file}: was written by an older version of soren-align{commit}; use that version for this run, or copy "
            "its model folder elsewhere to use it as a model"
        )
    sha256 = record.get("record_sha256")
    record = {key: value for key, value in record.items() if key != "record_sha256"}
    if sha256 not in (None, digest(record)):
        raise UserError(f"{file}: {CHANGED}. Restore it, or remove its line record_sha256 if the edit was on purpose")
    try:
        _MANIFEST.validate_python(record, strict=True)
        if "data" in record:
            train = record["data"]["train"]
            (_MIXTURE if "sources" in train else _SOURCE).validate_python(train, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{dotted(first['loc'])}: {first['msg']}"
    else:
        missing = [key for key in required if key not in record]
        if not missing:
            return record
        problem = f"lacks {', '.join(missing)}"
    raise UserError(f"{file}: {problem}; it was edited, or written by another version of soren-align")


def divergence(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why a training diverged, from the lines of its metrics.jsonl; None if it did not. See PEAK."""
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    training = [line["loss"] for line in lines if "loss" in line]
    ends = [losses[-1] for losses in (held_out, training) if losses]
    if not all(map(math.isfinite, ends)):
        return "the loss at the end is not a number"
    if held_out and next(line["step"] for line in lines if "eval_loss" in line) == 0:
        start, end, peak = held_out[0], held_out[-1], max(filter(math.isfinite, held_out + training))
        if peak > PEAK * start and min(ends) > RECOVERED * start:
            return f"the held-out loss was {start:.4g} at the start and {end:.4g} at the end, after {peak:.3g}"
    elif len(training) > 1 and min(training[(len(training) + 1) // 2 :]) > PEAK * training[0]:
        return f"the training loss was {training[0]:.4g} in the first log and {training[-1]:.4g} in the last one"
    return None


def describe_dropped(dropped: dict[str, int]) -> str:
    """Describe dropped examples (reason -> number): "3 dropped (messages is an empty list), ..."; "" for none."""
    return ", ".join(f"{count} dropped ({reason})" for reason, count in dropped.items())


def describe_truncation(num_truncated: int, num_tokens_left_out: int, num_tokens: int) -> str:
    """Describe truncated examples: "3 truncated to max_length: 120 tokens (4.1%) are left out".

    num_tokens: of all examples, after truncation.
    """
    if not num_truncated:
        return "0 truncated to max_length"
    share = num_tokens_left_out / (num_tokens + num_tokens_left_out)
    return f"{num_truncated:,} truncated to max_length: {num_tokens_left_out:,} tokens ({share:.1%}) are left out"


def describe_held_out(counts: Mapping[str, Any]) -> list[str]:
    """Return a line about the held-out examples, and one about truncated ones. counts: see `TrainingSetup.held_out`."""
    of_all = f" of {counts['num_examples']:,}" * (counts["num_kept"] < counts["num_examples"])
    dropped = f", {text}" if (text := describe_dropped(counts["dropped"])) else ""
    lines = [f"{counts['num_kept']:,}{of_all} examples for the evaluation loss, not trained on{dropped}"]
    if counts["num_truncated"]:
        numbers = (counts[key] for key in ("num_truncated", "num_truncated_tokens", "num_tokens"))
        lines.append(describe_truncation(*numbers))
    return lines


def describe_early_stop(early: dict[str, Any]) -> str:
    """Describe why training ended early: "3 evaluations in a row did not improve eval_loss; the best was ..."."""
    best, times = early["best"], early["patience"]
    evaluations = "the last evaluation" if times == 1 else f"{times} evaluations in a row"
    by = f" by more than {early['threshold']:g}" if early["threshold"] else ""
    value = f"; the best was {best['value']:.4g}" if best["value"] is not None else ""
    step = f" at step {best['step']}" if best["step"] is not None else ""
    return f"{evaluations} did not improve {best['metric']}{by}{value}{step}"


def describe_losses(training: dict[str, Any]) -> list[str]:
    """Describe the losses of a run, the held-out one first, and the preferences of DPO; a text for each."""
    texts = []
    if held_out := training.get("held_out"):
        ends = (0, training["steps"])
        losses = [
            f"{evaluation['loss']:.3f}" + f" at step {evaluation['step']:,}" * (evaluation["step"] not in ends)
            for evaluation in held_out["evaluations"]
        ]
        texts.append(f"held-out loss {' -> '.join(losses)} ({held_out['num_examples']:,} examples)")
    first, last = training["first_loss"], training["last_loss"]
    if first is not None and last is not None:
        counts = [f"{count:,}" for count in dict.fromkeys(training.get("examples_per_log", ()))]
        examples = f", of up to {' and '.join(counts)} examples" if counts else ""
        texts.append(f"training loss {first:.3f} -> {last:.3f} (first and last log{examples})")
    if preferences := training.get("preferences"):
        num_pairs, margin = preferences["num_pairs"], preferences["margin"]
        pairs = f"{num_pairs:,} held-out pairs" if preferences["held_out"] else f"{num_pairs:,} pairs (last log)"
        texts.append(f"the chosen answer preferred in {preferences['share']:.0%} of {pairs}, margin {margin:.3g}")
    return texts


def describe_earlier_runs(start: dict[str, Any]) -> str:
    """Describe the runs that trained a starting checkpoint: "after 600 steps of SFT, 100 steps of DPO"; "" for none."""
    runs = [f"{run['steps']:,} steps of {run['task'].upper()}" for run in start.get("after", [])]
    return f"after {', '.join(runs)}" if runs else ""
