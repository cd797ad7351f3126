"""run.json: its hash and version, and sentences about its content."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.files import CHANGED, digest, read_json
from ..tasks import TASKS

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


def to_text(record: Mapping[str, Any]) -> str:
    """Return the text of a run.json: the record, plain data, and as `record_sha256` a hash of
    it.
    """
    return json.dumps({**record, "record_sha256": digest(record)}, indent=2) + "\n"


def read_record(file: Path) -> dict[str, Any]:
    """Return the content of a run.json, without its hash.

    Raises UserError if it is none, of another format, or another one than was written: a flipped
    bit of a verdict would go unseen. One without a hash, edited on purpose, is not verified.
    """
    record = read_json(file)
    versions = record.get("versions") if isinstance(record, dict) else None
    if not isinstance(versions, dict) or "soren-align" not in versions:
        raise UserError(f"{file}: was not written by soren-align; choose another folder")
    # The hash is of all else, so that it comes out first.
    sha256 = record.pop("record_sha256", None)
    if sha256 not in (None, digest(record)):
        raise UserError(
            f"{file}: {CHANGED}; restore the file, or, if you edited it on purpose, remove its "
            "line record_sha256"
        )
    if (version := record.get("format_version")) != FORMAT_VERSION:
        raise UserError(f"{file}: format_version: {version} instead of {FORMAT_VERSION}; {EDITED}")
    if (task := record.get("task", "sft")) not in [*TASKS]:  # a missing key is named elsewhere
        raise UserError(f"{file}: task: {task!r} instead of {' or '.join(TASKS)}; {EDITED}")
    return record


def divergence(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why a training diverged, from the lines of its metrics.jsonl; None if it did not.
    See PEAK.
    """
    # The held-out loss decides where there is one: a training loss is of few examples, and may be
    # low by heart.
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    training = [line["loss"] for line in lines if "loss" in line]
    ends = [losses[-1] for losses in (held_out, training) if losses]
    # First, because comparisons with NaN are false: a training of NaNs would count as one that
    # learned.
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
            return (
                f"the held-out loss was {start:.4g} at the start, rose to {peak:.3g}, and was "
                f"{end:.4g} at the end"
            )
    elif len(training) > 1 and min(training[(len(training) + 1) // 2 :]) > PEAK * training[0]:
        return (
            f"the training loss was {training[0]:.4g} in the first log and {training[-1]:.4g} in "
            "the last one"
        )
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
    return (
        f"{num_truncated:,} truncated to max_length, which drops {num_tokens_left_out:,} tokens "
        f"({share:.1%})"
    )


def describe_held_out(counts: Mapping[str, Any]) -> list[str]:
    """Return a line about the held-out examples, and one about truncated ones.
    counts: see `TrainingSetup.held_out`.
    """
    line = f"{counts['num_kept']:,}"
    if counts["num_kept"] < counts["num_examples"]:
        line += f" of {counts['num_examples']:,}"
    line += " held-out examples for the evaluation loss"
    if counts["dropped"]:
        line += f", {describe_dropped(counts['dropped'])}"
    lines = [line]
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
    text = f"{evaluations} did not improve {best['metric']}"
    if early["threshold"]:
        text += f" by more than {early['threshold']:g}"
    if best["value"] is not None:
        text += f"; the best was {best['value']:.4g}"
    if best["step"] is not None:
        text += f" at step {best['step']}"
    return text


def describe_losses(training: dict[str, Any], *, with_updates: bool = False) -> list[str]:
    """Describe the losses of a run, the held-out one first, and the preferences of DPO; a text for
    each.

    with_updates: also how the updates differ from those of Muon and momentum SGD.
    """
    texts = []
    if held_out := training.get("held_out"):
        losses = []
        for evaluation in held_out["evaluations"]:
            is_end = evaluation["step"] in (0, training["steps"])
            step = "" if is_end else f" at step {evaluation['step']:,}"
            losses.append(f"{evaluation['loss']:.3f}{step}")
        texts.append(f"held-out loss {' -> '.join(losses)} ({held_out['num_examples']:,} examples)")
    first, last = training["first_loss"], training["last_loss"]
    if first is not None and last is not None:
        counts = [f"{count:,}" for count in dict.fromkeys(training.get("examples_per_log", ()))]
        examples = f", of up to {' and '.join(counts)} examples" if counts else ""
        texts.append(f"training loss {first:.3f} -> {last:.3f} (first and last log{examples})")
    if preferences := training.get("preferences"):
        pairs = "held-out pairs" if preferences["held_out"] else "pairs (last log)"
        texts.append(
            f"the model prefers the chosen answer in {preferences['share']:.0%} of "
            f"{preferences['num_pairs']:,} {pairs}, margin {preferences['margin']:.3g}"
        )
    if thumbs := training.get("thumbs"):
        start, end = thumbs["evaluations"]
        when = f"at step {start['step']:,}" if start["step"] else "before training"
        texts.append(
            f"of {thumbs['num_good']:,} good and {thumbs['num_bad']:,} bad held-out answers, a"
            f" good one is likelier than a bad one in {end['accuracy']:.0%} of all comparisons,"
            f" {when} in {start['accuracy']:.0%} (chance: 50%, two standard deviations"
            f" {2 * thumbs['error']:.0%})"
        )
        if start["accuracy"] >= 1 - thumbs["error"]:
            texts[-1] += ": the start preferred them already, so this cannot show a gain"
    if with_updates and (updates := training.get("updates")):
        texts.append(
            f"matrix updates: cosine {updates['cosine_to_muon']:.3f} to Muon's, "
            f"{updates['cosine_to_momentum']:.3f} to momentum SGD's"
        )
    return texts


def describe_result(training: dict[str, Any]) -> str:
    """Describe what a training has changed, by the held-out loss before and after it; "" if it was
    not measured.
    """
    held_out = training.get("held_out", {"evaluations": []})
    if len(held_out["evaluations"]) < 2 or held_out["evaluations"][0]["step"] != 0:
        return ""
    before, after = held_out["evaluations"]
    return (
        f"held-out loss {before['loss']:.3f} before training, {after['loss']:.3f} after it, on "
        f"{held_out['num_examples']:,} examples that were not trained on"
    )


def describe_earlier_runs(start: dict[str, Any]) -> str:
    """Describe the runs that trained a starting checkpoint: "after 600 steps of SFT, 100 steps of
    DPO"; "" for none.
    """
    runs = [f"{run['steps']:,} steps of {run['task'].upper()}" for run in start.get("after", [])]
    return f"after {', '.join(runs)}" if runs else ""
