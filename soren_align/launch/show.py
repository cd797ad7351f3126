"""Print runs from their files: one run (`show`), a list of runs (`runs`), curves (`curves`).

No torch here, and no model is loaded: half a second.
"""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.errors import UserError, in_one_line
from ..core.text import Table, Terminal, can_print, count, number, print_labelled, stderr_console
from ..evaluate.report.results import Results, read_results
from ..evaluate.report.tables import MIN_QUESTIONS, TOO_FEW, has_too_few
from ..evaluate.report.tables import terminal as results_table
from ..run.curves import HELD_OUT, LOSS, MARGIN, Curves, braille, draw_curves, read_curves
from ..run.folder import RunFolder, read_metrics
from ..run.preferences import describe_preferences
from ..run.record import describe_earlier_runs, describe_losses

CHART_LINES = 6
MAX_SAMPLES = 3
"""Samples that are shown: the last ones."""
MAX_SAMPLE_BYTES = 1 << 20
"""The bytes at the end of samples.jsonl in which they are looked for."""
RUNS = "runs"
"""The folder below which the shipped recipes and `new` put their runs."""
NO_RUNS = "{}: has no runs; name another folder, or train with `soren-align sft quickstart/sft`"
MAX_COLUMNS = 4
"""Scores of a suite that stand beside a run's name in 80 columns; the others follow in a table
below."""
MAX_DEPTH = 4
"""Folders below the one that `runs` looks into: runs/studies/mine/trials/a is the deepest that we
make."""


def show(run: str | None, *, full: bool = False, as_json: bool = False) -> None:
    """Print a run's status, curve, scores, samples and next commands.
    full: with all notes of the scores, and the angles of the updates.

    run: None: the newest one below RUNS. Raises UserError if the folder is not a run's.
    """
    folder, console = RunFolder(run) if run else newest_run(), Terminal()
    record, curves, evaluations = (
        folder.record(),
        read_curves(folder.metrics),
        evaluations_of(folder),
    )
    if as_json:
        values = {
            "run": record,
            "curves": {key: curve.points for key, curve in curves.by_key.items()},
        }
        values |= {
            "lowest_held_out_loss": curves.best,
            "evaluations": evaluations,
            "samples": last_samples(folder),
        }
        sys.stdout.write(
            json.dumps(values | {"next": next_commands(folder, record)[1]}, indent=2) + "\n"
        )
        return
    times = ", ".join(f"{key} {record[key]}" for key in ("started", "finished") if record.get(key))
    # The error of a run that has not ended.
    error = f"; last error: {record['last_error']}" if record.get("last_error") else ""
    reason = f" ({record['training']['diverged']})" if record["status"] == "diverged" else ""
    text = f"{folder}: {record['task'].upper()}, {record['status']}{reason}, {times}{error}"
    print_labelled(console, "run", text)
    start = record.get("start", {})
    if "path" in start:
        print_labelled(
            console, "start", " ".join(filter(None, (start["path"], describe_earlier_runs(start))))
        )
    training = record.get("training", {})
    if "first_loss" in training:
        seconds = training.get("seconds_since_start_or_resume", 0)
        steps = f"{count(training['steps'], 'step')} in {seconds:,.0f} s"
        print_labelled(console, "trained", steps, *describe_losses(training, with_updates=full))
    for line in (*curves.describe(), *describe_preferences(training)):
        print_labelled(console, "notice", line)
    print_chart(console, curves)
    for results in evaluations:
        console.print(results_table(results, brief=not full))
    for sample in last_samples(folder):
        print_labelled(
            console, f"step {sample['step']}", f"{sample['prompt']} -> {sample['completion']}"
        )
    print_next(console, folder, record)


def print_chart(console: Terminal, curves: Curves) -> None:
    """Print the loss of a run, if it was logged and the terminal has the characters: dots, o
    held-out, * the lowest.

    """
    if len(curves[LOSS]) + len(curves[HELD_OUT]) > 1 and can_print(console, "\u28ff"):
        legend = "loss" + ", o held-out loss, * lowest held-out loss" * bool(curves[HELD_OUT])
        width = min(console.width, 100) - 10
        chart = braille(
            curves[LOSS] or curves[HELD_OUT], width, CHART_LINES, curves[HELD_OUT], curves.best
        )
        print_labelled(console, "curve", legend, *chart, wrap=False)


def print_next(console: Terminal, folder: RunFolder, record: dict[str, Any]) -> None:
    """Print the commands that come next, a line each, to be copied, below the reason of the last
    one if it has one.
    """
    reason, commands = next_commands(folder, record)
    if reason:
        print_labelled(console, "notice", reason)
    print_labelled(console, "next", *commands, wrap=False)


def next_commands(folder: RunFolder, record: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the commands that a user may want next, by its status and scores, and a sentence why;
    "" for none.
    """
    # By the status, which is what is left to do: the next command is the one that continues.
    run, status = shlex.quote(str(folder)), record["status"]
    again = f"soren-align {record['task']} {shlex.quote(f'{folder}/{folder.recipe.name}')}"
    if status == "training" and folder.is_in_use():
        return "another process is training this run", [f"soren-align curves {run}"]
    if status == "training":
        return "this run was interrupted; the next command resumes it", [again]
    if status == "diverged":
        return "", [f"soren-align curves {run}", f"{again} --overwrite optimizer.lr=..."]
    chat = [] if record["task"] == "pretrain" else [f"soren-align chat {run} --compare start"]
    if status == "trained":
        return "", [again, *chat]
    evaluations = evaluations_of(folder)
    if suite := not evaluations and record.get("skipped_suite"):
        evaluate = f"soren-align eval {run} --suite {shlex.quote(suite)}"
        return "not evaluated; to see whether the training helped:", [*chat, evaluate]
    # A run without scores needs a measure first: `new` makes one of its own data if they are
    # questions and answers.
    if chat and not evaluations:
        data, start = record.get("data", {}).get("train", {}), record.get("start", {}).get("path")
        path, columns = data.get("path", ""), data.get("columns") or {}
        is_pairs = {*columns} == {"instruction", "output"} or (
            not columns and "Alpaca" in data.get("layout", "")
        )
        if start is None or not is_pairs or Path(path).suffix not in (".csv", ".jsonl"):
            reason = "no scores yet: choose a suite of questions (`soren-align suites` lists them)"
            return reason, [*chat, f"soren-align eval {run} --suite SUITE"]
        if Path(start).is_relative_to(Path.cwd()):
            start = os.path.relpath(start)
        words = ["soren-align", "new", "NAME", "--model", start, "--data", path]
        if columns and [*columns.values()] != ["question", "answer"]:
            words += ["--question", columns["instruction"], "--answer", columns["output"]]
        reason = f"no scores yet: `new` makes a recipe and a test of {path}"
        return reason, [*chat, shlex.join(words)]
    for results in evaluations:
        own = results["rows"][-1]
        # Publishing scores of too few questions would be the next mistake, so that `push` is not
        # offered.
        if few := [column for column in own["scores"] if has_too_few(own, column)]:
            remedy = (
                f"add questions to the suite {results['suite']}, {MIN_QUESTIONS} or more, and"
                " evaluate again"
            )
            return f"{', '.join(few)}: {TOO_FEW} to compare models; {remedy}", [
                *chat,
                f"soren-align eval {run}",
            ]
    return "", [*chat, f"soren-align push {run} YOU/NAME --dry-run"]


def evaluations_of(folder: RunFolder) -> list[Results]:
    """Return the results of a run's evaluations, in the order of their suites' names."""
    folders = sorted(path for path in (folder.path / "eval").glob("*") if path.is_dir())
    return [results for path in folders if (results := read_results(path))]


def last_samples(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the last samples of a run, each with its step, prompt and completion."""
    if not folder.samples.is_file():  # a pipe would never end
        return []
    return [
        {
            "step": int(line["step"]),
            "prompt": str(line["prompt"]),
            "completion": str(line["completion"]),
        }
        for line in read_metrics(folder.samples, last_bytes=MAX_SAMPLE_BYTES)
        if {"prompt", "completion"} <= line.keys()
    ][-MAX_SAMPLES:]


def runs(folder: str, *, as_json: bool = False) -> None:
    """Print a line for every run below a folder: status, task, steps, losses; and for every suite a
    table of scores.

    Raises UserError if there is no run.
    """
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"{folder}: there is no such folder; name a folder of runs")
    rows: list[list[str]] = []
    values: list[dict[str, Any]] = []
    suites: dict[str, dict[str, dict[str, float]]] = {}  # by suite, run and column
    for run in find_runs(path):
        # A damaged run is one line of the list: the others are shown all the same.
        try:
            record = run.record()
            scores = {
                results["suite"]: {
                    name: score["value"] for name, score in results["rows"][-1]["scores"].items()
                }
                for results in evaluations_of(run)
            }
        except UserError as error:
            reason = in_one_line(error, 200).removeprefix(f"{run}/")
            rows.append([str(run), "damaged", *[""] * 5])
            values.append({"run": str(run), "status": "damaged", "error": reason})
            continue
        training = record.get("training", {})
        values.append(
            {
                "run": str(run),
                "status": record["status"],
                "task": record["task"],
                "training": training,
            }
        )
        values[-1]["scores"] = scores
        for suite, by_column in scores.items():
            suites.setdefault(suite, {})[str(run)] = by_column
        held_out = training.get("held_out", {}).get("evaluations") or [{}]
        losses = (
            number(loss, ".4g") for loss in (training.get("last_loss"), held_out[-1].get("loss"))
        )
        steps = f"{training['steps']:,}" if "steps" in training else "-"
        date = str(record.get("started", "-"))[:10]
        rows.append([str(run), record["status"], record["task"], date, steps, *losses])
    if not rows:
        raise UserError(NO_RUNS.format(folder))
    if as_json:
        sys.stdout.write(json.dumps(values, indent=2) + "\n")
        return
    console = Terminal()
    head = ["run", "status", "task", "started", "steps", "training\nloss", "held-out\nloss"]
    console.print(Table(head, rows, align="lll").rich())
    for run in (run for run in values if "error" in run):
        print_labelled(console, "damaged", f"{run['run']}: {run['error']}")
    for suite, scores_by_run in suites.items():
        columns = list(
            dict.fromkeys(column for scores in scores_by_run.values() for column in scores)
        )
        for some in (columns[i : i + MAX_COLUMNS] for i in range(0, len(columns), MAX_COLUMNS)):
            rows = [
                [run, *(number(scores.get(c), ".1f") for c in some)]
                for run, scores in scores_by_run.items()
            ]
            console.print("", Table([f"{suite}, %", *some], rows).rich(), sep="\n")


def find_runs(folder: Path, depth: int = 0) -> list[RunFolder]:
    """Return the runs in a folder and below it, by name; nothing is looked for inside of a run, nor
    through links.
    """
    if (folder / "run.json").is_file():
        return [RunFolder(folder)]
    if depth == MAX_DEPTH:
        return []
    below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return [
        run for path in below if not path.name.startswith(".") for run in find_runs(path, depth + 1)
    ]


def newest_run() -> RunFolder:
    """Return the run below RUNS that a command changed last, and print which one.
    Raises UserError without any.
    """
    folders = find_runs(Path(RUNS)) if Path(RUNS).is_dir() else []
    if not folders:
        raise UserError(NO_RUNS.format(RUNS))
    newest = max(folders, key=lambda folder: (folder.path / "run.json").stat().st_mtime_ns)
    # Printed, since a person who has two terminals open may have meant another one.
    if len(folders) > 1:
        text = f"{newest} is the newest of {len(folders):,} runs; soren-align runs lists them"
        print_labelled(stderr_console(), "notice", text)
    return newest


def without_common_folder(paths: Sequence[str]) -> tuple[str, list[str]]:
    """The folder that all paths begin with, and their rests; an empty one and the paths, if a rest
    would be empty.
    """
    with suppress(ValueError):  # some are relative
        common = os.path.commonpath(paths)
        if common and common not in map(os.path.normpath, paths):
            return common, [os.path.relpath(path, common) for path in paths]
    return "", list(paths)


def curves(names: Sequence[str], *, output: str = "curves.png") -> None:
    """Draw the curves of runs into one picture, and print each one's ends.
    Raises UserError if none has any.

    names: empty: the newest run below RUNS.
    """
    path = Path(output)
    if path.suffix != ".png" or not path.absolute().parent.is_dir():
        raise UserError(f"--output: found {output}; write a file NAME.png in an existing folder")
    folders, console = [RunFolder(name) for name in names] or [newest_run()], Terminal()
    for folder in folders:
        folder.record()
    common, short_names = without_common_folder([str(folder) for folder in folders])
    named = [
        (name, read_curves(folder.metrics))
        for name, folder in zip(short_names, folders, strict=True)
    ]
    drawn = [(name, curves) for name, curves in named if curves.by_key]
    if not drawn:
        raise UserError(
            f"{', '.join(map(str, folders))}: training logged no loss; train again with a smaller"
            " trainer.logging_steps"
        )
    for folder in [
        folder for folder, (_, run) in zip(folders, named, strict=True) if not run.by_key
    ]:
        print_labelled(
            stderr_console(), "notice", f"{folder}: training logged no loss, so it is not drawn"
        )
    if common:
        print_labelled(console, "runs in", common, wrap=False)
    rows = []
    for name, run in named:
        ends = [
            f"{points[-1][1]:.4g}" if (points := run[key]) else "-"
            for key in (LOSS, HELD_OUT, MARGIN)
        ]
        best = f"{run.best[1]:.4g} at step {run.best[0]:g}" if run.best else "-"
        rows.append([name, f"{run.last_step:g}", *ends[:2], best, ends[2]])
    console.print(
        Table(
            ["run", "step", "loss", "held-out", "lowest held-out", "margin"], rows, align="lrrr"
        ).rich()
    )
    dark = draw_curves(drawn, path)
    print_labelled(console, "written", f"{path} and {dark}", wrap=False)
