"""The tables of spectrum.md about SmolLM2-135M: python docs/studies/spectrum.py docs/studies/smollm2-spectrum.jsonl

A line of the file is a run of recipes/studies/smollm2-spectrum.yaml: its losses at steps 0, 50 and 100 on held-out
docstrings and on the language reference (retention), and the relative change of the matrices.
"""

import json
import sys
from pathlib import Path
from typing import Any

NAMES = ("muon", "soren", "random", "soft-sign", "high-pass", "momentum-sgd", "adamw")


def rate(run: dict[str, Any]) -> str:
    """The learning rate, as in the tables' head."""
    return f"{run['lr']:.2g}"


def search_table(runs: list[dict[str, Any]]) -> str:
    """The held-out loss of each candidate at each learning rate, with the change of the retention loss."""
    of_search = [run for run in runs if run["stage"] == "search"]
    rates = sorted({rate(run) for run in of_search}, key=float)
    rows = [["candidate", *rates], ["---"] * (1 + len(rates))]
    for name in NAMES:
        own = {rate(run): run for run in of_search if run["candidate"] == name}
        best = min(own.values(), key=lambda run: run["held_out"][-1])
        cells = []
        for run in map(own.__getitem__, rates):
            loss = f"{run['held_out'][-1]:.3f}"
            change = run["retention"][-1] - run["retention"][0]
            cells.append(f"{f'**{loss}**' if run is best else loss} ({change:+.2f})")
        rows.append([name, *cells])
    return as_markdown(rows)


def seeds_table(runs: list[dict[str, Any]]) -> str:
    """The losses of the finished runs with new seeds, at the selected learning rates."""
    own = {(run["candidate"], run["seed"]): run for run in runs if run["stage"] == "verdict"}
    seeds = sorted({seed for _, seed in own})
    rows = [["candidate", "lr", *(f"seed {seed}" for seed in seeds)], ["---"] * (2 + len(seeds))]
    for name in NAMES:
        ended = [own.get((name, seed)) for seed in seeds]
        rates = [rate(run) for run in ended if run]
        cells = [
            f"{run['held_out'][-1]:.3f} ({run['retention'][-1] - run['retention'][0]:+.2f})" if run else "-"
            for run in ended
        ]
        if rates:
            rows.append([name, rates[0], *cells])
    return as_markdown(rows)


def as_markdown(rows: list[list[str]]) -> str:
    """The rows as a table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Print both tables."""
    runs = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    print(search_table(runs), seeds_table(runs), sep="\n\n")


if __name__ == "__main__":
    main()
