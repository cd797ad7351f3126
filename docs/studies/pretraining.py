"""The table of a pre-training study: perplexity with its interval over seeds, at the end and at
equal seconds.

python docs/studies/pretraining.py FOLDER     (a study's folder, with study.json)
"""

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from math import exp, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t

HEAD = """\
| optimizer | learning rate | perplexity (95% interval over seeds) | s per run | at {seconds:.0f} s | moved |
|---|---|---|---|---|---|
"""


def interval(losses: Sequence[float]) -> tuple[float, float, float]:
    """Return (perplexity, low, high): exp of the mean loss over seeds, and of its 95% interval
    (Student's t).
    """
    mean = fmean(losses)
    half = t.ppf(0.975, len(losses) - 1) * stdev(losses) / sqrt(len(losses))
    return exp(mean), exp(mean - half), exp(mean + half)


def at_seconds(run: dict[str, Any], seconds: float) -> float:
    """Return the validation loss of a run after so many seconds of training, linear between two
    evaluations.

    run: of study.json. Raises ValueError if it took less.
    """
    points = [
        (point["seconds"] or 0.0, point["metric"])
        for point in run["curve"]
        if point["metric"] is not None
    ]
    for (before, first), (after, second) in pairwise(points):
        if before <= seconds <= after:
            return first + (second - first) * (seconds - before) / (after - before)
    raise ValueError(f"{run['folder']}: no evaluation after {seconds:g} s")


def last_seconds(run: dict[str, Any]) -> float:
    """Return the seconds of training at the last evaluation of a run."""
    return max(point["seconds"] or 0.0 for point in run["curve"] if point["metric"] is not None)


def table(study: dict[str, Any]) -> str:
    """Return the Markdown table of the candidates, best first. study: study.json."""
    runs = {
        each["name"]: [run for run in each["verdict"] if run["status"] == "finished"]
        for each in study["candidates"]
    }
    seconds = min(last_seconds(run) for of_one in runs.values() for run in of_one)
    rows = []
    for name, of_one in runs.items():
        mean, low, high = interval([run["metric"] for run in of_one])
        early = exp(fmean(at_seconds(run, seconds) for run in of_one))
        moved = fmean(run["curve"][-1]["relative_change"] for run in of_one)
        rate, taken = of_one[0]["parameters"]["optimizer.lr"], fmean(map(last_seconds, of_one))
        cells = (
            name,
            f"{rate:.3g}",
            f"{mean:.2f} ({low:.2f} to {high:.2f})",
            f"{taken:.0f}",
            f"{early:.2f}",
        )
        rows.append((mean, f"| {' | '.join(cells)} | {moved:.0%} |\n"))
    return HEAD.format(seconds=seconds) + "".join(row for _, row in sorted(rows))


if __name__ == "__main__":
    print(table(json.loads((Path(sys.argv[1]) / "study.json").read_text(encoding="utf-8"))))
