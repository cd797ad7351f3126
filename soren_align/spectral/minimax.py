"""The sigmoid by a few composed minimax polynomials: cheaper than Muon's iteration, ten times closer than SNS.

    s(sigma) = (1 + tanh(sigma / 2)) / 2  ~  (f(u) + t(sigma)) / 2,     u = sigma / nu,  nu = (sum of sigma^8)^(1/8)

f rises from 0 to 1 on [0, resolution] and keeps within its certificate of 1 on [resolution, 1]; t is an odd polynomial.
nu costs nothing, since the first step computes (x x^T)^2, and lets u reach lower than |x|_F would. All polynomials are
in the Gram matrix, on the shorter side. After the first step of f, which lifts the weak modes, the Gram matrix is
formed anew: without that restart its rounding costs 1.4e-4 of the update in float32, 3% of a weak mode in float16.
"""

from typing import Literal

import torch
from torch import Tensor

from .coefficients import SIGN, TANH, TANH_WIDE, WIDE_FROM, WIDE_LIMIT
from .matrices import all_finite, frobenius_norm, from_wide, to_wide

RESOLUTION = 0.01
NUM_BLOCKS = 4  # of a symmetric product's rows: 10/16 of the work. At 512, 1024, 2048 rows 0.78, 0.71, 0.59 of the time
MIN_BLOCK = 128  # rows; with fewer, the overhead eats the gain (two CPU cores, MKL, float32)
HALF_FROM = 64  # rows; float16's rounding averages out over many (two rows: 1.7% off, 64: 0.5%)
SAFE_NORMS = (1e-6, 1e6)  # |x|_F in between needs no scaling: neither sigma^4 nor its sums leave float32

Method = Literal["auto", "products", "eigh"]
Precision = Literal["full", "float16"]


def minimax_sigmoid(
    x: Tensor, method: Method = "auto", resolution: float = RESOLUTION, precision: Precision = "full"
) -> Tensor:
    """U s(S) V^T of x = U S V^T, approximately: s is the sigmoid.

    x: [..., m, n], floating point; not modified.
    method: how the one scalar function is evaluated: by "products" of matrices, or by "eigh" of the Gram matrix in
    float64. "auto" takes what measures faster, which is products. They agree to 1e-4 of the result's norm in float32.
    resolution: the singular value, as a share of nu (at most |x|_F), from which the result is accurate: 0.01, or 0.001
    for 9/5 of the work, where float32 agrees to 1e-3 only.
    precision: "float16" rounds the factors of every product to float16 and sums in float32 (from 64 rows on).
    Returns [..., m, n] in the dtype of x. Within 0.5% (float16: 1%) of the sigmoid for singular values above
    `resolution` in a matrix with none above 4; below it falls to 0 for 0. With a singular value above about 4 the tanh
    part sees sigma * 4.3 / sigma_max: finite, bounded by 1, and rising with sigma but for the ripple of f. Zero for
    zero; a matrix with a NaN or an infinity in it comes out all NaN.
    """
    _check(method, resolution, precision)
    double = x.dtype == torch.float64 and precision == "full"
    wide = to_wide(x, torch.float64 if double else torch.float32)
    norm = frobenius_norm(wide)
    # One host read settles the ordinary case, a matrix as clipped gradients make it; NaN and overflow fail it too.
    low, high = SAFE_NORMS
    if precision == "full" and bool(((norm > low) & (norm < high)).all()):
        return from_wide(_map(wide, torch.ones_like(norm), norm, method, resolution, precision), x)

    finite = all_finite(wide)
    wide = wide.where(finite, 0.0)
    scale = wide.abs().amax(dim=(-2, -1), keepdim=True)
    scale = scale.where(scale > 0, 1.0)
    unit = wide / scale
    result = _map(unit, scale, frobenius_norm(unit) * scale, method, resolution, precision)
    return from_wide(result.masked_fill(~finite, torch.nan), x)


def _map(x: Tensor, scale: Tensor, norm: Tensor, method: Method, resolution: float, precision: Precision) -> Tensor:
    """The map of scale * x for wide x, whose norm is `norm`; `scale` and `norm` are [..., 1, 1]."""
    may_be_large = bool((norm > WIDE_FROM[0]).any())
    # "auto" is products: eigh in float64 took 1.1 to 1.4 times as long at 512 and 1024 rows (float32, CPU).
    if method == "eigh":
        return _by_eigh(x, scale, resolution, may_be_large)
    return _by_products(x, scale, resolution, may_be_large, precision)


def _by_products(x: Tensor, scale: Tensor, resolution: float, may_be_large: bool, precision: Precision) -> Tensor:
    half = precision == "float16" and x.shape[-2] >= HALF_FROM
    steps, num_restarts = SIGN[resolution].steps, SIGN[resolution].num_restarts + half
    r, r2, nu = _normalise_(_symmetric_product(x, x.mT, half), half)
    tanh = _tanh_part(r, r2, nu * scale, may_be_large, half).div_(nu)

    factor = lift = _odd_step(steps[0], r, r2, half).div_(nu)
    sign, y = lift, x  # sign: the steps after the last restart
    del r2
    for index, step in enumerate(steps[1:]):
        if index < num_restarts:
            y = _product(factor, y, half)
            r = _symmetric_product(y, y.mT, half)
        else:
            y = y if half else x  # lets the thin matrix go
            r = _symmetric_product(factor, _product(r, factor, half), half)
        factor = _odd_step(step, r, None, half)
        if index + 1 >= num_restarts:
            sign = factor if index + 1 == num_restarts else _symmetric_product(factor, sign, half)
        elif not half:
            lift = factor @ lift
    if half:  # lift grows to 14 and more on weak modes, too much for float16 to hold a strong mode's 1 to 0.5%
        return _product(sign, y, half).add_(_product(tanh, x, half)).mul_(0.5)
    # Not symmetric to rounding, on purpose: copying a half of sign @ lift would put the strong modes' error before the
    # lift of the weak ones, 2e-4 of the result instead of 2e-5.
    return (sign @ lift).add_(tanh).mul_(0.5) @ x


def _normalise_(gram: Tensor, half: bool) -> tuple[Tensor, Tensor, Tensor]:
    """R = gram / nu^2 in place, R^2 and nu, for the nu that makes |R^2|_F = 1."""
    norm = _at_least_something(frobenius_norm(gram))
    r = gram.div_(norm)
    r2 = _symmetric_product(r, r, half)
    square = _at_least_something(frobenius_norm(r2))
    return r.div_(square.sqrt()), r2.div_(square), (norm * square.sqrt()).sqrt()


def _odd_step(coefficients: tuple[float, ...], r: Tensor, r2: Tensor | None, half: bool) -> Tensor:
    """p(u) / u as a matrix polynomial in R = u^2, for p of degree 3, 5 or 9; R^2 is computed if not given."""
    c0, c1, *c = coefficients
    if not c:
        result = r * c1
    else:
        r2 = _symmetric_product(r, r, half) if r2 is None else r2
        result = r2 * c[0] if len(c) == 1 else _symmetric_product(r2, (r2 * c[2]).add_(r, alpha=c[1]), half)
        if len(c) == 3:
            result.add_(r2, alpha=c[0])
        result.add_(r, alpha=c1)
    result.diagonal(dim1=-2, dim2=-1).add_(c0)
    return result


def _tanh_part(r: Tensor, r2: Tensor, top: Tensor, may_be_large: bool, half: bool) -> Tensor:
    """t(sigma) / u as a matrix polynomial in R, where sigma = top * u."""
    powers = [r, r2]
    share = None
    if may_be_large:
        r4 = _symmetric_product(r2, r2, half)
        powers += [_symmetric_product(r, r2, half), r4]
        share = _top_share(r4, half)
    c0, *c = _tanh_coefficients(top, share)
    result = c[0] * r
    for coefficient, power in zip(c[1:], powers[1:], strict=True):
        result.addcmul_(coefficient, power)
    result.diagonal(dim1=-2, dim2=-1).add_(c0[..., 0])
    return result


def _top_share(power: Tensor, half: bool) -> Tensor:
    """(sum of u^128)^(1/128) from R^4: u of the largest singular value, or up to 7% more."""
    norm = _at_least_something(frobenius_norm(power))
    log, weight = norm.log() / 4, 1 / 4
    for _ in range(3):
        power = power / norm
        power = _symmetric_product(power, power, half)
        norm = _at_least_something(frobenius_norm(power))
        weight /= 2
        log += norm.log() * weight
    return (log / 2).exp()


def _tanh_coefficients(top: Tensor, share: Tensor | None) -> list[Tensor]:
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


def _by_eigh(x: Tensor, scale: Tensor, resolution: float, may_be_large: bool) -> Tensor:
    # float64: on sigma_i = 1/i with 512 rows float32's eigh is off by 2e-3 of the result, 20 times what is promised.
    double = x.double()
    eigenvalues, vectors = torch.linalg.eigh(double @ double.mT)
    del double
    largest = _at_least_something(eigenvalues[..., -1:])
    eigenvalues = (eigenvalues / largest).clamp(min=0.0)
    norm4 = eigenvalues.pow(4).sum(dim=-1, keepdim=True).clamp(min=1.0)
    r = eigenvalues / norm4.pow(0.25)  # u^2
    nu = (largest * norm4.pow(0.25)).sqrt()

    share = (eigenvalues.pow(64).sum(dim=-1, keepdim=True).clamp(min=1.0) ** (1 / 64) / norm4.pow(0.25)).sqrt()
    coefficients = _tanh_coefficients(nu * scale[..., 0].double(), share if may_be_large else None)
    tanh = sum(c * r**i for i, c in enumerate(coefficients))
    sign, power = torch.ones_like(r), r
    for step in SIGN[resolution].steps:
        factor = sum(c * power**i for i, c in enumerate(step))
        sign, power = sign * factor, power * factor**2
    gain = (sign + tanh) / (2 * nu)
    return ((vectors * gain.unsqueeze(-2)) @ vectors.mT).to(x.dtype) @ x


def _symmetric_product(a: Tensor, b: Tensor, half: bool) -> Tensor:
    """a @ b, known to be symmetric: the blocks above the diagonal are computed, those below are copied."""
    rows = a.shape[-2]
    block = max(MIN_BLOCK, -(-rows // NUM_BLOCKS))
    if rows <= block:
        return _product(a, b, half)
    result = a.new_empty((*a.shape[:-1], rows))
    for start in range(0, rows, block):
        stop = min(start + block, rows)
        result[..., start:stop, start:] = _product(a[..., start:stop, :], b[..., start:], half)
        result[..., stop:, start:stop] = result[..., start:stop, stop:].mT
    return result


def _product(a: Tensor, b: Tensor, half: bool) -> Tensor:
    if not half:
        return a @ b
    a, b = a.half(), b.half()
    if a.is_cuda:
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _at_least_something(norm: Tensor) -> Tensor:
    return norm.where(norm > 0, 1.0)  # a zero matrix is divided by 1


def _check(method: str, resolution: float, precision: str) -> None:
    if method not in ("auto", "products", "eigh"):
        raise ValueError(f"method: found {method!r}; write one of 'auto', 'products', 'eigh'")
    if resolution not in SIGN:
        raise ValueError(f"resolution: found {resolution!r}; write one of {', '.join(map(str, SIGN))}")
    if precision not in ("full", "float16"):
        raise ValueError(f"precision: found {precision!r}; write one of 'full', 'float16'")
    if precision == "float16" and (method == "eigh" or resolution < RESOLUTION):
        raise ValueError(
            f"precision: 'float16' is for products in resolution {RESOLUTION}; "
            f"found method {method!r} and resolution {resolution}: write precision='full'"
        )


def num_flops(spectral_map: Literal["minimax", "sns", "muon"], num_rows: int, num_columns: int, steps: int = 15) -> int:
    """Floating-point operations of a map's matrix products for one matrix; `steps` are those of sns.

    "minimax" is `minimax_sigmoid` by products in its default resolution, for singular values up to 2; "muon" is
    `newton_schulz` in 5 steps. In units of m^3, for n = a m: 20a + 10 (muon), 4a (steps + 2) (sns), and 8a + 20
    (minimax), of which from 512 rows on the symmetric products, 4a + 16, take 10/16.
    """
    m, n = sorted((num_rows, num_columns))
    thin, square = 2 * m * m * n, 2 * m**3
    if spectral_map == "sns":
        return 2 * thin * (steps + 2)
    if spectral_map == "muon":
        return 5 * (2 * thin + square)
    block = max(MIN_BLOCK, -(-m // NUM_BLOCKS))
    rows_times_columns = sum(min(block, m - start) * (m - start) for start in range(0, m, block))
    return round((2 * thin + 8 * square) * rows_times_columns / m**2) + 2 * thin + 2 * square
