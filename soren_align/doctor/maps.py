"""The maps on this device, against the same maps in float64 on the CPU, on matrices whose singular
values fall over four decades as those of real momenta do; and the time of the default map.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.optimizer_settings import FactorPrecision
from ..spectral import MAPS, SpectralMap
from ..spectral.maps import sigmoid
from .checks import Finding, Machine, judged

SMALLEST = 2.5e-4
"""The smallest singular value as a share of the largest: 45% of them then lie below 1% of it, as in
the momenta of SmolLM2-135M (research/studies/spectra.md)."""
SHAPES = ((64, 64), (96, 256), (256, 96))
LIMIT = 1e-3
"""The largest relative distance (Frobenius) from float64 in float32."""
LIKE_CPU = 1.5
"""The limit of the other precisions, times the distance of the CPU in the same precision. An
absolute one depends on the spectrum, most where many modes lie near the map's roll-off."""
LARGE_MODES = 1e-3
"""The share of nu above which singular values are accurate in minimax."""
SIGMOID_LIMITS: dict[FactorPrecision, float] = {"float32": 0.008, "float16": 0.02}
"""Limits of the relative error of these modes in minimax: its certificate, and what 11 bits add to
it."""

MATRICES = {"cuda": (4, 2048, 2048), "cpu": (4, 512, 1376)}
AT_MOST = {"cuda": 5.0, "cpu": 30.0}
"""Times the products alone; on an H200 2.7 for minimax in float16, 1.5 in float32."""


@dataclass(frozen=True)
class Momentum:
    """A matrix with known singular values, x = u diag(sigma) v^T, in float64."""

    x: Tensor
    u: Tensor
    sigma: Tensor
    v: Tensor


def momenta(smallest: float = SMALLEST) -> list[Momentum]:
    """Return matrices with random singular vectors and singular values from 0.05 down to a share of
    it.
    """
    matrices, generator = [], torch.Generator().manual_seed(0)
    for shape in SHAPES:
        num = min(shape)
        sigma = 0.05 * smallest ** torch.linspace(0, 1, num, dtype=torch.float64)
        u, v = (
            torch.linalg.qr(torch.randn(n, num, dtype=torch.float64, generator=generator)).Q
            for n in shape
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
    device = torch.device(machine.device)
    # Decompositions are 0 on the null space, which is another one in float32: no tiny values.
    usual, full_rank = momenta(), momenta(smallest=0.01)
    for spectral_map in MAPS.values():
        try:
            decomposes = spectral_map.num_flops(*SHAPES[0]) is None
            yield distances(spectral_map, full_rank if decomposes else usual, device)
        except Exception as error:  # of one map, as of a missing kernel; the next ones are checked
            reason = f"the map {spectral_map.name} fails on {device}: {type(error).__name__}"
            yield Finding(f"map {spectral_map.name}", "", "", "FAILED", f"{reason}: {error}")
    yield certificate(usual, device)
    yield nan_stays(device)


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
            own = relative(
                mapped(spectral_map, matrix.x.float().to(device), precision), exact, spectral_map
            )
            bound = LIMIT
            if precision != "float32":
                on_cpu = mapped(spectral_map, matrix.x.float(), precision)
                bound = LIKE_CPU * relative(on_cpu, exact, spectral_map)
            # The matrix that comes closest to its limit, or exceeds it most, stands in the table.
            if not limit or not own - bound < distance - limit:  # NaN too
                distance, limit = own, bound
        measured.append(f"{precision} {distance:.1e}")
        limits.append(f"{limit:.1g}")
        if not distance <= limit:
            finding = f"{precision} is {distance:.2g} from float64, and the limit is {limit:.2g}"
            problems.append(finding)
    name, listed = f"map {spectral_map.name}", "; ".join(problems)
    reason = f"the {name} in {listed}; do not train with it on this device"
    return judged(name, ", ".join(measured), f"<= {', '.join(limits)}", not problems, reason)


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
            # nu, by which minimax divides the singular values (spectral/iterate.py): smaller ones
            # are not certified.
            large = matrix.sigma > LARGE_MODES * matrix.sigma.pow(8).sum() ** (1 / 8)
            worst = max(worst, float((gain / sigmoid(matrix.sigma) - 1)[large].abs().max()))
        measured.append(f"{precision} {worst:.1e}")
        if not worst <= limit:
            finding = f"in {precision} is {worst:.1%} from the sigmoid"
            problems.append(f"{finding}, and its certificate is {limit:.1%}")
    expected = f"<= {', '.join(f'{limit:g}' for limit in SIGMOID_LIMITS.values())}"
    reason = f"the map minimax {'; '.join(problems)}; set optimizer.precision: float32"
    name = "minimax's certificate"
    return judged(name, ", ".join(measured), expected, not problems, reason)


def nan_stays(device: torch.device) -> Finding:
    """Whether a NaN in one matrix of a batch makes this matrix NaN and no other."""
    x = torch.randn(2, 96, 128, generator=torch.Generator().manual_seed(0)) / 100
    x[0, 1, 2] = torch.nan
    problems, num = [], 0
    for spectral_map in MAPS.values():
        for precision in precisions(spectral_map):
            output, num = mapped(spectral_map, x.to(device), precision), num + 1
            if not output[0].isnan().all() or not output[1].isfinite().all():
                problems.append(f"{spectral_map.name} ({precision})")
    reason = f"a NaN in one matrix does not stay in it under {', '.join(problems)}; report it"
    return judged("NaN", f"{num} maps and precisions", "stays in its matrix", not problems, reason)


def speed(machine: Machine) -> Iterator[Finding]:
    """Time the default map of a batch of matrices, beside its products at the device's own rate."""
    from torch.utils.benchmark import Timer

    minimax, shape = MAPS["minimax"], MATRICES[machine.device]
    precision = "float16" if machine.num_gpus else "float32"  # which CPUs emulate
    # The products alone are what the map cannot save; other time is launches and memory traffic.
    x = torch.randn(*shape, device=machine.device)
    x /= x.norm()
    factor = x.to(getattr(torch, precision))
    names = {"x": x, "factor": factor, "run": lambda: mapped(minimax, x, precision)}
    product, seconds = (
        Timer(line, globals=names, num_threads=torch.get_num_threads()).blocked_autorange().median
        for line in ("factor @ factor.mT", "run()")
    )
    num, num_rows, num_columns = shape
    rate = 2 * num * num_rows**2 * num_columns / product
    alone = num * (minimax.num_flops(num_rows, num_columns, precision) or 0) / rate
    most = AT_MOST[machine.device] * alone
    measured = f"minimax {1e3 * seconds:.3g} ms, {num} x {num_rows} x {num_columns}, {precision}"
    expected = f"<= {1e3 * most:.3g} ms (products {1e3 * alone:.3g})"
    reason = f"the map takes {1e3 * seconds:.3g} ms, and its products {1e3 * alone:.3g} ms; end "
    reason += "other processes on the device, and look at power and clocks (nvidia-smi -q)"
    yield judged("speed", measured, expected, seconds <= most, reason)
