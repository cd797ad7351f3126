"""Compute the poles of soren_align/spectral/powers.py, and print the alternatives to them.

    python -m research.studies.powers          prints the errors of 3 to 6 poles, then the table as it is shipped

lambda^((p - 1) / 2) on [RESOLUTION^2, TOP^2] is approximated by c + sum of w_k / (lambda + t_k).
Least squares in the logarithms of t, w and c, with weights that grow where the error is large
(Lawson), find nearly the best error.
"""

import numpy as np
from scipy.optimize import least_squares

from soren_align.spectral.composition import TOP
from soren_align.spectral.powers import POWERS, RESOLUTION, Poles

NUM_POLES = 5
ROUNDS = 60


def fit(p, num_poles, resolution=RESOLUTION):
    """The Poles of a power."""
    alpha, (low, high) = (1 - p) / 2, (2 * np.log(resolution), 2 * np.log(TOP))
    points = np.exp(np.linspace(low, high, 1500))
    powers = points[:, None] ** alpha

    def design(shifts):
        return np.hstack([1 / (points[:, None] + shifts), np.ones((len(points), 1))]) * powers

    shifts = np.exp(low + (high - low) / num_poles * (np.arange(num_poles) + 0.3))
    start = np.linalg.lstsq(design(shifts), np.ones(len(points)))[0]
    logs = np.log([*shifts, *np.maximum(start, 1e-9)])
    weights, best = np.ones(len(points)), Poles((), (), 0.0, np.inf)
    for _ in range(ROUNDS):

        def errors(logs, weights=weights):
            shifts, factors = np.split(np.exp(logs), [num_poles])
            return (design(shifts) @ factors - 1) * weights

        logs = least_squares(errors, logs, method="lm", max_nfev=300).x
        error = np.abs(errors(logs, 1.0))
        if error.max() < best.error:
            numbers = [float(f"{number:.8g}") for number in np.exp(logs)]
            best = Poles(
                tuple(numbers[:num_poles]),
                tuple(numbers[num_poles:-1]),
                numbers[-1],
                float(error.max()),
            )
        weights = weights * np.sqrt(error / error.max() + 1e-3)
        weights /= np.sqrt(np.mean(weights**2))
    return best


if __name__ == "__main__":
    for p in POWERS:
        for resolution in (1e-4, RESOLUTION, 1e-3):
            errors = ", ".join(f"{fit(p, number, resolution).error:.2%}" for number in (3, 4, 5, 6))
            print(f"p = {p}, from {resolution} on, with 3 to 6 poles: {errors}")
    for p in POWERS:
        print(f"    {p}: {fit(p, NUM_POLES)!r},")
