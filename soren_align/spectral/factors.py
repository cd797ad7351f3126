"""Matrix products with the narrow factors of tensor cores: 8 to 11 bits, summed in float32.

Where the hardware has such products they are used; elsewhere the factors are rounded and multiplied
in float32. Both are as close to float32 factors, so that a CPU certifies what a GPU computes. They
differ from each other, since tensor cores truncate their sums. Emulated in blocks of 16 products
(384 x 768, four spectra) the update is as far from float32's as without, 0.07% to 0.43%, and as far
again from the one without.
"""

import functools
import warnings

import torch
from torch import Tensor

from ..core.optimizer_settings import FactorPrecision

HALF_SCALE = 2.0**-11
DIAGONAL_FROM, HALVES_FROM = 20.0, 100.0
NARROW: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def rounded(a: Tensor, precision: FactorPrecision) -> Tensor:
    """`a` as a factor in `precision`; float32, or of 16 bits on a GPU.
    In "float32" `a` itself, of any dtype.

    A meta tensor stands for one of a GPU.
    """
    if precision in NARROW:
        narrow = a.to(NARROW[precision])
        has_products = a.is_meta or (
            a.is_cuda and (torch.version.hip is None or _exists_on_rocm(a.device))
        )
        return narrow if has_products else narrow.float()
    # on a GPU for `tf32_products`, which would round anyway, and for `rest_of`
    if precision == "tf32":
        return ((a.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return a


@functools.cache
def _exists_on_rocm(device: torch.device) -> bool:
    """Whether products of 16-bit factors with float32 sums exist on a device."""
    factor = torch.ones(1, 1, dtype=torch.float16, device=device)
    try:
        torch.mm(factor, factor, out_dtype=torch.float32)
        torch.bmm(factor[None], factor[None], out_dtype=torch.float32)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        warnings.warn(
            f"{device}: cannot multiply 16-bit factors with float32 sums ({reason}), so the maps"
            " use float32 factors, which is slower",
            stacklevel=2,
        )
        return False
    return True


def rest_of(a: Tensor, narrow: Tensor, precision: FactorPrecision) -> Tensor:
    """The factor c of a = b + HALF_SCALE c, to twice the bits of one, where b = rounded(a) is
    `narrow`.
    """
    scaled = a / HALF_SCALE  # since float16 ends at 6e-8
    # 16 bits are written in the same pass
    out = torch.empty_like(narrow) if narrow.dtype.itemsize == 2 else scaled
    return rounded(torch.sub(scaled, narrow, alpha=1 / HALF_SCALE, out=out), precision)


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b of [m, k] and [k, n], or of batches of them, for factors made by `rounded`; in `out` if
    there is one.

    The sums and the result are float32, or float64 for float64 factors.
    """
    function = torch.mm if a.ndim == 2 else torch.bmm
    if a.dtype.itemsize > 2:
        return function(a, b, out=out)
    return (
        function(a, b, out_dtype=torch.float32)
        if out is None
        else function(a, b, torch.float32, out=out)
    )


def add_product_(c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """c + alpha a @ b in c, of float32 or float64, for factors as in `multiply`."""
    function = torch.addmm if c.ndim == 2 else torch.baddbmm
    if a.dtype.itemsize > 2:
        return function(c, a, b, alpha=alpha, out=c)
    return function(c, a, b, torch.float32, alpha=alpha, out=c)


class Factors:
    """Two factors, rounded to `precision`, and their product.

    narrow: b in `precision`, if it is at hand.

    slope: by which a and all later polynomials magnify a singular value near 0, and with it
    rounding. Of narrow factors then a, m x m, has its diagonal in float32 from DIAGONAL_FROM on: it
    is about the polynomial's value at 0, up to 15, and its rounding would mix the singular vectors.
    From HALVES_FROM on b is a sum of two, since its rounding lies outside of them. For rank m/8 at
    a slope of 5000 float16 is 0.4% from float32 with both, 52% with neither (256 x 256, emulated on
    a CPU: notes/log.md).
    """

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        precision: FactorPrecision,
        slope: float = 1.0,
        narrow: Tensor | None = None,
    ):
        slope = slope if precision != "float32" else 1.0
        self.left, self.b = rounded(a, precision), b
        self.diagonal = self.rest = None
        if narrow is not None:
            self.right = narrow
        else:
            # One rounding serves both factors of a square, unless the left one loses its diagonal
            # below.
            self.right = self.left if a is b and slope < DIAGONAL_FROM else rounded(b, precision)
        if slope >= DIAGONAL_FROM:
            self.diagonal = a.diagonal(dim1=-2, dim2=-1)[..., None]
            self.left.diagonal(dim1=-2, dim2=-1).zero_()
        if slope >= HALVES_FROM:
            self.rest = rest_of(b, self.right, precision)

    def multiply(
        self, out: Tensor | None = None, rows: slice = slice(None), columns: slice = slice(None)
    ) -> Tensor:
        """These rows and columns of the product, in `out` if there is one."""
        left, right = self.left[..., rows, :], self.right[..., columns]
        if self.diagonal is None:
            result = multiply(left, right, out)
        else:  # first, because the product is then added to it in one pass
            scaled = torch.mul(self.diagonal[..., rows, :], self.b[..., rows, columns], out=out)
            result = add_product_(scaled, left, right)
        if self.rest is not None:
            add_product_(result, left, self.rest[..., columns], HALF_SCALE)
        return result
