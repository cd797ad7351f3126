"""Products in full float32 and without autocast, whatever the process has set for its model.

The maps magnify the rounding of their factors by up to 1800 (`coefficients`, slope). With the 8 bits of bfloat16 that
`torch.set_float32_matmul_precision("medium")` lets oneDNN use on a CPU, a matrix of rank m/8 came out wrong by 22% at
resolution 0.01 and by 210% at 0.001; with TF32's 11 bits by 1 to 3.5% and by 8 to 19% (test_full_precision.py).
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

# The owners of float32 products: cuBLAS, and oneDNN on CPUs and Intel's GPUs.
BACKENDS: dict[str, Any] = {"cuda": torch.backends.cuda.matmul, "mkldnn": torch.backends.mkldnn.matmul}  # pyright: ignore
FULL = ("ieee", "none")  # "none": nothing was set, which is full precision too

# The settings are the process's, autocast is the thread's: the first call inside saves them, the last restores them.
_lock = threading.Lock()
_num_inside = 0
_saved: dict[str, str] = {}


@contextmanager
def full_precision(device_types: Iterable[str]) -> Iterator[None]:
    """Within, float32 products have float32's factors, and autocast is off on these devices."""
    with ExitStack() as stack:
        for device_type in device_types:
            if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.callback(_restore)
        _pin()
        yield


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
    global _num_inside
    with _lock:
        _num_inside += 1
        if _num_inside > 1:
            return
        for name, backend in BACKENDS.items():
            if backend.fp32_precision not in FULL:
                # This API and not set_float32_matmul_precision, which would overwrite what is inherited.
                _saved[name], backend.fp32_precision = backend.fp32_precision, "ieee"


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
