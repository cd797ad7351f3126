"""`soren-align bench maps`: time, FLOPs and errors of every map on every shape."""

import contextlib
import functools
import importlib
import importlib.util
import io
import logging
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.errors import UserError
from ..core.optimizer_settings import MUON_STEPS, FactorPrecision
from ..spectral import MAPS, SOREN_MAPS, SpectralMap, minimax_sigmoid, newton_schulz
from ..spectral.maps import MINIMAX, polar, sigmoid
from ..spectral.matrices import frobenius_norm, from_wide, to_wide
from ..spectral.quintic import EPS, A, B, C, quintic_step
from .shapes import Matrices, Shape
from .timing import Timing, available_bytes, interleaved, machine, matmul_rates, too_slow

# ---
# The measured maps and their FLOPs.
#
# FLOPs are counted of matrix products, for an m x n matrix with m <= n: m^2 n multiplications and additions, 2 m^2 n,
# for x x^T as for (m x m) x; 2 m^3 for two m x m matrices. So
#     Muon      5 steps of x x^T, its square, and their sum times x:    5 (4 m^2 n + 2 m^3)
#     SNS       K steps of the sign stream and 2 of the tanh stream, each x x^T and its product with x:  4 m^2 n (K + 2)
#     released  as SNS, with another K
#     minimax   x x^T, once more after each restart, and a product with x each; about 15 of m x m. Symmetric
#               products are computed, and counted, in blocks on one side of the diagonal only
# test_counted_flops_are_those_that_torch_sees compares `num_flops` with torch's counter. Decompositions are not
# counted.

PEERS_OWN = "the peer's own"  # dtype
MUON, MUON_FLOAT32 = "Muon bfloat16", "Muon float32"


@dataclass(frozen=True)
class Candidate:
    """A map to be measured.

    dtype: of its products. counted_as: the map with the same FLOPs, None if they are not counted. target: see
    `SpectralMap`. settings: of both.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    dtype: str
    counted_as: SpectralMap | None = None
    target: Callable[..., Tensor] = sigmoid
    settings: dict[str, Any] = field(default_factory=dict)

    def num_flops(self, shape: Shape) -> int | None:
        """Floating-point operations for one matrix, None where they are not counted."""
        return self.counted_as.num_flops(*shape, **self.settings) if self.counted_as else None


def candidates(device: torch.device) -> list[Candidate]:
    """This package's maps, including Muon's in two dtypes, the references of the ratios."""
    entries = []
    for spectral_map in SOREN_MAPS.values():
        for settings in spectral_map.variants():
            entries.append(_candidate(spectral_map, settings))
            if device.type == "cuda" and settings == spectral_map.defaults:  # on a CPU narrow factors are emulated
                narrow: list[FactorPrecision] = [p for p in ("float16", "tf32") if p in spectral_map.precisions]
                entries += [_candidate(spectral_map, settings, p) for p in narrow]
        if spectral_map is MINIMAX:
            entries.append(Candidate("minimax eigh", lambda x: minimax_sigmoid(x, method="eigh"), "float64"))
    return [
        *entries,
        Candidate(MUON, newton_schulz, "bfloat16", MAPS["muon"], polar),
        Candidate(MUON_FLOAT32, newton_schulz_float32, "float32", MAPS["muon"], polar),
        Candidate(DION, scheduled_quintic, "bfloat16", MAPS["muon"], polar),
    ]


def _candidate(
    spectral_map: SpectralMap, settings: dict[str, Any], precision: FactorPrecision = "float32"
) -> Candidate:
    def function(x: Tensor) -> Tensor:
        return spectral_map.function(x, precision=precision, max_norm=None, **settings)[0]

    dtype = precision if spectral_map.flops else "float64"
    name = spectral_map.label.format(**settings) if precision == "float32" else f"{spectral_map.name} {precision}"
    counted_as = spectral_map if precision == "float32" and spectral_map.flops else None
    return Candidate(name, function, dtype, counted_as, spectral_map.target, settings)


def newton_schulz_float32(x: Tensor) -> Tensor:
    """Muon's five steps as in `newton_schulz`, iterated in float32."""
    y = to_wide(x, torch.float32)
    y = y / frobenius_norm(y).clamp(min=EPS)
    for _ in range(MUON_STEPS):
        y = quintic_step(y, A, B, C)
    return from_wide(y, x)


NUM_COPIES = 16  # of a matrix in float32: a decomposition holds five in float64, and errors their own three


@torch.no_grad()
def run(matrices: Matrices, device: torch.device, report: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """The results as JSON. `report` is called with the current state, for a spinner."""
    torch.manual_seed(0)
    _check_memory(matrices, device)
    peer_maps, notes = peers(device)
    entries = candidates(device) + [
        Candidate(name, function, PEERS_OWN, None, polar) for name, function in peer_maps.items()
    ]
    shapes = [_measure(shape, entries, device, report, notes) for shape in matrices.per_layer]
    for entry, count in zip(shapes, matrices.per_layer.values(), strict=True):
        entry["count"] = count * matrices.num_layers
    return {
        "command": "maps",
        "shapes_name": matrices.name,
        "machine": machine(device),
        "input": "independent normal numbers, |x|_F = 1 as after clipping, drawn anew for every call",
        "shapes": shapes,
        "over_all_shapes": _over_all(shapes),
        "notes": list(dict.fromkeys(notes)),
    }


def _check_memory(matrices: Matrices, device: torch.device) -> None:
    available = available_bytes(device)
    for m, n in matrices.per_layer:
        if (needed := 4 * NUM_COPIES * m * n) > available:
            sizes = f"needs about {needed / 1e9:.1f} GB; {available / 1e9:.1f} GB may be used"
            raise UserError(f"--shapes: {m}x{n} {sizes}; write smaller shapes")


def _measure(
    shape: Shape, entries: list[Candidate], device: torch.device, report: Callable[[str], None], notes: list[str]
) -> dict[str, Any]:
    name = "x".join(map(str, shape))

    def make_input() -> Tensor:
        x = torch.randn(shape, device=device)
        return x.div_(frobenius_norm(x))

    report(f"{name}: FLOP/s of matrix products")
    rates = matmul_rates(device)
    report(f"{name}: warm-up")
    quick = [entry for entry in entries if not _too_slow(entry, shape, rates, notes)]
    measured = [entry for entry in quick if _can_run(entry, shape, make_input, device, notes)]
    subjects = {entry.name: entry.function for entry in measured}
    timings = interleaved(
        subjects, make_input, device, lambda done, total: report(f"{name}: round {done + 1} of {total}")
    )

    small = error_shape(shape, device)
    matrices = known_matrices(small, device)
    all_errors = {}
    for entry in measured:
        report(f"{name}: errors of {entry.name}")
        target = partial(entry.target, **entry.settings)
        all_errors[entry.name] = {
            spectrum: errors(entry.function, matrix, target) for spectrum, matrix in matrices.items()
        }
    return {
        "shape": list(shape),
        "error_shape": list(small),
        "num_rounds": timings[MUON_FLOAT32].num_rounds,
        "matmul_flops_per_second": rates,
        "maps": [_row(entry, shape, timings, rates) | {"errors": all_errors[entry.name]} for entry in measured],
    }


def _too_slow(entry: Candidate, shape: Shape, rates: dict[str, float], notes: list[str]) -> bool:
    flops = entry.num_flops(shape)
    if flops is None or entry.name == MUON_FLOAT32:
        return False
    name = f"{'x'.join(map(str, shape))}: {entry.name}"
    reason = too_slow(name, flops, entry.dtype, rates)
    notes.extend([reason] if reason else [])
    return reason is not None


def _can_run(
    entry: Candidate, shape: Shape, make_input: Callable[[], Tensor], device: torch.device, notes: list[str]
) -> bool:
    if entry.name == "exact" and min(shape) > DECOMPOSITION_ROWS[device.type]:
        notes.append(f"exact is skipped above {DECOMPOSITION_ROWS[device.type]} rows")
        return False
    if entry.dtype != PEERS_OWN:
        return True
    try:
        entry.function(make_input())
    except Exception as error:  # a peer's failure must not end the benchmark; it is reported
        reason = str(error).strip().splitlines()
        notes.append(f"{entry.name} failed: {type(error).__name__}: {reason[0] if reason else ''}")
        return False
    return True


def _row(entry: Candidate, shape: Shape, timings: dict[str, Timing], rates: dict[str, float]) -> dict[str, Any]:
    timing = timings[entry.name]
    flops = entry.num_flops(shape)
    return {
        "name": entry.name,
        "dtype": entry.dtype,
        "target": entry.target.__name__,
        "seconds": asdict(timing),
        "flops": flops,
        "share_of_matmul_rate": flops / timing.median / rates[entry.dtype] if flops else None,
        "ratio_to_muon": timing.median / timings[MUON].median if MUON in timings else None,
        "ratio_to_muon_float32": timing.median / timings[MUON_FLOAT32].median,
    }


def _over_all(shapes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric mean and largest of each map's ratios, for the maps that ran on every shape."""
    rows = []
    for name in [row["name"] for row in shapes[0]["maps"]]:
        same_map = [row for shape in shapes for row in shape["maps"] if row["name"] == name]
        if len(same_map) == len(shapes):
            means = {key: _mean_and_max([row[key] for row in same_map]) for key in _RATIOS}
            rows.append({"name": name, **means})
    return rows


_RATIOS = ("ratio_to_muon", "ratio_to_muon_float32")


def _mean_and_max(ratios: list[float | None]) -> dict[str, float] | None:
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios):
        return None
    return {"geometric_mean": math.exp(statistics.fmean(map(math.log, known))), "max": max(known)}


# ---
# Newton-Schulz iterations of other packages, measured where these are installed. None of them is required.
#
# `scheduled_quintic` stands for two that are not on every registry: it is written anew from their published
# coefficients.

Map = Callable[[Tensor], Tensor]
STEPS = 5
# You Jiacheng's five steps, of microsoft/dion and of NVIDIA's Emerging-Optimizers ("quintic", its default).
SCHEDULE = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
DION = "dion, Emerging"


def peers(device: torch.device) -> tuple[dict[str, Map], list[str]]:
    """(name -> map, a note on each package that cannot run here)."""
    maps: dict[str, Map] = {}
    notes = []
    deepspeed = _load("deepspeed", "deepspeed.runtime.zero.muon.original_muon", notes)
    if deepspeed is not None:
        # Both are compiled by DeepSpeed itself, in its default setting.
        maps["DeepSpeed"] = lambda x: deepspeed.zeropower_via_newtonschulz5(x, STEPS)
        if hasattr(deepspeed, "zeropower_via_gram_newtonschulz"):
            maps["DeepSpeed gram"] = lambda x: deepspeed.zeropower_via_gram_newtonschulz(x, STEPS)
    if device.type != "cuda":
        notes.append("gram-newton-schulz is left out: its kernels are for a GPU")
    else:
        gram = _load("gram-newton-schulz", "gram_newton_schulz", notes)
        if gram is not None:
            build = functools.cache(
                gram.GramNewtonSchulz
            )  # loads its kernels at the first call; a failure counts as the map's
            maps["gram-newton-schulz"] = lambda x: build()(x)
    return maps, notes


def scheduled_quintic(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The iteration of dion and Emerging-Optimizers in `dtype`: a quintic whose coefficients change step by step."""
    y = to_wide(x, dtype)
    y = y / (torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True) + EPS)
    for a, b, c in SCHEDULE:
        y = quintic_step(y, a, b, c)
    return from_wide(y, x)


def _load(package: str, module: str, notes: list[str]) -> Any:
    """The module, or None and an additional note."""
    if importlib.util.find_spec(module.split(".")[0]) is None:
        notes.append(f"{package} is not installed")
        return None
    output = io.StringIO()
    level = logging.root.manager.disable
    try:
        logging.disable(logging.CRITICAL)
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return importlib.import_module(module)
    except Exception as error:  # whatever another package raises on import, the benchmark continues without it
        notes.append(f"{package} is installed and cannot be imported: {type(error).__name__}: {error}")
        return None
    finally:
        logging.disable(level)


# ---
# Errors of a map on known spectra: the singular values of its output, compared with the exact ones.
#
# Each spectrum has a largest singular value of 1. In "flat" all are 1; "power law" is 1/i; "gaussian" is the spectrum
# of independent normal numbers. All modes count, including those below a map's accurate range.

# Rows of the largest float64 decomposition. At 1024 one takes seconds on two CPU cores, at 2048 on a GPU.
DECOMPOSITION_ROWS = {"cpu": 1024, "cuda": 2048}


@dataclass(frozen=True)
class KnownMatrix:
    """x = u diag(sigma) vh: x in float32, its decomposition in float64."""

    x: Tensor
    u: Tensor
    sigma: Tensor
    vh: Tensor


def error_shape(shape: Shape, device: torch.device) -> Shape:
    """`shape`, or a smaller one of the same aspect ratio where its decomposition would take too long."""
    scale = min(1.0, DECOMPOSITION_ROWS[device.type] / min(shape))
    return (round(shape[0] * scale), round(shape[1] * scale))


def known_matrices(shape: Shape, device: torch.device) -> dict[str, KnownMatrix]:
    """A matrix of `shape` for each spectrum."""
    m, n = shape
    r = min(shape)
    normal = {"dtype": torch.float64, "device": device}
    u = torch.linalg.qr(torch.randn(m, r, **normal)).Q
    vh = torch.linalg.qr(torch.randn(n, r, **normal)).Q.mT
    index = torch.arange(1, r + 1, **normal)
    x = torch.randn(m, n, **normal)
    gaussian = torch.linalg.svd(x / torch.linalg.matrix_norm(x, 2), full_matrices=False)
    # Rounding x to float32 moves its singular values by less than 1e-8: no need to decompose it again.
    parts = {"flat": (u, torch.ones_like(index), vh), "power law": (u, 1 / index, vh), "gaussian": gaussian}
    return {name: KnownMatrix(((u * sigma) @ vh).float(), u, sigma, vh) for name, (u, sigma, vh) in parts.items()}


def errors(
    function: Callable[[Tensor], Tensor], matrix: KnownMatrix, target: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """{"max", "mean"} relative error of the output along the input's singular vectors.

    target: of the singular values.
    """
    output = function(matrix.x).double()
    values = ((matrix.u.mT @ output) * matrix.vh).sum(dim=-1)
    exact = target(matrix.sigma)
    relative = (values / exact - 1).abs()
    return {"max": relative.max().item(), "mean": relative.mean().item()}
