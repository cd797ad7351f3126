"""The tables of pretrained-by.md: forgetting at equal gain, of several optimizers that fine-tune
several bases.

    python docs/studies/pretrained_by.py adamw=FOLDER muon=FOLDER

Before a folder of the study pretrained-by, with study.json, stands the candidate whose optimizer
pretrained its base. A gain is a fall of the held-out loss, and a rise is that of the retention
loss, both since the start and in nats per token.
"""

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from scipy.stats import t

from soren_align.core.text import Table
from soren_align.evaluate.stats.paired import holm
from soren_align.evaluate.stats.power import Part, detectable_by

Run = dict[str, Any]
Studies = dict[str, dict[str, Any]]
"""The optimizer that pretrained the base -> study.json."""


class Mean(NamedTuple):
    """A mean over seeds, half of its 95% interval, and its standard error, by Student's t."""

    value: float
    half: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """values: two or more."""
        error = stdev(values) / sqrt(len(values))
        return cls(fmean(values), float(t.ppf(0.975, len(values) - 1)) * error, error)

    def __str__(self) -> str:
        return f"{self.value:+.3f} ({self.value - self.half:+.3f} to {self.value + self.half:+.3f})"


def finished(runs: Sequence[Run]) -> list[Run]:
    """The runs that ended with a result."""
    return [run for run in runs if run["status"] == "finished"]


def path(run: Run) -> list[tuple[float, float]]:
    """(gain, rise) at each evaluation; the start, (0, 0), is the first."""
    points = [(point["metric"], point["retention_loss"]) for point in run["curve"]]
    (loss, retention), *_ = points
    return [(loss - metric, now - retention) for metric, now in points]


def rise_at(points: Sequence[tuple[float, float]], gain: float) -> float:
    """The rise where the gain is first reached, linear between two points.
    Raises ValueError if it is not reached.
    """
    for (before, first), (after, second) in pairwise(points):
        if before <= gain <= after:
            return first + (second - first) * (gain - before) / (after - before)
    raise ValueError(
        f"a gain of {gain:.3f} is not reached: the largest is {max(x for x, _ in points):.3f}"
    )


def candidates(study: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The candidates of a study by name."""
    return {candidate["name"]: candidate for candidate in study["candidates"]}


def final_runs(study: dict[str, Any]) -> dict[str, dict[int, Run]]:
    """The finished final runs of each candidate by seed."""
    return {
        name: {run["seed"]: run for run in finished(each["verdict"])}
        for name, each in candidates(study).items()
    }


def common_gain(studies: Studies) -> float:
    """The largest gain that every final run of every base reaches."""
    by_seed = [runs for study in studies.values() for runs in final_runs(study).values()]
    return min(max(gain for gain, _ in path(run)) for runs in by_seed for run in runs.values())


def bases_table(studies: Studies) -> str:
    """The losses of each base before fine-tuning, on the examples of the final runs."""
    rows = []
    for base, study in studies.items():
        start = next(run for runs in final_runs(study).values() for run in runs.values())["curve"][
            0
        ]
        rows.append([base, f"{start['metric']:.3f}", f"{start['retention_loss']:.3f}"])
    return Table(["base pretrained by", "held-out loss", "retention loss"], rows).markdown()


def ends_table(studies: Studies) -> str:
    """Gain and rise of each optimizer at the end of its final runs, at the learning rate that the
    search selected.
    """
    rows = []
    for base, study in studies.items():
        for name, runs in final_runs(study).items():
            gains, rises = zip(*(path(run)[-1] for run in runs.values()), strict=True)
            lr = next(iter(runs.values()))["parameters"]["optimizer.lr"]
            rows.append([base, name, f"{lr:.2g}", str(Mean.of(gains)), str(Mean.of(rises))])
    head = [
        "base pretrained by",
        "fine-tuned by",
        "lr",
        "gain (95% interval)",
        "rise of the retention loss",
    ]
    return Table(head, rows, align="ll").markdown()


def equal_gain_table(studies: Studies) -> str:
    """The rise where each final run first reaches the common gain, and the difference to the base's
    own optimizer.

    Differences are of runs with the same seed, so with the same batches. The detectable difference
    has a power of 80% at Holm's first threshold.
    """
    gain = common_gain(studies)
    rows: list[list[str]] = []
    differences: list[Part] = []
    p_values: list[float] = []
    for base, study in studies.items():
        rises = {
            name: {seed: rise_at(path(run), gain) for seed, run in runs.items()}
            for name, runs in final_runs(study).items()
        }
        for name, own in rises.items():
            rows.append([base, name, str(Mean.of([*own.values()]))])
            if name != base:
                seeds = sorted(own.keys() & rises[base].keys())
                difference = Mean.of([own[seed] - rises[base][seed] for seed in seeds])
                rows[-1].append(str(difference))
                differences.append(Part(difference.error**2, len(seeds) - 1))
                p_values.append(
                    2 * float(t.sf(abs(difference.value) / difference.error, len(seeds) - 1))
                )
    tests = iter(zip(differences, holm(p_values), strict=True))
    for row in rows:
        if len(row) == 3:
            row += ["", "", ""]
        else:
            part, p = next(tests)
            row += [f"{detectable_by(part, len(p_values)):.3f}", f"{p:.3f}"]
    head = [
        "base pretrained by",
        "fine-tuned by",
        f"rise at a gain of {gain:.3f}",
        "difference to the base's optimizer",
    ]
    return Table([*head, "detectable", "p (Holm)"], rows, align="ll").markdown()


def ends_of_trials(candidate: dict[str, Any]) -> dict[float, tuple[float, float]]:
    """(gain, rise) at the end of each finished trial of the search, by learning rate, the smallest
    first.
    """
    runs = sorted(finished(candidate["trials"]), key=lambda run: run["parameters"]["optimizer.lr"])
    return {run["parameters"]["optimizer.lr"]: path(run)[-1] for run in runs}


def whole_schedules_table(studies: Studies) -> str:
    """The rise at one gain of the search's ends, interpolated over learning rates: all schedules
    are complete.

    One seed per learning rate, so there is no interval. The gain is the largest that every
    optimizer reaches.
    """
    ends = {
        base: {
            name: [(0.0, 0.0), *ends_of_trials(candidate).values()]
            for name, candidate in candidates(study).items()
        }
        for base, study in studies.items()
    }
    gain = min(
        max(x for x, _ in points) for by_name in ends.values() for points in by_name.values()
    )
    names = list(dict.fromkeys(name for by_name in ends.values() for name in by_name))
    rows = [
        [name, *(f"{rise_at(by_name[name], gain):+.3f}" for by_name in ends.values())]
        for name in names
    ]
    return Table(
        [f"rise at a gain of {gain:.3f}", *(f"base of {base}" for base in ends)], rows
    ).markdown()


def search_table(study: dict[str, Any]) -> str:
    """Gain and rise at the end of each trial by learning rate; the largest gain of each row is
    marked.
    """
    rates = sorted(
        {
            run["parameters"]["optimizer.lr"]
            for each in study["candidates"]
            for run in each["trials"]
        }
    )
    rows = []
    for name, candidate in candidates(study).items():
        ends = ends_of_trials(candidate)
        best = max(gain for gain, _ in ends.values())
        rows.append([name, *(cell(ends.get(rate), best) for rate in rates)])
    return Table(["fine-tuned by", *(f"{rate:.2g}" for rate in rates)], rows).markdown()


def cell(end: tuple[float, float] | None, best: float) -> str:
    """The gain of a trial, with its rise; None: it did not finish."""
    return "-" if end is None else f"{'best: ' * (end[0] == best)}{end[0]:.3f} ({end[1]:+.3f})"


def main() -> None:
    """Print all tables."""
    folders = dict(argument.split("=", 1) for argument in sys.argv[1:])
    texts = {
        base: (Path(folder) / "study.json").read_text(encoding="utf-8")
        for base, folder in folders.items()
    }
    studies = {base: json.loads(text) for base, text in texts.items()}
    tables = [
        bases_table(studies),
        ends_table(studies),
        equal_gain_table(studies),
        whole_schedules_table(studies),
    ]
    print(*tables, *map(search_table, studies.values()), sep="\n\n")


if __name__ == "__main__":
    main()
