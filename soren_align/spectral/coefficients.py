"""The polynomials of `minimax_sigmoid`. docs/studies/minimax_polynomials.py computes them and prints the alternatives.

An odd polynomial is given by its coefficients of x, x^3, x^5, ... tests/spectral/test_minimax_coefficients.py computes
them again, and evaluates their certificates.
"""

from typing import NamedTuple


class Sign(NamedTuple):
    """f, a composition of odd polynomials that approximates 1 on u in [resolution, TOP]."""

    steps: tuple[tuple[float, ...], ...]
    centers: tuple[float, ...]  # of the interval of each step, in u^2
    num_restarts: int  # of wide matrices: the Gram matrix is computed again after each of the first num_restarts steps
    error: float  # |f(u) - 1| is at most this
    slope: float  # f'(0)


TOP = 1.005  # u is at most 1; the margin is for rounding

# By resolution. Every later interval is 0.5% wider than the range of the step before it, for float16's rounding.
SIGN = {
    # degrees (9, 9, 5, 9, 9)
    0.0004: Sign(
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
    0.001: Sign(
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
    0.01: Sign(
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

# tanh(x / 2), increasing on the whole interval; the error is relative to the sigmoid, of which this is one half.
TANH = (4.96740021e-01, -3.61866082e-02, 1.77539158e-03)  # on [0, 2.5], error 0.0827%
TANH_WIDE = (  # on [0, 4.3], error 0.0561%
    4.97856604e-01,
    -3.83000524e-02,
    2.68336953e-03,
    -1.12038574e-04,
    1.94851463e-06,
)
WIDE_LIMIT = 4.3  # (sum of sigma^128)^(1/128) is at most 7% above sigma_max, for up to 10 000 singular values
WIDE_FROM = (2.0, 2.5)  # between these nu, TANH and TANH_WIDE are interpolated; below, five products are saved
