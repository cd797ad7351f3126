"""Coefficients of compositions of quintic steps that match a function on a grid.

By least squares from several starts, and then by linear programs that lower the largest error. What
lies between the points of the grid is for `bound.largest_error`.
"""

import numpy as np
from scipy.optimize import least_squares, linprog

from soren_align.spectral.composition import TOP, Composition

from .bound import Array, Function

GAINS = (1.0, 2.0, 4.0, 8.0, 16.0, 40.0, 100.0, 300.0, 1000.0, 2500.0)
"""By which the first steps magnify a small u at the start of a fit; the best five starts are
improved."""
NUM_STARTS = 5
NUM_PROGRAMS = 100
DENSITY = 10
"""Points of a grid for one of the coarse grid."""
POWERS = np.array([1, 3, 5])
UNCHANGED = (1.0, 0.0, 0.0)
"""A step that changes nothing."""


def grid(low: float) -> Array:
    """Points of [low, TOP]: equally many in every decade, and more near the top, where steps that
    approximate the sign oscillate most.
    """
    from_top = (TOP - low) * np.linspace(0, 1, 120 * DENSITY) ** 2
    return np.unique(np.concatenate([np.geomspace(low, TOP, 170 * DENSITY), TOP - from_top]))


def _powers(u: Array) -> Array:
    square = u * u
    return np.stack([u, u * square, u * square * square], axis=1)


def num_steps(parameters: Array) -> int:
    """The number of steps of a composition with these parameters: three coefficients a step, the
    weights of u_1 to u_(K-2), and the linear term.

    The weight of u_(K-1) is one with the first coefficient of the last step, and for K = 1 the
    linear term is one with the step.
    """
    return (len(parameters) + 1) // 4 if len(parameters) > 3 else 1


def _iterates(parameters: Array, u: Array) -> list[Array]:
    """u, and the iterate after each step."""
    iterates = [u]
    for a, b, c in parameters[: 3 * num_steps(parameters)].reshape(-1, 3):
        x = iterates[-1]
        square = x * x
        iterates.append(((c * square + b) * square + a) * x)
    return iterates


def values(parameters: Array, u: Array) -> Array:
    """The composition with these parameters at u."""
    iterates, count = _iterates(parameters, u), num_steps(parameters)
    if count == 1:
        return iterates[1]
    *weights, linear = parameters[3 * count :]
    weighted = (w * x for w, x in zip(weights, iterates[1:-2], strict=True))
    return iterates[-1] + linear * u + sum(weighted)


def jacobian(parameters: Array, u: Array) -> Array:
    """That of `values`."""
    iterates, count = _iterates(parameters, u), num_steps(parameters)
    jacobians = [np.zeros((len(u), len(parameters)))]
    for number, x in enumerate(iterates[:-1]):
        part, square = slice(3 * number, 3 * number + 3), x * x
        a, b, c = parameters[part]
        step = jacobians[-1] * ((5 * c * square + 3 * b) * square + a)[:, None]
        step[:, part] += _powers(x)
        jacobians.append(step)
    total = jacobians[-1]
    for number, place in enumerate(range(3 * count, len(parameters) - 1), 1):
        total = total + parameters[place] * jacobians[number]
        total[:, place] += iterates[number]
    if count > 1:
        total[:, -1] += u
    return total


def longer(parameters: Array) -> Array:
    """The parameters of the same function with one step more, which changes nothing."""
    count = num_steps(parameters)
    steps, rest = parameters[: 3 * count], parameters[3 * count :]
    # The new weight is that of the iterate before the last step so far.
    weights = [*rest[:-1], *[0.0] * (count > 1)]
    return np.array([*steps, *UNCHANGED, *weights, *(rest[-1:] if count > 1 else [0.0])])


def _starts(count: int, target: Array, u: Array) -> list[Array]:
    """Parameters to begin with, the best first: all but the last step are rising, or approximate
    the sign.
    """
    starts: list[tuple[float, Array]] = []
    for rises in (True, False):
        for gain in GAINS if count > 1 else GAINS[:1]:
            steps, iterates, low, high = [], [u], 1 / gain, TOP
            for _ in range(count - 1):
                if rises:
                    share = np.linspace(0.01, 1, 60)
                    slope = gain ** (1 / (count - 1))
                    shape = np.tanh(slope * share) / np.tanh(slope) if slope > 1.01 else share
                    step = np.linalg.lstsq(_powers(share), shape, rcond=None)[0]
                else:
                    step, error = best_odd(min(low, 0.98 * high), high)
                    low, high = (1 - error) * 0.995, (1 + error) * 1.005
                steps.append(step)
                iterates.append(_powers(iterates[-1]) @ step)
            parts = [_powers(iterates[-1]), *(iterate[:, None] for iterate in iterates[1:-1])]
            columns = np.concatenate([*parts, u[:, None]] if count > 1 else parts, axis=1)
            if not np.isfinite(columns).all() or np.abs(columns).max() > 1e8:
                continue
            solution = np.linalg.lstsq(columns, target, rcond=1e-9)[0]
            size = float(np.abs(columns @ solution - target).max())
            starts.append((size, np.concatenate([*steps, solution])))
    return [start for _, start in sorted(starts, key=lambda pair: pair[0])]


def best_odd(low: float, high: float) -> tuple[Array, float]:
    """(a step, largest error): the best odd quintic approximation of 1 on [low, high], by Remez
    exchange.

    The extrema are found exactly: they are the ends and the roots of the derivative, a polynomial
    in u^2.
    """
    low_share = low / high
    middle, half = (low_share**2 + 1) / 2, (1 - low_share**2) / 2
    points = np.sqrt(middle - half * np.cos(np.pi * np.arange(4) / 3))
    signs = (-1.0) ** np.arange(4)
    coefficients, error = np.zeros(3), 1.0
    for _ in range(100):
        system = np.column_stack([_powers(points), signs])
        *coefficients, error = np.linalg.solve(system, np.ones(4))
        extrema = np.polynomial.polynomial.polyroots(POWERS * coefficients)
        previous, inner = points, np.sqrt(np.sort(extrema.real))
        points = np.concatenate([[low_share], inner, [1.0]])
        if np.abs(points - previous).max() < 1e-14:
            break
    return coefficients / high**POWERS, abs(error)


def fit(
    count: int, target: Function, low: float, error: float, shorter: Array | None = None
) -> Array | None:
    """Parameters of so many steps whose largest error on [low, TOP] is within `error`, or is as
    small as they get, on a dense grid.

    target: of about 1 at most. shorter: parameters of one step less, which are a start too, so that
    a step more is never worse. None: no start is finite.
    """
    u = grid(low)
    wanted, best = target(u), (np.inf, None)
    coarse = np.arange(len(u)) % DENSITY == 0
    with np.errstate(all="ignore"):
        starts = _starts(count, wanted[coarse], u[coarse])[:NUM_STARTS]
        if shorter is not None:
            starts.insert(0, longer(shorter))
            best = float(np.abs(_residuals(starts[0], u, wanted)).max()), starts[0]
        for start in starts:
            # Not by "lm", whose results differ from run to run, and so do those that follow.
            solution = least_squares(
                _residuals,
                start,
                _jacobian,  # pyright: ignore[reportArgumentType]
                method="trf",
                x_scale="jac",
                max_nfev=40,
                args=(u[coarse], wanted[coarse]),
            )
            lowered = _lowered(solution.x, u, wanted, coarse, error)
            best = min(best, lowered, key=lambda pair: pair[0])
            if best[0] <= error:
                break
    return best[1]


def _residuals(parameters: Array, u: Array, target: Array) -> Array:
    difference = values(parameters, u) - target
    return np.nan_to_num(np.clip(difference, -1e3, 1e3), nan=1e3)


def _jacobian(parameters: Array, u: Array, target: Array) -> Array:
    return np.nan_to_num(jacobian(parameters, u), nan=0.0, posinf=0.0, neginf=0.0)


def _lowered(
    parameters: Array, u: Array, target: Array, coarse: Array, error: float
) -> tuple[float, Array]:
    """Lower the largest residual, by linear programs within a trust region that grows and shrinks.

    A program has the coarse points and those where the residual is largest; all decide whether it
    has made it better.
    """
    rest, radius = _residuals(parameters, u, target), 0.1
    size = float(np.abs(rest).max())
    for _ in range(NUM_PROGRAMS):
        if size <= error or radius < 1e-5:
            break
        sizes = np.pad(np.abs(rest), 1)
        is_peak = (sizes[1:-1] >= np.maximum(sizes[:-2], sizes[2:])) & (sizes[1:-1] > size / 2)
        places = is_peak | coarse
        scale = np.abs(parameters) + 1e-2
        slopes = _jacobian(parameters, u[places], target) * scale
        column = -np.ones((len(slopes), 1))
        program = linprog(
            [0.0] * len(parameters) + [1.0],
            A_ub=np.block([[slopes, column], [-slopes, column]]),
            b_ub=np.concatenate([-rest[places], rest[places]]),
            bounds=[(-radius, radius)] * len(parameters) + [(0, None)],
            method="highs-ds",
        )
        if program.x is None:
            break
        moved = parameters + program.x[:-1] * scale
        moved_rest = _residuals(moved, u, target)
        reached = float(np.abs(moved_rest).max())
        if reached >= size:
            radius /= 4
            continue
        as_predicted = size - reached > 0.5 * (size - program.fun)
        is_done = as_predicted and size - reached < 2e-4 * size
        parameters, rest, size = moved, moved_rest, reached
        radius = min(2 * radius, 1.0) if as_predicted else radius
        if is_done:
            break
    return size, parameters


def as_composition(parameters: Array, scale: float) -> Composition:
    """The record of fitted parameters, with inner iterates of at most 1, and `scale` times the
    result.
    """
    count = num_steps(parameters)
    steps = [np.array(step) for step in parameters[: 3 * count].reshape(count, 3)]
    weights, linear = np.zeros(count - 1), 0.0
    if count > 1:
        *weights[:-1], linear = parameters[3 * count :] * scale
    x = np.linspace(0, TOP, 2001)
    for number in range(count - 1):
        x = _powers(x) @ steps[number]
        largest = float(np.abs(x).max())
        x, steps[number] = x / largest, steps[number] / largest
        steps[number + 1] = steps[number + 1] * largest**POWERS
        weights[number] *= largest
    steps[-1] = steps[-1] * scale
    slopes = np.cumprod([float(step[0]) for step in steps])
    return Composition(
        steps=tuple((float(a), float(b), float(c)) for a, b, c in steps),
        error=np.inf,
        slope=float(slopes[-1] + weights @ slopes[:-1] + linear),
        weights=tuple(map(float, weights)) if weights.any() else (),
        linear=float(linear),
    )
