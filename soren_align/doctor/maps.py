"""The maps on the device, against the same maps in float64 on the CPU, on matrices with the spectra
of real momenta.

On a GPU also: global settings of torch (TF32, sums in float16, autocast) do not change a map's
result, and the times of the maps beside Muon's.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.optimizer_settings import FactorPrecision
from ..spectral import MAPS, SpectralMap
from ..spectral.maps import sigmoid
from .findings import Finding, Machine, judged, skipped

LIMITS = {"float32": 1e-3, "tf32": 0.01, "float16": 0.01}
"""Of the relative distance (Frobenius) from float64: tests/research/test_recorded_spectra.py,
test_precisions.py."""
LIKE_CPU = 1.5
"""For bfloat16, which promises no distance: times the distance of the CPU in the same precision."""
DECADES = -3.6
"""From the largest to the smallest singular value: 45% lie below 1% of the largest, as in the
momenta of SmolLM2-135M (research/studies/spectra.md)."""
SHAPES = ((64, 64), (64, 172), (256, 64), (192, 192), (96, 256), (256, 256))
LARGE_MODES = 1e-3
"""Of nu: singular values above it are accurate in minimax."""
SIGMOID_LIMITS: dict[FactorPrecision, float] = {"float32": 0.005, "tf32": 0.02, "float16": 0.02}
"""Of the relative error of these modes in minimax: its certificate, and what 11 bits add to it."""
SAME = 1e-6
"""Relative distance up to which two results of one map are equal: libraries may choose another
kernel."""


@dataclass(frozen=True)
class Momentum:
    """A matrix of known singular values, x = u diag(sigma) v^T, in float64."""

    x: Tensor
    u: Tensor
    sigma: Tensor
    v: Tensor


def momenta(num: int, *, full_rank: bool = False) -> list[Momentum]:
    """Matrices with spectra like those of real momenta, and random singular vectors.
    full_rank: small singular values are raised, because decompositions are 0 on the null space,
    which is another one in float32.
    """
    matrices, generator = [], torch.Generator().manual_seed(0)
    for shape in (SHAPES * num)[:num]:
        sigma = torch.logspace(0, DECADES, min(shape), dtype=torch.float64)
        if full_rank:
            sigma = sigma + 0.01 * sigma[0] * torch.linspace(
                1, 0.5, len(sigma), dtype=torch.float64
            )
        sizes = [(size, len(sigma)) for size in shape]
        u, v = (
            torch.linalg.qr(torch.randn(*size, dtype=torch.float64, generator=generator)).Q
            for size in sizes
        )
        matrices.append(Momentum((u * sigma) @ v.mT, u, sigma, v))
    return matrices


def mapped(spectral_map: SpectralMap, x: Tensor, precision: FactorPrecision = "float32") -> Tensor:
    """The map of a matrix, or of a batch, with its default settings."""
    settings: dict[str, Any] = dict(spectral_map.defaults)
    if spectral_map.is_drawn:
        settings["seeds"] = list(range(len(x))) if x.ndim > 2 else [0]
    return spectral_map.function(x, precision=precision, max_norm=None, **settings)[0]


def maps(machine: Machine) -> Iterator[Finding]:
    """One line for each map in all its precisions, and one for each property."""
    device, num = torch.device(machine.device), 4 if machine.quick else 12
    usual, full_rank = momenta(num), momenta(num, full_rank=True)
    num_rows, num_columns = usual[0].x.shape
    for spectral_map in MAPS.values():
        try:
            decomposes = spectral_map.num_flops(num_rows, num_columns) is None
            yield distances(spectral_map, full_rank if decomposes else usual, device)
        except Exception as error:  # of one map, as of a missing kernel; the next ones are checked
            reason = (
                f"the map {spectral_map.name} fails on {device}: {type(error).__name__}: {error}"
            )
            yield Finding(f"map {spectral_map.name}", "an error", "", "FAILED", reason)
    yield certificate(usual, device)
    yield nan_stays(device)
    if machine.num_gpus:
        yield from settings_have_no_effect(usual[0].x.float().to(device))
    else:
        yield skipped("global settings", "no GPU: TF32 and sums in float16 exist on GPUs only")


def precisions(spectral_map: SpectralMap) -> list[FactorPrecision]:
    """The precisions of a map, without "auto", which is one of them."""
    named: list[Any] = [precision for precision in spectral_map.precisions if precision != "auto"]
    return named or [spectral_map.auto_precision(64, True)]


def distances(spectral_map: SpectralMap, matrices: list[Momentum], device: torch.device) -> Finding:
    """The largest relative distance of the map on the device from the map in float64 on the CPU."""
    measured, limits, problems = [], [], []
    for precision in precisions(spectral_map):
        distance = limit = 0.0
        for matrix in matrices:
            exact = mapped(spectral_map, matrix.x)
            on_device = mapped(spectral_map, matrix.x.float().to(device), precision)
            own = relative(on_device, exact, spectral_map)
            if precision in LIMITS:
                bound = LIMITS[precision]
            else:
                bound = LIKE_CPU * relative(
                    mapped(spectral_map, matrix.x.float(), precision), exact, spectral_map
                )
            if not limit or not own - bound < distance - limit:  # NaN too
                distance, limit = own, bound
        measured.append(f"{precision} {distance:.1e}")
        limits.append(f"{limit:.1g}")
        if not distance <= limit:
            problems.append(
                f"{precision} is {distance:.2g} from float64, and the limit is {limit:.2g}"
            )
    reason = (
        f"the map {spectral_map.name} in {'; '.join(problems)}; do not train with it on this device"
    )
    return judged(
        f"map {spectral_map.name}",
        ", ".join(measured),
        f"<= {', '.join(limits)}",
        not problems,
        reason,
    )


def relative(output: Tensor, exact: Tensor, spectral_map: SpectralMap) -> float:
    """The relative Frobenius distance; of random maps that of the sorted singular values: similar
    modes may mix.
    """
    output = output.cpu().double()
    if spectral_map.is_drawn:
        output, exact = torch.linalg.svdvals(output), torch.linalg.svdvals(exact)
    return float((output - exact).norm() / exact.norm())


def certificate(matrices: list[Momentum], device: torch.device) -> Finding:
    """Whether minimax is within its proved error of the sigmoid for modes above its resolution."""
    measured, problems = [], []
    for precision, limit in SIGMOID_LIMITS.items():
        worst = 0.0
        for matrix in matrices:
            output = mapped(MAPS["minimax"], matrix.x.float().to(device), precision).cpu().double()
            gain = ((matrix.u.mT @ output) * matrix.v.mT).sum(-1)
            large = matrix.sigma > LARGE_MODES * matrix.sigma.pow(8).sum() ** (1 / 8)
            worst = max(worst, float((gain / sigmoid(matrix.sigma) - 1)[large].abs().max()))
        measured.append(f"{precision} {worst:.1e}")
        if not worst <= limit:
            problems.append(
                f"in {precision} is {worst:.1%} from the sigmoid, and its certificate is {limit:.1%}"
            )
    limits = ", ".join(f"{limit:g}" for limit in SIGMOID_LIMITS.values())
    reason = f"the map minimax {'; '.join(problems)}; set optimizer.precision: float32 and run doctor again"
    return judged(
        "minimax's certificate", ", ".join(measured), f"<= {limits}", not problems, reason
    )


def nan_stays(device: torch.device) -> Finding:
    """Whether a NaN in one matrix of a batch makes this matrix NaN and no other."""
    x, problems, num = (
        torch.randn(2, 96, 128, generator=torch.Generator().manual_seed(0)) / 100,
        [],
        0,
    )
    x[0, 1, 2] = torch.nan
    for spectral_map in MAPS.values():
        for precision in precisions(spectral_map):
            output, num = mapped(spectral_map, x.to(device), precision), num + 1
            if not output[0].isnan().all() or not output[1].isfinite().all():
                problems.append(f"{spectral_map.name} ({precision})")
    reason = f"a NaN in one matrix does not stay in it under {', '.join(problems)}; report this as a defect"
    return judged("NaN", f"{num} maps and precisions", "stays in its matrix", not problems, reason)


def settings_have_no_effect(x: Tensor) -> Iterator[Finding]:
    """Whether each map has the same result under settings that a user or a library may choose."""
    names = (
        "fp32_precision",
        "allow_fp16_accumulation",
        "allow_fp16_reduced_precision_reduction",
        "autocast",
    )
    matmul = torch.backends.cuda.matmul
    subjects: list[tuple[SpectralMap, FactorPrecision]] = []
    for spectral_map in MAPS.values():
        subjects.extend((spectral_map, precision) for precision in precisions(spectral_map))
    usual = [mapped(spectral_map, x, precision) for spectral_map, precision in subjects]
    for name in names:
        if name != "autocast" and not hasattr(matmul, name):
            yield skipped(name, f"torch {torch.__version__} has no such setting")
            continue
        with ExitStack() as stack:
            if name == "autocast":
                stack.enter_context(torch.autocast("cuda", torch.bfloat16))
            else:
                stack.callback(setattr, matmul, name, getattr(matmul, name))
                setattr(
                    matmul, name, "tf32" if name == "fp32_precision" else not getattr(matmul, name)
                )
            outputs = [mapped(spectral_map, x, precision) for spectral_map, precision in subjects]
        worst, where = 0.0, ""
        for (spectral_map, precision), before, after in zip(subjects, usual, outputs, strict=True):
            difference = float((after - before).norm() / before.norm())
            if not difference <= worst:
                worst, where = difference, f"{spectral_map.name} ({precision})"
        reason = (
            f"{name} changes the map {where} by {worst:.2g}; leave this setting at torch's default"
        )
        yield judged(name, f"{worst:.1e}", f"no effect (<= {SAME:g})", worst <= SAME, reason)
