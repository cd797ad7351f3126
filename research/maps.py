"""Maps by a formula: fit polynomials to it, prove their error, and write the file of a recipe.

    python -m research.maps 'tanh(x / 0.05)' --output tanh.json     then, in a recipe: `map: {file: tanh.json}`
    python -m research.maps 'min(x / 0.1, 1)' --error 0.03 --plot clip.png
    python -m research.maps minimax --plot minimax.png              a map of soren-align, by its name

x is a singular value, divided by the size of the matrix that --of names: nu, (sum of
sigma^8)^(1/8), which is a little more than the largest singular value; norm, the Frobenius norm;
rms, the root mean square of the singular values; none, 1. The composition is fitted on
[resolution * limit, limit]; a matrix with a larger x is scaled down. The error is a share of the
largest value, and is proved (bound.py), not sampled.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from soren_align.core.errors import UserError
from soren_align.core.figures import LIGHT, Colors, style_axes, write_pictures
from soren_align.core.text import number
from soren_align.spectral.composition import Composed, value
from soren_align.spectral.exact import unit_of
from soren_align.spectral.maps import FILE, MAPS, SpectralMap, steps_flops

from .compose import SHAPES, compose, over_muon, target_of
from .formula import parse
from .recorded import recorded_spectra

ROWS = 256
"""Of the matrices of float16's error."""
EVERY = 6
"""One recorded spectrum in so many is mapped."""
PAPER_RANGE = (0.01, 1.0)
"""The singular values of the paper's figure of SNS. The matrices are diag(x, sqrt(1 - x^2)): the
norm is 1."""


def settings_of(composed: Composed) -> dict[str, Any]:
    """The settings of the map `file` with this content, without a file."""
    return {"file": "", "composition": {**composed.as_dict(), "file": ""}}


def measure(spectral_map: SpectralMap, settings: dict[str, Any]) -> dict[str, Any]:
    """The cost of a map, and its errors: of float16, and on recorded momenta of its target."""
    flops: Any = partial(spectral_map.num_flops, **settings)
    result = {"flops_over_muon": over_muon(flops) if flops(*SHAPES[0]) else None}
    # float16's products by emulation on a CPU: the largest distance on four spectra
    result["float16_error"] = None
    if "float16" in spectral_map.precisions:
        generator = torch.Generator().manual_seed(0)
        normal = torch.randn(2, ROWS, ROWS, generator=generator, dtype=torch.float64)
        (u, v), index = torch.linalg.qr(normal).Q, torch.arange(1, ROWS + 1, dtype=torch.float64)
        distances = []
        for sigma in (torch.ones_like(index), 1 / index, index**-0.5, 1.0 * (index <= ROWS // 8)):
            x = ((u * (sigma / sigma.norm())) @ v.mT).float()
            wide, narrow = (
                spectral_map.function(x, precision=precision, max_norm=1.0, **settings)[0]
                for precision in ("float32", "float16")
            )
            distances.append(float((narrow - wide).norm() / wide.norm()))
        result["float16_error"] = max(distances)
    return result


def recorded_error(
    spectral_map: SpectralMap, settings: dict[str, Any], target: Any, every: int = EVERY
) -> float:
    """The mean relative distance of a map's output from that of its target, on recorded momenta.
    target: of singular values.
    """
    distances = []
    for spectrum in recorded_spectra()[::every]:
        sigma = spectrum.without_null_space
        exact = target(sigma).where(sigma > 0, 0.0)
        x = sigma.float().diag()
        output, _ = spectral_map.function(x, precision="float32", max_norm=None, **settings)
        distances.append(float((output.diagonal().double() - exact).norm() / exact.norm()))
    return fmean(distances)


def describe_formula(composed: Composed) -> dict[str, Any]:
    """The numbers of a fitted formula."""

    def target(sigma: torch.Tensor) -> torch.Tensor:
        x = sigma / unit_of(sigma, composed.of)
        return parse(composed.formula)(x.clamp(max=composed.limit))

    settings = settings_of(composed)
    return {
        "formula": composed.formula,
        "num_steps": len(composed.composition.steps),
        **measure(FILE, settings),
        "flops_over_muon": over_muon(partial(steps_flops, steps=composed.composition.steps)),
        "recorded_error": recorded_error(FILE, settings, target),
        "composition": composed.as_dict(),
    }


def describe_map(name: str) -> dict[str, Any]:
    """The numbers of a map of soren-align, with its default settings."""
    spectral_map = MAPS[name]
    settings = spectral_map.defaults
    result = {"formula": name, **measure(spectral_map, settings), "recorded_error": None}
    if not spectral_map.is_drawn:
        target = partial(spectral_map.target, **settings)
        result["recorded_error"] = recorded_error(spectral_map, settings, target)
    return result


def lines(result: dict[str, Any]) -> list[str]:
    """The numbers as text, one line each."""
    rows = [("map", result["formula"])]
    if composition := result.get("composition"):
        start, below = composition["resolution"] * composition["limit"], composition["error_below"]
        certificate = f"{composition['error']:.2%} of the largest value, from x = {start:g} on"
        rows += [("of", composition["of"]), ("certified error", certificate)]
        falls = "not bounded" if below is None else f"{below:.2%}: the update falls to 0"
        rows += [("below", falls)]
        rows += [("steps", f"{result['num_steps']}, each a polynomial of degree 5")]
    rows.append(("FLOPs over Muon's", number(result["flops_over_muon"], ".2f")))
    rows.append(("float16", f"{number(result['float16_error'], '.2%')} from float32 (emulated)"))
    distance = number(result["recorded_error"], ".2%")
    rows.append(("recorded momenta", f"{distance} from the formula, on average"))
    width = max(len(label) for label, _ in rows)
    return [f"{label:{width}}  {text}" for label, text in rows]


def draw(subject: Composed | str, file: Path) -> list[Path]:
    """Write the picture of a composition, or of a map by its name, and return its paths.
    file: .svg, or .png, which gets NAME-dark.png beside it.

    Above the function and what the polynomials make of it, below their difference: of a map the
    relative one, the paper's two panels of SNS.
    """
    figure = partial(_figure, subject)
    if file.suffix == ".png":
        return [file, write_pictures(file, figure)]
    figure(LIGHT).savefig(file, metadata={"Date": None})
    return [file]


def _figure(subject: Composed | str, colors: Colors) -> Figure:
    figure = Figure(figsize=(7, 5), dpi=200, layout="constrained", facecolor=colors.paper)
    top, bottom = figure.subplots(2, 1, sharex=True)
    if isinstance(subject, Composed):
        u = np.geomspace(subject.resolution / 10, 1, 1000)
        x, ours = u * subject.limit, value(subject.composition, u)
        exact = parse(subject.formula)(x)
        error = (ours - exact) / subject.largest
        labels = subject.formula, f"polynomials, {len(subject.composition.steps)} steps"
        titles = "error, as a share of the largest value", "x"
        top.set_xscale("log")
        for side in (-1, 1):
            bottom.axhline(side * subject.error, color=colors.muted, linestyle=":")
        bottom.axvline(subject.resolution * subject.limit, color=colors.muted, linestyle=":")
        bottom.set_ylim(-2 * subject.error, 2 * subject.error)
    else:
        spectral_map = MAPS[subject]
        settings = spectral_map.defaults
        x = torch.linspace(*PAPER_RANGE, 2000, dtype=torch.float64)
        matrices = torch.stack([x, (1 - x**2).sqrt()], dim=-1).float().diag_embed()
        output, _ = spectral_map.function(matrices, precision="float32", max_norm=1.0, **settings)
        ours, exact = output[:, 0, 0].double(), spectral_map.target(x, **settings)
        relative = (ours - exact).abs() / exact
        error = 100 * relative
        labels = spectral_map.target.__name__, spectral_map.label.format(**settings)
        largest = f"{float(relative.max()):.2%} at {float(x[relative.argmax()]):.2g}"
        titles = f"relative error, %; largest: {largest}", "singular value of a matrix of norm 1"
    top.plot(x, exact, color=colors.muted, linewidth=3, label=labels[0])
    top.plot(x, ours, color=colors.lines[2], linestyle="--", label=labels[1])
    top.legend(frameon=False, labelcolor=colors.ink)
    bottom.plot(x, error, color=colors.lines[1])
    style_axes(top, "value", "", colors)
    style_axes(bottom, *titles, colors)
    return figure


def main(arguments: list[str] | None = None) -> int:
    """Fit, print, write and draw. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m research.maps", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("formula", help="a function of x, or a map's name")
    parser.add_argument("--of", choices=("nu", "norm", "rms", "none"), default="nu")
    parser.add_argument("--error", type=float, default=0.01, metavar="SHARE")
    parser.add_argument("--resolution", type=float, default=4e-4, metavar="X")
    parser.add_argument("--limit", type=float, default=1.0, metavar="X", help="of rms and none")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=".png or .svg")
    parser.add_argument("--json", action="store_true")
    o = parser.parse_args(arguments)
    try:
        if o.formula in MAPS:
            subject, result = o.formula, describe_map(o.formula)
        else:
            target = target_of(o.formula, {}, o.of, o.resolution, o.limit)
            subject = compose(target, o.error)
            result = describe_formula(subject)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=2) if o.json else "\n".join(lines(result)))
    if o.output and isinstance(subject, Composed):
        o.output.write_text(json.dumps(subject.as_dict(), indent=1) + "\n", encoding="utf-8")
    if o.plot:
        draw(subject, o.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
