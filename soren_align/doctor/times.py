"""Times of the maps of one layer beside Muon's, against the time of their products at the device's
own rate.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..core.optimizer_settings import FactorPrecision
from ..spectral import MAPS, SpectralMap
from .findings import Finding, Machine, judged
from .maps import mapped

TIMED: tuple[tuple[str, FactorPrecision], ...] = (
    ("minimax", "float16"),
    ("minimax", "float32"),
    ("sns", "float32"),
    ("muon", "bfloat16"),
)
MODELS: dict[str, tuple[str, dict[tuple[int, int], int]]] = {
    "cuda": ("qwen2.5-3b", {(2048, 2048): 2, (256, 2048): 2, (11008, 2048): 2, (2048, 11008): 1}),
    "cpu": ("llama-60m", {(512, 512): 4, (1376, 512): 2, (512, 1376): 1}),
}
"""The matrices of one layer, [out, in], by their number."""
AT_MOST = {"cuda": 5.0, "cpu": 30.0}
"""Times the products alone; on an H200 2.7 for minimax in float16, 1.5 for minimax in float32 and
for Muon."""
RATE_SHARE = 0.5
"""Of the peak in a GPU's data sheet, for large matrix products, which reach 0.6 on an H200."""
SECONDS, QUICK_SECONDS = 10.0, 2.0
"""Of the rounds for one shape."""


def times(machine: Machine) -> Iterator[Finding]:
    """One line for the products, and one for each map over the matrices of one layer; on CPUs
    without float16, which they emulate.
    """
    from ..planning.flops import PEAKS, data_sheet

    device, (model, shapes) = torch.device(machine.device), MODELS[machine.device]
    rates = matmul_rates(device)
    name = torch.cuda.get_device_name() if machine.num_gpus else "CPU"
    # The data sheet's, by which plan predicts times.
    peaks = PEAKS.get(data_sheet(name) or "", {})
    slow = [
        precision
        for precision, peak in peaks.items()
        if rates.get(precision, peak) < RATE_SHARE * peak
    ]
    measured = ", ".join(f"{precision} {rate / 1e12:.3g}" for precision, rate in rates.items())
    expected = ", ".join(
        f"{RATE_SHARE * peaks[precision] / 1e12:.3g}" for precision in rates if precision in peaks
    )
    reason = f"matrix products of {name} in {', '.join(slow)} reach less than {RATE_SHARE:.0%} of the data sheet's peak"
    reason += "; look at power and clocks (nvidia-smi -q -d CLOCK,POWER)"
    yield judged(
        "matrix products", f"{measured} TFLOP/s", f">= {expected or 0} TFLOP/s", not slow, reason
    )
    timed: dict[str, tuple[SpectralMap, FactorPrecision]] = {
        f"{name} {precision}": (MAPS[name], precision) for name, precision in TIMED
    }
    if not machine.num_gpus:
        del timed["minimax float16"]
    subjects = {key: lambda x, key=key: mapped(timed[key][0], x, timed[key][1]) for key in timed}
    seconds, products = dict.fromkeys(timed, 0.0), dict.fromkeys(timed, 0.0)
    for shape, count in shapes.items():

        def make_input(shape: tuple[int, int] = shape, count: int = count) -> torch.Tensor:
            x = torch.randn(count, *shape, device=device)
            return x / x.norm()

        limit = SECONDS if machine.num_gpus and not machine.quick else QUICK_SECONDS
        timings = interleaved(subjects, make_input, device, seconds=limit)
        for key, (spectral_map, precision) in timed.items():
            seconds[key] += timings[key]
            products[key] += (
                count * (spectral_map.num_flops(*shape, precision) or 0) / rates[precision]
            )
    for key in timed:
        own, alone = 1e3 * seconds[key], 1e3 * products[key]
        most = AT_MOST[machine.device] * alone
        measured = (
            f"{own:.3g} ms a layer of {model}, {seconds[key] / seconds['muon bfloat16']:.2f} x Muon"
        )
        reason = (
            f"the map {key.replace(' ', ' in ')} takes {own:.3g} ms, and its products {alone:.3g} ms; end other "
            "processes on the device"
        )
        yield judged(
            f"time {key}", measured, f"<= {most:.3g} ms (products {alone:.3g})", own <= most, reason
        )


def interleaved(
    subjects: Mapping[str, Callable[[Any], object]],
    make_argument: Callable[[], Any],
    device: torch.device,
    seconds: float,
) -> dict[str, float]:
    """The median seconds of one call of each subject, in rounds A B C, A B C, ... of at least 3.

    Other processes and the clock's changes then slow all subjects alike.
    """
    for _ in range(3):  # the first calls compile, load kernels and record CUDA graphs
        began = time.perf_counter()
        for function in subjects.values():
            _seconds(function, make_argument(), device)
    num_rounds = min(max(int(seconds / (time.perf_counter() - began)), 3), 50)
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(num_rounds):
        for name, function in subjects.items():
            times[name].append(_seconds(function, make_argument(), device))
    return {name: statistics.median(measured) for name, measured in times.items()}


def _seconds(function: Callable[[Any], object], argument: Any, device: torch.device) -> float:
    """The time of one call, until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    function(argument)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def matmul_rates(device: torch.device) -> dict[str, float]:
    """FLOP/s of a large square matrix product, by dtype."""
    size = {"cpu": 1024, "cuda": 8192}[device.type]
    names = ["float32", "bfloat16", *(["float16"] if device.type == "cuda" else [])]

    def make_argument() -> dict[str, torch.Tensor]:
        x = torch.randn(size, size, device=device)
        return {name: x.to(getattr(torch, name)) for name in names}

    subjects = {name: lambda x, name=name: x[name] @ x[name] for name in names}
    times = interleaved(subjects, make_argument, device, seconds=0.5)
    return {name: 2 * size**3 / measured for name, measured in times.items()}
