"""Compute the polynomials of soren_align/spectral/products.py, and print the alternatives to them.

    python -m research.studies.minimax_polynomials            prints the front, then the tables as they are shipped

The sign of u in [resolution, 1] is approximated by a composition of odd polynomials. Each is the
best one on the range of the previous one: for given degrees this greedy choice is optimal (Polar
Express, arXiv 2505.16932). The resolution is chosen by the error on recorded spectra
(research/recorded.py).
"""

import functools
import itertools
from collections.abc import Callable

import numpy as np
from scipy.optimize import linprog

from research import recorded
from research.fitting import best_odd
from soren_align.core.optimizer_settings import MUON_STEPS, SNS_STEPS
from soren_align.spectral import MAPS
from soren_align.spectral.composition import TOP, Composition
from soren_align.spectral.flops import POLYNOMIAL_PRODUCTS, composition_flops
from soren_align.spectral.quintic import A, B, C
from soren_align.spectral.sns import T_LIMIT, T_STEPS

# every later interval is wider by this share: what float16 products add (0.5% instead of 0.7% in
# error)
SLACK = 0.005
RESOLUTIONS = {0.0004: (9, 9, 5, 9, 9), 0.001: (9, 9, 9, 3, 5), 0.01: (9, 9, 9)}
NUM_RESTARTS = {0.01: 1}  # else 2; see `coefficients`
CANDIDATES = (0.01, 0.003, 0.001, 0.0007, 0.0005, 0.0004, 0.0003, 0.0002)
MOST_ERROR = 0.005
TANH_DOMAINS = {5: 2.5, 9: 4.3}  # degree: largest argument
# To form p(u) / u in R = u^2, by degree; degree 7 costs what 9 costs.
NUM_PRODUCTS = {2 * terms - 1: count for terms, count in POLYNOMIAL_PRODUCTS.items()}


def compose(resolution, degrees, slack=SLACK):
    """(list of coefficient arrays, largest error of the last polynomial on [resolution, TOP])."""
    low, high, steps = resolution, TOP, []
    for degree in degrees:
        coefficients, error = best_odd(low, high, (degree + 1) // 2)
        steps.append(coefficients)
        low, high = (1 - error) * (1 - slack), (1 + error) * (1 + slack)
    return steps, error


def best_tanh(degree, largest):
    """(coefficients, largest error): an odd rising polynomial for tanh(x / 2) on [0, largest].

    The error is relative to the sigmoid, (1 + tanh(x / 2)) / 2, of which this is one half.
    """
    share = np.linspace(0, 1, 4001)[1:]
    powers = 2 * np.arange((degree + 1) // 2) + 1
    values, slopes = share[:, None] ** powers, powers * share[:, None] ** (powers - 1)
    target = np.tanh(share * largest / 2)
    weight = 1 + target
    solution = linprog(
        [0.0] * len(powers) + [1.0],
        A_ub=np.block(
            [
                [values, -weight[:, None]],
                [-values, -weight[:, None]],
                [-slopes, np.zeros((len(share), 1))],
            ]
        ),
        b_ub=np.concatenate([target, -target, np.zeros(len(share))]),
        bounds=[(None, None)] * len(powers) + [(0, None)],
        method="highs-ds",
    )
    return solution.x[:-1] / largest**powers, solution.x[-1]


def num_square_products(degrees, num_restarts):
    """r x r products to turn R into the composition; after a restart, the next step's R comes from
    thin products.

    R^2 is needed in any case, for nu.
    """
    updates = len(degrees) - 1 - min(num_restarts, len(degrees) - 1)
    polynomials = max(1, NUM_PRODUCTS[degrees[0]]) + sum(NUM_PRODUCTS[d] for d in degrees[1:])
    return polynomials + len(degrees) - 1 + 2 * updates


def front(resolution, num_restarts, most=20):
    """{products: (error, degrees)}: the best composition for every number of products, if better
    than all cheaper.
    """
    best = {}
    for length in range(1, 6):
        for degrees in itertools.product(NUM_PRODUCTS, repeat=length):
            cost = num_square_products(degrees, num_restarts)
            if cost <= most:
                best[cost] = min(
                    best.get(cost, (np.inf,)), (compose(resolution, degrees)[1], degrees)
                )
    return {
        cost: best[cost]
        for cost in sorted(best)
        if all(best[cost] < best[c] for c in best if c < cost)
    }


def exact_values(sigma, shape):
    """What `exact_sigmoid` makes of the singular values of a float32 matrix: 0 on the numerical
    null space.
    """
    threshold = np.finfo(np.float32).eps * max(shape) * sigma.max()
    return np.where(sigma > threshold, 1 / (1 + np.exp(-sigma)), 0)


def minimax_values(sigma, steps):
    """What a composition makes of them, beside the exact tanh."""
    u = sigma / np.sum(sigma**8) ** (1 / 8)
    for coefficients in steps:
        u = sum(c * u ** (2 * i + 1) for i, c in enumerate(coefficients))
    return (u + np.tanh(sigma / 2)) / 2


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
    u = sigma / np.linalg.norm(sigma)
    for _ in range(MUON_STEPS):
        u = A * u + B * u**3 + C * u**5
    return u / 2


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


def print_recorded():
    """For each resolution the cheapest composition within MOST_ERROR: FLOPs over Muon's, errors on
    recorded spectra.
    """
    shapes = ((1024, 1024), (1024, 4096))
    keys = [f"{name} {step}" for name, step in recorded_errors(sns_values)]
    head = ["map", *("FLOPs {}x{}".format(*shape) for shape in shapes), *keys]
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for resolution in CANDIDATES:
        restarts = NUM_RESTARTS.get(resolution, 2)
        degrees = RESOLUTIONS.get(resolution) or next(
            degrees
            for error, degrees in front(resolution, restarts).values()
            if error <= MOST_ERROR
        )
        steps, error = compose(resolution, degrees)
        table = Composition(tuple(map(tuple, steps)), (), restarts, error, 0.0)
        flops = [
            f"{composition_flops(table, *sorted(shape), has_base=True) / MAPS['muon'].num_flops(*shape):.2f}"
            for shape in shapes
        ]
        name = f"{resolution:g} {degrees}, {num_square_products(degrees, restarts)} products"
        print_row(name, functools.partial(minimax_values, steps=steps), flops)
    for steps in (10, SNS_STEPS, 20):
        flops = [
            f"{MAPS['sns'].num_flops(*shape, steps=steps) / MAPS['muon'].num_flops(*shape):.2f}"
            for shape in shapes
        ]
        print_row(f"SNS({steps})", functools.partial(sns_values, steps=steps), flops)
    print_row("half of Muon's, float32", muon_values, ("1.00", "1.00"))


def main():
    """Print the fronts, the errors on recorded spectra, the effect of the slack, and the tables."""
    for resolution in RESOLUTIONS:
        for restarts in (0, NUM_RESTARTS.get(resolution, 2)):
            print(f"\nresolution {resolution}, {restarts} restarts: products, error, degrees")
            for cost, (error, degrees) in front(resolution, restarts).items():
                print(f"  {cost:2d}   {error:8.4%}   {degrees}")
    print_recorded()
    print("\nslack of the later intervals and error, resolution 0.01:")
    for slack in (0, 0.001, 0.005, 0.01, 0.02):
        print(f"  {slack:.3f}   {compose(0.01, RESOLUTIONS[0.01], slack)[1]:.4%}")
    for resolution, degrees in RESOLUTIONS.items():
        steps, error = compose(resolution, degrees)
        print(
            f"\nsign, resolution {resolution}: error {error:.6f}, slope {np.prod([c[0] for c in steps]):.1f}"
        )
        for coefficients in steps:
            print("  (" + ", ".join(f"{c:.9f}" for c in coefficients) + "),")
    for degree, largest in TANH_DOMAINS.items():
        coefficients, error = best_tanh(degree, largest)
        print(f"\ntanh, degree {degree} on [0, {largest}]: error {error:.6f}")
        print("  (" + ", ".join(f"{c:.9e}" for c in coefficients) + ")")


if __name__ == "__main__":
    main()
