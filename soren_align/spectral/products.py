"""Compositions of odd polynomials by matrix products: polynomials in the Gram matrix R, whose
eigenvalues are u^2.

An odd polynomial is given by its coefficients of x, x^3, x^5, ... Those of `minimax_sigmoid` are
here: research/studies/minimax_polynomials.py computes them and prints the alternatives;
tests/research/test_minimax_coefficients.py computes them again, and evaluates their certificates.

A polynomial in R is evaluated about the center c of its interval, in Z = R - c I: its coefficients
are then thirty times smaller, and so is the rounding error. With float16 factors it is up to 0.2%
in powers of R, 0.02% in powers of Z. After a step, which magnifies small singular values, the Gram
matrix is computed again (a restart). R has u^2 to float32's 6e-8 of the largest, and the steps
magnify this error by the square of their slopes: at resolution 0.01, 512 rows and rank 128 it is
1.2e-4 of the result without a restart, 1.1e-5 with one; at 0.0004 and 576 x 1536 1e-2 with one and
1.4e-4 with two.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ..core.optimizer_settings import FactorPrecision
from .composition import TOP as TOP
from .composition import Composition, all_weights
from .factors import Factors, add_product_, rounded
from .flops import block_size, ends_thin, row_padding, steepness
from .matrices import frobenius_norm, replace_zeros

# By resolution: f, a composition that approximates 1 on u in [resolution, TOP]. Every later
# interval is 0.5% wider than the range of the step before it, for float16's rounding.
SIGN = {
    # degrees (9, 9, 5, 9, 9)
    0.0004: Composition(
        steps=(
            (15.08530945, -146.9692398, 484.9142501, -617.5342869, 266.1164541),
            (7.386197654, -17.95210715, 14.86212682, -4.75491647, 0.515020259),
            (3.878366832, -2.866868514, 0.5446092245),
            (4.467791103, -9.571048096, 8.511749242, -3.076387457, 0.3841255678),
            (2.578172422, -3.642778195, 3.320222597, -1.535098677, 0.2789642616),
        ),
        centers=(0.5, 2.0, 2.0, 1.5, 1.0),
        num_restarts=2,
        error=0.00106,
        slope=4977.7,
    ),
    # degrees (9, 9, 9, 3, 5)
    0.001: Composition(
        steps=(
            (15.00170263, -145.8817406, 481.0634255, -612.4696568, 263.8931793),
            (7.127204928, -17.23286016, 14.33546009, -4.618578823, 0.5041801681),
            (5.255616759, -11.90669048, 10.34117265, -3.569772009, 0.4218085415),
            (1.691634347, -0.5240391478),
            (1.906368705, -1.282913018, 0.377032829),
        ),
        centers=(0.5, 2.0, 1.75, 1.0, 0.75),
        num_restarts=2,
        error=0.00337,
        slope=1812.2,
    ),
    # degrees (9, 9, 9)
    0.01: Composition(
        steps=(
            (13.84676986, -130.8831892, 427.9914727, -542.6972287, 233.2723984),
            (4.826307337, -10.6428311, 9.359393927, -3.306409887, 0.4015702996),
            (2.657797512, -3.893663595, 3.571411626, -1.621458911, 0.2838386059),
        ),
        centers=(0.5, 1.75, 1.0),
        num_restarts=1,
        error=0.00348,
        slope=177.6,
    ),
}

# tanh(x / 2), increasing on the whole interval. The error, 0.0827% of TANH on [0, 2.5] and 0.0561%
# of TANH_WIDE on [0, 4.3], is relative to the sigmoid, of which this is one half.
TANH = (4.96740021e-01, -3.61866082e-02, 1.77539158e-03)
TANH_WIDE = (4.97856604e-01, -3.83000524e-02, 2.68336953e-03, -1.12038574e-04, 1.94851463e-06)
# (sum of sigma^128)^(1/128) is at most 7% above sigma_max, for up to 10 000 singular values
WIDE_LIMIT = 4.3
# between these nu, TANH and TANH_WIDE are interpolated; below, five products are saved
WIDE_FROM = (2.0, 2.5)

# A matrix with a smaller |x|_F is divided by nu of this one, so that its result falls to 0: below
# 1e-19, sigma^2 leaves float32. MIN_SQUARE is less than the Frobenius norm of R^2 for any R with a
# trace of 1 and up to 10^6 rows.
MIN_NORM, MIN_SQUARE = 1e-15, 1e-9
MIN_STEP = 1e-9  # of a step's first coefficient, which may be 0


def by_products(
    x: Tensor,
    scale: Tensor | float,
    may_be_large: bool,
    resolution: float,
    precision: FactorPrecision = "float32",
) -> tuple[Tensor, Tensor | int]:
    """The map of scale * x for x of shape [..., m, n] with m <= n; scale is [..., 1, 1] or a
    number.

    Also returns the number of guarded matrices, those with a singular value beyond the domain of
    tanh's polynomial.
    may_be_large: whether |scale * x|_F may be above WIDE_FROM[0]; five more products then find the
    largest singular
        value. precision: of the factors of all products; narrower ones need entries of x of about 1
        at most.
    The host reads nothing, so torch.compile and CUDA graphs can take the whole function.
    """
    work = Workspace(x, precision)
    r, r2, nu = gram_over_nu(x, work)
    tanh, beyond = _tanh_part(r, r2, nu, nu * scale, may_be_large, work)
    return evaluate(SIGN[resolution], x, r, r2, nu, work, base=tanh, factor=0.5), beyond


def gram_over_nu(x: Tensor, work: "Workspace") -> tuple[Tensor, Tensor, Tensor]:
    """R = x x^T / nu^2, its square, and nu [..., 1, 1], (sum of sigma^8)^(1/8): |R^2|_F is 1."""
    r = work.gram(x)
    # By the trace first: the square of R then stays within float32, whatever the scale of x is.
    trace = r.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[..., None, None].clamp(min=work.least_trace)
    r2 = work.symmetric(r.div_(trace), r)
    square = frobenius_norm(r2).clamp(min=MIN_SQUARE)
    r.div_(square.sqrt())
    return r, r2.div_(square), (trace * square.sqrt()).sqrt()


def evaluate(
    table: Composition,
    x: Tensor,
    r: Tensor,
    r2: Tensor | None,
    unit: Tensor,
    work: "Workspace",
    base: Tensor | None = None,
    linear: float = 0.0,
    factor: float = 1.0,
) -> Tensor:
    """U f(S / unit) V^T of x = U S V^T, where f is `factor` times the composition; R = x x^T /
    unit^2, and its square.

    R and its square are released. base: a matrix polynomial in R, whose product with x is added.
    linear: the coefficient of u, which is added too.
    """
    steps, weights = list(zip(table.steps, table.centers, strict=True)), all_weights(table)
    thin = ends_thin(x.shape[-2], x.shape[-1], work.precision)
    num_restarts = len(steps) - 1 if thin else table.num_restarts
    y, spare, lift = x, None, None  # y = lift @ x
    slope = steepness(table)  # of the remaining steps, see `Factors`
    total = None  # of the weighted iterates before the last one: of y, or of their factors of x
    # A restart computes the Gram matrix of the mapped matrix: the small singular values, which the
    # step has magnified, are then above the rounding of the large ones.
    for (step, center), weight in zip(steps[:num_restarts], weights, strict=False):
        polynomial = _odd_step(step, center, r, r2, work, slope)
        # Only the first step divides by the unit: y is normalized from then on.
        if r2 is not None:
            polynomial, r2 = polynomial.div_(unit), None
        work.release(r)
        y, spare = work.product(polynomial, y, spare, slope), None if y is x else y
        slope /= max(abs(step[0]), MIN_STEP)
        r = work.gram(y)
        if thin:
            work.release(polynomial)
        elif lift is None:
            lift = polynomial
        else:
            longer = work.product(polynomial, lift, work.take())
            work.release(polynomial, lift)
            lift = longer
        if weight:
            iterate = y if lift is None else lift
            total = iterate * weight if total is None else total.add_(iterate, alpha=weight)

    # The remaining steps are polynomials in one R: only m x m products, and one thin one at the
    # end.
    sign = _composed_factor(steps[num_restarts:], weights[num_restarts:], r, r2, work)
    if factor != 1:
        sign.mul_(factor)
    if num_restarts == 0:
        sign.div_(unit)
    if thin:
        result = work.product(sign, y, spare)
        result = result if total is None else result.add_(total)
        result = result.addcmul_(x, linear / unit) if linear else result
        return result if base is None else work.add_product_(result, base, x)
    if lift is None:
        matrix = sign if base is None else sign.add_(base)
    elif base is not None:
        # Not a symmetric product, on purpose: copying a half of sign @ lift would magnify the error
        # of large singular values by the lift of small ones, 2e-4 of the result instead of 2e-5.
        matrix = work.add_product_(base, sign, lift)
    else:
        matrix = work.product(sign, lift, work.take())
    matrix = matrix if total is None else matrix.add_(total)
    matrix = add_to_diagonal_(matrix, linear / unit[..., 0]) if linear else matrix
    return work.product(matrix, x, y if lift is not None else None)


def _composed_factor(
    steps: Sequence[tuple[tuple[float, ...], float]],
    weights: Sequence[float],
    r: Tensor,
    r2: Tensor | None,
    work: "Workspace",
) -> Tensor:
    """f(u) / u as a polynomial in R, where f is the composition of these steps and its weighted
    iterates.

    steps: coefficients and center of each. The R of a later step follows from the one before. R and
    its square are released.
    """
    (step, center), *others = steps
    polynomial = sign = _odd_step(step, center, r, r2, work)
    combined = None  # of the weighted iterates among these steps
    for (step, center), weight in zip(others, weights, strict=False):
        if weight:
            combined = sign * weight if combined is None else combined.add_(sign, alpha=weight)
        # The next R is p R p: two square products in place of a thin one.
        half_way = work.symmetric(r, polynomial)
        work.release(r)
        r = work.symmetric(polynomial, half_way)
        work.release(half_way, *(() if polynomial is sign else (polynomial,)))
        polynomial = _odd_step(step, center, r, None, work)
        longer = work.symmetric(polynomial, sign)
        work.release(sign)
        sign = longer
    return sign if combined is None else sign.add_(combined)


def tanh_coefficients(top: Tensor, share: Tensor | None) -> list[Tensor]:
    """Coefficients in u of t(sigma), sigma = top * u; `share` is the largest u, needed where top >
    WIDE_FROM[0].

    A matrix whose largest singular value is beyond the polynomial's domain is scaled down to it.
    """
    if share is None:
        return [c * top ** (2 * i + 1) for i, c in enumerate(TANH)]
    low, high = WIDE_FROM
    weight = ((top - low) / (high - low)).clamp(0, 1)
    top = torch.minimum(top, WIDE_LIMIT / share)
    narrow = (*TANH, *(0.0,) * (len(TANH_WIDE) - len(TANH)))
    pairs = zip(narrow, TANH_WIDE, strict=True)
    return [(a + (b - a) * weight) * top ** (2 * i + 1) for i, (a, b) in enumerate(pairs)]


def num_beyond(top: Tensor, share: Tensor | None) -> Tensor | int:
    """The number of matrices that `tanh_coefficients` scales down."""
    return 0 if share is None else (top * share > WIDE_LIMIT).sum()


def _odd_step(
    coefficients: tuple[float, ...],
    center: float,
    r: Tensor,
    r2: Tensor | None,
    work: "Workspace",
    slope: float = 1.0,
) -> Tensor:
    """p(u) / u as a matrix polynomial in R = u^2, for p of degree 3, 5 or 9.
    R^2, if known, is released.
    """
    c0, c1, *c = _about(center, coefficients)
    # In the first step R^2 is at hand, and Z^2 follows from it without a product.
    if r2 is not None:
        r2 = add_to_diagonal_(r2.add_(r, alpha=-2 * center), center**2)
    z = add_to_diagonal_(r, -center)
    if not c:
        result = torch.mul(z, c1, out=work.take())
    else:
        z2 = work.symmetric(z, z, slope) if r2 is None else r2
        if len(c) == 1:
            result = z2.mul_(c[0])
        else:
            inner = torch.mul(z2, c[2], out=work.take()).add_(z, alpha=c[1])
            result = work.symmetric(z2, add_to_diagonal_(inner, c[0]), slope)
            work.release(z2, inner)
        result.add_(z, alpha=c1)
    add_to_diagonal_(z, center)  # R again
    return add_to_diagonal_(result, c0)


@cache
def _about(center: float, coefficients: tuple[float, ...]) -> tuple[float, ...]:
    """The coefficients in x - center of the polynomial with `coefficients` in x, by repeated
    synthetic division.
    """
    remaining, shifted = list(coefficients), []
    while remaining:
        for i in reversed(range(len(remaining) - 1)):
            remaining[i] += center * remaining[i + 1]
        shifted.append(remaining.pop(0))
    return tuple(shifted)


def _tanh_part(
    r: Tensor, r2: Tensor, nu: Tensor, top: Tensor, may_be_large: bool, work: "Workspace"
) -> tuple[Tensor, Tensor | int]:
    """t(sigma) / (2 nu u) as a matrix polynomial in R, where sigma = top * u; and the number of
    guarded matrices.
    """
    powers, share = [r, r2], None
    if may_be_large:
        powers += [work.symmetric(r, r2), work.symmetric(r2, r2)]
        # (sum of u^128)^(1/128) from R^4: u of the largest singular value, or up to 7% more
        power, weight = torch.mul(powers[-1], 1.0, out=work.take()), 1 / 4
        norm = replace_zeros(frobenius_norm(power))
        log = norm.log() * weight
        for _ in range(3):
            # Divided by its norm before each squaring: u^64 would leave the range of float32.
            square = work.symmetric(power.div_(norm), power)
            work.release(power)
            power = square
            norm = replace_zeros(frobenius_norm(power))
            weight /= 2
            log += norm.log() * weight
        work.release(power)
        share = (log / 2).exp()
    c0, *c = (coefficient / (2 * nu) for coefficient in tanh_coefficients(top, share))
    result = torch.mul(r, c[0], out=work.take())
    for coefficient, power in zip(c[1:], powers[1:], strict=True):
        result.addcmul_(coefficient, power)
    work.release(*powers[2:])
    return add_to_diagonal_(result, c0[..., 0]), num_beyond(top, share)


def add_to_diagonal_(a: Tensor, value: float | Tensor) -> Tensor:
    """`a` with `value` added to its diagonal, in place."""
    a.diagonal(dim1=-2, dim2=-1).add_(value)
    return a


class Workspace:
    """The matrix products of one call, and its m x m buffers, which are reused.

    With new memory for every product a map takes 5% longer from 1024 rows on (CPU), and needs more
    memory.
    """

    def __init__(self, x: Tensor, precision: FactorPrecision):
        rows = x.shape[-2]
        self.precision: FactorPrecision = precision
        # With narrow factors the largest entry of x is 1, unless x is 0: 1 / nu would leave
        # float16's range.
        self.least_trace = MIN_NORM**2 if precision == "float32" else 1.0
        self.block = block_size(rows, x.device.type)
        self._shape, self._padding = (*x.shape[:-1], rows), row_padding(rows, x.device.type)
        self._options = {"dtype": x.dtype, "device": x.device}
        self._free: list[Tensor] = []
        # the last factor of `gram`, and as rounded there
        self._rounded: tuple[Tensor, Tensor] | None = None

    def take(self) -> Tensor:
        """A buffer of m x m, whose content is arbitrary."""
        if self._free:
            return self._free.pop()
        *outer, rows = self._shape
        return torch.empty(*outer, rows + self._padding, **self._options)[..., :rows]

    def release(self, *buffers: Tensor) -> None:
        """Take back buffers, for later products."""
        self._free.extend(buffers)

    def gram(self, a: Tensor) -> Tensor:
        """a @ a.mT."""
        narrow = rounded(a, self.precision)
        self._rounded = a, narrow
        return self._symmetric(Factors(narrow, narrow.mT, "float32"), a.shape[-2])

    def symmetric(self, a: Tensor, b: Tensor, slope: float = 1.0) -> Tensor:
        """a @ b, which must be symmetric."""
        return self._symmetric(Factors(a, b, self.precision, slope), a.shape[-2])

    def _symmetric(self, factors: Factors, rows: int) -> Tensor:
        """A symmetric product: the blocks above the diagonal are computed, those below are
        copied.
        """
        result = self.take()
        for start in range(0, rows, self.block):
            stop = min(start + self.block, rows)
            factors.multiply(
                result[..., start:stop, start:], slice(start, stop), slice(start, None)
            )
            if stop < rows:
                result[..., stop:, start:stop] = result[..., start:stop, stop:].mT
        return result

    def product(self, a: Tensor, b: Tensor, out: Tensor | None, slope: float = 1.0) -> Tensor:
        """a @ b, in `out` if there is one; b must not be `out`."""
        # The Gram matrix of b was made of its rounded copy, which serves here again.
        narrow = self._rounded[1] if self._rounded and self._rounded[0] is b else None
        return Factors(a, b, self.precision, slope, narrow).multiply(out)

    def add_product_(self, c: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """c + a @ b, in c."""
        return add_product_(c, rounded(a, self.precision), rounded(b, self.precision))
