"""Whether the map's accuracy matters for learning: Soren's maps and Muon at equal update RMS and at
their tuned rates.

    python -m research.studies.maps             the tables of maps.md, of the runs in maps.jsonl
    python -m research.studies.maps --half      those with half powers of two

Two tasks: "quickstart", its SFT cut to 150 of 600 steps, and "source", a Llama of 1.25 million
parameters on the bytes of the standard library. All columns but the last have match_rms_measured,
so that at one learning rate they have one update RMS; embeddings, head and norms have AdamW at a
fixed rate. First five seeds (weights and order of the data) at the rate that all share. Then each
column's own rate: powers of two, by the mean loss of other seeds, extended until the best is
inside, and the five seeds at the best. With --half the rates half a power of two below and above
the best are tried too. The loss is that of the same held-out data for all. The
script that made the runs: `git show d945cc19:research/studies/maps.py`.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from scipy.stats import ttest_1samp

from soren_align.evaluate.stats.paired import holm

COLUMNS = (
    "exact",
    "minimax 0.0004",
    "minimax 0.001",
    "minimax 0.01",
    "sns 15",
    "released",
    "muon",
    "minimax 0.01, match_rms_adamw",
)
RUNS = Path(__file__).with_name("maps.jsonl")
SHARED_RATES = {"quickstart": 2**-6, "source": 2**-6}
# more where a large rate may diverge
GRID_SEEDS = {"quickstart": (100, 101, 102, 103), "source": (100, 101)}
SEEDS = (0, 1, 2, 3, 4)
T_975 = 2.776  # Student's t of 4 degrees of freedom, for 95% intervals


def half_powers(lr: float, number: int) -> float:
    """Return a power of two times a number of factors of the square root of 2."""
    return 2.0 ** (math.log2(lr) + number / 2)


class Study:
    """The runs in a file of JSON lines."""

    def __init__(self, path: Path):
        self.path = path
        lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        self.runs = {(r["task"], r["column"], r["lr"], r["seed"]): r for r in lines}

    def best_measured(self, task: str, column: str, half: bool) -> float | None:
        """The rate with the lowest held-out loss on the grid's seeds; None if it lies at an end of
        the grid. half: of the half powers of two beside it too.
        """
        rates = {
            key[2] for key in self.runs if key[:2] == (task, column) and key[3] in GRID_SEEDS[task]
        }
        runs_of = {
            lr: [self.runs.get((task, column, lr, seed)) for seed in GRID_SEEDS[task]]
            for lr in sorted(rates)
        }
        losses = {
            lr: fmean(run["held_out"] for run in runs) for lr, runs in runs_of.items() if all(runs)
        }
        powers = [lr for lr in losses if math.log2(lr).is_integer()]
        best = min(powers, key=losses.__getitem__, default=None)
        if best is None or best not in powers[1:-1]:
            return None
        rates = [half_powers(best, number) for number in ((-1, 0, 1) if half else (0,))]
        return min(rates, key=losses.__getitem__) if losses.keys() >= {*rates} else None

    def fresh(self, task: str, column: str, lr: float | None) -> dict[int, float]:
        """The losses of the fresh seeds that the file has, by seed."""
        return {
            seed: self.runs[key]["held_out"]
            for seed in SEEDS
            if (key := (task, column, lr, seed)) in self.runs
        }


def interval(values: Sequence[float]) -> str:
    """Mean and half the width of the 95% interval by Student's t; no mean of a part of the
    seeds.
    """
    if len(values) < len(SEEDS):
        return "no result"
    return f"{fmean(values):.4f} ± {T_975 * stdev(values) / len(values) ** 0.5:.4f}"


def table(study: Study, task: str, columns: list[str]) -> None:
    """Print the task's table.
    Differences to the first column are paired by seed, p is Holm's over each half.
    """
    best = {column: study.best_measured(task, column, half=False) for column in columns}
    shared = dict.fromkeys(columns, SHARED_RATES[task])
    cells = [_cells(study, task, columns, rates) for rates in (shared, best)]
    print(
        f"| {task} | at lr {SHARED_RATES[task]:g} | difference | own lr | at its own lr | difference |"
    )
    print("|---|---|---|---|---|---|")
    for column, left, right in zip(columns, *cells, strict=True):
        print(
            "| "
            + " | ".join(
                [column, *left, f"{best[column]:g}" if best[column] else "no result", *right]
            )
            + " |"
        )
    print()


def half_table(study: Study, task: str, columns: list[str]) -> None:
    """Print the columns whose rate is known to half a power of two and has the fresh seeds, each at
    this rate.
    """
    best = {column: study.best_measured(task, column, half=True) for column in columns}
    best = {
        column: rate
        for column, rate in best.items()
        if len(study.fresh(task, column, rate)) == len(SEEDS)
    }
    print(f"| {task}, half powers of 2 | own lr | at its own lr | difference |\n|---|---|---|---|")
    for (column, rate), cells in zip(best.items(), _cells(study, task, [*best], best), strict=True):
        print(f"| {column} | {rate:.4g} | {' | '.join(cells)} |")
    print()


def _cells(
    study: Study, task: str, columns: list[str], rates: Mapping[str, float | None]
) -> list[tuple[str, str]]:
    """(held-out loss, difference to the first column) of every column at its rate."""
    losses = [study.fresh(task, column, rates[column]) for column in columns]
    differences = [
        [each[seed] - losses[0][seed] for seed in each if seed in losses[0]] for each in losses[1:]
    ]
    whole = [i for i, difference in enumerate(differences) if len(difference) == len(SEEDS)]
    p = dict(
        zip(whole, holm([float(ttest_1samp(differences[i], 0).pvalue) for i in whole]), strict=True)
    )
    shown = [
        f"{interval(each)} ({_shown(p[i])})" if i in p else "no result"
        for i, each in enumerate(differences)
    ]
    return [
        (interval([*each.values()]), other)
        for each, other in zip(losses, ["", *shown], strict=True)
    ]


def _shown(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p {p:.3f}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--half", action="store_true")
    half, study = parser.parse_args().half, Study(RUNS)
    for task in SHARED_RATES:
        (half_table if half else table)(study, task, list(COLUMNS))


if __name__ == "__main__":
    main()
