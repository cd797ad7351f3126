"""`minimax_sigmoid` by matrix products: polynomials in the Gram matrix R, whose eigenvalues are u^2.

A polynomial in R is evaluated about the center c of its interval, in Z = R - c I: its coefficients are then thirty
times smaller, and so is the rounding error. With float16 factors it is up to 0.2% in powers of R, 0.02% in powers of Z.
After the first step, which magnifies small singular values, the Gram matrix is computed again (a restart). R has u^2 to
float32's 6e-8 of the largest, and the steps magnify this error by the square of their slopes: at 512 rows and rank 128
it is 1.2e-4 of the result without the restart, 1.1e-5 with it.
"""

from functools import cache

import torch
from torch import Tensor

from .coefficients import SIGN, TANH, TANH_WIDE, WIDE_FROM, WIDE_LIMIT
from .matrices import frobenius_norm, replace_zeros

# Columns of a block of a symmetric product. The part above the diagonal is copied: with 8 blocks 9/16 of the work, in
# 0.75 (512 rows), 0.70 (1024) and 0.65 (2048) of the time (two CPU cores, MKL, float32).
MIN_BLOCK, MAX_BLOCKS = 128, 8
NEAR_SQUARE = 1.15  # n / m up to which one more restart, which replaces square products by thin ones, costs less
# Elements after each row, if there are blocks: at 1024 and 2048 rows the copies to above the diagonal take half the
# time if the stride is no power of two.
PADDING = 16


def by_products(x: Tensor, scale: Tensor, norm: Tensor, resolution: float, half: bool) -> tuple[Tensor, int]:
    """The map of scale * x, whose norm is `norm`, for x of shape [..., m, n] with m <= n; the others are [..., 1, 1].

    Also returns the number of guarded matrices, those with a singular value beyond the domain of tanh's polynomial.
    half: round the factors of every product to float16; the sums are float32.
    """
    table = SIGN[resolution]
    steps = list(zip(table.steps, table.centers, strict=True))
    thin = ends_thin(x.shape[-2], x.shape[-1], half)
    num_restarts = len(steps) - 1 if thin else table.num_restarts
    work = _Workspace(x, half)

    r = work.symmetric(x, x.mT)
    r2, nu = _normalise_(r, work)
    tanh, beyond = _tanh_part(r, r2, nu, nu * scale, bool((norm > WIDE_FROM[0]).any()), work)
    y, spare, lift = x, None, None  # y = lift @ x
    for step, center in steps[:num_restarts]:
        factor = _odd_step(step, center, r, r2, work)
        if r2 is not None:
            factor, r2 = factor.div_(nu), None
        work.release(r)
        y, spare = work.product(factor, y, spare), None if y is x else y
        r = work.symmetric(y, y.mT)
        if thin:
            work.release(factor)
        elif lift is None:
            lift = factor
        else:
            longer = work.product(factor, lift, work.take())
            work.release(factor, lift)
            lift = longer

    step, center = steps[num_restarts]
    factor = sign = _odd_step(step, center, r, None, work)
    for step, center in steps[num_restarts + 1 :]:
        half_way = work.symmetric(r, factor)
        work.release(r)
        r = work.symmetric(factor, half_way)
        work.release(half_way, *(() if factor is sign else (factor,)))
        factor = _odd_step(step, center, r, None, work)
        longer = work.symmetric(factor, sign)
        work.release(sign)
        sign = longer
    sign.mul_(0.5)
    if lift is None:
        return work.add_product_(work.product(sign, y, spare), tanh, x), beyond
    # Not a symmetric product, on purpose: copying a half of sign @ lift would magnify the error of large singular
    # values by the lift of small ones, 2e-4 of the result instead of 2e-5.
    return work.product(work.add_product_(tanh, sign, lift), x, y), beyond


def ends_thin(num_rows: int, num_columns: int, half: bool) -> bool:
    """Whether the result is sign @ y + tanh @ x, with one more restart, instead of (sign @ lift + tanh) @ x.

    float16 needs it: its 11 bits cannot hold a small singular value's lift of 14 and more beside a large one's 1.
    """
    return half or num_columns < NEAR_SQUARE * num_rows


def block_size(num_rows: int) -> int:
    """Columns of a block of a symmetric product."""
    return max(MIN_BLOCK, -(-num_rows // MAX_BLOCKS))


def tanh_coefficients(top: Tensor, share: Tensor | None) -> list[Tensor]:
    """Coefficients in u of t(sigma), sigma = top * u; `share` is the largest u, needed where top > WIDE_FROM[0].

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


def num_beyond(top: Tensor, share: Tensor | None) -> int:
    """The number of matrices that `tanh_coefficients` scales down."""
    return 0 if share is None else int((top * share > WIDE_LIMIT).sum())


def _normalise_(gram: Tensor, work: "_Workspace") -> tuple[Tensor, Tensor]:
    """Divide gram in place: R = gram / nu^2, for the nu with |R^2|_F = 1; returns R^2 and nu."""
    norm = replace_zeros(frobenius_norm(gram))
    r = gram.div_(norm)
    r2 = work.symmetric(r, r)
    square = replace_zeros(frobenius_norm(r2))
    r.div_(square.sqrt())
    return r2.div_(square), (norm * square.sqrt()).sqrt()


def _odd_step(
    coefficients: tuple[float, ...], center: float, r: Tensor, r2: Tensor | None, work: "_Workspace"
) -> Tensor:
    """p(u) / u as a matrix polynomial in R = u^2, for p of degree 3, 5 or 9. R^2, if known, is released."""
    c0, c1, *c = _about(center, coefficients)
    if r2 is not None:
        r2 = _add_to_diagonal_(r2.add_(r, alpha=-2 * center), center**2)
    z = _add_to_diagonal_(r, -center)
    if not c:
        result = torch.mul(z, c1, out=work.take())
    else:
        z2 = work.symmetric(z, z) if r2 is None else r2
        if len(c) == 1:
            result = z2.mul_(c[0])
        else:
            inner = torch.mul(z2, c[2], out=work.take()).add_(z, alpha=c[1])
            result = work.symmetric(z2, _add_to_diagonal_(inner, c[0]))
            work.release(z2, inner)
        result.add_(z, alpha=c1)
    _add_to_diagonal_(z, center)  # R again
    return _add_to_diagonal_(result, c0)


@cache
def _about(center: float, coefficients: tuple[float, ...]) -> tuple[float, ...]:
    """The coefficients in x - center of the polynomial with `coefficients` in x, by repeated synthetic division."""
    remaining, shifted = list(coefficients), []
    while remaining:
        for i in reversed(range(len(remaining) - 1)):
            remaining[i] += center * remaining[i + 1]
        shifted.append(remaining.pop(0))
    return tuple(shifted)


def _tanh_part(
    r: Tensor, r2: Tensor, nu: Tensor, top: Tensor, may_be_large: bool, work: "_Workspace"
) -> tuple[Tensor, int]:
    """t(sigma) / (2 nu u) as a matrix polynomial in R, where sigma = top * u; and the number of guarded matrices."""
    powers, share = [r, r2], None
    if may_be_large:
        powers += [work.symmetric(r, r2), work.symmetric(r2, r2)]
        share = _top_share(powers[-1], work)
    c0, *c = (coefficient / (2 * nu) for coefficient in tanh_coefficients(top, share))
    result = torch.mul(r, c[0], out=work.take())
    for coefficient, power in zip(c[1:], powers[1:], strict=True):
        result.addcmul_(coefficient, power)
    work.release(*powers[2:])
    return _add_to_diagonal_(result, c0[..., 0]), num_beyond(top, share)


def _top_share(r4: Tensor, work: "_Workspace") -> Tensor:
    """(sum of u^128)^(1/128) from R^4: u of the largest singular value, or up to 7% more."""
    power, weight = torch.mul(r4, 1.0, out=work.take()), 1 / 4
    norm = replace_zeros(frobenius_norm(power))
    log = norm.log() * weight
    for _ in range(3):
        square = work.symmetric(power.div_(norm), power)
        work.release(power)
        power = square
        norm = replace_zeros(frobenius_norm(power))
        weight /= 2
        log += norm.log() * weight
    work.release(power)
    return (log / 2).exp()


def _add_to_diagonal_(a: Tensor, value: float | Tensor) -> Tensor:
    a.diagonal(dim1=-2, dim2=-1).add_(value)
    return a


class _Workspace:
    """The matrix products of one call, and its m x m buffers, which are reused.

    With new memory for every product a map takes 5% longer from 1024 rows on (CPU), and needs more memory.
    """

    def __init__(self, x: Tensor, half: bool):
        rows = x.shape[-2]
        self.half = half
        self.block = block_size(rows)
        self._shape, self._padding = (*x.shape[:-1], rows), PADDING if rows > self.block else 0
        self._options = {"dtype": x.dtype, "device": x.device}
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        if self._free:
            return self._free.pop()
        *outer, rows = self._shape
        return torch.empty(*outer, rows + self._padding, **self._options)[..., :rows]

    def release(self, *buffers: Tensor) -> None:
        self._free.extend(buffers)

    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b, which must be symmetric: the blocks above the diagonal are computed, those below are copied."""
        result, rows = self.take(), a.shape[-2]
        a, b = self._factors(a, b)
        for start in range(0, rows, self.block):
            stop = min(start + self.block, rows)
            _multiply(a[..., start:stop, :], b[..., start:], out=result[..., start:stop, start:])
            if stop < rows:
                result[..., stop:, start:stop] = result[..., start:stop, stop:].mT
        return result

    def product(self, a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
        """a @ b, in `out` if there is one; b must not be `out`."""
        return _multiply(*self._factors(a, b), out=out)

    def add_product_(self, c: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """c + a @ b, in c."""
        a, b = self._factors(a, b)
        if a.dtype != c.dtype:
            return c.add_(_multiply(a, b, out=None))
        return (torch.addmm if c.ndim == 2 else torch.baddbmm)(c, a, b, out=c)

    def _factors(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if not self.half:
            return a, b
        a, b = a.half(), b.half()
        return (a, b) if a.is_cuda else (a.float(), b.float())  # only so does a CPU sum float16 products in float32


def _multiply(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    multiply = torch.mm if a.ndim == 2 else torch.bmm
    if a.dtype != torch.float16:
        return multiply(a, b, out=out)
    result = multiply(a, b, out_dtype=torch.float32)
    return result if out is None else out.copy_(result)
