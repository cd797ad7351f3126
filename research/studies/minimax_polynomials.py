"""Compute the tables of soren_align/spectral/coefficients.py, and print the alternatives to them.

    python -m research.studies.minimax_polynomials   prints the front, then the tables as they are shipped

The sign of u in [resolution, 1] is approximated by quintic steps. Each is the best one on the range
of the previous one: this greedy choice is optimal (Polar Express, arXiv 2505.16932). The resolution
is chosen by the error on recorded spectra (research/recorded.py).
"""

import functools
from collections.abc import Callable

import numpy as np
from scipy.optimize import least_squares, minimize_scalar

from research import recorded
from research.fitting import best_odd
from soren_align.core.optimizer_settings import MUON_STEPS, SNS_STEPS
from soren_align.spectral import MAPS
from soren_align.spectral.coefficients import MUON, NORM_LIMIT, TANH_LIMIT, TOP
from soren_align.spectral.maps import steps_flops
from soren_align.spectral.sns import T_LIMIT, T_STEPS

SLACK = 0.005
"""Every later interval is wider by this share, for the rounding of 16 bits."""
RESOLUTIONS = {0.0004: 7, 0.001: 6, 0.01: 4}
"""The shipped ones, and their steps."""
CANDIDATES = (0.01, 0.003, 0.001, 0.0007, 0.0005, 0.0004, 0.0003, 0.0002)
MOST_STEPS = 9
MOST_ERROR = 0.005
TANH_FIT_LIMIT = TANH_LIMIT + 0.02  # what float16 adds to the largest argument
SHAPES = ((1024, 1024), (1024, 4096))


def compose(resolution, count, slack=SLACK):
    """(steps, largest error of the last one on [resolution, TOP])."""
    low, high, steps = resolution, TOP, []
    for _ in range(count):
        step, error = best_odd(low, high)
        steps.append(step)
        low, high = (1 - error) * (1 - slack), (1 + error) * (1 + slack)
    return steps, error


def values_of(steps, u):
    """The composition of steps at u."""
    for a, b, c in steps:
        u = a * u + b * u**3 + c * u**5
    return u


def best_tanh_slope(limit=NORM_LIMIT):
    """(s, largest error): 1/2 + s sigma for the sigmoid on [0, limit], with the least relative
    error.
    """
    x = np.linspace(0, limit, 10_001)

    def error(slope):
        return np.abs((0.5 + slope * x) * (1 + np.exp(-x)) - 1).max()

    slope = minimize_scalar(error, bounds=(0.2, 0.25), method="bounded", options={"xatol": 1e-9}).x
    return slope, error(slope)


def tanh_errors(steps, x):
    """Of tanh(x / 2) by steps, relative to the sigmoid, (1 + tanh(x / 2)) / 2, of which it is one
    half.
    """
    target = np.tanh(x / 2)
    return (values_of(steps, x) - target) / (1 + target)


def best_tanh(limit=TANH_FIT_LIMIT):
    """(two steps, largest error): for tanh(x / 2) on [0, limit].

    Least squares, with weights that grow where the error is large (Lawson), find nearly the best
    error.
    """
    x = np.linspace(0, limit, 3001)[1:]

    def errors(parameters, weights=1.0):
        return tanh_errors(parameters.reshape(2, 3), x) * weights

    best = np.inf, np.zeros(6)
    for slope in (0.25, 0.35, 0.5):
        parameters = np.array([slope, -0.03 * slope, 6e-4 * slope, 0.5 / slope, -0.1, 0.01])
        weights = np.ones_like(x)
        for _ in range(60):
            parameters = least_squares(
                errors, parameters, x_scale="jac", max_nfev=200, args=(weights,)
            ).x
            sizes = np.abs(errors(parameters))
            best = min(best, (sizes.max(), parameters), key=lambda pair: pair[0])
            weights = weights * (1e-3 + sizes / sizes.max()) ** 0.3
    return best[1].reshape(2, 3), best[0]


def exact_values(sigma, shape):
    """What `exact_sigmoid` makes of the singular values of a float32 matrix: 0 on the numerical
    null space.
    """
    threshold = np.finfo(np.float32).eps * max(shape) * sigma.max()
    return np.where(sigma > threshold, 1 / (1 + np.exp(-sigma)), 0)


def minimax_values(sigma, steps):
    """What the steps make of them, beside the exact tanh."""
    u = sigma / np.sum(sigma**8) ** (1 / 8)
    return (values_of(steps, u) + np.tanh(sigma / 2)) / 2


def sns_values(sigma, steps=SNS_STEPS):
    """What `soft_newton_schulz` makes of them."""
    q, t = sigma / np.linalg.norm(sigma), sigma / T_LIMIT
    for _ in range(steps):
        q = (3 - q**2) * q / 2
    for _ in range(T_STEPS):
        t = (3 - t**2) * t / 2
    return (q + t) / 2


def muon_values(sigma):
    """Half of what `newton_schulz` makes of them, in float32: half, to compare it with a map to
    1/2.
    """
    return values_of([MUON] * MUON_STEPS, sigma / np.linalg.norm(sigma)) / 2


def recorded_errors(
    values: Callable[[np.ndarray], np.ndarray],
) -> dict[tuple[str, int], tuple[float, float]]:
    """{(set, step): (mean, worst)} of |map(M) - exact(M)|_F / |exact(M)|_F over the recorded
    spectra, in float64.
    """
    errors: dict[tuple[str, int], list[float]] = {}
    for spectrum in recorded.recorded_spectra():
        sigma = spectrum.sigma.numpy()
        exact = exact_values(sigma, spectrum.shape)
        error = np.linalg.norm(values(sigma) - exact) / np.linalg.norm(exact)
        errors.setdefault((spectrum.set, spectrum.step), []).append(float(error))
    return {key: (float(np.mean(each)), max(each)) for key, each in errors.items()}


def print_row(name, values, flops=("", "")):
    """One row of the table of errors on recorded spectra."""
    errors = [f"{mean:.1%} ({worst:.0%})" for mean, worst in recorded_errors(values).values()]
    print("| " + " | ".join([name, *flops, *errors]) + " |")


def over_muon(flops):
    """A map's FLOPs, of m and n, over Muon's, as text for each of SHAPES."""
    return [f"{flops(*shape) / MAPS['muon'].num_flops(*shape):.2f}" for shape in SHAPES]


def print_recorded():
    """For each resolution the fewest steps within MOST_ERROR, or those that are shipped: FLOPs over
    Muon's, errors on recorded spectra.
    """
    keys = [f"{name} {step}" for name, step in recorded_errors(sns_values)]
    head = ["map", *("FLOPs {}x{}".format(*shape) for shape in SHAPES), *keys]
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for resolution in CANDIDATES:
        count = RESOLUTIONS.get(resolution) or next(
            k for k in range(1, MOST_STEPS + 1) if compose(resolution, k)[1] <= MOST_ERROR
        )
        steps, _ = compose(resolution, count)
        print_row(
            f"{resolution:g}, {count} steps",
            functools.partial(minimax_values, steps=steps),
            over_muon(functools.partial(steps_flops, steps=steps)),
        )
    for count in (10, SNS_STEPS, 20):
        flops = over_muon(functools.partial(MAPS["sns"].num_flops, steps=count))
        print_row(f"SNS({count})", functools.partial(sns_values, steps=count), flops)
    print_row("half of Muon's, float32", muon_values, ("1.00", "1.00"))


def print_steps(steps):
    """Steps as coefficients.py has them."""
    for step in steps:
        print("  (" + ", ".join(f"{coefficient:.9g}" for coefficient in step) + "),")


def main():
    """Print the fronts, the errors on recorded spectra, the effect of the slack, and the tables."""
    for resolution in RESOLUTIONS:
        print(f"\nresolution {resolution}: steps, error, slope")
        for count in range(1, MOST_STEPS + 1):
            steps, error = compose(resolution, count)
            print(f"  {count}   {error:8.4%}   {np.prod([step[0] for step in steps]):.0f}")
    print_recorded()
    print("\nslack of the later intervals and error, resolution 0.01:")
    for slack in (0, 0.001, 0.005, 0.01, 0.02):
        print(f"  {slack:.3f}   {compose(0.01, RESOLUTIONS[0.01], slack)[1]:.4%}")
    for resolution, count in RESOLUTIONS.items():
        steps, error = compose(resolution, count)
        slope = np.prod([step[0] for step in steps])
        print(f"\nsign, resolution {resolution}: error {error:.2g}, slope {slope:.1f}")
        print_steps(steps)
    print("\ntanh(sigma / 2) / 2 ~ {:.4f} sigma: error {:.3%}".format(*best_tanh_slope()))
    steps, error = best_tanh()
    print(f"\ntanh on [0, {TANH_FIT_LIMIT:g}]: error {error:.3%}")
    print_steps(steps)


if __name__ == "__main__":
    main()
