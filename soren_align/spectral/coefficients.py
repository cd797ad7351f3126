"""The coefficients of Soren's and Muon's iterations, to copy from: plain numbers, without torch.

A step (a, b, c) takes every singular value u to a u + b u^3 + c u^5, by matrix products alone:

    A = X X^T;  X <- a X + (b A + c A^2) X

Muon takes one step of its own five times. Soren's map at its default takes the seven steps of
SIGN[0.0004], from X = M / nu of a momentum M, where nu is at least its largest singular value (the
Frobenius norm is one such number):

    O = X / 2 + TANH_SLOPE M        the sigmoid of M's singular values, if |M|_F <= NORM_LIMIT

so that any Muon becomes Soren by another table and one addition:
tests/spectral/test_copied_into_a_muon.py does it to torch.optim.Muon's function.
research/studies/minimax_polynomials.py computes the tables and prints the alternatives,
tests/research/test_minimax_coefficients.py computes them again and proves their errors.
"""

from typing import NamedTuple

Step = tuple[float, float, float]
"""a, b, c of a u + b u^3 + c u^5."""

MUON: Step = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's (kellerjordan.github.io/posts/muon), as torch.optim.Muon's: the steepest slope at
0 for which the iteration stays within about [0.7, 1.2]."""
NEWTON_SCHULZ: Step = (1.5, -0.5, 0.0)
"""The classical step, rising on [0, 1], which the paper's Algorithm 1 (SNS) takes."""
PROMOTION: Step = (1.875, -1.25, 0.375)
"""Of Pion's map: 15/8 near 0, and 1 at 1 with a slope of 0."""
SUPPRESSION: Step = (0.0, 2.5, -1.5)
"""Of Pion's map. Fixed points: 0, sqrt(2/3) and 1. Below sqrt(2/3) a step lowers a singular value,
above it raises it towards 1."""

TOP = 1.005
"""The largest u: 1, and a margin for rounding."""


class Sign(NamedTuple):
    """Steps that take every u in [resolution, TOP] to 1."""

    steps: tuple[Step, ...]
    error: float
    """The result is at most this far from 1."""
    slope: float
    """By which they magnify a u near 0, and rounding with it."""


# By resolution. Each step is the best odd quintic on the range of the one before, which for a
# composition is optimal (Polar Express, arXiv 2505.16932); every range is 0.5% wider than proved,
# for the rounding of 16 bits.
SIGN: dict[float, Sign] = {
    0.0004: Sign(
        (
            (8.45447584, -24.8379808, 18.2514154),
            (4.20652011, -3.09320736, 0.569800893),
            (4.11521204, -3.0307237, 0.562840935),
            (3.78007623, -2.79804416, 0.536962419),
            (2.92553548, -2.17203572, 0.468009703),
            (2.05549932, -1.43416772, 0.390902132),
            (1.87676926, -1.25162911, 0.374862547),
        ),
        error=5.8e-5,
        slope=6243.6,
    ),
    0.001: Sign(
        (
            (8.42840448, -24.7360356, 18.1711161),
            (4.16327608, -3.06365957, 0.566509181),
            (3.94947859, -2.91634958, 0.550111307),
            (3.29597046, -2.45049634, 0.4985065),
            (2.293668, -1.65451204, 0.412969943),
            (1.89141385, -1.26705241, 0.375784933),
        ),
        error=1.4e-3,
        slope=1981.6,
    ),
    0.01: Sign(
        (
            (8.05508779, -23.2773869, 17.0225645),
            (3.62748321, -2.69012804, 0.524989553),
            (2.67067287, -1.97149447, 0.446342993),
            (1.96172776, -1.34057305, 0.382080873),
        ),
        error=1.5e-2,
        slope=153.1,
    ),
}

# The sigmoid is 1/2 + tanh(sigma / 2) / 2, of which the first part is half of the sign. The second
# one is as good as linear up to the norm that clipped gradients have.
TANH_SLOPE = 0.236
"""tanh(sigma / 2) / 2 ~ TANH_SLOPE sigma: within 0.74% of the sigmoid up to NORM_LIMIT."""
NORM_LIMIT = 1.01
TANH: tuple[Step, Step] = (
    (0.149584378, -0.00423991824, 6.11231626e-05),
    (3.33824131, -7.85476619, 14.2523812),
)
"""tanh(sigma / 2) in two steps, within 0.016% of the sigmoid up to TANH_LIMIT, and rising."""
TANH_LIMIT = 4.6
