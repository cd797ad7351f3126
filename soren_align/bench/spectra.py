"""`soren-align spectrum`: the output of every map on the momenta of a run, from their singular
values alone.

A map commutes with rotations: its output has the input's singular vectors, and singular values that
are those of its output for the diagonal matrix of the input's. So no gradient is needed, and no
training, and a recorded spectrum stands for its matrix. The measurements are shown in tables, and
the spectra in pictures as in the paper's Figure 1: a panel per layer and step, a line per map,
values on a log axis.
"""

import math
import pickle
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor

from ..core.errors import UserError
from ..core.figures import FONT, Colors, line_style, short, style_axes, write_pictures
from ..core.files import CHANGED, contents, parse_json, read_text
from ..core.text import Table, count, number
from ..optim import Muon, Soren, SpectralOptimizer, matrices_of, momentum_of
from ..optim.product import has_factors
from ..run.folder import PREVIOUS, RunFolder, read_seal, step_of
from ..spectral import SOREN_MAPS, singular_values
from ..spectral.exact import null_space_bound
from ..spectral.maps import sigmoid

MAX_BYTES = 1 << 28  # of spectra.jsonl; 252 matrices with 2048 singular values are 6 MB a step
MAX_RANK = 1 << 14  # of a matrix in it: the diagonal matrix of a larger one has more than 1 GB
SHARES = (0.01, 0.001)
"""Of nu, the norm by which `minimax` divides; the table counts the modes below them."""
EXACT = "exact"
WIDTH = 80
"""Of the tables."""
NOTE = """\
nu: the norm (sum of sigma^8)^(1/8), by which minimax divides the matrix
-: the momentum is zero, so mean and extremes do not include this matrix
Muon's output is halved, as match_rms_adamw halves Muon's output"""
MAX_LAYERS, MAX_STEPS = 3, 3
FLOOR = 3e-4
"""The lower end of the axis: smaller values are not drawn."""


@dataclass(frozen=True)
class Spectrum:
    """The singular values of one matrix's momentum, or gradient, before one step, in descending
    order.
    """

    name: str
    step: int
    shape: tuple[int, int]
    singular_values: tuple[float, ...]
    of: str = "momentum"

    @cached_property
    def sigma(self) -> Tensor:
        """The singular values, float64. Do not modify them."""
        return torch.tensor(self.singular_values, dtype=torch.float64)

    @property
    def nu(self) -> float:
        """(sum of sigma^8)^(1/8)."""
        return float(torch.linalg.vector_norm(self.sigma, 8))

    @property
    def without_null_space(self) -> Tensor:
        """The singular values with 0 for those of the numerical null space, which are noise that no
        map should see.
        """
        bound = null_space_bound(torch.empty(self.shape, dtype=torch.float32, device="meta"))
        return self.sigma.where(self.sigma > bound * self.sigma[0], 0.0)


def spectra_of_run(
    folder: RunFolder, globs: Sequence[str] = ("*",), of: str = "momentum"
) -> tuple[str, list[Spectrum]]:
    """The recorded spectra of a run, or those of its last checkpoint, and a description of the
    source.

    globs: names of the matrices. of: momentum, or gradient, which only a recording has. Raises
    UserError if there are none, and if a file is damaged.
    """
    spectra: list[Spectrum] = []
    if folder.spectra.is_file():
        file, source = folder.spectra, "the map's input, recorded in training"
        source = source if of == "momentum" else "the gradients, recorded in training"
        for line_number, line in enumerate(read_text(file, MAX_BYTES).splitlines(), 1):
            record = parse_json(line, f"{file.name}:{line_number}")
            try:
                shape, values = (
                    tuple(record["shape"]),
                    sorted(map(float, record["singular_values"]), reverse=True),
                )
                kind = str(record.get("of", "momentum"))
                spectra.append(
                    Spectrum(str(record["name"]), int(record["step"]), shape, tuple(values), kind)
                )
                damaged = (
                    len(shape) != 2 or len(values) != min(shape) or not 0 < min(shape) <= MAX_RANK
                )
                damaged = damaged or not all(
                    math.isfinite(value) and value >= 0 for value in values
                )
            except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
                damaged = True
            if damaged:
                fields = "name, step, shape [m, n] and min(m, n) singular_values"
                raise UserError(
                    f"{file}:{line_number}: invalid spectrum; restore the fields {fields}, or remove the line"
                )
        spectra = [spectrum for spectrum in spectra if spectrum.of == of]
    elif of == "momentum":
        checkpoint = next(reversed(folder.complete_checkpoints()), None)
        if checkpoint is None or not (file := checkpoint / "optimizer.pt").is_file():
            raise UserError(
                f"{folder}: has no spectra.jsonl, and no checkpoint with the momentum of whole matrices; "
                "train with --set run.log_spectra.steps=[1,100] to record spectra"
            )
        source = f"the momentum in {checkpoint.name}, without the part that Nesterov's method adds from the next gradient"
        if contents([file]) != [read_seal(checkpoint)["files"].get(file.name)]:
            raise UserError(f"{file}: {CHANGED}; {PREVIOUS}")
        momenta: list[tuple[str, Tensor]] = []
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            groups = [group for group in saved["param_groups"] if group["rule"] == "spectral"]
            has_products = any(map(has_factors, groups))
            for group in groups:
                for name, index in zip(group["param_names"], group["params"], strict=True):
                    layout = group.get("weight_layouts", {}).get(name, "linear")
                    momenta += matrices_of(name, momentum_of(saved["state"][index]), layout)
        except (
            AttributeError,
            pickle.UnpicklingError,
            RuntimeError,
            KeyError,
            TypeError,
            ValueError,
            EOFError,
        ):
            raise UserError(
                f"{file}: contains no momentum of whole matrices, which the checkpoints of soren, muon and htmuon "
                "have; choose a run of one of these optimizers"
            ) from None
        if has_products:
            raise UserError(
                f"{file}: has the momenta of factors that are updated as their product, and not the map's inputs; "
                "train with --set run.log_spectra.steps=[1,100] to record these"
            )
        for name, momentum in momenta:
            if any(fnmatchcase(name, glob) for glob in globs):
                values = tuple(singular_values(momentum).tolist())
                shape = (momentum.shape[0], momentum.shape[1])
                spectra.append(Spectrum(name, step_of(checkpoint), shape, values))
    if not spectra and of != "momentum":
        raise UserError(
            f"{folder}: has no spectra of gradients; train with --set run.log_spectra.steps=[1,100] --set "
            "'run.log_spectra.of=[momentum, gradient]' to record them"
        )
    chosen = [
        spectrum for spectrum in spectra if any(fnmatchcase(spectrum.name, glob) for glob in globs)
    ]
    if not chosen:
        names = ", ".join(sorted({spectrum.name for spectrum in spectra})[:3]) or "none"
        raise UserError(
            f"--matrices: {folder} has spectra, but none of a matrix with a name like {' or '.join(globs)}; write "
            f"a name such as {names}"
        )
    return source, chosen


def all_maps() -> dict[str, SpectralOptimizer]:
    """Muon, and Soren with each approximation of the sigmoid, by their labels ("minimax 0.01")."""
    matrix = [torch.nn.Parameter(torch.zeros(1, 1))]
    maps: dict[str, SpectralOptimizer] = {"muon": Muon(matrix)}
    for name, spectral_map in SOREN_MAPS.items():
        for settings in spectral_map.variants() if spectral_map.target is sigmoid else ():
            label = " ".join([name, *(f"{value:g}" for value in settings.values())])
            maps[label] = Soren(matrix, 0.0, map={"name": name, **settings}, adjust_lr_fn="none")
    return maps


def outputs(spectrum: Spectrum, optimizer: SpectralOptimizer) -> Tensor:
    """The singular values of the map's output, float64, computed in float32 as in training."""
    x = spectrum.without_null_space.float().diag()
    return optimizer.map_matrix(x, optimizer.param_groups[0]).diagonal().double()


def mapped(spectrum: Spectrum, optimizer: SpectralOptimizer) -> Tensor:
    """`outputs`, scaled as match_rms_adamw does, to Soren's level of 1/2: those of Muon are
    halved.
    """
    return outputs(spectrum, optimizer) * (Soren.map_level / optimizer.map_level)


def measure(spectrum: Spectrum, maps: dict[str, SpectralOptimizer]) -> dict[str, Any]:
    """The spectrum in numbers, as plain data.

    below: share of the modes below SHARES of nu. maps: of each map's output the relative Frobenius
    distance from that of the exact sigmoid, the cosine of the angle between them, and `size`, its
    norm relative to that of an output whose singular values are all at the map's level, as
    match_rms_adamw assumes. A zero momentum, as of LoRA's A at step 1, has no direction and no
    modes: its `below` and `maps` are None throughout.
    """
    sigma, nu = spectrum.sigma, spectrum.nu
    about = {"name": spectrum.name, "step": spectrum.step, "shape": list(spectrum.shape)}
    about |= {"largest": float(sigma[0]), "nu": nu}
    if not nu:
        nothing = dict.fromkeys(("distance", "cosine", "size"))
        return {
            **about,
            "below": dict.fromkeys(f"{share:g}" for share in SHARES),
            "maps": dict.fromkeys(maps, nothing),
        }
    exact = mapped(spectrum, maps[EXACT])
    fidelity = {}
    for label, optimizer in maps.items():
        output = mapped(spectrum, optimizer)
        size = float(output.norm())
        fidelity[label] = {
            "distance": float((output - exact).norm() / exact.norm()),
            "cosine": float(output @ exact / exact.norm()) / size if size else 0.0,
            "size": size / (Soren.map_level * math.sqrt(min(spectrum.shape))),
        }
    below = {f"{share:g}": float((sigma < share * nu).double().mean()) for share in SHARES}
    return {**about, "below": below, "maps": fidelity}


def short_names(names: Sequence[str], num_parts: int) -> list[str]:
    """The names without the first parts, between dots, that all share; at least `num_parts` of each
    stay.
    """
    parts = [name.split(".") for name in names]
    start = 0
    while start < min(map(len, parts)) - num_parts and len({p[start] for p in parts}) == 1:
        start += 1
    return [".".join(p[start:]) for p in parts]


MEASURES = (
    ("distance from the exact sigmoid", "distance", ".1%", max, "largest"),
    ("cosine of the angle to the exact sigmoid", "cosine", ".3f", min, "smallest"),
    (
        "size: norm of the output / its norm if all singular values were 1/2",
        "size",
        ".2f",
        min,
        "smallest",
    ),
)
"""Of `measure`: title, key, format, the extreme that is shown beside the mean, and its name."""


def summary(source: str, records: Sequence[dict[str, Any]]) -> Group:
    """The mean and the extreme over all spectra of each quantity of `measure`, in one table of six
    lines.
    """
    labels = list(records[0]["maps"])
    rows = []
    for _, key, form, extreme, word in MEASURES:
        for name, function in (("mean", fmean), (word, extreme)):
            columns = [_measured(records, label, key) for label in labels]
            cells = (number(function(column) if column else None, form) for column in columns)
            rows.append([f"{key}, {name}", *cells])
    header = ["", *(label.replace(" ", "\n") for label in labels)]
    about = (
        "distance and cosine: between the outputs of the map and of the exact sigmoid. size: norm of the map's output,"
        " divided by its norm if all singular values were 1/2. Muon's output is halved, as match_rms_adamw halves it."
        " --full shows every matrix"
    )
    title = f"{count(len(records), 'spectrum', 'spectra')} of {source}"
    notes = Text("\n" + textwrap.fill(about, WIDTH), style="dim")
    return Group(Text(title, style="dim"), Table(header, rows).rich(collapse_padding=True), notes)


def _measured(records: Sequence[dict[str, Any]], label: str, key: str) -> list[float]:
    """The measurements of one map, without those of momenta that are zero."""
    return [value for record in records if (value := record["maps"][label][key]) is not None]


def tables(source: str, records: Sequence[dict[str, Any]]) -> Group:
    """The measurements of `measure` in four tables, the last three with their mean and their
    extreme.
    """
    names = short_names([record["name"].removesuffix(".weight") for record in records], 3)
    labels = list(records[0]["maps"])
    approximate = [label for label in labels if label != EXACT]
    header = ["matrix", "step", "shape", "largest", *(f"< {share:g} nu" for share in SHARES)]
    rows = []
    for name, record in zip(names, records, strict=True):
        shape, shares = " x ".join(map(str, record["shape"])), record["below"].values()
        numbers = [f"{record['largest']:.1e}", *(number(share, ".0%") for share in shares)]
        rows.append([name, str(record["step"]), shape, *numbers])
    parts = [_table("singular values, and the share of small ones", header, rows)]
    for title, key, form, extreme, word in MEASURES:
        shown = labels if key == "size" else approximate
        columns = [[record["maps"][label][key] for record in records] for label in shown]
        rows = [
            [name, str(record["step"]), *(number(column[i], form) for column in columns)]
            for i, (name, record) in enumerate(zip(names, records, strict=True))
        ]
        measured = [_measured(records, label, key) for label in shown]
        rows.append(
            ["mean", "", *(number(fmean(column) if column else None, form) for column in measured)]
        )
        rows.append(
            [word, "", *(number(extreme(column, default=None), form) for column in measured)]
        )
        parts.append(
            _table(title, ["matrix", "step", *(label.replace(" ", "\n") for label in shown)], rows)
        )
    return Group(Text(f"spectra of {source}", style="dim"), *parts, Text(f"\n{NOTE}", style="dim"))


def _table(title: str, header: list[str], rows: list[list[str]]) -> RenderableType:
    """A table whose first column has the room that the others leave."""
    columns = [*zip(header, *rows, strict=True)][1:]
    room = WIDTH - sum(
        1 + max(len(line) for cell in column for line in cell.split("\n")) for column in columns
    )
    rows = [
        [first if len(first) <= room else f"...{first[3 - room :]}", *cells]
        for first, *cells in rows
    ]
    return Table(header, rows, title).rich(collapse_padding=True)


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
    return values.where(values >= FLOOR / 2, torch.nan).tolist()


def spread(items: list, most: int) -> list:
    """At most `most` of the items, the first and the last among them, in their order."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
