"""One loop for every map by matrix products: quintic steps on the matrix itself, as Muon's.

    A = y y^T;  y <- a y + (b A + c A^2) y          a u + b u^3 + c u^5 for every singular value u

The maps are tables for it (coefficients.py). Muon takes one step, five times. SNS, the Soren
paper's Algorithm 1, takes the classical cubic step. Soren's default, `minimax_sigmoid`, is that
algorithm with better numbers, seven quintics for fifteen cubics:

    s(sigma) = (1 + tanh(sigma / 2)) / 2        y starts from x / nu and ends at U V^T, the 1;
    O = y / 2 + t                               t, the tanh, is linear for gradients clipped to 1

nu = (sum of sigma^8)^(1/8) costs nothing, since the first step has |A^2|_F at hand, and it is
smaller than |x|_F, so that u is larger. Compositions from files are tables too, with the iterates
and u itself in the sum (composition.py).

Precision. The steps magnify a small u, and with it the rounding of all entries, by 6244 at the
default resolution. In 16 bits each result is rounded, but the first step adds a x from x's own 32
bits, and the rounding of its result is magnified by the other six alone, 739. Where a matrix has
nothing, that remains: one of low rank needs float32 (research/studies/optimizers.md). A CPU has no
fast float16: its factors are rounded, and multiplied in float32.
"""

import functools
from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any, get_args

import torch
from torch import Tensor

from ..core.optimizer_settings import MUON_STEPS, RESOLUTION, FactorPrecision
from .coefficients import (
    MUON,
    NORM_LIMIT,
    PROMOTION,
    SIGN,
    SUPPRESSION,
    TANH,
    TANH_LIMIT,
    TANH_SLOPE,
    Step,
)
from .composition import Composed, all_weights
from .matrices import (
    frobenius_norm,
    from_wide,
    in_full_precision,
    multiply_add,
    replace_zeros,
    to_wide,
)

EPS = 1e-7
"""The least norm that torch.optim.Muon divides by."""
LEAST = 1e-30
"""The least number by which a map divides a matrix. One with smaller entries has a result that
falls to 0 with it."""
LEAST_SQUARE = 1e-24
"""The least nu^4, for such a matrix: nu^-3 stays within float32."""
MOST_COLUMNS = 2**15
"""A row of so many ones has a sum of squares within float16."""
BLEND = 0.19
"""Between the norms NORM_LIMIT and NORM_LIMIT + BLEND, tanh's line turns into its two steps: the
map has no jump, and rises."""
NUM_SQUARINGS = 8
"""Of A^2, for the largest singular value: the 2048-norm is at most 0.5% above it, for up to 10 000
singular values."""


def same(y: Tensor) -> Tensor:
    """y: its dtype has rounded it."""
    return y


def iterate(
    y: Tensor,
    steps: Sequence[Step],
    weights: Sequence[float] = (),
    total: Tensor | None = None,
    rounded: Callable[[Tensor], Tensor] = same,
) -> Tensor:
    """y [..., m, n], m <= n, after these steps.

    total: the iterate after each step is added to it, times its weight. rounded: stands for a
    narrower dtype's rounding of each result.
    """
    for number, (a, b, c) in enumerate(steps):
        gram = rounded(symmetric_product(y))
        if c:  # else A^2 is for nothing
            gram = rounded(symmetric_product(gram, gram, beta=b, alpha=c))
        # (a I + b A + c A^2) y is a plain product, where addmm first copies y: a quarter of all
        # traffic. In bfloat16 the sum on the diagonal has too few bits, and the steps diverge.
        if c and y.dtype != torch.bfloat16:
            gram.diagonal(dim1=-2, dim2=-1).add_(a)
            y = rounded(rounded(gram) @ y)
        else:
            y = rounded(multiply_add(y, gram, y, beta=a, alpha=1.0 if c else b))
        if total is not None and weights[number]:
            total.add_(y, alpha=weights[number])
    return y


def symmetric_product(
    y: Tensor, add: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """alpha y y^T of [..., m, n], in the dtype of y; or beta add + alpha y^2 for a symmetric y."""
    kernel = _symmetric_kernel(y)
    if kernel is not None:
        out = y.new_empty(*y.shape[:-1], y.shape[-2])
        kernel(y, y.mT, C=add, out=out, alpha=alpha, beta=beta)
        return out
    return y @ y.mT if add is None else multiply_add(add, y, y, beta=beta, alpha=alpha)


def _symmetric_kernel(y: Tensor) -> Any:
    """QuACK's symmetric product, which computes one triangle and mirrors it, where it is installed
    (the extra `kernels`) and serves: 16 bits, rows of 16 bytes, capability 9 on. Else None.
    """
    is_aligned = y.shape[-1] % 8 == 0 == y.shape[-2] % 8
    serves = y.is_cuda and y.dtype.itemsize == 2 and is_aligned and y.is_contiguous()
    return _quack(y.device.index) if serves else None


@functools.cache
def _quack(device: int) -> Any:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0):
        return None
    try:
        from quack.gemm_interface import gemm_symmetric  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return gemm_symmetric


class Start:
    """A matrix scaled into the range of its products, with those of the first step.

    scale: [..., 1, 1], the largest entry (or more, see LEAST and MOST_COLUMNS); y = x / scale.
    gram: A = y y^T. square: A^2, in the dtype of x. nu: (sum of sigma^8)^(1/8) of y, [..., 1, 1],
    at least its largest singular value.
    """

    def __init__(self, x: Tensor, precision: FactorPrecision, least: float = LEAST):
        """x: [..., m, n] with m <= n in float32, or float64. precision: of the factors. least: of
        the scale.

        A NaN or an infinity makes all products NaN, and needs no check.
        """
        self.x = x
        # By the largest entry, whose products neither overflow nor vanish in float32; nor in
        # float16, where the rows' sums of squares must stay below 65504 too.
        largest = torch.linalg.vector_norm(x, torch.inf, dim=(-2, -1), keepdim=True)
        self.scale = largest.clamp(min=least)
        if x.shape[-1] > MOST_COLUMNS:
            self.scale = self.scale * sqrt(x.shape[-1] / MOST_COLUMNS)
        dtype, self.rounded = _factors(precision, x)
        y = torch.div(x, self.scale, out=x.new_empty(x.shape, dtype=dtype))
        self.y = self.rounded(y)
        self.gram = self.rounded(symmetric_product(self.y))
        self.square = _wide_product(self.gram, self.gram)
        self.nu = frobenius_norm(self.square).clamp(min=LEAST_SQUARE).pow(0.25)

    def iterate(
        self,
        steps: Sequence[Step],
        unit: Tensor,
        weights: Sequence[float] = (),
        total: Tensor | None = None,
    ) -> Tensor:
        """As `iterate`, from y / unit, for a unit [..., 1, 1] and a first b that is not 0.

        Call it once, and last: y, gram and square are freed.
        """
        (a, b, c), *others = steps
        y, gram, square = self.y, self.gram, self.square
        del self.y, self.gram, self.square
        # With v = y / unit:  v <- a v + b (G + c / b G^2) v,  G = A / unit^2. The factors a and b
        # cost no pass within the product, and unit^-3 none with the rounding.
        is_wide = y.dtype == square.dtype
        inner = square if is_wide else torch.empty_like(gram)
        inner = self.rounded(torch.addcmul(gram, square, unit.pow(-2), value=c / b, out=inner))
        start = self.x * (unit.square() / self.scale)
        wide = _add_wide_product_(start, inner, y, beta=a, alpha=b)
        y = self.rounded(torch.mul(wide, unit.pow(-3), out=wide if is_wide else y))
        del gram, square, inner, start, wide
        if total is not None and weights[0]:
            total.add_(y, alpha=weights[0])
        return iterate(y, others, weights[1:], total, self.rounded)

    def norm(self) -> Tensor:
        """|y|_F, [..., 1, 1]."""
        trace = self.gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=self.x.dtype)
        return trace[..., None, None].clamp(min=sqrt(LEAST_SQUARE)).sqrt()

    def largest(self) -> Tensor:
        """The largest singular value of y or up to 0.5% more, [..., 1, 1]; products of m x m."""
        power, log = self.square / self.nu.pow(4), self.nu.log() * 4
        for _ in range(NUM_SQUARINGS):
            power = power @ power
            norm = replace_zeros(frobenius_norm(power))
            power.div_(norm)
            log = 2 * log + norm.log()
        return (log / 2 ** (NUM_SQUARINGS + 2)).exp()


def _factors(
    precision: FactorPrecision, x: Tensor
) -> tuple[torch.dtype, Callable[[Tensor], Tensor]]:
    """The dtype of the factors of x, and how they are rounded where the dtype does not do it."""
    if precision == "float32":
        return x.dtype, same
    if precision == "float16" and not (x.is_cuda or x.is_meta):
        return torch.float32, lambda y: y.half().float()
    return getattr(torch, precision), same


def _has_wide_products(a: Tensor) -> bool:
    """Whether torch multiplies 16-bit factors into float32 on this device."""
    return a.dtype.itemsize == 2 and (a.is_meta or (a.is_cuda and torch.version.hip is None))


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, or float64 for float64 factors."""
    if _has_wide_products(a):
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    a, b = (factor.float() if factor.dtype.itemsize == 2 else factor for factor in (a, b))
    return a @ b


def _add_wide_product_(c: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float) -> Tensor:
    """beta c + alpha a @ b in c, of float32 or float64."""
    function: Any = torch.addmm if c.ndim == 2 else torch.baddbmm
    if _has_wide_products(a):
        return function(c, a, b, torch.float32, beta=beta, alpha=alpha, out=c)
    return function(c, a.to(c.dtype), b.to(c.dtype), beta=beta, alpha=alpha, out=c)


def minimax_sigmoid(
    x: Tensor,
    resolution: float = RESOLUTION,
    precision: FactorPrecision = "float32",
    max_norm: float | None = None,
) -> Tensor:
    """U s(S) V^T of x = U S V^T, approximately: s is the sigmoid.

    x: [..., m, n], floating point; not modified.
    resolution: the singular value, as a share of nu (at most |x|_F), from which the result is
    accurate: 0.0004, 0.001 or 0.01. Singular values far below it map to nearly 0.
    precision: of the factors of every product: "float32" (float64 for float64), "float16" or
    "bfloat16"; tests/spectral/test_precisions.py has the distances.
    max_norm: an upper bound of |x|_F of every matrix, if it is known: then the host reads nothing
    from the device, and the map can be compiled whole. None: it is read from x.
    Returns [..., m, n] in the dtype of x. Within 0.75% of the sigmoid for singular values above
    `resolution` (0.9% at 0.001, 1.8% at 0.01; in float16 1% at the default). With a singular value
    above 4.6 the tanh part is evaluated at sigma * 4.6 / sigma_max ("guarded"): finite, at most
    1.001, and too small for the other singular values. Zero for zero; a matrix that contains a NaN
    or an infinity gives all NaN.
    """
    return guarded_minimax_sigmoid(x, resolution, precision, max_norm)[0]


@torch.no_grad()
@in_full_precision
def guarded_minimax_sigmoid(
    x: Tensor,
    resolution: float = RESOLUTION,
    precision: FactorPrecision = "float32",
    max_norm: float | None = None,
) -> tuple[Tensor, Tensor | int]:
    """`minimax_sigmoid`, and the number of guarded matrices: those scaled down to the domain of
    tanh's steps.
    """
    if resolution not in SIGN:
        raise ValueError(
            f"resolution: found {resolution!r}; write one of {', '.join(map(str, SIGN))}"
        )
    wide = _checked(x, precision)
    norm = frobenius_norm(wide) if max_norm is None or max_norm > NORM_LIMIT else None
    # By the host, so that a step of clipped gradients has no products for the tanh.
    is_linear = norm is None or (max_norm is None and bool((norm <= NORM_LIMIT).all()))
    start = Start(wide, precision)
    largest = None if is_linear else start.largest()
    *steps, (a, b, c) = SIGN[resolution].steps
    steps.append((a / 2, b / 2, c / 2))  # so that the result is one addition
    y = start.iterate(steps, start.nu)
    if norm is None or largest is None:
        return from_wide(torch.add(y, wide, alpha=TANH_SLOPE), x), 0

    # For each matrix by its own norm: on another number of ranks it lies beside others.
    blend = ((norm - NORM_LIMIT) / BLEND).clamp(0, 1)
    shrink = TANH_LIMIT / largest / start.scale
    t = (wide * shrink.clamp(max=1.0)).to(y.dtype)
    t = iterate(start.rounded(t), TANH, rounded=start.rounded)
    result = torch.addcmul(y, wide, TANH_SLOPE * (1 - blend)).addcmul_(t, blend / 2)
    return from_wide(result, x), (shrink < 1).sum()


@torch.no_grad()
@in_full_precision
def guarded_composition(
    x: Tensor,
    composed: Composed,
    precision: FactorPrecision = "float32",
    max_norm: float | None = None,
) -> tuple[Tensor, Tensor | int]:
    """U f(S / N) V^T of x = U S V^T within the composition's certificate, and the number of guarded
    matrices.

    N is nu, (sum of sigma^8)^(1/8), for `of: nu`, which is between the largest singular value and
    2.4 times it (for 1000 equal ones); |x|_F for `norm`; the root mean square of the singular
    values for `rms`; and 1 for `none`. With the last two f is matched up to `limit`: a matrix with
    a larger singular value is scaled down to it ("guarded").
    x: [..., m, n], floating point; not modified. precision, max_norm: as in `minimax_sigmoid`.
    Returns [..., m, n] in the dtype of x. Zero for zero. A matrix that contains a NaN or an
    infinity gives all NaN.
    """
    wide, composition = _checked(x, precision), composed.composition
    # Far below the limit the scale is the limit's, and u is next to nothing.
    start = Start(wide, precision, composed.limit / 1e3 if composed.of == "none" else LEAST)
    unit, num_guarded = start.nu, 0
    if composed.of == "norm":
        unit = start.norm()
    elif composed.of != "nu":
        unit = composed.limit / start.scale
        if composed.of == "rms":
            unit = composed.limit * start.norm() / sqrt(wide.shape[-2])
        if composed.of == "rms" or max_norm is None or max_norm > composed.limit:
            largest = start.largest()
            num_guarded = (largest > unit * (1 + 1e-6)).sum()
            unit = torch.maximum(largest, unit)
    total = wide * (composition.linear / unit / start.scale)
    start.iterate(composition.steps, unit, all_weights(composition), total)
    return from_wide(total, x), num_guarded


@in_full_precision
def newton_schulz(x: Tensor, steps: int = MUON_STEPS) -> Tensor:
    """U S' V^T of x = U S V^T, with S' between about 0.7 and 1.2 where sigma is above 1% of |x|_F.

    x: [..., m, n], floating point; not modified. Returns [..., m, n] in the dtype of x. Computed in
    bfloat16 with the bits of torch.optim.Muon (but for another library's products, see
    `symmetric_product`); a float64 input is computed in float64. Below |x|_F
    = 1e-7 the result shrinks with x, down to zero for zero. Above 1.8e19 float32's sum of squares
    overflows and the result is zero, as in torch. NaN or an infinity gives all NaN.
    """
    y = to_wide(x, torch.float64 if x.dtype == torch.float64 else torch.bfloat16)
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    y = iterate(y, [MUON] * steps)
    return from_wide(y, x)


@in_full_precision
def high_pass(x: Tensor, promotions: int = 3, suppressions: int = 2) -> Tensor:
    """U f(S / |x|_F) V^T of x = U S V^T: f is `promotions` steps of PROMOTION, then `suppressions`
    of SUPPRESSION.

    x: [..., m, n], floating point; not modified. Returns [..., m, n] in the dtype of x, with
    singular values in [0, 1]: near 1 for the leading ones, near 0 for the others, and for all of
    them where no mode leads. Computed in float32, or float64 for a float64 input. Zero for zero; a
    matrix that contains a NaN or an infinity gives all NaN. Source: Pion, arXiv 2605.19282, with
    five steps in all; how many of them promote was not in what we could read, and is our choice.
    """
    y = to_wide(x, torch.float64 if x.dtype == torch.float64 else torch.float32)
    steps = [PROMOTION] * promotions + [SUPPRESSION] * suppressions
    return from_wide(iterate(y / replace_zeros(frobenius_norm(y)), steps), x)


def _checked(x: Tensor, precision: FactorPrecision) -> Tensor:
    """x as `to_wide` has it, in float32, or float64 for float64 factors."""
    if precision not in (choices := get_args(FactorPrecision)):
        raise ValueError(
            f"precision: found {precision!r}; write one of {', '.join(map(repr, choices))}"
        )
    is_double = x.dtype == torch.float64 and precision == "float32"
    return to_wide(x, torch.float64 if is_double else torch.float32)
