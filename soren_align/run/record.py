"""run.json: its hash, the types of the keys that are read again, and sentences about its content.

A run folder may come from anyone, or from another version: a key of the wrong type is reported when
the file is read. Other keys are for people.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ..core.errors import UserError
from ..core.files import CHANGED, digest, read_json
from ..core.text import dotted
from ..tasks import TaskName

FORMAT_VERSION = 2
EDITED = "restore this file, which was edited or written by another version of soren-align"
SURVIVAL_THRESHOLD = 0.5
"""Share of a change, or of the entries to be changed, below which more is lost to rounding than
survives. Good settings are far above, bad ones far below: in its first step, Soren at the paper's
1e-6 changes 0.98 of float32 weights and less than 0.01 of bfloat16 ones."""
PEAK, RECOVERED = 1.5, 0.9
"""A training diverged if a loss rose to more than PEAK times the held-out loss of the start, and at
the end neither the training loss nor the held-out loss is below RECOVERED times it. One that learns
its training examples by heart did not: its training loss is low. With a learning rate of 100
weights overflow to equal probabilities, and the loss ends a little below that of random weights.
Where the start was not evaluated, all losses that were logged in the second half have to be above
PEAK times the first one, which is of few examples."""
Count = Annotated[int, Field(ge=0)]


def form(kind: Any) -> Any:
    """Return pydantic's form of a type in such a table: a dict is a mapping of its own, [kind] a
    list of them.
    """
    if isinstance(kind, list):
        return list[form(kind[0])]
    if not isinstance(kind, dict):
        return kind
    types = {
        key: NotRequired[form(value)] if key.endswith("?") else form(value)
        for key, value in kind.items()
    }
    return TypedDict("Keys", {key.removesuffix("?"): value for key, value in types.items()})  # pyright: ignore


_BEST = {"metric": str, "value": float | None, "step": Annotated[int | None, Field(ge=0)]}
_ENDS = Annotated[list[float], Field(min_length=2, max_length=2)]
_SOURCE = {
    # a dataset, identified by the hub's commit or a file's sha256; several of a mixture are in
    # `sources`
    "path": str,
    "split": str,
    "revision?": str | None,
    "sha256?": str,
    "num_files?": Count,
    "num_bytes?": Count,
    "weight?": float,
}
_TRAINING = {
    "steps": Count,
    "first_loss": float | None,
    "last_loss": float | None,
    # The numbers of examples that first_loss and last_loss average. Fewer where an epoch's last
    # batch is smaller, and in the first log after resuming.
    "examples_per_log?": list[Count],
    # The first held-out loss, and that of the saved model: one evaluation if these are the same.
    "held_out?": {"num_examples": Count, "evaluations": [{"step": Count, "loss": float}]},
    # The share of pairs whose chosen answer the model prefers, and the mean margin of the rewards.
    # held_out: otherwise the pairs are those of the last training log. log_probability_changes: of
    # the chosen and of the rejected answers, since the start.
    "preferences?": {
        **{
            "share": float,
            "margin": float,
            "num_pairs": Count,
            "held_out": bool,
            "loss_type?": list[str],
        },
        "log_probability_changes?": {"chosen": float, "rejected": float},
    },
    # Of DPO, the answers of samples.jsonl: means at the start and at the end; see
    # run/preferences.py.
    "samples?": {"num_prompts": Count, "characters": _ENDS, "repeated": _ENDS},
    "relative_change?": float,
    "aux_relative_change?": float,
    # The shares of each parameter group's change that the saved model contains.
    "change_after_saving?": {
        "dtype": str,
        "matrices?": {"fraction_changed": float, "projection": float},
    },
    "stopped_early?": {"max_steps": Count, "patience": Count, "threshold": float, "best": _BEST},
    "best_model?": _BEST,
    # The held-out tokens of a pre-training: loss in nats per token, and its exponential.
    "validation?": {"loss": float, "perplexity": float, "num_tokens": Count},
    "diverged?": str,
}
_KEYS = {
    "format_version": Literal[2],
    "status": Literal["training", "trained", "finished", "diverged"],
    "task": TaskName,
    "versions": dict[str, str],
    "extends?": list[str],
    "processes?": Annotated[int | None, Field(ge=1)],
    "previous_processes?": list[int | None],
    "resumed_from_steps?": list[int],
    "parallel_config?": dict[str, Any],
    "started?": str,
    "commit?": str | None,
    "last_error?": str | None,
    "diverged?": bool,
    "resumable?": bool,
    "failure?": str,
    "defect?": str | None,
    "optimizer?": {"class?": str, "num_matrices?": Count},
    # The checkpoint that training started from, the runs that trained it, the first one first, and
    # run.perturb.
    "start?": {
        "path": str,
        "sha256_or_revision": str | None,
        "after?": [{"task": TaskName, "steps": Count}],
        "perturb?": {"size": float, "seed": Count},
    },
    # The numbers of examples trained on and, by reason, dropped; num_read: of a stream.
    "data?": {"train": {"num_kept": Count, "dropped": dict[str, Count], "num_read?": Count}},
    "parallel?": str,
    "global_batch_size?": Count,
    "seeds?": dict[str, int | None],
    "device?": str,
    "num_threads?": Count,
    "parameters?": {
        "dtype": list[str],
        "total": Count,
        "trainable": Count,
        "spectral_share?": float,
    },
    "training?": _TRAINING,
    # What a training has left: hashes of recipe.yaml's part that determines the weights, of
    # metrics.jsonl, and of the model's weights. A study's audit compares them with the files, and
    # the last one with the model that was evaluated.
    "written?": {
        "recipe_sha256": str,
        "metrics_sha256": str,
        "held_out_sha256?": str | None,
        "weights_sha256": str | None,
    },
    # The questions of run.benchmark, by column: those of lm-eval's task whose doc_hash is at most
    # last_doc_hash. selected_by: the column, or "average", by which the saved weights were chosen.
    "benchmark?": {
        "suite": str,
        "columns": dict[
            str, form({"task": str, "questions": Count, "of": Count, "last_doc_hash": str})
        ],
        "selected_by?": str,
    },
    # What must be equal for runs that are compared at one seed; see training/reference.py.
    "identity?": {
        **dict.fromkeys(("starting_weights", "data", "recipe", "device"), str),
        "precision": dict[str, Any],
        "processes": Annotated[int, Field(ge=1)],
        "global_batch_size": Count,
        "versions": dict[str, str],
        "batches?": str | None,
        "num_batches?": Count,
    },
}
"""Key -> type; a key that ends with ? may be missing."""


TRAINED = (
    "start",
    "data",
    "parallel",
    "global_batch_size",
    "seeds",
    "device",
    "parameters",
    "training",
)
"""The keys of every run that has a model."""
_RECORD, _ONE_SOURCE, _MIXTURE = (
    TypeAdapter(form(keys)) for keys in (_KEYS, _SOURCE, {"sources": [_SOURCE]})
)


def to_text(record: Mapping[str, Any]) -> str:
    """Return the text of a run.json: the record, plain data, and as `record_sha256` a hash of
    it.
    """
    return json.dumps({**record, "record_sha256": digest(record)}, indent=2) + "\n"


def read_record(file: Path) -> dict[str, Any]:
    """Return the content of a run.json, without its hash.

    Raises UserError if it is none, or another one than was written; one without a hash, made by
    hand, is not verified.
    """
    record = read_json(file)
    versions = record.get("versions") if isinstance(record, dict) else None
    if not isinstance(versions, dict) or "soren-align" not in versions:
        raise UserError(f"{file}: was not written by soren-align; choose another folder")
    sha256 = record.pop("record_sha256", None)
    if sha256 not in (None, digest(record)):
        raise UserError(
            f"{file}: {CHANGED}; restore the file, or, if you edited it on purpose, remove its line record_sha256"
        )
    try:
        _RECORD.validate_python(record, strict=True)
        if "data" in record:
            train = record["data"]["train"]
            (_MIXTURE if "sources" in train else _ONE_SOURCE).validate_python(train, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"{file}: {dotted(first['loc'])}: {first['msg']}; {EDITED}") from None
    return record


def divergence(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why a training diverged, from the lines of its metrics.jsonl; None if it did not.
    See PEAK.
    """
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    training = [line["loss"] for line in lines if "loss" in line]
    ends = [losses[-1] for losses in (held_out, training) if losses]
    if not all(map(math.isfinite, ends)):
        return "the loss at the end is NaN or infinite"
    if held_out and next(line["step"] for line in lines if "eval_loss" in line) == 0:
        start, end, peak = (
            held_out[0],
            held_out[-1],
            max(filter(math.isfinite, held_out + training)),
        )
        if peak > PEAK * start and min(ends) > RECOVERED * start:
            # If possible by the held-out losses: a training loss that is logged after a resume is
            # of fewer steps.
            highest = max(filter(math.isfinite, held_out))
            peak = highest if highest > PEAK * start else peak
            return f"the held-out loss was {start:.4g} at the start, rose to {peak:.3g}, and was {end:.4g} at the end"
    elif len(training) > 1 and min(training[(len(training) + 1) // 2 :]) > PEAK * training[0]:
        return f"the training loss was {training[0]:.4g} in the first log and {training[-1]:.4g} in the last one"
    return None


def describe_dropped(dropped: dict[str, int]) -> str:
    """Describe dropped examples (reason -> number): "3 dropped (messages is an empty list), ...";
    "" for none.
    """
    return ", ".join(f"{count} dropped ({reason})" for reason, count in dropped.items())


def describe_truncation(num_truncated: int, num_tokens_left_out: int, num_tokens: int) -> str:
    """Describe truncated examples: "3 truncated to max_length: 120 tokens (4.1%) are left out".

    num_tokens: of all examples, after truncation.
    """
    if not num_truncated:
        return "0 truncated to max_length"
    share = num_tokens_left_out / (num_tokens + num_tokens_left_out)
    return f"{num_truncated:,} truncated to max_length, which drops {num_tokens_left_out:,} tokens ({share:.1%})"


def describe_held_out(counts: Mapping[str, Any]) -> list[str]:
    """Return a line about the held-out examples, and one about truncated ones.
    counts: see `TrainingSetup.held_out`.
    """
    of_all = f" of {counts['num_examples']:,}" * (counts["num_kept"] < counts["num_examples"])
    dropped = f", {text}" if (text := describe_dropped(counts["dropped"])) else ""
    lines = [f"{counts['num_kept']:,}{of_all} held-out examples for the evaluation loss{dropped}"]
    if counts["num_truncated"]:
        numbers = (counts[key] for key in ("num_truncated", "num_truncated_tokens", "num_tokens"))
        lines.append(describe_truncation(*numbers))
    return lines


def describe_early_stop(early: dict[str, Any]) -> str:
    """Describe why training ended early: "3 evaluations in a row did not improve eval_loss; the
    best was ...".
    """
    best, times = early["best"], early["patience"]
    evaluations = "the last evaluation" if times == 1 else f"{times} evaluations in a row"
    by = f" by more than {early['threshold']:g}" if early["threshold"] else ""
    value = f"; the best was {best['value']:.4g}" if best["value"] is not None else ""
    step = f" at step {best['step']}" if best["step"] is not None else ""
    return f"{evaluations} did not improve {best['metric']}{by}{value}{step}"


def describe_losses(training: dict[str, Any], *, of_updates: str = "") -> list[str]:
    """Describe the losses of a run, the held-out one first, the preferences of DPO, and the
    updates; a text for each.

    of_updates: the end of the last one.
    """
    texts = []
    if held_out := training.get("held_out"):
        ends = (0, training["steps"])
        losses = [
            f"{evaluation['loss']:.3f}"
            + f" at step {evaluation['step']:,}" * (evaluation["step"] not in ends)
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
        pairs = (
            f"{num_pairs:,} held-out pairs"
            if preferences["held_out"]
            else f"{num_pairs:,} pairs (last log)"
        )
        texts.append(
            f"the model prefers the chosen answer in {preferences['share']:.0%} of {pairs}, margin {margin:.3g}"
        )
    if updates := training.get("updates"):
        texts.append(
            f"matrix updates: cosine {updates['cosine_to_muon']:.3f} to Muon's, {updates['cosine_to_momentum']:.3f} to "
            f"momentum SGD's{of_updates}"
        )
    return texts


def describe_result(training: dict[str, Any]) -> str:
    """Describe what a training has changed, by the held-out loss before and after it; "" if it was
    not measured.
    """
    held_out = training.get("held_out", {"evaluations": []})
    if [evaluation["step"] for evaluation in held_out["evaluations"][:1]] != [0] or len(
        held_out["evaluations"]
    ) < 2:
        return ""
    before, after = (f"{evaluation['loss']:.3f}" for evaluation in held_out["evaluations"])
    examples = f"{held_out['num_examples']:,} examples that were not trained on"
    return f"held-out loss {before} before training, {after} after it, on {examples}"


def describe_earlier_runs(start: dict[str, Any]) -> str:
    """Describe the runs that trained a starting checkpoint: "after 600 steps of SFT, 100 steps of
    DPO"; "" for none.
    """
    runs = [f"{run['steps']:,} steps of {run['task'].upper()}" for run in start.get("after", [])]
    return f"after {', '.join(runs)}" if runs else ""
