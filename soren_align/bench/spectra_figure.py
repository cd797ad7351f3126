"""Pictures of spectra, as in the paper's Figure 1: a panel per layer and step, a line per map, values on a log axis."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from ..optim import SpectralOptimizer
from .run_spectra import EXACT, mapped, short_names
from .spectra import Spectrum

MAX_LAYERS, MAX_STEPS = 3, 3
# Line styles and markers differ without colour too. Okabe and Ito's colours, the lightest excepted.
EXACT_STYLE = {"color": "#767676", "linestyle": "-", "marker": "o", "markerfacecolor": "white"}
STYLES = (
    {"color": "#D55E00", "linestyle": ":", "marker": "x"},
    {"color": "#0072B2", "linestyle": "--", "marker": "s"},
    {"color": "#009E73", "linestyle": "-.", "marker": "^"},
    {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "D"},
    {"color": "#E69F00", "linestyle": (0, (1, 1)), "marker": "v"},
    {"color": "#56B4E9", "linestyle": (0, (7, 2)), "marker": "P"},
)
NUM_COLORS = 64
"""Of a picture: a third of the bytes of one in all colours."""
FLOOR = 3e-4
"""The lower end of the axis: smaller values are not drawn."""


def draw(spectra: Sequence[Spectrum], maps: dict[str, SpectralOptimizer], folder: Path) -> list[Path]:
    """Write a PNG per kind of matrix into `folder`, and return their paths; equal spectra give equal bytes.

    Matrices whose names differ in numbers only are of one kind: a row per layer, a column per step, at most MAX_LAYERS
    and MAX_STEPS, the first and the last among them.
    """
    kinds: dict[str, list[Spectrum]] = {}
    for spectrum in spectra:
        kinds.setdefault(re.sub(r"\.\d+\b", "", spectrum.name.removesuffix(".weight")), []).append(spectrum)
    # A name may come from anyone, and must not lead to another folder.
    names = [re.sub(r"[^\w.-]", "_", name)[-100:] for name in short_names([*kinds], 2)]
    files = [folder / f"{name}.png" for name in names]
    for members, file in zip(kinds.values(), files, strict=True):
        _draw_kind(members, maps, file)
    return files


def _draw_kind(spectra: Sequence[Spectrum], maps: dict[str, SpectralOptimizer], file: Path) -> None:
    rows = _spread([*dict.fromkeys(spectrum.name for spectrum in spectra)], MAX_LAYERS)
    columns = _spread(sorted({spectrum.step for spectrum in spectra}), MAX_STEPS)
    figure = Figure(figsize=(8.5, 0.9 + 2.4 * len(rows)), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), len(columns), squeeze=False, sharex="row", sharey=True)
    for spectrum in spectra:
        if spectrum.name in rows and spectrum.step in columns:
            panel = panels[rows.index(spectrum.name)][columns.index(spectrum.step)]
            _draw_panel(panel, spectrum, maps)
            entries = panel.get_legend_handles_labels()
    for name, row in zip(rows, panels, strict=True):
        label = re.sub(r".*layers\.(\d+)\.", r"layer \1, ", name.removesuffix(".weight"))
        row[0].set_ylabel(label, fontsize=8, parse_math=False)
    legend = {"loc": "outside upper center", "ncols": 4, "fontsize": 8, "frameon": False, "handlelength": 3.5}
    figure.legend(*entries, **legend)
    figure.supxlabel("mode, from the largest singular value on", fontsize=8)
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba()))
    image.convert("RGB").quantize(NUM_COLORS).save(file, optimize=True)


def _draw_panel(panel: Axes, spectrum: Spectrum, maps: dict[str, SpectralOptimizer]) -> None:
    numbers = range(1, min(spectrum.shape) + 1)
    if not spectrum.nu:
        panel.text(0.5, 0.5, "zero", transform=panel.transAxes, ha="center", fontsize=8)
    # 0 / 0 is nan, which is not drawn: the lines stay for the legend.
    panel.semilogy(numbers, _drawn(spectrum.without_null_space / spectrum.nu), color="black", label="momentum / nu")
    for i, (label, optimizer) in enumerate(maps.items()):
        style = EXACT_STYLE if label == EXACT else STYLES[i % len(STYLES)]
        drawn = _drawn(mapped(spectrum, optimizer))
        # Markers at different modes, so that none covers another; matplotlib fails to place them on an empty line.
        places = None if all(map(math.isnan, drawn)) else (0.03 + 0.13 * i / len(maps), 0.16)
        line = {**style, "markevery": places, "markersize": 4, "linewidth": 1.1}
        panel.semilogy(numbers, drawn, label=label, **line)
    panel.set_xlim(0, len(numbers) + 1)
    panel.set_ylim(FLOOR, 1.5)
    panel.set_title(f"step {spectrum.step}, {' x '.join(map(str, spectrum.shape))}", fontsize=8)
    panel.tick_params(labelsize=8)
    panel.grid(color="#dddddd", linewidth=0.5)
    panel.set_axisbelow(True)


def _drawn(values: Tensor) -> list[float]:
    return values.where(values >= FLOOR / 2, torch.nan).tolist()


def _spread(items: list, most: int) -> list:
    """At most `most` of the items, the first and the last among them, in their order."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
