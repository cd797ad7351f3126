"""The tables of spectrum.md about SmolLM2-135M: python docs/studies/spectrum.py
docs/studies/smollm2-spectrum.jsonl

A line of the file is a run of recipes/studies/smollm2-spectrum.yaml with its first learning rates
and seeds: its losses at steps 0, 50 and 100 on held-out docstrings and on the language reference
(retention), and the relative change of the matrices.
"""

import json
import sys
from pathlib import Path
from typing import Any

from soren_align.core.text import Table

NAMES = ("muon", "soren", "random", "soft-sign", "high-pass", "momentum-sgd", "adamw")
Run = dict[str, Any]


def rate(run: Run) -> str:
    """The learning rate, as in the tables' head."""
    return f"{run['lr']:.2g}"


def losses(run: Run, *, is_best: bool = False) -> str:
    """The held-out loss at the end, with the change of the retention loss."""
    return f"{'best: ' * is_best}{run['held_out'][-1]:.3f} ({run['retention'][-1] - run['retention'][0]:+.2f})"


def search_table(runs: list[Run]) -> str:
    """The losses of each candidate at each learning rate."""
    of_search = [run for run in runs if run["stage"] == "search"]
    rates = sorted({rate(run) for run in of_search}, key=float)
    rows = []
    for name in NAMES:
        own = {rate(run): run for run in of_search if run["candidate"] == name}
        best = min(own.values(), key=lambda run: run["held_out"][-1])
        rows.append([name, *(losses(own[lr], is_best=own[lr] is best) for lr in rates)])
    return Table(["candidate", *rates], rows).markdown()


def seeds_table(runs: list[Run]) -> str:
    """The losses of the finished runs with new seeds, at the selected learning rates."""
    own = {(run["candidate"], run["seed"]): run for run in runs if run["stage"] == "verdict"}
    seeds = sorted({seed for _, seed in own})
    rows = []
    for name in NAMES:
        if ended := [own[name, seed] for seed in seeds if (name, seed) in own]:
            cells = (losses(own[name, seed]) if (name, seed) in own else "-" for seed in seeds)
            rows.append([name, rate(ended[0]), *cells])
    return Table(["candidate", "lr", *(f"seed {seed}" for seed in seeds)], rows).markdown()


def main() -> None:
    """Print both tables."""
    runs = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    print(search_table(runs), seeds_table(runs), sep="\n\n")


if __name__ == "__main__":
    main()
