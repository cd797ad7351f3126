"""The evaluation stage: every model is asked the same questions, and compared with the one in the first row."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ..recipe import UserError
from ..report import write
from . import tables
from .harness import Answers, evaluate_model
from .pairing import compare
from .suites import load_suite


def evaluate(
    rows: list[tuple[str, Path]],
    suite_name: str | Path,
    output: Path,
    *,
    device: str | None = None,
    batch_size: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Evaluate each (name, model folder) in order, the starting checkpoint first; print and write the table.

    Writes into `output`: results.json (what is returned), table.md, and samples/<row>/<column>.jsonl. Nothing there
    is touched before all models have answered.
    """
    console = console or Console()
    names = [name for name, _ in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"two models would stand in the table as {twice[0]!r}; give one folder another name")
    suite = load_suite(suite_name)
    answers: list[tuple[str, Answers]] = []
    entries: list[dict[str, Any]] = []
    for number, (name, model) in enumerate(rows, 1):
        began = time.monotonic()
        with console.status(f"evaluating {name} ({number} of {len(rows)})"):
            found = evaluate_model(model, suite, device=device, batch_size=batch_size)
        entry: dict[str, Any] = {"name": name, "model": str(model), "scores": found.scores}
        answers.append((name, found))
        entries.append(entry)
        console.print(f"evaluated {name} in {time.monotonic() - began:.1f} s", highlight=False)
    for entry, differences in zip(entries, compare(answers, average=False), strict=True):
        if differences:
            entry["differences"] = differences
    results = {"title": suite.title, "suite": suite.name, "rows": entries, "settings": answers[0][1].settings}
    _write(results, answers, Path(output))
    console.print()
    console.print(tables.terminal(results), highlight=False)
    return results


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """The scores alone, as fractions: {"rows": [{"name": "base", "zoo_mc": 0.25, ...}, ...]}."""
    return {
        "rows": [
            {"name": row["name"], **{column: score["value"] / 100 for column, score in row["scores"].items()}}
            for row in results["rows"]
        ]
    }


def _write(results: dict[str, Any], answers: list[tuple[str, Answers]], output: Path) -> None:
    samples = output / "samples"
    if samples.is_dir():
        shutil.rmtree(samples)  # another evaluation's rows must not stand beside these
    for name, found in answers:
        folder = samples / name
        folder.mkdir(parents=True)
        for column, asked in found.samples.items():
            write(folder / f"{column}.jsonl", "".join(json.dumps(sample, default=str) + "\n" for sample in asked))
    write(output / "table.md", tables.markdown(results))
    write(output / "results.json", json.dumps(results, indent=2) + "\n")
