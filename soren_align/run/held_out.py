"""The metrics of each held-out example, at the start of a run and at its end: what a study
compares.

    held_out.json  {"format": 1, "examples": hash of all examples, "weights": [12, 7, ...],
                    "clusters": [0, 1, 0, ...],
                    "start": {"eval_loss": [2.31, ...], ...}, "end": {...}}

A mean over examples has an error because these examples are a sample; without the value of each
example this error is unknown. The score of a run is the mean over examples by `weights`: numbers of
trained tokens, or 1 for preference pairs. `clusters` is null where all examples differ; equal
examples have one number.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..core.errors import UserError
from ..core.files import read_json, write

FORMAT = 1
MAX_BYTES = 256 << 20
"""The largest file that is read. 10,000 preference pairs with three metrics are 1.3 MB."""
End = Literal["start", "end"]
Values = Mapping[str, Sequence[float]]
"""A value for each example, by metric ("eval_loss")."""


@dataclass(frozen=True)
class HeldOutValues:
    """One metric of a run's held-out examples, scaled so that plain means are the means by
    weight.
    """

    start: np.ndarray
    end: np.ndarray
    clusters: np.ndarray | None
    weights: np.ndarray | None
    """None: all are equal."""
    examples: str
    """Hash of the examples and their order: runs are compared only if it is equal."""


def add_values(
    file: Path,
    at: End,
    examples: str,
    weights: Sequence[float],
    clusters: Sequence[int] | None,
    values: Values,
) -> None:
    """Write the values of a run's start or end; those of the end beside the start's."""
    content: dict[str, Any] = {}
    if at == "end":
        with suppress(UserError):  # a missing start is reported by whoever reads the file
            content["start"] = read_json(file, max_bytes=MAX_BYTES)["start"]
    content |= {
        "format": FORMAT,
        "examples": examples,
        "weights": weights,
        "clusters": clusters,
        at: values,
    }
    write(file, json.dumps(content) + "\n")


def read_held_out(file: Path, metric: str) -> HeldOutValues:
    """Return the values of one metric.
    Raises UserError if the file is missing, damaged or without the run's end.

    With weights w of mean m(w), the value x of an example becomes m + (x - m) w / m(w), where m is
    the mean by weight: the plain mean is m, and the plain standard error is that of a ratio
    (Cochran 1977, section 6.3). The map is linear, so that differences of runs may be taken before
    or after it.
    """
    remedy = (
        "the verdict needs the metric of each held-out example: remove the run's folder and rerun "
        "the study"
    )
    if not file.is_file():
        raise UserError(f"{file}: is missing; {remedy}")
    content = read_json(file, max_bytes=MAX_BYTES)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{file}: was not written by this version of soren-align; {remedy}")
    weights = np.array(content["weights"], float)
    clusters = None if content["clusters"] is None else np.array(content["clusters"])
    parts = []
    for at in ("start", "end"):
        # The end is missing in the file of a run that has not ended.
        values = np.array(content.get(at, {}).get(metric, ()), float)
        if len(values) != len(weights):
            raise UserError(
                f"{file} {at}.{metric}: has {len(values)} values for {len(weights)} held-out "
                f"examples; {remedy}"
            )
        mean = np.average(values, weights=weights)
        parts.append(mean + (values - mean) * weights / weights.mean())
    # Numbered anew, without gaps: one large number in a changed file would take all memory where
    # clusters are counted.
    if clusters is not None:
        _, clusters = np.unique(clusters, return_inverse=True)
    unequal = weights if np.ptp(weights) else None
    return HeldOutValues(parts[0], parts[1], clusters, unequal, content["examples"])
