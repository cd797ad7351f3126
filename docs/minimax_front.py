"""Compute the polynomials of soren_align/spectral/coefficients.py, and print the alternatives to them.

    python docs/minimax_front.py            prints the front, then the tables as they are shipped

The sign of u in [resolution, 1] is approximated by a composition of odd polynomials. Each is the best one on the range
of the previous one: for given degrees this greedy choice is optimal (Polar Express, arXiv 2505.16932).
"""

import itertools

import numpy as np
from scipy.optimize import linprog

TOP = 1.005  # by rounding a normalised singular value may exceed 1, where the first polynomial is steep
SLACK = 0.005  # every later interval is wider by this share: what float16 products add (0.5% instead of 0.7% in error)
RESOLUTIONS = {0.01: (9, 9, 9), 0.001: (9, 9, 9, 3, 5)}
TANH_DOMAINS = {5: 2.5, 9: 4.3}  # degree: largest argument
NUM_PRODUCTS = {3: 0, 5: 1, 9: 2}  # to form p(u) / u in R = u^2; degree 7 costs what 9 costs


def best_odd(low, high, degree):
    """(coefficients of u, u^3, ..., largest error): the best odd approximation of 1 on [low, high], by Remez exchange.

    The extrema are found exactly: they are the ends and the roots of the derivative, a polynomial in u^2.
    """
    count = (degree + 1) // 2
    powers = 2 * np.arange(count) + 1
    low_share = low / high
    middle, half = (low_share**2 + 1) / 2, (1 - low_share**2) / 2
    points = np.sqrt(middle - half * np.cos(np.pi * np.arange(count + 1) / count))
    signs = (-1.0) ** np.arange(count + 1)
    for _ in range(100):
        system = np.column_stack([points[:, None] ** powers, signs])
        *coefficients, error = np.linalg.solve(system, np.ones(count + 1))
        extrema = np.polynomial.polynomial.polyroots(powers * coefficients)
        previous, points = points, np.concatenate([[low_share], np.sqrt(np.sort(extrema.real)), [1.0]])
        if np.abs(points - previous).max() < 1e-14:
            break
    return coefficients / high**powers, abs(error)


def compose(resolution, degrees, slack=SLACK):
    """(list of coefficient arrays, largest error of the last polynomial on [resolution, TOP])."""
    low, high, steps = resolution, TOP, []
    for degree in degrees:
        coefficients, error = best_odd(low, high, degree)
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
        A_ub=np.block([[values, -weight[:, None]], [-values, -weight[:, None]], [-slopes, np.zeros((len(share), 1))]]),
        b_ub=np.concatenate([target, -target, np.zeros(len(share))]),
        bounds=[(None, None)] * len(powers) + [(0, None)],
        method="highs-ds",
    )
    return solution.x[:-1] / largest**powers, solution.x[-1]


def num_square_products(degrees, restart):
    """r x r products to turn R into the composition; with a restart, R of the second step comes from thin products."""
    updates = len(degrees) - 1 - (restart and len(degrees) > 1)
    return sum(NUM_PRODUCTS[d] for d in degrees) + len(degrees) - 1 + 2 * updates


def front(resolution, restart, most=20):
    """{products: (error, degrees)}: the best composition for every number of products, if better than all cheaper."""
    best = {}
    for length in range(1, 6):
        for degrees in itertools.product(NUM_PRODUCTS, repeat=length):
            cost = num_square_products(degrees, restart)
            if cost <= most:
                best[cost] = min(best.get(cost, (np.inf,)), (compose(resolution, degrees)[1], degrees))
    return {cost: best[cost] for cost in sorted(best) if all(best[cost] < best[c] for c in best if c < cost)}


def main():
    """Print the fronts, the effect of the slack, and the tables."""
    for resolution in RESOLUTIONS:
        for restart in (False, True):
            thin = 8 if restart else 4
            print(
                f"\nresolution {resolution}, {'with' if restart else 'no'} restart: products, m^3 units, error, degrees"
            )
            for cost, (error, degrees) in front(resolution, restart).items():
                print(f"  {cost:2d}   {thin}a + {2 * cost:2d}   {error:8.4%}   {degrees}")
    print("\nslack of the later intervals and error, resolution 0.01:")
    for slack in (0, 0.001, 0.005, 0.01, 0.02):
        print(f"  {slack:.3f}   {compose(0.01, RESOLUTIONS[0.01], slack)[1]:.4%}")
    for resolution, degrees in RESOLUTIONS.items():
        steps, error = compose(resolution, degrees)
        print(f"\nsign, resolution {resolution}: error {error:.6f}, slope {np.prod([c[0] for c in steps]):.1f}")
        for coefficients in steps:
            print("  (" + ", ".join(f"{c:.9f}" for c in coefficients) + "),")
    for degree, largest in TANH_DOMAINS.items():
        coefficients, error = best_tanh(degree, largest)
        print(f"\ntanh, degree {degree} on [0, {largest}]: error {error:.6f}")
        print("  (" + ", ".join(f"{c:.9e}" for c in coefficients) + ")")


if __name__ == "__main__":
    main()
