"""Update LoRA factors A [r, n] and B [m, r] as their product B A, by any map f (`lora_update:
product`).

A product has many pairs of factors: (Q A, B Q^-1) for any invertible Q. A map of each factor by
itself changes the product differently for each of them. Here the change of the product is the same
for all. With B = U M and A = L V, where U has orthonormal columns and V orthonormal rows, the
momenta N_A and N_B of the factors are those of the product in the bases U and V:

    X_B = N_B L^-T                      [m, r]; G V^T, if G is the gradient of the product
    X_A = M^-T N_A                      [r, n]; U^T G
    Y_B = f(X_B), Y_A = f(X_A)
    dB  = Y_B L^-1                      so that dB A = Y_B V
    dA  = M^-1 D Y_A                    so that B dA = U D Y_A
    D   = P P^T (P P^T + d^2 I)^-1      with P = M L, whose singular values are those of B A

L and M come from the Gram matrices A A^T and B^T B, in float64. Another choice of them multiplies
P, X and Y by rotations, which f commutes with. For D = 1 these are the directions of LoRA-Muon
(arXiv 2606.12921), for any f.

D is ours. LoRA starts at B = 0, where U is not defined. One step later M is as small as the step,
so that without D the change dA would be as large as A itself. d is the root mean square of the
singular values of the step of B alone, lr * scale * Y_B: while B A is smaller than a step, A
changes less; where B A is much larger, D is 1. The first step changes B alone.

Weight decay: each factor decays by half of it, so that the product decays by all of it, up to (lr *
weight_decay)^2.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..spectral.matrices import frobenius_norm

WEIGHTS = "weights"
"""The key of a factor's own numbers, which are sent to its owner rank as a map's state is."""
NUM_PRODUCT_NUMBERS = 8
"""Numbers for each of a factor, of float32's size, beside its map: the factor, its momentum and
direction in both precisions."""
CUTOFF = 1e-12
"""Eigenvalues of a Gram matrix below this share of the largest are rounding of float32 factors, and
count as zero."""


def product_directions(
    factor_a: Any,
    factor_b: Any,
    map_matrices: Callable[..., Tensor],
    *,
    step_size: float,
    to_unit_rms: bool,
) -> tuple[Tensor, Tensor]:
    """The directions (dA, dB) of factors A and B: a `layout.Batch` each, of [..., r, n] and [...,
    m, r].

    map_matrices: f, see `step.GroupMaps`. step_size: lr * scale. to_unit_rms: divide both
    directions by one number, so that dB A + B dA has an RMS of 1. Nothing is modified.
    """
    n_a, n_b = factor_a.inputs, factor_b.inputs
    dtype, eye = n_a.dtype, torch.eye(n_a.shape[-2]).to(n_a.device, torch.float64)
    a, b = (
        factor.map_state[WEIGHTS].view(factor.inputs.shape).to(eye)
        for factor in (factor_a, factor_b)
    )
    gram_a = a @ a.mT
    (_, inverse_a), (root_b, inverse_b) = _root(gram_a), _root(b.mT @ b)
    y_a = map_matrices((inverse_b.mT @ n_a.double()).to(dtype), factor_a.names).double()
    y_b = map_matrices((n_b.double() @ inverse_a).to(dtype), factor_b.names).double()

    full_norm = math.sqrt(b.shape[-2] * a.shape[-1])  # of a matrix [m, n] with an RMS of 1
    norm_b = full_norm if to_unit_rms else frobenius_norm(y_b)
    squares = root_b @ gram_a @ root_b.mT  # P P^T
    least = 1e-14 * squares.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]  # for lr = 0
    damping = (step_size * norm_b) ** 2 / a.shape[-2] + least + 1e-60
    # M^-1 D = A A^T M^T (P P^T + d^2 I)^-1, without the inverse of M
    damped_inverse = torch.linalg.solve(squares + damping * eye, root_b @ gram_a).mT
    direction_a, direction_b = damped_inverse @ y_a, y_b @ inverse_a.mT
    if to_unit_rms:
        # |U D Y_A + Y_B V|^2 = |D Y_A|^2 + |Y_B|^2 + 2 <D Y_A V^T, U^T Y_B>, without a matrix [m,
        # n]
        damped = root_b @ direction_a
        overlap = (root_b @ damped_inverse @ (y_a @ a.mT) @ inverse_a) * (
            inverse_b.mT @ (b.mT @ y_b)
        )
        square = (
            frobenius_norm(damped) ** 2
            + frobenius_norm(y_b) ** 2
            + 2 * overlap.sum((-2, -1), keepdim=True)
        )
        rms = square.clamp(min=0).sqrt() / full_norm
        direction_a, direction_b = (x / rms.clamp(min=1e-12) for x in (direction_a, direction_b))
    return direction_a.to(dtype), direction_b.to(dtype)


def _root(gram: Tensor) -> tuple[Tensor, Tensor]:
    """R with R^T R = gram, and its inverse, 0 on the null space. gram: [..., r, r], float64."""
    values, vectors = torch.linalg.eigh(gram)
    is_null = values <= CUTOFF * values[..., -1:]
    roots = values.where(~is_null, 0.0).sqrt()
    inverses = roots.where(~is_null, 1.0).reciprocal().where(~is_null, 0.0)
    return roots[..., None] * vectors.mT, vectors * inverses[..., None, :]


def is_factor(layout: str) -> bool:
    """Whether a weight of this `layout.WeightLayout` is updated as a factor of a product."""
    return layout.startswith("lora_")


def has_factors(group: Mapping[str, Any]) -> bool:
    """Whether a parameter group has such weights."""
    return any(map(is_factor, group.get("weight_layouts", {}).values()))


def product_shape(shape: Sequence[int], layout: str) -> tuple[int, int]:
    """(m, n) of the product of which a weight is a factor."""
    kind, _, size = layout.partition(" ")
    return (int(size), shape[1]) if kind == "lora_A" else (shape[0], int(size))


def num_flops(shape: Sequence[int], layout: str) -> int:
    """Floating-point operations for a factor beside its map: products of r columns or rows, without
    those of [r, r].
    """
    return (10 if layout.startswith("lora_A") else 8) * min(shape) ** 2 * max(shape)


def mapped_together(weights: Sequence[tuple[str, str]]) -> list[tuple[int, ...]]:
    """The indices of named weights whose updates need one another: of each weight itself, or of the
    factors A and B.

    Raises ValueError for a factor without the other one next to it.
    """
    units: list[tuple[int, ...]] = []
    for index, (name, layout) in enumerate(weights):
        if layout.startswith("lora_B") and units and len(units[-1]) == 2 and units[-1][1] == index:
            continue
        if is_factor(layout):
            follower = weights[index + 1][0] if index + 1 < len(weights) else ""
            if layout.startswith("lora_B") or follower != name.replace("lora_A", "lora_B"):
                raise ValueError(
                    f"lora_update: product needs both factors of an adapter, but {name} is updated without the "
                    "other factor; let the matrices' optimizer train both factors (under ZeRO 3, set a larger "
                    "sub_group_size, so that one sub-group has both), or write lora_update: factors"
                )
            units.append((index, index + 1))
        else:
            units.append((index,))
    return units
