"""`soren-align map FORMULA`: a map's certificate, cost and errors, without a model and without
training.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from ..core.errors import UserError
from ..core.figures import LIGHT, Colors, style_axes, write_pictures
from ..core.text import number
from ..spectral.compose import SHAPES, Target, from_dict, over_muon
from ..spectral.composed import unit_of
from ..spectral.composition import value
from ..spectral.formula_maps import target_of
from ..spectral.maps import MAPS
from .recorded import RECORDED, recorded_spectra

ROWS = 256
"""Of the matrices of float16's error."""
EVERY = 6
"""Of the recorded spectra one in so many, for maps that are no composition: their matrices are
mapped."""
PAPER_RANGE = (0.01, 1.0)
"""The singular values of the paper's figure of SNS. The matrices are diag(x, sqrt(1 - x^2)): the
norm is 1."""
Settings = Mapping[str, Any]


def describe(text: str, chosen: Settings) -> tuple[dict[str, Any], Target | None]:
    """The numbers of a formula, or of a map by name, and what its polynomials match.
    chosen: some of its settings.

    Raises UserError for a formula without a certificate, and for a setting that a map does not
    have.
    """
    name = text if text in MAPS and text != "formula" else "formula"
    spectral_map, own = MAPS[name], {"formula": text} if name == "formula" else {}
    for key in chosen.keys() - spectral_map.settings.keys():
        raise UserError(f"--{key}: the map {name} has no such setting; remove this option")
    settings = spectral_map.complete({**spectral_map.plain_defaults, **own, **chosen})
    flops: Any = partial(spectral_map.num_flops, **settings)
    composed, target = None, None
    result = {
        "formula": text,
        "settings": {key: setting for key, setting in settings.items() if key != "composition"},
        "resolution": settings.get("resolution"),
        "certified_error": None,
        "error_below": None,
        "num_products": None,
        "steps": None,
        "flops_over_muon": over_muon(flops) if flops(*SHAPES[0]) else None,
        "float16_error": None,
        "recorded_error": None,
    }
    if settings.get("composition"):
        composed = from_dict(settings["composition"])
        target = target_of(name, settings)
        result["formula"] = str(target.formula)
        result |= {"certified_error": composed.error, "error_below": composed.error_below}
        result |= {"num_products": composed.num_products, "steps": settings["composition"]}

    # on a CPU by emulation: the largest distance on four spectra
    if "float16" in spectral_map.precisions:
        generator = torch.Generator().manual_seed(0)
        u, v = (
            torch.linalg.qr(torch.randn(ROWS, ROWS, generator=generator, dtype=torch.float64)).Q
            for _ in range(2)
        )
        index, distances = torch.arange(1, ROWS + 1, dtype=torch.float64), []
        for sigma in (torch.ones_like(index), 1 / index, index**-0.5, 1.0 * (index <= ROWS // 8)):
            x = ((u * (sigma / sigma.norm())) @ v.mT).float()
            wide, narrow = (
                spectral_map.function(x, precision=precision, max_norm=1.0, **settings)[0]
                for precision in ("float32", "float16")
            )
            distances.append(float((narrow - wide).norm() / wide.norm()))
        result["float16_error"] = max(distances)
    if not spectral_map.is_drawn and RECORDED.is_file():
        distances = []
        for spectrum in recorded_spectra()[:: 1 if composed else EVERY]:
            sigma = spectrum.without_null_space
            exact = spectral_map.target(sigma, **settings).where(sigma > 0, 0.0)
            if composed and target:
                u = (sigma / unit_of(sigma, target.of) / target.limit).numpy()
                output = torch.from_numpy(value(composed.composition, np.minimum(u, 1.0)))
            else:
                x = sigma.float().diag()
                output = (
                    spectral_map.function(x, precision="float32", max_norm=None, **settings)[0]
                    .diagonal()
                    .double()
                )
            distances.append(float((output - exact).norm() / exact.norm()))
        result["recorded_error"] = fmean(distances)
    return result, target


def lines(result: dict[str, Any]) -> list[str]:
    """The numbers as text, one line each."""
    settings = result["settings"]
    domain = f", x = sigma / {settings['of']}" if settings.get("of", "none") != "none" else ""
    rows = [("map", f"{result['formula']}{domain}")]
    if result["certified_error"] is not None:
        below = result["error_below"]
        certificate = f"{result['certified_error']:.2%} of the largest value"
        rows.append(
            (
                "certified error",
                f"{certificate}, from x = {result['resolution'] * settings['limit']:g} on",
            )
        )
        rows.append(
            ("below", "not bounded" if below is None else f"{below:.2%}: the update falls to 0")
        )
        degrees = ", ".join(str(2 * len(step) - 1) for step in result["steps"]["steps"])
        rows.append(("products", f"{result['num_products']}: polynomials of degree {degrees}"))
    rows.append(("FLOPs over Muon's", number(result["flops_over_muon"], ".2f")))
    rows.append(("float16", f"{number(result['float16_error'], '.2%')} from float32 (emulated)"))
    rows.append(
        (
            "recorded momenta",
            f"{number(result['recorded_error'], '.2%')} from the formula, on average",
        )
    )
    width = max(len(label) for label, _ in rows)
    return [f"{label:{width}}  {text}" for label, text in rows]


def draw(result: dict[str, Any], target: Target | None, file: Path) -> list[Path]:
    """Write the picture of a map, and return its paths.
    file: .svg, or .png, which gets NAME-dark.png beside it.

    Of a composition (with a target): the formula, the polynomials, and their difference. Of another
    map: its values and those of its target, and their relative difference, the paper's two panels
    of SNS.
    """
    figure = partial(_figure, result, target)
    if file.suffix == ".png":
        return [file, write_pictures(file, figure)]
    figure(LIGHT).savefig(file, metadata={"Date": None})
    return [file]


def _figure(result: dict[str, Any], target: Target | None, colors: Colors) -> Figure:
    figure = Figure(figsize=(7, 5), dpi=200, layout="constrained", facecolor=colors.paper)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1) if target else None)
    if target:
        composed = from_dict(result["steps"])
        u = np.geomspace(target.resolution / 10, 1, 1000)
        x, exact, ours = u * target.limit, target(u), value(composed.composition, u)
        error = (ours - exact) / composed.largest
        labels = str(target.formula), f"polynomials, {result['num_products']} products"
        titles = "error, as a share of the largest value", "x"
        top.set_xscale("log")
        for side in (-1, 1):
            bottom.axhline(side * composed.error, color=colors.muted, linestyle=":")
        bottom.axvline(target.resolution * target.limit, color=colors.muted, linestyle=":")
        bottom.set_ylim(-2 * composed.error, 2 * composed.error)
    else:
        spectral_map, settings = MAPS[result["formula"]], result["settings"]
        x = torch.linspace(*PAPER_RANGE, 2000, dtype=torch.float64)
        matrices = torch.stack([x, (1 - x**2).sqrt()], dim=-1).float().diag_embed()
        ours = spectral_map.function(matrices, precision="float32", max_norm=1.0, **settings)[0][
            :, 0, 0
        ].double()
        exact = spectral_map.target(x, **settings)
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
