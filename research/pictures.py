"""Pictures of the spectra of a run, and the paper's figures of them.

    python -m research.pictures RUN DIR                          the spectra of the momenta, and every map's output
    python -m research.pictures RUN DIR --gradients              those of the gradients, if they were recorded
    python -m research.pictures RUN DIR --preset paper-spectra   the paper's figures, of recorded gradients:

    paper-spectra        singular values of gradients and of the maps' outputs, of the first and of the last layer
    paper-log-centered   log2 of the singular values of outputs, minus their median, of the last layer

A picture has a column per step and a row per layer, a line per map. The paper's source lacks its
pictures, so the scales and limits of the axes are ours. Beside the paper's lines stands the map of
the authors' released code.
"""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor, nan

from soren_align.core.figures import FONT, Colors, line_style, short, style_axes, write_pictures
from soren_align.optim import SpectralOptimizer
from soren_align.run.folder import RunFolder
from soren_align.run.spectra import EXACT, Spectrum, all_maps, mapped, outputs, spectra_of_run

MAX_LAYERS, MAX_STEPS = 3, 3
FLOOR = 3e-4
"""The lower end of the axis: smaller values are not drawn."""


def by_kind(spectra: Sequence[Spectrum]) -> dict[str, list[Spectrum]]:
    """The spectra of each kind of matrix, by the stem of its picture's file name.

    Matrices whose names differ in numbers only are of one kind.
    """
    kinds: dict[str, list[Spectrum]] = {}
    for spectrum in spectra:
        kind = re.sub(r"\.\d+\b", "", spectrum.name.removesuffix(".weight"))
        kinds.setdefault(kind + "-gradient" * (spectrum.of == "gradient"), []).append(spectrum)
    # A name may come from anyone, and must not lead to another folder.
    names = [re.sub(r"[^\w.-]", "_", name)[-100:] for name in short_names([*kinds], 2)]
    return dict(zip(names, kinds.values(), strict=True))


def short_names(names: Sequence[str], num_parts: int) -> list[str]:
    """The names without the first parts, between dots, that all share; at least `num_parts` of each
    stay.
    """
    parts = [name.split(".") for name in names]
    start = 0
    # Names of one model begin alike, and a table of 80 columns has no room for that.
    while start < min(map(len, parts)) - num_parts and len({p[start] for p in parts}) == 1:
        start += 1
    return [".".join(p[start:]) for p in parts]


def draw(
    spectra: Sequence[Spectrum], maps: dict[str, SpectralOptimizer], folder: Path
) -> list[Path]:
    """Write a PNG per kind of matrix into `folder`, and one for a dark page; equal spectra give
    equal bytes.

    A picture has a row per layer and a column per step, at most MAX_LAYERS and MAX_STEPS, the first
    and the last among them. Returns the paths.
    """
    files = []
    for kind, members in by_kind(spectra).items():
        names = spread([*dict.fromkeys(spectrum.name for spectrum in members)], MAX_LAYERS)
        steps = spread(sorted({spectrum.step for spectrum in members}), MAX_STEPS)
        panels = {
            (spectrum.name, spectrum.step): (
                spectrum,
                {label: mapped(spectrum, map_) for label, map_ in maps.items()},
            )
            for spectrum in members
            if spectrum.name in names and spectrum.step in steps
        }
        light = folder / f"{kind}.png"
        files += [light, write_pictures(light, partial(_figure, names, steps, panels))]
    return files


Panels = dict[tuple[str, int], tuple[Spectrum, dict[str, Tensor]]]
"""The spectrum of a matrix's name and step, and the outputs of the maps."""


def _figure(names: list[str], steps: list[int], panels: Panels, colors: Colors) -> Figure:
    figure = Figure(
        figsize=(6.4, 1.2 + 2.3 * len(names)), dpi=200, layout="constrained", facecolor=colors.paper
    )
    grid = figure.subplots(len(names), len(steps), squeeze=False, sharex="row", sharey=True)
    entries: dict[str, Any] = {}
    for name, row in zip(names, grid, strict=True):
        for step, axes in zip(steps, row, strict=True):
            axes.set_yscale("log")
            axes.set_ylim(FLOOR, 1.5)
            axes.yaxis.set_minor_locator(NullLocator())
            style_axes(axes, f"step {step:,}", "", colors)
            if (name, step) in panels:
                _draw_lines(axes, *panels[name, step], colors)
                entries |= {line.get_label(): line for line in axes.lines}
                place = re.sub(r".*layers\.(\d+)\.", r"layer \1, ", name.removesuffix(".weight"))
                label = f"{short(place, 32)}\n{' x '.join(map(str, panels[name, step][0].shape))}"
                row[0].set_ylabel(label, fontsize=FONT - 1, color=colors.ink, parse_math=False)
    legend: dict[str, Any] = {
        "loc": "outside upper center",
        "frameon": False,
        "labelcolor": colors.ink,
    }
    figure.legend(
        [*entries.values()], [*entries], ncols=3, handlelength=3.5, fontsize=FONT, **legend
    )
    figure.supxlabel(
        "number of the singular value, from the largest on", fontsize=FONT, color=colors.ink
    )
    return figure


def _draw_lines(axes: Axes, spectrum: Spectrum, outputs: dict[str, Tensor], colors: Colors) -> None:
    """The singular values of one matrix and of the outputs of the maps."""
    numbers = range(1, min(spectrum.shape) + 1)
    if not spectrum.nu:
        axes.text(
            0.5, 0.5, "zero", transform=axes.transAxes, ha="center", fontsize=FONT, color=colors.ink
        )
    # 0 / 0 is nan, which is not drawn: the lines stay for the legend.
    values = _drawn(spectrum.without_null_space / spectrum.nu)
    axes.plot(numbers, values, color=colors.ink, linewidth=1.8, label=f"{spectrum.of} / nu")
    for i, (label, output) in enumerate(outputs.items()):
        style: dict[str, Any] = line_style(1 + i, colors)
        if label == EXACT:
            style = {
                "color": colors.muted,
                "linestyle": "-",
                "marker": "o",
                "markerfacecolor": colors.paper,
            }
        drawn = _drawn(output)
        # Markers at different modes, so that none covers another; matplotlib fails to place them on
        # an empty line.
        places = None if all(map(math.isnan, drawn)) else (0.03 + 0.13 * i / len(outputs), 0.3)
        axes.plot(
            numbers, drawn, label=label, markevery=places, markersize=4, linewidth=1.3, **style
        )
    axes.set_xlim(0, len(numbers) + 1)


def _drawn(values: Tensor) -> list[float]:
    return values.where(values >= FLOOR / 2, nan).tolist()


def spread(items: list, most: int) -> list:
    """At most `most` of the items, the first and the last among them, in their order."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


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


def draw_preset(name: str, spectra: Sequence[Spectrum], maps: Maps, folder: Path) -> list[Path]:
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
        files += [
            light,
            write_pictures(light, partial(_preset_figure, preset, layers, steps, panels)),
        ]
    return files


def _preset_figure(
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


def main() -> None:
    """Draw, as the module's docstring says."""
    parser = argparse.ArgumentParser(prog="python -m research.pictures", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", help="a run folder")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--matrices", action="append", metavar="GLOB")
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--preset", choices=PRESETS)
    options = parser.parse_args()
    of = "gradient" if options.preset or options.gradients else "momentum"
    _, spectra = spectra_of_run(RunFolder(options.run), options.matrices or ["*"], of)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.preset:
        files = draw_preset(options.preset, spectra, all_maps(), options.folder)
    else:
        files = draw(spectra, all_maps(), options.folder)
    print("\n".join(map(str, files)))


if __name__ == "__main__":
    main()
