"""Show runs from their files alone: one run (`show`), all runs of a folder (`runs`), their curves.

No torch here, and no model is loaded: half a second.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import UserError, in_one_line
from ..core.text import Table, Terminal, can_print, count, print_labelled
from ..evaluate.report.results import Results, read_results
from ..evaluate.report.tables import terminal as results_table
from ..run.curves import HELD_OUT, LOSS, MARGIN, Curves, braille, describe, draw_curves, read_curves
from ..run.folder import RunFolder, read_metrics
from ..run.record import describe_earlier_runs, describe_losses

CHART_LINES = 6
MAX_SAMPLES = 3
"""Samples that are shown: the last ones."""
MAX_SAMPLE_BYTES = 1 << 20
"""At the end of samples.jsonl, in which they are looked for."""
MAX_DEPTH = 4
"""Folders below the one that `runs` looks into: runs/studies/mine/trials/a is the deepest that we make."""


def show(run: str, *, full: bool = False, as_json: bool = False) -> None:
    """Print a run's status, curve, scores, samples and next commands. full: with all notes of the scores.

    Raises UserError if the folder is not a run's.
    """
    folder, console = RunFolder(run), Terminal()
    record, curves, evaluations = folder.record(), read_curves(folder.metrics), evaluations_of(folder)
    if as_json:
        values = {"run": record, "curves": {key: curve.points for key, curve in curves.by_key.items()}}
        values |= {"lowest_held_out_loss": curves.best, "evaluations": evaluations, "samples": last_samples(folder)}
        sys.stdout.write(json.dumps(values | {"next": next_commands(folder, record)}, indent=2) + "\n")
        return
    print_labelled(console, "run", f"{folder}: {record['task'].upper()}, {status_of(record)}")
    start = record.get("start", {})
    if "path" in start:
        print_labelled(console, "start", " ".join(filter(None, (start["path"], describe_earlier_runs(start)))))
    training = record.get("training", {})
    if "first_loss" in training:
        seconds = training.get("seconds_since_start_or_resume", 0)
        print_labelled(console, "trained", f"{count(training['steps'], 'step')} in {seconds:,.0f} s")
        for line in describe_losses(training):
            print_labelled(console, "", line)
    for line in describe(curves):
        print_labelled(console, "notice", line)
    print_chart(console, curves)
    for results in evaluations:
        console.print(results_table(results, brief=not full))
    for sample in last_samples(folder):
        print_labelled(console, f"step {sample['step']}", f"{sample['prompt']} -> {sample['completion']}")
    print_next(console, folder, record)


def print_chart(console: Terminal, curves: Curves) -> None:
    """Print the loss of a run, if it was logged and the terminal has the characters: dots, o held-out, * the lowest."""
    if len(curves[LOSS]) + len(curves[HELD_OUT]) < 2 or not can_print(console, "\u28ff"):
        return
    legend = "loss" + ", o held-out, * its lowest" * bool(curves[HELD_OUT])
    width = min(console.width, 100) - 10
    chart = braille(curves[LOSS] or curves[HELD_OUT], width, CHART_LINES, curves[HELD_OUT], curves.best)
    _print_lines(console, "curve", [legend, *chart])


def print_next(console: Terminal, folder: RunFolder, record: dict[str, Any]) -> None:
    """Print the commands that come next, a line each, to be copied."""
    _print_lines(console, "next", next_commands(folder, record))


def _print_lines(console: Terminal, label: str, lines: Sequence[str]) -> None:
    """Print lines as they are, the first one behind the label."""
    for i, line in enumerate(lines):
        print_labelled(console, "" if i else label, line, wrap=False)


def next_commands(folder: RunFolder, record: dict[str, Any]) -> list[str]:
    """Return the commands that a user may want next, by the run's status."""
    run, status = shlex.quote(str(folder)), record["status"]
    again = f"soren-align {record['task']} {shlex.quote(str(folder.recipe))}"
    if status == "training":
        return [again]
    if status == "diverged":
        return [f"soren-align curves {run}", f"{again} --overwrite optimizer.lr=..."]
    chat = [] if record["task"] == "pretrain" else [f"soren-align chat {run} --compare start"]
    if status == "trained":
        return [again, *chat]
    return [*chat, f"soren-align push {run} YOU/NAME --dry-run"]


def status_of(record: dict[str, Any]) -> str:
    """Return a run's status with its dates, and the last error of one that has not ended."""
    times = ", ".join(f"{key} {record[key]}" for key in ("started", "finished") if record.get(key))
    error = f"; last error: {record['last_error']}" if record.get("last_error") else ""
    reason = f" ({record['training']['diverged']})" if record["status"] == "diverged" else ""
    return f"{record['status']}{reason}, {times}{error}"


def evaluations_of(folder: RunFolder) -> list[Results]:
    """Return the results of a run's evaluations, in the order of their suites' names."""
    folders = sorted(path for path in (folder.path / "eval").glob("*") if path.is_dir())
    return [results for path in folders if (results := read_results(path))]


def last_samples(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the last samples of a run, each with its step, prompt and completion."""
    if not folder.samples.is_file():  # a pipe would never end
        return []
    return [
        {"step": int(line["step"]), "prompt": str(line["prompt"]), "completion": str(line["completion"])}
        for line in read_metrics(folder.samples, last_bytes=MAX_SAMPLE_BYTES)
        if {"prompt", "completion"} <= line.keys()
    ][-MAX_SAMPLES:]


def runs(folder: str, *, as_json: bool = False) -> None:
    """Print a line for every run below a folder: status, task, steps, losses, scores. Raises UserError without any."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"{folder}: no such folder; name one that holds runs")
    rows, values = [], []
    for run in find_runs(path):
        try:
            record = run.record()
            scores = [results["rows"][-1] for results in evaluations_of(run)]
        except UserError as error:
            reason = in_one_line(error, 200).removeprefix(f"{run}/")
            rows.append([str(run), "damaged", "", "", "", reason])
            values.append({"run": str(run), "status": "damaged", "error": reason})
            continue
        training = record.get("training", {})
        held_out = training.get("held_out", {}).get("evaluations", [])
        loss = held_out[-1]["loss"] if held_out else training.get("last_loss")
        values.append({"run": str(run), "status": record["status"], "task": record["task"], "training": training})
        values[-1]["scores"] = {name: score["value"] for row in scores for name, score in row["scores"].items()}
        names = ", ".join(f"{name} {value:.1f}" for name, value in list(values[-1]["scores"].items())[:3])
        steps = f"{training['steps']:,}" if "steps" in training else ""
        texts = [record["status"], record["task"], steps, "" if loss is None else f"{loss:.4g}"]
        rows.append([str(run), *texts, names])
    if not rows:
        raise UserError(f"{folder}: holds no runs; train one, as with `soren-align sft quickstart/sft`")
    if as_json:
        sys.stdout.write(json.dumps(values, indent=2) + "\n")
        return
    Terminal().print(Table(["run", "status", "task", "steps", "loss", "scores"], rows, align="lllrrl").rich())


def find_runs(folder: Path, depth: int = 0) -> list[RunFolder]:
    """Return the runs in a folder and below it, by name; nothing is looked for inside of a run, nor through links."""
    if (folder / "run.json").is_file():
        return [RunFolder(folder)]
    if depth == MAX_DEPTH:
        return []
    below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return [run for path in below if not path.name.startswith(".") for run in find_runs(path, depth + 1)]


def curves(names: Sequence[str], *, output: str = "curves.png") -> None:
    """Draw the curves of runs into one picture, and print each one's ends. Raises UserError if none has any."""
    path = Path(output)
    if path.suffix != ".png" or not path.absolute().parent.is_dir():
        raise UserError(f"--output: {output}: write a file NAME.png in a folder that exists")
    folders, console = [RunFolder(name) for name in names], Terminal()
    for folder in folders:
        folder.record()
    named = [(str(folder), read_curves(folder.metrics)) for folder in folders]
    drawn = [(name, curves) for name, curves in named if curves.by_key]
    if not drawn:
        raise UserError(
            f"{', '.join(map(str, folders))}: nothing was logged; trainer.logging_steps sets how often a run logs"
        )
    rows = []
    for name, run in named:
        ends = [f"{points[-1][1]:.4g}" if (points := run[key]) else "-" for key in (LOSS, HELD_OUT, MARGIN)]
        best = f"{run.best[1]:.4g} at step {run.best[0]:g}" if run.best else "-"
        rows.append([name, f"{run.last_step:g}", *ends[:2], best, ends[2]])
    console.print(Table(["run", "step", "loss", "held-out", "lowest held-out", "margin"], rows, align="lrrr").rich())
    dark = draw_curves(drawn, path)
    print_labelled(console, "written", f"{path} and {dark}", wrap=False)
