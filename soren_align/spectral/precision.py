"""Matrix products in full float32 and without autocast, whatever precision the process has set for its model.

The maps magnify the rounding of their factors by up to 5000 (`coefficients`, slope). With the 8 bits of bfloat16 that
`torch.set_float32_matmul_precision("medium")` allows oneDNN on a CPU, the error of a matrix of rank m/8 was 22% at
resolution 0.01 and 210% at 0.001; with TF32's 11 bits 1 to 3.5% and 8 to 19% (test_full_precision.py).
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

# The libraries of float32 products: cuBLAS, and oneDNN on CPUs and Intel's GPUs.
BACKENDS: dict[str, Any] = {"cuda": torch.backends.cuda.matmul, "mkldnn": torch.backends.mkldnn.matmul}  # pyright: ignore
FULL = ("ieee", "none")  # "none": not set, which is full precision too

# The settings are global to the process, autocast to the thread: the outermost call saves and restores the settings.
_lock = threading.Lock()
_num_inside = 0
_saved: dict[str, str] = {}
_sums_in_float16 = False


@contextmanager
def full_precision(device_types: Iterable[str]) -> Iterator[None]:
    """A context in which float32 products are computed in full precision, without autocast on these devices.

    Products of float16 factors are summed in float32: cuBLAS has no float32 output of sums in float16.
    """
    with ExitStack() as stack:
        for device_type in device_types:
            if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.callback(_restore)
        _pin()
        yield


@contextmanager
def tf32_products(device_type: str, wanted: bool = True) -> Iterator[None]:
    """A context within `full_precision` in which cuBLAS rounds float32 factors to TF32, if `wanted`.

    Not run on a GPU yet. The setting is the process's: no other thread may compute in full precision meanwhile.
    """
    if not wanted or device_type != "cuda":
        yield
        return
    before, BACKENDS["cuda"].fp32_precision = BACKENDS["cuda"].fp32_precision, "tf32"
    try:
        yield
    finally:
        BACKENDS["cuda"].fp32_precision = before


def in_full_precision(
    function: Callable[Concatenate[Tensor, P], R],
) -> Callable[Concatenate[Tensor, P], R]:
    """`function`, called within `full_precision` on its first argument's device."""

    @functools.wraps(function)
    def inner(x: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        with full_precision([x.device.type]):
            return function(x, *args, **kwargs)

    return inner


def _pin() -> None:
    global _num_inside, _sums_in_float16
    with _lock:
        _num_inside += 1
        if _num_inside > 1:
            return
        for name, backend in BACKENDS.items():
            if backend.fp32_precision not in FULL:
                # This API and not set_float32_matmul_precision, which would overwrite what is inherited.
                _saved[name], backend.fp32_precision = backend.fp32_precision, "ieee"
        if _sums_in_float16 := BACKENDS["cuda"].allow_fp16_accumulation:
            BACKENDS["cuda"].allow_fp16_accumulation = False


def _restore() -> None:
    global _num_inside
    with _lock:
        _num_inside -= 1
        if _num_inside:
            return
        for name, precision in _saved.items():
            BACKENDS[name].fp32_precision = "none"
            if BACKENDS[name].fp32_precision != precision:  # else it is inherited from torch.backends.fp32_precision
                BACKENDS[name].fp32_precision = precision
        _saved.clear()
        if _sums_in_float16:
            BACKENDS["cuda"].allow_fp16_accumulation = True
