"""The files of an evaluation, written into its folder in place of those of an earlier one."""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...core.files import remove, write
from . import tables
from .results import NAME, POINTS, read_results, refuse_foreign

Samples = dict[str, dict[str, list[dict[str, Any]]]]
"""lm-eval's samples by row and column."""
UNSAFE = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that JSON allows in a string and that control a terminal, end a line, or cannot be written in UTF-8."""


def write_results(results: dict[str, Any], samples: Samples, output: Path, points: str = "") -> None:
    """Write results.json, points.json, samples/<row>/<column>.jsonl, table.md and scores.png.

    points: content of points.json.

    Raises UserError if this would replace files that no evaluation wrote.
    """
    folder = output / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(output):
        refuse_foreign(output, list(samples))  # again: another evaluation may have written there since the first time
        remove_samples(output)
        # First: it marks the folder as an evaluation's, so that after a kill the same command replaces the other files.
        write(output / NAME, json.dumps(results, indent=2) + "\n")
        write(output / POINTS, points)
        for row, columns in samples.items():
            (folder / row).mkdir()
            for column, each in columns.items():
                write(folder / row / f"{column}.jsonl", "".join(map(_line, each)))
        write(output / "table.md", tables.markdown(results))
        part = output / "scores.png.part"
        remove(part)
        draw(results, part)
        part.replace(output / "scores.png")


def remove_samples(output: Path) -> None:
    """Remove the samples that results.json in `output` names, so that no other evaluation's stay beside new ones."""
    results = read_results(output)
    for row in results["rows"] if results else []:
        entry = output / "samples" / row["name"]
        if entry.is_symlink() or entry.is_file():
            entry.unlink()
        elif entry.is_dir():
            shutil.rmtree(entry)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock a folder, waiting for another evaluation that is writing there, so that its files are all of one."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks: the results of hours are written nevertheless
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _line(sample: dict[str, Any]) -> str:
    """Return a sample as a line of JSON that can be read in a terminal: only control characters are escaped."""
    text = json.dumps(_compact(sample), default=str, ensure_ascii=False)
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def _compact(sample: dict[str, Any]) -> dict[str, Any]:
    """Return lm-eval's sample with a prompt that all choices share written once: 25 shots are 5 kB.

    First what a reader looks for: prompt, answer, right answer and scores.
    """
    prompts, choices = zip(*sample["arguments"], strict=True)
    arguments = {"prompt": prompts[0] if len(set(prompts)) == 1 else prompts, "choices": choices}
    omitted = {"arguments"} | ({"resps"} if [r[0] for r in sample["resps"]] == sample["filtered_resps"] else set())
    first = ("doc_id", "prompt", "choices", "filtered_resps", "target", *sample.get("metrics", ()))
    content = {key: value for key, value in sample.items() if key not in omitted} | arguments
    return {key: content[key] for key in first if key in content} | content


# ---
# The table as a figure: a panel per column, a dot per row with its 95% interval.

MAX_ACROSS = 4
BLUE, GREY = "#0072B2", "#767676"
"""Okabe and Ito's blue, and a grey of contrast 4.5:1 on white. Filled and hollow dots differ without colour too."""


def draw(results: dict[str, Any], path: str | Path) -> None:
    """Write the figure of `results` as a PNG; the same results give the same bytes.

    Rows are in the table's order; a line through each panel marks the first row's score. Published scores are hollow
    and grey, without an interval if none was published.
    """
    columns = list(results["rows"][0]["scores"])
    rows = [(row, row["name"], True) for row in results["rows"]]
    rows += [(row, f"{row['name']} (published)", False) for row in results.get("published", [])]
    across = ceil(len(columns) / ceil(len(columns) / MAX_ACROSS))
    down = ceil(len(columns) / across)
    # Inches: on a page 830 pixels wide, letters of 9 points are 12 pixels high.
    figure = Figure(figsize=(8.5, 0.75 + down * (0.65 + 0.24 * len(rows))), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(fill(results["title"], 80), fontsize=11, fontweight="bold")
    panels = figure.subplots(down, across, squeeze=False, sharey=True).flatten()
    for panel, column in zip(panels, columns, strict=False):
        _draw(panel, column, rows)
    for panel in panels[len(columns) :]:
        panel.set_visible(False)
    panels[0].set_yticks(range(len(rows)), [name for _, name, _ in rows])
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    first = results["rows"][0]["name"]
    caption = f"percent, with the 95% interval of each score; line: {first}; paired differences: see the table"
    figure.supxlabel(caption, fontsize=8, color=GREY)
    canvas.print_png(path, metadata={"Software": None}, pil_kwargs={"optimize": True})


def _draw(panel: Axes, column: str, rows: list[tuple[dict[str, Any], str, bool]]) -> None:
    panel.axvline(rows[0][0]["scores"][column]["value"], color=BLUE, linewidth=0.8, zorder=1)
    for y, (row, _, own) in enumerate(rows):
        score = row["scores"].get(column)
        if score is None:
            continue
        color = BLUE if own else GREY
        half = 1.96 * score.get("stderr", 0)  # published scores have no low and high
        ends = [score.get("low", max(score["value"] - half, 0)), score.get("high", min(score["value"] + half, 100))]
        panel.plot(ends, [y, y], color=color, linewidth=1.4, zorder=2)
        face = color if own else "white"
        panel.plot(score["value"], y, "o", markersize=5, color=color, markerfacecolor=face, zorder=3)
    panel.set_title(column, fontsize=9, fontweight="bold" if column == "average" else "normal")
    panel.tick_params(axis="x", labelsize=8)
    panel.tick_params(axis="y", length=0, labelsize=9)
    panel.locator_params(axis="x", nbins=4)
    panel.grid(axis="x", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
