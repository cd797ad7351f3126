"""Helpers of all maps: check the input, transpose it, and restore its shape and dtype.

A map works on [m, n] or [batch, m, n] with m <= n, so that products and decompositions have the
smaller dimension.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor


def to_wide(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` as [m, n] or [batch, m, n] with m <= n, in `dtype`; may share memory with `x`.

    Raises ValueError if `x` has fewer than two dimensions or is not floating point.
    """
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(
            f"found {x.dtype} of shape {tuple(x.shape)}; pass floating-point matrices [..., m, n]"
            " to a spectral map"
        )
    if x.ndim > 3:
        x = x.flatten(0, -3)
    return (x.mT if x.shape[-2] > x.shape[-1] else x).to(dtype)


def from_wide(y: Tensor, x: Tensor) -> Tensor:
    """`y`, the map of `to_wide(x)`, in the shape and dtype of `x`."""
    y = y.mT if x.shape[-2] > x.shape[-1] else y
    return y.reshape(x.shape).to(x.dtype)


def multiply_add(c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float) -> Tensor:
    """beta * c + alpha * a @ b, in one rounding, for [m, n] or [batch, m, n]."""
    # addmm for single matrices: torch.optim.Muon uses it, and baddbmm may sum in another order.
    product = torch.addmm if c.ndim == 2 else torch.baddbmm
    return product(c, a, b, beta=beta, alpha=alpha)


def frobenius_norm(x: Tensor) -> Tensor:
    """|x|_F of every matrix, [..., 1, 1]."""
    # Row by row: one float32 sum over 2048 x 2048 squares is off by up to 1e-3 on a CPU.
    rows = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.linalg.vector_norm(rows, dim=-2, keepdim=True)


def all_finite(x: Tensor) -> Tensor:
    """Whether every entry of a matrix is finite, [..., 1, 1] bool."""
    return x.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)


def replace_zeros(norm: Tensor) -> Tensor:
    """`norm`, or 1 where it is 0, so that a zero matrix is divided by 1."""
    return norm.where(norm > 0, 1.0)


# Matrix products in full float32 and without autocast, whatever precision the process has set for
# its model.  The maps magnify the rounding of their factors by up to 6244 (`coefficients`, slope).
# With the 8 bits of bfloat16 that `torch.set_float32_matmul_precision("medium")` allows oneDNN on a
# CPU, a matrix of rank m/8 would be 4% off at resolution 0.01 and 121% at 0.0004; with TF32's 11
# bits 0.5% and 17% (factors rounded on a CPU, as in test_full_precision.py).

P = ParamSpec("P")
R = TypeVar("R")

# The libraries of float32 products: cuBLAS, and oneDNN on CPUs and Intel's GPUs.
_mkldnn: Any = torch.backends.mkldnn
BACKENDS: dict[str, Any] = {"cuda": torch.backends.cuda.matmul, "mkldnn": _mkldnn.matmul}
FULL = ("ieee", "none")  # "none": not set, which is full precision too

# The settings are global to the process, autocast to the thread: the outermost call saves and
# restores the settings.
_lock = threading.Lock()
_num_inside = 0
_saved: dict[str, str] = {}
_sums_in_16_bits: dict[str, bool] = {}
SUMS = (
    "allow_fp16_accumulation",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)
"""Settings of cuBLAS that let products of 16-bit factors be summed in 16 bits."""


@contextmanager
def full_precision(device_types: Iterable[str]) -> Iterator[None]:
    """A context in which float32 products are computed in full precision, without autocast on these
    devices.

    Products of 16-bit factors are summed in float32.
    """
    with ExitStack() as stack:
        for device_type in device_types:
            if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(
                device_type
            ):
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
                # This API and not set_float32_matmul_precision, which would overwrite what is
                # inherited.
                _saved[name], backend.fp32_precision = backend.fp32_precision, "ieee"
        for name in SUMS:
            if getattr(BACKENDS["cuda"], name):
                _sums_in_16_bits[name] = getattr(BACKENDS["cuda"], name)
                setattr(BACKENDS["cuda"], name, False)


def _restore() -> None:
    global _num_inside
    with _lock:
        _num_inside -= 1
        if _num_inside:
            return
        for name, precision in _saved.items():
            BACKENDS[name].fp32_precision = "none"
            # else it is inherited from torch.backends.fp32_precision
            if BACKENDS[name].fp32_precision != precision:
                BACKENDS[name].fp32_precision = precision
        _saved.clear()
        for name, was_allowed in _sums_in_16_bits.items():
            setattr(BACKENDS["cuda"], name, was_allowed)
        _sums_in_16_bits.clear()
