"""`soren-align spectrum`: the output of every map on the momenta of a run, from their singular
values alone.

A map commutes with rotations: its output has the input's singular vectors, and singular values that
are those of its output for the diagonal matrix of the input's. So no gradient is needed, and no
training, and a recorded spectrum stands for its matrix. research/pictures.py draws the spectra.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Group
from rich.text import Text
from torch import Tensor

from ..core.errors import UserError
from ..core.files import CHANGED, contents, parse_json, read_text
from ..core.text import Table, count, number
from ..optim import MapContext, Muon, Soren, SpectralOptimizer, matrices_of
from ..spectral import SOREN_MAPS, singular_values
from ..spectral.exact import null_space_bound
from ..spectral.maps import sigmoid
from .folder import PREVIOUS, RunFolder, read_seal, step_of

MAX_BYTES = 1 << 28  # of spectra.jsonl; 252 matrices with 2048 singular values are 6 MB a step
SHARES = (0.01, 0.001)
"""Shares of nu, the norm by which `minimax` divides; the table counts the modes below them."""
EXACT = "exact"
WIDTH = 80
"""The table's width in characters."""


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
        """The norm (sum of sigma^8)^(1/8), by which `minimax` divides the matrix."""
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
    """Return a description of the source, and the spectra: recorded, or of the last checkpoint.

    globs: names of the matrices. of: momentum, or gradient, which only a recording has. Raises
    UserError if there are none, and if a file is damaged.
    """
    # A recording has the maps' own inputs at several steps; a checkpoint only the momentum, at one.
    if folder.spectra.is_file():
        spectra = [spectrum for spectrum in _recorded(folder.spectra) if spectrum.of == of]
        inputs = "the map's input" if of == "momentum" else "the gradients"
        source = f"{inputs}, recorded in training"
    else:
        source, spectra = _of_checkpoint(folder, globs)
    if not spectra and of != "momentum":
        raise UserError(
            f"{folder}: has no spectra of gradients; train with --set run.log_spectra.steps=[1,100]"
            " --set 'run.log_spectra.of=[momentum, gradient]' to record them"
        )
    chosen = [s for s in spectra if any(fnmatchcase(s.name, glob) for glob in globs)]
    if not chosen:
        names = ", ".join(sorted({spectrum.name for spectrum in spectra})[:3]) or "none"
        raise UserError(
            f"--matrices: {folder} has spectra, but none of a matrix with a name like "
            f"{' or '.join(globs)}; write a name such as {names}"
        )
    return source, chosen


def _recorded(file: Path) -> Iterator[Spectrum]:
    """The lines of spectra.jsonl. Raises UserError for a damaged one, with its number."""
    for line_number, line in enumerate(read_text(file, MAX_BYTES).splitlines(), 1):
        record = parse_json(line, f"{file.name}:{line_number}")
        try:
            m, n = map(int, record["shape"])
            values = sorted(map(float, record["singular_values"]), reverse=True)
            # A NaN or a negative number would become a map's output without a word.
            if len(values) != min(m, n) or not all(0 <= value < math.inf for value in values):
                raise ValueError("singular_values")
            of = str(record.get("of", "momentum"))
            spectrum = Spectrum(str(record["name"]), int(record["step"]), (m, n), tuple(values), of)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise UserError(
                f"{file}:{line_number}: invalid spectrum; restore the fields name, step, shape [m,"
                " n] and min(m, n) singular_values, or remove the line"
            ) from None
        yield spectrum


def _of_checkpoint(folder: RunFolder, globs: Sequence[str]) -> tuple[str, list[Spectrum]]:
    """The spectra of the momenta in the last checkpoint, and a description of it."""
    checkpoint = next(reversed(folder.complete_checkpoints()), None)
    if checkpoint is None or not (file := checkpoint / "optimizer.pt").is_file():
        raise UserError(
            f"{folder}: has no spectra.jsonl, and no checkpoint with the momentum of whole "
            "matrices; train with --set run.log_spectra.steps=[1,100] to record spectra"
        )
    # By the seal's hash: a changed momentum would give other spectra without a message.
    if contents([file]) != [read_seal(checkpoint)["files"].get(file.name)]:
        raise UserError(f"{file}: {CHANGED}; {PREVIOUS}")
    momenta: list[tuple[str, Tensor]] = []
    try:
        # mmap: of a file that is larger than the model, only the momenta are read.
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        groups = [group for group in saved["param_groups"] if group["rule"] == "spectral"]
        for group in groups:
            for name, index in zip(group["param_names"], group["params"], strict=True):
                layout = group.get("weight_layouts", {}).get(name, "linear")
                momentum = saved["state"][index]["exp_avg"].float()
                momenta += matrices_of(name, momentum, layout)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
        # Shards of ZeRO, or the state of another optimizer.
        raise UserError(
            f"{file}: contains no momentum of whole matrices, which the checkpoints of soren, muon "
            "and htmuon have; choose a run of one of these optimizers"
        ) from None
    source = (
        f"the momentum in {checkpoint.name}, without the part that Nesterov's method adds from the "
        "next gradient"
    )
    return source, [
        Spectrum(
            name, step_of(checkpoint), (m.shape[0], m.shape[1]), tuple(singular_values(m).tolist())
        )
        for name, m in momenta
        if any(fnmatchcase(name, glob) for glob in globs)
    ]


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
    # A diagonal matrix stands for the momentum: on one of 24 x 40 with the same singular values,
    # distance, cosine and size are equal to 1e-4 (notes/log.md).
    x = spectrum.without_null_space.float().diag()
    return optimizer.map_matrix(x, optimizer.param_groups[0], MapContext()).diagonal().double()


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


MEASURES = (
    ("distance from the exact sigmoid", "distance", ".1%", max, "largest"),
    ("cosine of the angle to the exact sigmoid", "cosine", ".3f", min, "smallest"),
    ("size: norm of the output / its norm if all were 1/2", "size", ".2f", min, "smallest"),
)
"""The quantities of `measure`: title, key, format, the extreme that is shown beside the mean, and
its name."""


def summary(source: str, records: Sequence[dict[str, Any]]) -> Group:
    """The mean and the extreme over all spectra of each quantity of `measure`, in one table."""
    labels = list(records[0]["maps"])
    rows = [row for measure in MEASURES for row in _mean_and_extreme(records, labels, *measure[1:])]
    header = ["", *(label.replace(" ", "\n") for label in labels)]
    about = (
        "distance and cosine: between the outputs of the map and of the exact sigmoid. size: norm"
        " of the map's output, divided by its norm if all singular values were 1/2. Muon's output"
        " is halved, as match_rms_adamw halves it. --json has every matrix"
    )
    title = f"{count(len(records), 'spectrum', 'spectra')} of {source}"
    notes = Text("\n" + textwrap.fill(about, WIDTH), style="dim")
    return Group(Text(title, style="dim"), Table(header, rows).rich(collapse_padding=True), notes)


def _mean_and_extreme(
    records: Sequence[dict[str, Any]],
    labels: Sequence[str],
    key: str,
    form: str,
    extreme: Any,
    word: str,
) -> list[list[str]]:
    """Two rows of a table over all momenta that are not zero."""
    columns = [
        [record["maps"][label][key] for record in records if record["nu"]] for label in labels
    ]
    return [
        [f"{key}, {name}", *(number(function(c) if c else None, form) for c in columns)]
        for name, function in (("mean", fmean), (word, extreme))
    ]
