"""Draw docs/idea.svg and docs/idea-dark.svg, README's first picture: what each optimizer makes of a
momentum.

    python docs/make_pictures.py        ten seconds

The singular values of a momentum (research/recorded.py: SFT of SmolLM2-135M, step 12) and of
the updates that AdamW, Muon and Soren make: Soren's and Muon's by the maps of soren_align.spectral,
AdamW's as recorded. All have the same size, a root mean square of 1 over a matrix's singular
values, as match_rms_measured scales updates. A line is the median over 28 matrices of the four
layers 0, 9, 19 and 29.
"""

import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from torch import Tensor

from research.recorded import ADAMW as ADAMW_UPDATES
from research.recorded import recorded_spectra
from soren_align.core.figures import DARK, FONT, LIGHT, LINES, Colors, compact, style_axes
from soren_align.core.text import Table
from soren_align.spectral import minimax_sigmoid, newton_schulz, released_sigmoid

DOCS = Path(__file__).parent
STEP = 12
SHARES = torch.linspace(0, 1, 101, dtype=torch.float64)
"""Of a matrix's directions, the strongest first: where a line is drawn."""
MOMENTUM, ADAMW, RELEASED = "the momentum", "AdamW", "Soren, the\nreleased code"
MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "Soren": minimax_sigmoid,
    "Muon": newton_schulz,
    RELEASED: released_sigmoid,
}
STYLES = {MOMENTUM: (None, ":"), ADAMW: (LINES["adamw"], (0, (5, 2))), RELEASED: (4, (0, (6, 2, 1.2, 2))),
          "Muon": (LINES["muon"], (0, (3, 1.5))), "Soren": (LINES["soren"], "-")}  # fmt: skip
"""In the order of drawing: the number of a line's colour in figures.Colors (None: muted), and its
dashes."""


def spectra() -> dict[str, Tensor]:
    """The singular values at SHARES by name, medians over the matrices, each matrix's with a root
    mean square of 1.
    """
    momenta = [each.sigma for each in recorded_spectra(sets=["smollm2"]) if each.step == STEP]
    updates = [each.sigma for each in recorded_spectra(sets=[ADAMW_UPDATES])]
    by_name = {MOMENTUM: momenta, ADAMW: updates}
    by_name |= {
        name: [f(torch.diag(sigma)).diagonal() for sigma in momenta] for name, f in MAPS.items()
    }
    return {
        name: torch.stack([*map(_at_shares, values)]).quantile(0.5, 0)
        for name, values in by_name.items()
    }


def _at_shares(sigma: Tensor) -> Tensor:
    sigma = sigma.sort(descending=True).values
    return (sigma / sigma.square().mean().sqrt())[(SHARES * (len(sigma) - 1)).round().long()]


def numbers(lines: dict[str, Tensor]) -> str:
    """The lines at some of SHARES, as a table in Markdown."""
    rows = [
        [name.replace("\n", " "), *(f"{float(lines[name][i]):.2g}" for i in (0, 10, 50, 90))]
        for name in STYLES
    ]
    return Table(["update", "largest", "at 10%", "at 50%", "at 90%"], rows).markdown()


def draw(lines: dict[str, Tensor], colors: Colors) -> str:
    """The picture as SVG, its letters as paths; equal lines give equal bytes."""
    settings = {"svg.hashsalt": "soren-align", "font.family": "DejaVu Sans", "svg.fonttype": "path"}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(6.8, 3.4), layout="constrained")
        axes = figure.subplots()
        for name, (number, dashes) in STYLES.items():
            color = colors.muted if number is None else colors.lines[number]
            width = 2.6 if name == "Soren" else 1.8
            axes.semilogy(100 * SHARES, lines[name], color=color, linestyle=dashes, linewidth=width)
            place = {"xy": (101, float(lines[name][-4])), "va": "center", "annotation_clip": False}
            axes.annotate(
                name, **place, fontsize=FONT, color=color, fontweight="bold", linespacing=0.95
            )
        style_axes(
            axes,
            "How much each direction of a weight matrix moves",
            "singular values, largest first (%)",
            colors,
        )
        axes.set_xlim(0, 100)
        axes.set_ylim(0.006, 20)
        axes.yaxis.set_major_formatter(FuncFormatter(compact))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylabel("strength in the update", fontsize=FONT, color=colors.ink)
        text = StringIO()
        figure.savefig(
            text, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    return text.getvalue()


def main() -> None:
    """Write both pictures, and print numbers of their lines for research/studies/spectra.md."""
    lines = spectra()
    print(numbers(lines))
    for name, colors in (("idea", LIGHT), ("idea-dark", DARK)):
        (DOCS / f"{name}.svg").write_text(draw(lines, colors), encoding="utf-8")


if __name__ == "__main__":
    main()
