"""Helpers of all maps: check the input, transpose it, and restore its shape and dtype.

A map works on [m, n] or [batch, m, n] with m <= n, so that products and decompositions have the
smaller dimension.
"""

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..core.optimizer_settings import FactorPrecision


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


# |x|_F in between needs no scaling: neither sigma^4 nor its sums leave float32
SAFE_NORMS = (1e-12, 1e6)


def mapped_in_range(
    x: Tensor,
    function: Callable[[Tensor, Tensor | float, bool], tuple[Tensor, Tensor | int]],
    precision: FactorPrecision,
    max_norm: float | None,
    large_from: float = math.inf,
) -> tuple[Tensor, Tensor | int]:
    """The map of x, and the number of guarded matrices, by a function whose products stay within
    the range of float32.

    function(wide, scale, may_be_large) maps scale * wide, [..., m, n] with m <= n in float32
    (float64 for float64, but for narrow factors); may_be_large: whether |x|_F may be above
    large_from. max_norm: as in `minimax_sigmoid`. Returns all NaN for a matrix that contains a NaN
    or an infinity.
    """
    narrow = precision != "float32"
    double = x.dtype == torch.float64 and not narrow
    wide = to_wide(x, torch.float64 if double else torch.float32)
    low, high = SAFE_NORMS
    # A known bound spares the host read, for which a GPU would wait at every map.
    if max_norm is not None:
        is_safe, may_be_large = max_norm < high, not max_norm <= large_from
    else:  # by one host read; NaN and overflow are as large matrices
        norm = frobenius_norm(wide)
        checks = [((norm > low) & (norm < high)).all(), (norm <= large_from).all()]
        is_safe, is_small = torch.stack(checks).tolist()
        may_be_large = not is_small
    if is_safe and not narrow:
        result, num_guarded = function(wide, 1.0, may_be_large)
        return from_wide(result, x), num_guarded

    # NaN if there is a NaN
    largest = torch.linalg.vector_norm(wide, torch.inf, dim=(-2, -1), keepdim=True)
    finite = largest.isfinite()
    # products alone, which carry a NaN to all entries; no pass over x is needed
    if narrow and precision != "tf32":
        scale = replace_zeros(largest).where(finite, torch.nan)
        result, num_guarded = function(wide / scale, scale, may_be_large)
        return from_wide(result, x), num_guarded
    scale = replace_zeros(largest).where(finite, 1.0)
    # a GPU's NaN has all bits set, of which TF32's `rounded` makes 0: hence the masks
    with tf32_products(x.device.type, precision == "tf32"):
        result, num_guarded = function((wide / scale).where(finite, 0.0), scale, may_be_large)
    return from_wide(result.masked_fill_(~finite, torch.nan), x), num_guarded


# Matrix products in full float32 and without autocast, whatever precision the process has set for
# its model.  The maps magnify the rounding of their factors by up to 5000 (`coefficients`, slope).
# With the 8 bits of bfloat16 that `torch.set_float32_matmul_precision("medium")` allows oneDNN on a
# CPU, the error of a matrix of rank m/8 was 22% at resolution 0.01 and 210% at 0.001; with TF32's
# 11 bits 1 to 3.5% and 8 to 19% (test_full_precision.py).

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
_sums_in_float16 = False


@contextmanager
def full_precision(device_types: Iterable[str]) -> Iterator[None]:
    """A context in which float32 products are computed in full precision, without autocast on these
    devices.

    Products of float16 factors are summed in float32: cuBLAS has no float32 output of sums in
    float16.
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


@contextmanager
def tf32_products(device_type: str, wanted: bool = True) -> Iterator[None]:
    """A context within `full_precision` in which cuBLAS rounds float32 factors to TF32, if
    `wanted`.

    The setting is the process's: no other thread may compute in full precision meanwhile.
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
                # This API and not set_float32_matmul_precision, which would overwrite what is
                # inherited.
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
            # else it is inherited from torch.backends.fp32_precision
            if BACKENDS[name].fp32_precision != precision:
                BACKENDS[name].fp32_precision = precision
        _saved.clear()
        if _sums_in_float16:
            BACKENDS["cuda"].allow_fp16_accumulation = True
