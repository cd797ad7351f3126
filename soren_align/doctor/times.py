"""Times of the maps of one layer beside Muon's, against the time of their products at the device's
own rate.
"""

from collections.abc import Iterator

import torch

from ..bench.shapes import MODELS
from ..bench.timing import interleaved, matmul_rates
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
MODEL = {"cuda": "qwen2.5-3b", "cpu": "llama-60m"}
AT_MOST = {"cuda": 5.0, "cpu": 30.0}
"""Times the products alone; on an H200 2.7 for minimax in float16, 1.5 for minimax in float32 and
for Muon."""
RATE_SHARE = 0.5
"""Of the peak in a GPU's data sheet, for large matrix products: docs/predicted_times.py assumes
0.6."""
SECONDS, QUICK_SECONDS = 10.0, 2.0
"""Of the rounds for one shape."""


def times(machine: Machine) -> Iterator[Finding]:
    """One line for the products, and one for each map over the matrices of one layer; on CPUs
    without float16, which they emulate.
    """
    from ..planning.flops import PEAKS, data_sheet

    device, model = torch.device(machine.device), MODELS[MODEL[machine.device]]
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
    for shape, count in model.per_layer.items():

        def make_input(shape: tuple[int, int] = shape, count: int = count) -> torch.Tensor:
            x = torch.randn(count, *shape, device=device)
            return x / x.norm()

        limit = SECONDS if machine.num_gpus and not machine.quick else QUICK_SECONDS
        timings = interleaved(subjects, make_input, device, seconds=limit)
        for key, (spectral_map, precision) in timed.items():
            seconds[key] += timings[key].median
            products[key] += (
                count * (spectral_map.num_flops(*shape, precision) or 0) / rates[precision]
            )
    for key in timed:
        own, alone = 1e3 * seconds[key], 1e3 * products[key]
        most = AT_MOST[machine.device] * alone
        measured = f"{own:.3g} ms a layer of {model.name}, {seconds[key] / seconds['muon bfloat16']:.2f} x Muon"
        reason = (
            f"the map {key.replace(' ', ' in ')} takes {own:.3g} ms, and its products {alone:.3g} ms; end other "
            "processes on the device, then see soren-align bench maps"
        )
        yield judged(
            f"time {key}", measured, f"<= {most:.3g} ms (products {alone:.3g})", own <= most, reason
        )
