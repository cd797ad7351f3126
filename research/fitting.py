"""Coefficients of composed odd polynomials that match a function on a grid.

By least squares from several starts, and then by linear programs that lower the largest error. What
lies between the points of the grid is for `bound.largest_error`.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares, linprog

from soren_align.spectral.composition import TOP, Composition, odd

from .bound import Array, Function

GAINS = (1.0, 2.0, 4.0, 8.0, 16.0, 40.0, 100.0, 300.0, 1000.0, 2500.0)
"""By which the first polynomials magnify a small u at the start of a fit; the best two starts are
improved."""
RESTART_ABOVE = 60.0
"""The Gram matrix is computed again until the slope of the remaining polynomials is at most this.
Its rounding, 6e-8 of the largest, is magnified by the slope's square; the shipped tables of
`minimax` have 13 to 45."""


def grid(low: float) -> Array:
    """Points of [low, TOP]: equally many in every decade, and more near the top."""
    return np.unique(np.concatenate([np.geomspace(low, TOP, 170), np.linspace(low, TOP, 90)]))


def _value_and_jacobian(
    num_terms: Sequence[int], parameters: Array, u: Array
) -> tuple[Array, Array]:
    """The composition with these parameters at u, and its Jacobian.

    parameters: the steps' coefficients, the weights of u_1 to u_(K-2), and the base's coefficients.
    The weight of u_(K-1) is one with the first coefficient of the last step, and for K = 1 the base
    is one with the step.
    """
    iterates, jacobians, start = [u], [np.zeros((len(u), len(parameters)))], 0
    for count in num_terms:
        step, x = parameters[start : start + count], iterates[-1]
        powers = (x * x)[:, None] ** np.arange(count)
        slope = powers @ (step * (2 * np.arange(count) + 1))
        jacobian = jacobians[-1] * slope[:, None]
        jacobian[:, start : start + count] += x[:, None] * powers
        start += count
        iterates.append((x[:, None] * powers) @ step)
        jacobians.append(jacobian)
    result, total = iterates[-1].copy(), jacobians[-1].copy()
    for number in range(1, len(num_terms) - 1):
        result += parameters[start] * iterates[number]
        total += parameters[start] * jacobians[number]
        total[:, start] += iterates[number]
        start += 1
    base = _odd_powers(u, len(parameters) - start)
    total[:, start:] += base
    return result + base @ parameters[start:], total


def _odd_powers(u: Array, num_terms: int) -> Array:
    return u[:, None] ** (2 * np.arange(num_terms) + 1)


def _starts(num_terms: Sequence[int], num_base: int, target: Array, u: Array) -> list[Array]:
    """Parameters to begin with, the best first: all but the last step are rising, or approximate
    the sign.
    """
    starts: list[tuple[float, Array]] = []
    for rises in (True, False):
        for gain in GAINS if len(num_terms) > 1 else GAINS[:1]:
            steps, iterates, low, high = [], [u], 1 / gain, TOP
            for count in num_terms[:-1]:
                if rises:
                    share = np.linspace(0.01, 1, 60)
                    slope = gain ** (1 / (len(num_terms) - 1))
                    shape = np.tanh(slope * share) / np.tanh(slope) if slope > 1.01 else share
                    step = np.linalg.lstsq(_odd_powers(share, count), shape, rcond=None)[0]
                else:
                    step, error = best_odd(min(low, 0.98 * high), high, count)
                    low, high = (1 - error) * 0.995, (1 + error) * 1.005
                steps.append(step)
                iterates.append(odd(step, iterates[-1]))
            parts = [
                _odd_powers(iterates[-1], num_terms[-1]),
                *(iterate[:, None] for iterate in iterates[1:-1]),
            ]
            columns = np.concatenate([*parts, _odd_powers(u, num_base)], axis=1)
            if not np.isfinite(columns).all() or np.abs(columns).max() > 1e8:
                continue
            solution = np.linalg.lstsq(columns, target, rcond=1e-9)[0]
            starts.append(
                (
                    float(np.abs(columns @ solution - target).max()),
                    np.concatenate([*steps, solution]),
                )
            )
    return [start for _, start in sorted(starts, key=lambda pair: pair[0])]


def best_odd(low: float, high: float, num_terms: int) -> tuple[Array, float]:
    """(coefficients of u, u^3, ..., largest error): the best odd approximation of 1 on [low, high],
    by Remez exchange.

    The extrema are found exactly: they are the ends and the roots of the derivative, a polynomial
    in u^2.
    """
    powers = 2 * np.arange(num_terms) + 1
    low_share = low / high
    middle, half = (low_share**2 + 1) / 2, (1 - low_share**2) / 2
    points = np.sqrt(middle - half * np.cos(np.pi * np.arange(num_terms + 1) / num_terms))
    signs = (-1.0) ** np.arange(num_terms + 1)
    coefficients, error = np.zeros(num_terms), 1.0
    for _ in range(100):
        system = np.column_stack([points[:, None] ** powers, signs])
        *coefficients, error = np.linalg.solve(system, np.ones(num_terms + 1))
        extrema = np.polynomial.polynomial.polyroots(powers * coefficients)
        previous, points = (
            points,
            np.concatenate([[low_share], np.sqrt(np.sort(extrema.real)), [1.0]]),
        )
        if np.abs(points - previous).max() < 1e-14:
            break
    return coefficients / high**powers, abs(error)


def fit(
    num_terms: Sequence[int], num_base: int, target: Array, u: Array, error: float
) -> Array | None:
    """Parameters whose largest error at the points u is within `error`, or is as small as they get.

    num_terms, num_base: of the steps, and of the base.
    target: its values at u, of about 1 at most. None: no start is finite.
    """

    def residuals(parameters: Array) -> Array:
        difference = _value_and_jacobian(num_terms, parameters, u)[0] - target
        return np.nan_to_num(np.clip(difference, -1e3, 1e3), nan=1e3)

    def jacobian(parameters: Array) -> Array:
        return np.nan_to_num(
            _value_and_jacobian(num_terms, parameters, u)[1], nan=0.0, posinf=0.0, neginf=0.0
        )

    best: tuple[float, Array | None] = (np.inf, None)
    with np.errstate(all="ignore"):
        for start in _starts(num_terms, num_base, target, u)[:2]:
            solution = least_squares(
                residuals, start, jacobian, method="lm", x_scale="jac", max_nfev=40
            )  # pyright: ignore[reportArgumentType]
            size, parameters = _lowered(residuals, jacobian, solution.x, error)
            best = min(best, (size, parameters), key=lambda pair: pair[0])
            if size <= error:
                break
    return best[1]


def _lowered(
    residuals: Function, jacobian: Function, parameters: Array, error: float
) -> tuple[float, Array]:
    """Lower the largest residual, by linear programs within a trust region that grows and
    shrinks.
    """
    size, radius = float(np.abs(residuals(parameters)).max()), 0.1
    for _ in range(25):
        if size <= error or radius < 1e-5:
            break
        scale, rest = np.abs(parameters) + 1e-2, residuals(parameters)
        slopes, column = jacobian(parameters) * scale, -np.ones((len(rest), 1))
        program = linprog(
            [0.0] * len(parameters) + [1.0],
            A_ub=np.block([[slopes, column], [-slopes, column]]),
            b_ub=np.concatenate([-rest, rest]),
            bounds=[(-radius, radius)] * len(parameters) + [(0, None)],
            method="highs-ds",
        )
        if program.x is None:
            break
        moved = parameters + program.x[:-1] * scale
        reached = float(np.abs(residuals(moved)).max())
        if reached >= size:
            radius /= 4
            continue
        as_predicted = size - reached > 0.5 * (size - program.fun)
        is_done = as_predicted and size - reached < 1e-3 * size
        parameters, size = moved, reached
        radius = min(2 * radius, 1.0) if as_predicted else radius
        if is_done:
            break
    return size, parameters


def as_composition(num_terms: Sequence[int], parameters: Array, scale: float) -> Composition:
    """The record of fitted parameters, with inner iterates of at most 1, and `scale` times the
    result.
    """
    steps, start = [], 0
    for count in num_terms:
        steps.append(np.array(parameters[start : start + count], dtype=float))
        start += count
    num_weights = max(len(steps) - 2, 0)
    weights, base = np.zeros(len(steps) - 1), parameters[start + num_weights :] * scale
    weights[:num_weights] = parameters[start : start + num_weights]
    centers, x = [], np.linspace(0, TOP, 2001)
    for number, step in enumerate(steps):
        centers.append(round(float(np.abs(x).max() ** 2 / 2), 2))
        x = odd(step, x)
        if number < len(steps) - 1:
            largest = float(np.abs(x).max())
            x, steps[number] = x / largest, step / largest
            steps[number + 1] = steps[number + 1] * largest ** (
                2 * np.arange(len(steps[number + 1])) + 1
            )
            weights[number] *= largest
    steps[-1], weights = steps[-1] * scale, weights * scale
    slopes = np.cumprod([float(step[0]) for step in steps])
    slope = float(slopes[-1] + weights @ slopes[:-1] + (base[0] if len(base) else 0.0))
    remaining, num_restarts = abs(float(slopes[-1])) / scale, 0
    for step in steps[:-1]:
        if remaining <= RESTART_ABOVE:
            break
        remaining, num_restarts = remaining / max(abs(float(step[0])), 1e-9), num_restarts + 1
    return Composition(
        steps=tuple(tuple(map(float, step)) for step in steps),
        centers=tuple(centers),
        num_restarts=num_restarts,
        error=np.inf,
        slope=slope,
        weights=tuple(map(float, weights)) if weights.any() else (),
        base=tuple(map(float, base)),
    )
