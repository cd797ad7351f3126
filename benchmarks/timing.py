"""Measure times in interleaved rounds (A B C A B C ...) after a warm-up."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from soren_align.core.errors import UserError
from soren_align.run.provenance import provenance

T = TypeVar("T")
# CUDA graphs record in the second call and replay from the third on
WARM_UPS = {"cpu": 1, "cuda": 3}
MIN_ROUNDS, MAX_ROUNDS = 3, 50
ROUNDS_SECONDS = 20.0  # for all rounds of one comparison, if MIN_ROUNDS allow
# A shorter call is repeated once, untimed, just before: after another subject's code it is up to
# 45% slower (one 64x96 map under two names: 0.65 and 0.45 ms; with this, 0.27 and 0.25).
SHORT_SECONDS = 0.01
# Subjects with a longer call are skipped: some CPUs multiply bfloat16 at 1/100 of float32's rate.
MAX_CALL_SECONDS = 30.0
PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}
PRODUCT_SECONDS = 0.5


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, over the rounds of one comparison."""

    median: float
    low: float  # quartiles
    high: float
    num_rounds: int


def interleaved(
    subjects: Mapping[str, Callable[[T], object]],
    make_argument: Callable[[], T],
    device: torch.device,
    on_round: Callable[[int, int], None] = lambda done, total: None,
    seconds: float = ROUNDS_SECONDS,
) -> dict[str, Timing]:
    """Time of one call of each subject, with a new argument that `make_argument` creates outside of
    the measured time.

    After the warm-up there are as many rounds as fit into `seconds`, between MIN_ROUNDS and
    MAX_ROUNDS. `on_round(done, total)` is called before every round.
    """
    estimates: dict[str, float] = {}
    for _ in range(WARM_UPS[device.type]):
        estimates = {
            name: measure(function, make_argument(), device) for name, function in subjects.items()
        }
    num_rounds = min(max(int(seconds / max(sum(estimates.values()), 1e-9)), MIN_ROUNDS), MAX_ROUNDS)
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for done in range(num_rounds):
        on_round(done, num_rounds)
        for name, function in subjects.items():
            if estimates[name] < SHORT_SECONDS:
                measure(function, make_argument(), device)
            times[name].append(measure(function, make_argument(), device))
    timings = {}
    for name in subjects:
        low, median, high = statistics.quantiles(times[name], n=4, method="inclusive")
        timings[name] = Timing(median, low, high, num_rounds)
    return timings


def measure(function: Callable[[T], object], argument: T, device: torch.device) -> float:
    """Seconds of one call, until the device has finished, without freeing the result."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        begin.record()
        result = function(argument)
        end.record()
        end.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
    else:
        began = time.perf_counter()
        result = function(argument)
        seconds = time.perf_counter() - began
    del result
    return seconds


def matmul_rates(device: torch.device) -> dict[str, float]:
    """Measured FLOP/s of a large square matrix product, by dtype."""
    size = PRODUCT_SIZE[device.type]
    names = ["float32", "bfloat16", *(["float16"] if device.type == "cuda" else [])]

    def make_argument() -> dict[str, torch.Tensor]:
        x = torch.randn(size, size, device=device)
        return {name: x.to(getattr(torch, name)) for name in names}

    subjects = {name: lambda operands, name=name: operands[name] @ operands[name] for name in names}
    timings = interleaved(subjects, make_argument, device, seconds=PRODUCT_SECONDS)
    return {name: 2 * size**3 / timing.median for name, timing in timings.items()}


def too_slow(name: str, flops: float, dtype: str, rates: dict[str, float]) -> str | None:
    """Why `name` is skipped, if its products alone would take longer than MAX_CALL_SECONDS; else
    None.
    """
    seconds = flops / rates[dtype]
    if seconds <= MAX_CALL_SECONDS:
        return None
    return (
        f"{name} is skipped: at {rates[dtype] / 1e9:.0f} GFLOP/s, this device's rate in {dtype}, one call would take "
        f"{seconds:.0f} s or more"
    )


def find_device(name: str | None) -> torch.device:
    """The device `name`; for None the GPU if there is one, else the CPU.
    Raises UserError without such a device.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError("--device: found 'cuda', but torch finds no GPU on this machine; write cpu")
    return torch.device(name or ("cuda" if available else "cpu"))


def available_bytes(device: torch.device) -> int:
    """Memory for a benchmark: 90% of a GPU's free memory, or half of the CPU's total memory."""
    if device.type == "cuda":
        return int(0.9 * torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def machine(device: torch.device) -> dict[str, Any]:
    """The head of the tables: device, threads, versions, commit."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else platform.processor() or platform.machine()
    versions = provenance()
    return {
        "device": name,
        "kind": device.type,
        "num_threads": torch.get_num_threads(),
        "versions": {
            name: versions["versions"][name] for name in ("python", "torch", "soren-align")
        },
        "num_processors": os.cpu_count(),
        "load": os.getloadavg()[0],  # mean over the minute before
        "commit": versions["commit"],
        "platform": versions["platform"],
    }
