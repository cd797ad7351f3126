"""The paper's figures of spectra, for any run that recorded gradients: `soren-align spectrum
--preset`.

    paper-spectra        singular values of gradients and of the maps' outputs, of the first and of the last layer
    paper-log-centered   log2 of the singular values of outputs, minus their median, of the last layer

A picture has a column per step. The paper's source lacks its pictures, so the scales and limits of
the axes are ours. Beside the paper's lines stands the map of the authors' released code.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor, nan

from ..core.figures import FONT, Colors, style_axes, write_pictures
from ..optim import SpectralOptimizer
from .spectra import EXACT, FLOOR, MAX_STEPS, Spectrum, by_kind, outputs, spread

GRADIENT, SNS, RELEASED = "gradient / its largest", "Soren (SNS)", "Soren, released code"
LABELS = {"muon": "Muon", EXACT: "exact sigmoid", "sns 15": SNS, "released 5": RELEASED}
"""Of the maps of `all_maps` that are drawn."""
STYLES: dict[str, tuple[int | None, Any]] = {
    GRADIENT: (None, ":"), "Muon": (2, (0, (3, 1.5))), "exact sigmoid": (1, "-"), SNS: (0, (0, (5, 2))),
    RELEASED: (3, (0, (6, 2, 1.2, 2))),
}  # fmt: skip
"""The number of a line's colour in Colors.lines (None: muted), and its dashes."""
Lines = dict[str, Tensor]
Maps = dict[str, SpectralOptimizer]


def reshaped(spectrum: Spectrum, maps: Maps) -> Lines:
    """The singular values of a gradient over the largest, and of the outputs of Muon, SNS and the
    released map.
    """
    sigma = spectrum.without_null_space
    mapped = {
        LABELS[name]: outputs(spectrum, maps[name]) for name in ("muon", "sns 15", "released 5")
    }
    lines = {GRADIENT: sigma / sigma[0], **mapped}
    return {label: values.where(values >= FLOOR / 2, nan) for label, values in lines.items()}


def log_centered(spectrum: Spectrum, maps: Maps) -> Lines:
    """log2 of the singular values of the outputs of the exact sigmoid, SNS and the released map,
    minus the median.

    Without the null space of the input, whose modes have no logarithm.
    """
    lines = {}
    for name in (EXACT, "sns 15", "released 5"):
        values = outputs(spectrum, maps[name])
        logarithms = values.where(values > 0, nan).log2()
        lines[LABELS[name]] = logarithms - logarithms.nanquantile(0.5)
    return lines


@dataclass(frozen=True)
class Preset:
    """A figure of the paper: its lines, the number of layers (the last ones of the chosen), and its
    vertical axis.
    """

    lines: Callable[[Spectrum, Maps], Lines]
    num_layers: int
    label: str
    scale: str
    limits: tuple[float, float] | None = None


PRESETS = {
    "paper-spectra": Preset(reshaped, 2, "singular value", "log", (FLOOR, 2.0)),
    "paper-log-centered": Preset(log_centered, 1, "log2 - median", "linear"),
}


def draw(name: str, spectra: Sequence[Spectrum], maps: Maps, folder: Path) -> list[Path]:
    """Write a picture of PRESETS per kind of matrix into `folder`, and one for a dark page; returns
    their paths.
    """
    preset, files = PRESETS[name], []
    for kind, members in by_kind(spectra).items():
        layers = spread([*dict.fromkeys(spectrum.name for spectrum in members)], 2)[
            -preset.num_layers :
        ]
        steps = spread(sorted({spectrum.step for spectrum in members}), MAX_STEPS)
        panels = {
            (spectrum.name, spectrum.step): preset.lines(spectrum, maps)
            for spectrum in members
            if spectrum.name in layers and spectrum.step in steps
        }
        light = folder / f"{kind}-{name}.png"
        files += [light, write_pictures(light, partial(_figure, preset, layers, steps, panels))]
    return files


def _figure(
    preset: Preset,
    layers: list[str],
    steps: list[int],
    panels: dict[tuple[str, int], Lines],
    colors: Colors,
) -> Figure:
    figure = Figure(
        figsize=(6.4, 0.9 + 2.1 * len(layers)),
        dpi=200,
        layout="constrained",
        facecolor=colors.paper,
    )
    grid = figure.subplots(len(layers), len(steps), squeeze=False, sharex="row", sharey=True)
    for i, layer in enumerate(layers):
        for j, step in enumerate(steps):
            axes = grid[i][j]
            for label, values in panels.get((layer, step), {}).items():
                number, dashes = STYLES[label]
                color = colors.muted if number is None else colors.lines[number]
                axes.plot(
                    range(1, len(values) + 1),
                    values,
                    color=color,
                    linestyle=dashes,
                    linewidth=1.6,
                    label=label,
                )
            axes.set_yscale(preset.scale)
            # without: None would end the scaling to the lines of the later panels
            if preset.limits:
                axes.set_ylim(preset.limits)
            axes.yaxis.set_minor_locator(NullLocator())
            style_axes(axes, f"step {step:,}", "", colors)
        place = re.sub(r".*layers\.(\d+)\..*", r"layer \1", layer.removesuffix(".weight"))
        grid[i][0].set_ylabel(
            f"{place}: {preset.label}", fontsize=FONT - 1, color=colors.ink, parse_math=False
        )
    entries = {
        label: line
        for axes in grid.flat
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    legend: dict[str, Any] = {
        "loc": "outside upper center",
        "frameon": False,
        "labelcolor": colors.ink,
    }
    legend |= {"ncols": 3 if len(entries) == 3 else 2, "handlelength": 3.0, "fontsize": FONT}
    figure.legend([*entries.values()], [*entries], **legend)
    figure.supxlabel(
        "number of the singular value, from the largest on", fontsize=FONT, color=colors.ink
    )
    return figure
