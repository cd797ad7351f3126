"""The table as a figure: a panel per column, a dot per row with its 95% interval."""

from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

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
