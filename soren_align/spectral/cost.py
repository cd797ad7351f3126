"""The cost of a map: floating-point operations and memory, from the shape alone."""

from typing import Literal

from ..core.optimizer_settings import MUON_STEPS, RELEASED_STEPS, RESOLUTION, SNS_STEPS
from .factors import HALVES_FROM
from .products import PADDING, SIGN, Sign, block_size, ends_thin

SpectralMap = Literal["minimax", "sns", "released", "muon"]
POLYNOMIAL_PRODUCTS = {2: 0, 3: 1, 5: 2}
"""Products of m x m matrices by the number of coefficients."""


def num_flops(
    spectral_map: SpectralMap,
    num_rows: int,
    num_columns: int,
    steps: int | None = None,
    resolution: float = RESOLUTION,
) -> int:
    """Floating-point operations of a map's matrix products for one matrix.

    steps: of "sns" (None: 15), "released" or "muon" (None: 5). "minimax" is `minimax_sigmoid` by products, for singular
    values up to 2; "muon" is `newton_schulz`. In units of m^3, for n = a m: steps (4a + 2) (muon), 4a (steps + 2) (sns,
    released), and for minimax in its default resolution 12a + 34 (22a + 18 near squares). Of the last, the symmetric
    products, 6a + 30 (10a + 18), cost down to 9/16 of that from 128 rows on.
    """
    m, n = sorted((num_rows, num_columns))
    thin, square = 2 * m * m * n, 2 * m**3
    if spectral_map in ("sns", "released"):
        default = SNS_STEPS if spectral_map == "sns" else RELEASED_STEPS
        return 2 * thin * ((default if steps is None else steps) + 2)
    if spectral_map == "muon":
        return (MUON_STEPS if steps is None else steps) * (2 * thin + square)
    return minimax_flops(SIGN[resolution], m, n)


def minimax_flops(table: Sign, num_rows: int, num_columns: int) -> int:
    """As `num_flops`, of `minimax_sigmoid` with these polynomials, for num_rows <= num_columns."""
    m, n = num_rows, num_columns
    thin, square = 2 * m * m * n, 2 * m**3
    block = block_size(m)
    symmetric = sum(min(block, m - start) * (m - start) for start in range(0, m, block)) / m**2
    later = len(table.steps) - 1
    num_square = sum(POLYNOMIAL_PRODUCTS[len(step)] for step in table.steps)
    num_square += len(table.steps[0]) == 2  # nu needs R^2 if the first polynomial does not
    if ends_thin(m, n):
        return round(((1 + later) * thin + num_square * square) * symmetric) + (later + 2) * thin
    restarts = table.num_restarts
    num_square += 3 * (later - restarts)  # R <- p R p, and the product of the polynomials
    return round(((1 + restarts) * thin + num_square * square) * symmetric) + (restarts + 1) * thin + restarts * square


def num_workspace_numbers(num_rows: int, num_columns: int, device_type: str = "cpu") -> int:
    """The largest number of elements that a map of one matrix allocates at once, its result included, not its input.

    That of `minimax_sigmoid` by products, the default map: 7 buffers of m x m, with padding, and two of m x n
    (test_no_more_memory_than_stated); on a GPU 6 of each, with the copies that narrow factors are (test_cost.py).
    """
    m, n = sorted((num_rows, num_columns))
    if device_type == "cpu":
        return 7 * m * (m + PADDING) + 2 * m * n
    return 6 * (m * (m + PADDING) + m * n)


def usual_workspace_numbers(
    spectral_map: SpectralMap | None, num_rows: int, num_columns: int, narrow: bool = False
) -> int:
    """As `num_workspace_numbers`, but for `spectral_map`, and for a matrix of norm 1 at most, as clipped gradients are.

    spectral_map: None is a decomposition, without the workspace of its library.
    narrow: the products of "minimax" have factors of 16 bits on a GPU; x is then copied, and each factor. TF32's are
        copied too, and take up to a fifth more.
    Source: measured for the shapes of test_usual_workspace.
    """
    m, n = sorted((num_rows, num_columns))
    if spectral_map in ("sns", "released"):
        return m * m + 5 * m * n
    if spectral_map == "muon":  # in bfloat16: elements of half the size
        return max(3 * m * n, 2 * m * n + 2 * m * m) // 2
    if spectral_map is None:
        return 2 * m * m + 7 * m * n
    padding = PADDING if block_size(m, "cuda" if narrow else "cpu") < m else 0
    if narrow:
        return (11 * m * (m + padding) + 10 * m * n) // 2
    return (5 if ends_thin(m, n) else 7) * m * (m + padding) + 2 * m * n


def narrow_flops(num_rows: int, num_columns: int, resolution: float = RESOLUTION, device_type: str = "cuda") -> int:
    """As `num_flops`, of `minimax_sigmoid` with narrow factors, all of them for tensor cores on a GPU."""
    m, n = sorted((num_rows, num_columns))
    thin, square, block = 2 * m * m * n, 2 * m**3, block_size(m, device_type)
    symmetric = sum(min(block, m - start) * (m - start) for start in range(0, m, block)) / m**2
    steps, slope = SIGN[resolution].steps, SIGN[resolution].slope
    num_thin, num_symmetric = len(steps) + 1, sum(POLYNOMIAL_PRODUCTS[len(step)] for step in steps)
    for number, step in enumerate(steps[:-1]):
        if slope >= HALVES_FROM:  # the second factor is a sum of two, but for R^2 of the first step
            num_thin, num_symmetric = num_thin + 1, num_symmetric + POLYNOMIAL_PRODUCTS[len(step)] - (number == 0)
        slope /= step[0]
    return round((len(steps) * thin + num_symmetric * square) * symmetric) + num_thin * thin
