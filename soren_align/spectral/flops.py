"""Floating-point operations of the maps by products, and the choices that they depend on.
Needs no torch.

In units of m^3, for an m x n matrix with n = a m >= m, a thin product (x x^T, or m x m times x) has
2a operations, one of two m x m matrices 2. A symmetric product is computed, and counted, in blocks
on one side of the diagonal only, down to 9/16 of the operations from 128 rows on.
"""

from typing import TYPE_CHECKING

from ..core.optimizer_settings import FactorPrecision

if TYPE_CHECKING:
    from .composition import Composition

POLYNOMIAL_PRODUCTS = {2: 0, 3: 1, 5: 2}
"""Products of m x m matrices by the number of coefficients of an odd polynomial."""
# Rows of a block of a symmetric product. The part below the diagonal is copied: with 8 blocks 9/16
# of the work, in 0.69 (512 rows), 0.67 (1024) and 0.66 (2048) of the time (one thread of a CPU,
# MKL, float32).
MIN_BLOCK, MAX_BLOCKS, PADDING = 128, 8, 16
# On a GPU each block is a launch, and blocks save time from LARGE_ROWS on only. Milliseconds of a
# float16 map on an H200 (torch 2.11) with 1, 2 and 4 blocks: 9 of 2048 x 2048 12.1, 12.3, 12.5;
# 2048 x 11008 4.6, 4.9, 7.4; 4096 x 14336 16.4, 15.8, 14.9; 8192 x 28672 106, 101, 96.
LARGE_ROWS, LARGE_BLOCKS = 4096, 4
# n / m up to which restarts after all steps, which replace square products by thin ones, cost less
NEAR_SQUARE = 1.15


def ends_thin(num_rows: int, num_columns: int, precision: FactorPrecision = "float32") -> bool:
    """Whether the result is sign @ y + tanh @ x, with restarts after all steps, instead of (sign @
    lift + tanh) @ x.

    Narrow factors need it: 11 bits cannot hold a small singular value's lift of 14 and more beside
    a large one's 1.
    """
    return precision != "float32" or num_columns < NEAR_SQUARE * num_rows


def block_size(num_rows: int, device_type: str = "cpu") -> int:
    """Rows of a block of a symmetric product."""
    if device_type == "cpu":
        return max(MIN_BLOCK, -(-num_rows // MAX_BLOCKS))
    return num_rows if num_rows < LARGE_ROWS else -(-num_rows // LARGE_BLOCKS)


def row_padding(num_rows: int, device_type: str = "cpu") -> int:
    """Elements after each row of an m x m matrix, with blocks on a CPU: at 1024 and 2048 rows the
    copies across the diagonal take half the time if the stride is no power of two. A GPU's
    elementwise kernels are slower with it.
    """
    return PADDING if device_type == "cpu" and num_rows > block_size(num_rows) else 0


def symmetric_share(num_rows: int, device_type: str = "cpu") -> float:
    """The computed share of a symmetric product, whose blocks below the diagonal are copied."""
    block = block_size(num_rows, device_type)
    return (
        sum(
            min(block, num_rows - start) * (num_rows - start) for start in range(0, num_rows, block)
        )
        / num_rows**2
    )


def steepness(table: "Composition") -> float:
    """The factor by which the steps magnify a singular value near 0."""
    product = 1.0
    for step in table.steps:  # a loop, which torch.compile can trace
        product *= abs(step[0])
    return product


def composition_flops(
    table: "Composition",
    num_rows: int,
    num_columns: int,
    precision: FactorPrecision = "float32",
    *,
    has_base: bool | None = None,
    device_type: str = "cuda",
) -> int:
    """Operations of a composition's products, num_rows <= num_columns; with narrow factors, all for
    tensor cores.

    has_base: whether a polynomial of the Gram matrix is added to it, as minimax's tanh; None: if
    the table has one.
    device_type: where narrow factors are multiplied; in float32 the blocks are a CPU's.

    In units of m^3, for n = a m, minimax in float32 and its default resolution has 12a + 34 (22a +
    18 near squares), of which the symmetric products, 6a + 30 (10a + 18), cost down to 9/16 of that
    from 128 rows on.
    """
    has_base = len(table.base) > 1 if has_base is None else has_base
    m, n = num_rows, num_columns
    thin, square = 2 * m * m * n, 2 * m**3
    num_square = sum(POLYNOMIAL_PRODUCTS[len(step)] for step in table.steps)
    if precision != "float32":
        from .factors import HALVES_FROM

        slope, num_thin = steepness(table), len(table.steps) + has_base
        for number, step in enumerate(table.steps[:-1]):
            # the second factor is a sum of two, but for R^2 of the first step
            if slope >= HALVES_FROM:
                num_thin, num_square = (
                    num_thin + 1,
                    num_square + POLYNOMIAL_PRODUCTS[len(step)] - (number == 0),
                )
            slope /= max(abs(step[0]), 1e-9)
        symmetric = symmetric_share(m, device_type)
        return round((len(table.steps) * thin + num_square * square) * symmetric) + num_thin * thin
    symmetric, later = symmetric_share(m), len(table.steps) - 1
    num_square += len(table.steps[0]) == 2  # nu needs R^2 if the first polynomial does not
    if ends_thin(m, n):
        return (
            round(((1 + later) * thin + num_square * square) * symmetric)
            + (later + 1 + has_base) * thin
        )
    restarts = table.num_restarts
    num_square += 3 * (later - restarts)  # R <- p R p, and the product of the polynomials
    return (
        round(((1 + restarts) * thin + num_square * square) * symmetric)
        + (restarts + 1) * thin
        + restarts * square
    )


def quintic_flops(num_rows: int, num_columns: int, steps: int) -> int:
    """Operations of Muon's iteration, num_rows <= num_columns: x x^T, its square, and their sum
    times x.
    """
    return steps * (4 * num_rows**2 * num_columns + 2 * num_rows**3)
