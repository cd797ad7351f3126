"""`soren-align spectrum`: the output of every map on the momenta of a run, from their singular values alone.

A map commutes with rotations: its output has the input's singular vectors, and singular values that are those of its
output for the diagonal matrix of the input's. So no gradient is needed, and no training.
"""

import json
import math
import pickle
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..files import CHANGED, contents, parse_json, read_text
from ..optim import Muon, Soren, SpectralOptimizer, matrices_of, momentum_of
from ..optimizer_settings import MAPS, RESOLUTIONS
from ..run_folder import PREVIOUS, RunFolder, read_seal, step_of
from ..spectral import singular_values
from .spectra import Spectrum

MAX_BYTES = 1 << 28  # of spectra.jsonl; 252 matrices with 2048 singular values are 6 MB a step
MAX_RANK = 1 << 14  # of a matrix in it: the diagonal matrix of a larger one has more than 1 GB
SHARES = (0.01, 0.001)
"""Of nu, the norm by which `minimax` divides; the table counts the modes below them."""
EXACT = "exact"


def spectra_of_run(folder: RunFolder, globs: Sequence[str] = ("*",)) -> tuple[str, list[Spectrum]]:
    """The recorded spectra of a run, or those of its last checkpoint, and a description of the source.

    globs: names of the matrices. Raises UserError if there are none, and if a file is damaged.
    """
    if folder.spectra.is_file():
        source, spectra = "the map's input, recorded in training", list(_recorded(folder.spectra))
    else:
        checkpoint = next(reversed(folder.complete_checkpoints()), None)
        if checkpoint is None or not (checkpoint / "optimizer.pt").is_file():
            raise UserError(
                f"{folder}: has no spectra.jsonl, and no checkpoint with the momentum of whole matrices; "
                "train with --set run.log_spectra.steps=[1,100] to record spectra"
            )
        source = f"the momentum in {checkpoint.name}, which lacks the Nesterov term of the next gradient"
        spectra = list(_of_checkpoint(checkpoint, globs))
    chosen = [spectrum for spectrum in spectra if any(fnmatchcase(spectrum.name, glob) for glob in globs)]
    if not chosen:
        names = ", ".join(sorted({spectrum.name for spectrum in spectra})[:3]) or "none"
        raise UserError(f"{folder}: no spectrum of a matrix {' or '.join(globs)}; it has {names}")
    return source, chosen


def _recorded(file: Path) -> Iterator[Spectrum]:
    for number, line in enumerate(read_text(file, MAX_BYTES).splitlines(), 1):
        record = parse_json(line, f"{file.name}:{number}")
        try:
            shape, values = tuple(record["shape"]), sorted(map(float, record["singular_values"]), reverse=True)
            spectrum = Spectrum(str(record["name"]), int(record["step"]), shape, tuple(values))
            rank = min(shape)
            damaged = len(shape) != 2 or len(values) != rank or not 0 < rank <= MAX_RANK
            damaged = damaged or not all(math.isfinite(value) and value >= 0 for value in values)
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
            damaged = True
        if damaged:
            raise UserError(f"{file}:{number} is no spectrum: name, step, shape [m, n] and min(m, n) singular_values")
        yield spectrum


def _of_checkpoint(checkpoint: Path, globs: Sequence[str]) -> Iterator[Spectrum]:
    """The spectra of the momentum in a checkpoint, of matrices that match."""
    file = checkpoint / "optimizer.pt"
    if contents([file]) != [read_seal(checkpoint)["files"].get(file.name)]:
        raise UserError(f"{file}: {CHANGED}; {PREVIOUS}")
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        groups = [group for group in saved["param_groups"] if group["rule"] == "spectral"]
        momenta = [
            named
            for group in groups
            for name, number in zip(group["param_names"], group["params"], strict=True)
            for named in matrices_of(
                name, momentum_of(saved["state"][number]), group.get("storages", {}).get(name, "plain")
            )
        ]
    except (AttributeError, pickle.UnpicklingError, RuntimeError, KeyError, TypeError, ValueError, EOFError):
        raise UserError(f"{file}: not the state of an optimizer with matrices") from None
    for name, momentum in momenta:
        if any(fnmatchcase(name, glob) for glob in globs):
            yield Spectrum(
                name,
                step_of(checkpoint),
                (momentum.shape[0], momentum.shape[1]),
                tuple(singular_values(momentum).tolist()),
            )


def all_maps() -> dict[str, SpectralOptimizer]:
    """Muon, and Soren with each of its maps and resolutions, by their labels ("minimax 0.01")."""
    matrix = [torch.nn.Parameter(torch.zeros(1, 1))]
    maps: dict[str, SpectralOptimizer] = {"muon": Muon(matrix)}
    for name, defaults in MAPS.items():
        for choice in [{"resolution": r} for r in RESOLUTIONS] if "resolution" in defaults else [{}]:
            settings = {**defaults, **choice}
            numbers = [f"{value:g}" for value in settings.values() if isinstance(value, int | float)]
            maps[" ".join([name, *numbers])] = Soren(matrix, 0.0, map={"name": name, **settings})
    return maps


def mapped(spectrum: Spectrum, optimizer: SpectralOptimizer) -> Tensor:
    """The singular values of the map's output, float64, computed in float32 as in training.

    Scaled as match_rms_adamw does, to Soren's level of 1/2: those of Muon are halved.
    """
    x = spectrum.without_null_space.float().diag()
    output = optimizer.map_matrix(x, optimizer.param_groups[0]).diagonal().double()
    return output * (Soren.map_level / optimizer.map_level)


def measure(spectrum: Spectrum, maps: dict[str, SpectralOptimizer]) -> dict[str, Any]:
    """The spectrum in numbers, as plain data.

    below: share of the modes below SHARES of nu. maps: of each map's output the relative Frobenius distance from that
    of the exact sigmoid, the cosine of the angle between them, and `size`, its norm relative to that of an output whose
    singular values are all at the map's level, as match_rms_adamw assumes. A zero momentum, as of LoRA's A at step 1,
    has no direction and no modes: its `below` and `maps` are None throughout.
    """
    sigma, nu = spectrum.sigma, spectrum.nu
    about = {"name": spectrum.name, "step": spectrum.step, "shape": list(spectrum.shape)}
    about |= {"largest": float(sigma[0]), "nu": nu}
    if not nu:
        nothing = dict.fromkeys(("distance", "cosine", "size"))
        return {**about, "below": dict.fromkeys(f"{share:g}" for share in SHARES), "maps": dict.fromkeys(maps, nothing)}
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
    """The names without the first parts, between dots, that all share; at least `num_parts` of each stay."""
    parts = [name.split(".") for name in names]
    start = 0
    while start < min(map(len, parts)) - num_parts and len({p[start] for p in parts}) == 1:
        start += 1
    return [".".join(p[start:]) for p in parts]


def as_json(source: str, records: Sequence[dict[str, Any]]) -> str:
    """The measurements as JSON."""
    return json.dumps({"source": source, "spectra": list(records)}, indent=2)
