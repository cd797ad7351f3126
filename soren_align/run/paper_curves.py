"""The paper's figures of losses, from any run folders: `soren-align curves RUN... --preset paper-losses`.

A row for each model, with the training losses at the left and the evaluation losses at the right; a line for each run,
with the name of its optimizer. The paper's source lacks its pictures, so the axes are ours: linear, and without the
losses above those after the first tenth of the steps, which would hide all differences.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import printable
from ..core.figures import FONT, Colors, compact, line_style, short, style_axes, write_pictures
from .curves import HELD_OUT, LOSS, MAX_MARKERS, Curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..recipe import Recipe

PRESET = "paper-losses"
PANELS = {LOSS: "training loss", HELD_OUT: "evaluation loss"}
CUT_OFF = 0.1
"""The share of the steps whose losses do not set the limits of an axis."""


def draw_losses(runs: Sequence[tuple[str, "Recipe", Curves]], path: Path) -> Path:
    """Write the picture of runs (folder, recipe, curves), and one for a dark page, whose path is returned."""
    rows: dict[str, list[tuple[str, Curves]]] = {}
    models = [Path(recipe.model.name_or_path).name for _, recipe, _ in runs]
    lines = Counter(zip(models, (recipe.optimizer.title for _, recipe, _ in runs), strict=True))
    for model, (folder, recipe, curves) in zip(models, runs, strict=True):
        title = recipe.optimizer.title
        label = title if lines[model, title] == 1 else f"{title}, {folder}"
        rows.setdefault(model, []).append((label, curves))
    return write_pictures(path, partial(_figure, rows))


def limits(curves: Sequence[list[tuple[float, float]]]) -> tuple[float, float] | None:
    """Return the limits of an axis for curves of (step, loss): from the lowest loss to the highest after CUT_OFF.

    None for fewer than two different losses.
    """
    last = max((step for points in curves for step, _ in points), default=0.0)
    late = [loss for points in curves for step, loss in points if step >= CUT_OFF * last]
    if not late or min(late) == max(late):
        return None
    margin = 0.04 * (max(late) - min(late))
    return min(late) - margin, max(late) + margin


def _figure(rows: dict[str, list[tuple[str, Curves]]], colors: Colors) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 0.6 + 2.6 * len(rows)), dpi=200, layout="constrained", facecolor=colors.paper)
    for panels, (model, runs) in zip(figure.subplots(len(rows), 2, squeeze=False), rows.items(), strict=True):
        for axes, (key, title) in zip(panels, PANELS.items(), strict=True):
            for number, (label, curves) in enumerate(runs):
                points = curves[key]
                style: dict[str, Any] = line_style(number, colors) | {"linewidth": 1.2, "markersize": 4}
                if key == LOSS or len(points) >= MAX_MARKERS:
                    style["marker"] = ""
                axes.plot(*(zip(*points, strict=True) if points else ([], [])), **style, label=printable(label))
            axes.set_ylim(limits([curves[key] for _, curves in runs]))
            style_axes(axes, title, "step", colors)
            axes.xaxis.set_major_formatter(compact)
        panels[0].set_ylabel(short(model, 40), fontsize=FONT, color=colors.ink, fontweight="bold", parse_math=False)
        panels[0].legend(frameon=False, fontsize=FONT - 1, labelcolor=colors.ink)
    return figure
