"""The paper's convergence theorems as numbers: the tables of research/studies/theorems.md.

    python -m research.studies.theorems            a minute, float64

Steps W <- W - eta s(G) without momentum and decay, as in the theorems. For a gradient G = U
diag(sigma) V^T, [m, n] with m <= n, P = U diag(s(sigma) / sigma) U^T, so that s(G) = P G. Matrices
on vec(W) are [m n, m n], rows of W first. tests/research/test_theorems.py tests the inequalities.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from soren_align.spectral import (
    exact_sigmoid,
    minimax_sigmoid,
    released_sigmoid,
    soft_newton_schulz,
)

Map = Callable[[Tensor], Tensor]
MAPS: dict[str, Map] = {
    "sns": soft_newton_schulz,
    "minimax": minimax_sigmoid,
    "released": released_sigmoid,
}
NUM_STEPS = 12
NUM_POINTS = 9  # of a segment
NUM_BISECTIONS = 20


@dataclass(frozen=True)
class Problem:
    """A convex loss of W [m, n], and what bounds its Hessian on the whole space.

    curvature: the largest Hessian, attained somewhere in all directions at once. strong: |g|_P^2 /
    2 over the loss has the smallest eigenvalue of P^(1/2) strong P^(1/2) as its infimum, for every
    P.
    """

    name: str
    start: Tensor
    loss: Callable[[Tensor], Tensor]  # of W [..., m, n], minus the minimum
    gradient: Callable[[Tensor], Tensor]
    hessian: Callable[[Tensor], Tensor]  # [..., m n, m n]
    curvature: Tensor
    strong: Tensor


@dataclass(frozen=True)
class Step:
    """One step with eta = 1 / beta: alpha and beta of its map and of the exact one at the same W,
    and the losses.
    """

    gradient: Tensor
    exact: tuple[float, float]
    own: tuple[float, float]
    loss: float
    next_loss: float

    @property
    def guarantee(self) -> float:
        """alpha / beta: by the theorem the loss falls by at least this share."""
        return self.own[0] / self.own[1]

    @property
    def progress(self) -> float:
        """The share by which the loss falls."""
        return 1 - self.next_loss / self.loss


def randn(*shape: int, seed: int) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def quadratic(
    condition: float, size: float, shape: tuple[int, int] = (3, 5), seed: int = 0
) -> Problem:
    """w^T H w / 2 with eigenvalues from 1 / condition to 1; size: the norm of the first
    gradient.
    """
    num = shape[0] * shape[1]
    basis = torch.linalg.qr(randn(num, num, seed=seed)).Q
    hessian = basis * condition ** -torch.linspace(0, 1, num, dtype=torch.float64) @ basis.mT

    def gradient(w: Tensor) -> Tensor:
        return (w.flatten(-2) @ hessian).unflatten(-1, shape)

    def loss(w: Tensor) -> Tensor:
        return (gradient(w) * w).sum((-2, -1)) / 2

    start = randn(*shape, seed=seed + 1)
    start *= size / gradient(start).norm()
    name = f"quadratic, condition {condition:g}, first gradient of norm {size:g}"
    return Problem(
        name,
        start,
        loss,
        gradient,
        lambda w: hessian.expand(*w.shape[:-2], num, num),
        hessian,
        hessian,
    )


def logistic(
    decay: float = 0.1, shape: tuple[int, int] = (3, 5), num_examples: int = 40, seed: int = 0
) -> Problem:
    """m logistic regressions on n features, and decay |W|^2 / 2.

    The Hessian is largest at W = 0, where all probabilities are 1/2, and approaches decay * I far
    away.
    """
    x = randn(shape[1], num_examples, seed=seed)
    target = (
        randn(*shape, seed=seed + 1) @ x + randn(shape[0], num_examples, seed=seed + 2) > 0
    ).double()
    rows, everything = (
        torch.eye(shape[0], dtype=torch.float64),
        torch.eye(shape[0] * shape[1], dtype=torch.float64),
    )

    def value(w: Tensor) -> Tensor:
        losses = torch.nn.functional.softplus(w @ x) - target * (w @ x)
        return losses.sum((-2, -1)) / num_examples + decay / 2 * w.square().sum((-2, -1))

    def gradient(w: Tensor) -> Tensor:
        return ((w @ x).sigmoid() - target) @ x.mT / num_examples + decay * w

    def hessian(w: Tensor) -> Tensor:
        p = (w @ x).sigmoid()
        blocks = torch.einsum("...mk,ik,jk,mp->...mipj", p * (1 - p) / num_examples, x, x, rows)
        return blocks.flatten(-2).flatten(-3, -2) + decay * everything

    best = torch.zeros(shape, dtype=torch.float64)
    for _ in range(30):  # Newton's method
        best = best - torch.linalg.solve(hessian(best), gradient(best).flatten()).unflatten(
            0, shape
        )
    minimum, largest = value(best), hessian(torch.zeros(shape, dtype=torch.float64))
    name = f"{shape[0]} logistic regressions, decay {decay:g}"
    start = 3 * randn(*shape, seed=seed + 3)
    return Problem(
        name, start, lambda w: value(w) - minimum, gradient, hessian, largest, decay * everything
    )


def problems() -> list[Problem]:
    """Quadratics of gentle and steep curvature, with small and large gradients, and a convex
    problem.
    """
    return [
        quadratic(10, 1),
        quadratic(1000, 1),
        quadratic(100, 0.01),
        quadratic(100, 4),
        logistic(),
    ]


def coefficients(gradient: Tensor, spectral_map: Map) -> tuple[Tensor, Tensor, Tensor]:
    """U [m, m], sigma [m], and the values [m] to which the map sends sigma."""
    u, sigma, vh = torch.linalg.svd(gradient, full_matrices=False)
    return u, sigma, ((u.mT @ spectral_map(gradient)) * vh).sum(-1)


def preconditioner(gradient: Tensor, spectral_map: Map, power: float = 1.0) -> Tensor:
    """P^power as a matrix on vec(W)."""
    u, sigma, values = coefficients(gradient, spectral_map)
    return torch.kron(
        (u * (values / sigma) ** power) @ u.mT, torch.eye(gradient.shape[1], dtype=torch.float64)
    )


def rho(gradient: Tensor, spectral_map: Map) -> float:
    """The largest relative error of a map's singular values: rho of Theorem 2."""
    _, sigma, values = coefficients(gradient, spectral_map)
    return (values / sigma.sigmoid() - 1).abs().max().item()


def on_the_space(problem: Problem, w: Tensor, spectral_map: Map) -> tuple[float, float]:
    """alpha and beta by their definitions, for Omega the whole space: exact for these problems."""
    root = preconditioner(problem.gradient(w), spectral_map, 0.5)
    alpha = torch.linalg.eigvalsh(root @ problem.strong @ root)[0]
    return alpha.item(), torch.linalg.eigvalsh(root @ problem.curvature @ root)[-1].item()


def on_the_segment(problem: Problem, w: Tensor, spectral_map: Map) -> tuple[float, float]:
    """alpha and beta at NUM_POINTS points of the smallest Omega that is allowed: the step itself.

    Omega defines beta, beta the step, and the step Omega: eta beta(eta) = 1 is solved by bisection.
    """
    gradient = problem.gradient(w)
    direction = spectral_map(gradient)
    metric, root = (preconditioner(gradient, spectral_map, power) for power in (1.0, 0.5))
    shares = torch.linspace(0, 1, NUM_POINTS, dtype=torch.float64)[:, None, None]

    def beta(eta: float) -> float:
        return (
            torch.linalg.eigvalsh(root @ problem.hessian(w - eta * shares * direction) @ root)[
                :, -1
            ]
            .max()
            .item()
        )

    low, high = 1 / on_the_space(problem, w, spectral_map)[1], 1 / beta(0.0)
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * beta(middle) <= 1 else (low, middle)
    points = w - low * shares * direction
    slopes = problem.gradient(points).flatten(-2)
    return (((slopes @ metric) * slopes).sum(-1) / 2 / problem.loss(points)).min().item(), 1 / low


def trajectory(
    problem: Problem,
    spectral_map: Map = exact_sigmoid,
    constants: Callable = on_the_space,
    num_steps: int = NUM_STEPS,
) -> list[Step]:
    """Steps with eta = 1 / beta."""
    w, steps = problem.start, []
    for _ in range(num_steps):
        gradient = problem.gradient(w)
        own = constants(problem, w, spectral_map)
        exact = own if spectral_map is exact_sigmoid else constants(problem, w, exact_sigmoid)
        after = w - spectral_map(gradient) / own[1]
        steps.append(Step(gradient, exact, own, problem.loss(w).item(), problem.loss(after).item()))
        w = after
    return steps


def with_rates(problem: Problem, rates: list[float]) -> float:
    """The loss after exact steps with these learning rates, over the loss before them."""
    w = problem.start
    for rate in rates:
        w = w - rate * exact_sigmoid(problem.gradient(w))
    return (problem.loss(w) / problem.loss(problem.start)).item()


def equal_outputs(shape: tuple[int, int] = (3, 5), seed: int = 0) -> tuple[Tensor, Tensor]:
    """(H, W) of a quadratic in which the first two rows of W are alike: its gradient has rank m - 1
    in every step.
    """
    factor = torch.linalg.qr(randn(shape[1], shape[1], seed=seed)).Q
    rows = factor * torch.linspace(0.1, 1, shape[1], dtype=torch.float64) @ factor.mT
    start = randn(*shape, seed=seed + 1)
    start[1] = start[0]
    return torch.kron(torch.eye(shape[0], dtype=torch.float64), rows), start


def rank_deficient_steps(num_steps: int = NUM_STEPS) -> list[tuple[int, float, float, float]]:
    """(rank, alpha / beta, progress, smallest singular value) where P^-1 does not exist.

    The constants are those of the theorem on the range of P alone, with Omega the subspace that the
    iterates never
    leave: W + range(P).
    """
    hessian, w = equal_outputs()
    steps = []
    for _ in range(num_steps):
        gradient = (w.flatten() @ hessian).unflatten(0, w.shape)
        u, sigma, vh = torch.linalg.svd(gradient, full_matrices=False)
        active = sigma > 1e-12 * sigma[0]
        gain = sigma.sigmoid()[active] / sigma[active]
        basis = torch.kron(u[:, active] * gain.sqrt(), torch.eye(w.shape[1], dtype=torch.float64))
        eigenvalues = torch.linalg.eigvalsh(basis.mT @ hessian @ basis)
        after = w - (u[:, active] * sigma.sigmoid()[active]) @ vh[active] / eigenvalues[-1]
        losses = [(v.flatten() @ hessian @ v.flatten()).item() for v in (w, after)]
        guarantee = (eigenvalues[0] / eigenvalues[-1]).item()
        steps.append((int(active.sum()), guarantee, 1 - losses[1] / losses[0], sigma[-1].item()))
        w = after
    return steps


def print_contraction() -> None:
    """Theorem 1: guaranteed and measured progress."""
    print(
        "| problem | Omega | guaranteed: alpha / beta | measured over guaranteed | beta |\n|---|---|---|---|---|"
    )
    for problem in problems():
        for name, constants in (("the whole space", on_the_space), ("the step", on_the_segment)):
            steps = trajectory(problem, constants=constants)
            guaranteed, ratios = (
                [s.guarantee for s in steps],
                [s.progress / s.guarantee for s in steps],
            )
            betas = f"{steps[0].own[1]:.2g} to {steps[-1].own[1]:.2g}"
            print(
                f"| {problem.name} | {name} | {_range(guaranteed)} | {_range(ratios)} | {betas} |"
            )


def print_stall() -> None:
    """Theorem 1's step size beside learning rates that the theorem does not cover."""
    print(
        "\n| problem | after 10, 20, 30 steps of 1 / beta | sigma_min | eta | 30 of 0.3 | 30 from 0.6 to 0 |"
    )
    print("|---|---|---|---|---|---|")
    for problem in problems():
        steps = trajectory(problem, num_steps=30)
        losses = ", ".join(f"{steps[t - 1].next_loss / steps[0].loss:.3f}" for t in (10, 20, 30))
        smallest = [torch.linalg.svdvals(s.gradient)[-1].item() for s in (steps[0], steps[-1])]
        rates = [1 / s.own[1] for s in (steps[0], steps[-1])]
        others = [[0.3] * 30, [0.6 * (1 - t / 30) for t in range(30)]]
        pairs = [f"{first:.2g} to {last:.2g}" for first, last in (smallest, rates)]
        print(
            f"| {problem.name} | {losses} |",
            *pairs,
            *(f"{with_rates(problem, r):.3f}" for r in others),
            sep=" | ",
        )


def print_maps() -> None:
    """Lemma 1, Theorem 2 and Corollary 1 for every map."""
    print("\n| problem | map | rho | (1 - rho) / (1 + rho) | measured ratio | bound | loss |")
    print("|---|---|---|---|---|---|---|")
    for problem in problems():
        for name, spectral_map in MAPS.items():
            steps = trajectory(problem, spectral_map)
            errors = [rho(s.gradient, spectral_map) for s in steps]
            factor = (1 - max(errors)) / (1 + max(errors))
            ratios = [s.guarantee / (s.exact[0] / s.exact[1]) for s in steps]
            bound = (
                1 - factor * min(s.exact[0] for s in steps) / max(s.exact[1] for s in steps)
            ) ** NUM_STEPS
            loss = steps[-1].next_loss / steps[0].loss
            print(
                f"| {problem.name} | {name} | {_range(errors)} | {factor:.2f} | {_range(ratios)} |",
                end=" ",
            )
            print(f"{bound:.4f} | {loss:.3f} |")


def _range(values: list[float]) -> str:
    return f"{min(values):.2g} to {max(values):.2g}"


def main() -> None:
    """Print the tables."""
    print_contraction()
    print_stall()
    print_maps()
    ranks, guaranteed, measured, smallest = zip(*rank_deficient_steps(), strict=True)
    print(
        f"\nrank {ranks[0]} of 3: guaranteed {_range(guaranteed)}, measured {_range(measured)}",
        end="",
    )
    print(f", smallest singular value {max(smallest):.0e}")


if __name__ == "__main__":
    main()
