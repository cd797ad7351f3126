"""Update LoRA factors A [r, n] and B [m, r] as their product B A, by any map f of singular values.

A product has many pairs of factors: (Q A, B Q^-1) for any invertible Q. A map of each factor by itself changes the
product differently for each of them. Here the change of the product is the same for all. With B = U M and A = L V,
where U has orthonormal columns and V orthonormal rows, the momenta N_A and N_B of the factors are those of the product
in the bases U and V:

    X_B = N_B L^-T                      [m, r]; G V^T, if G is the gradient of the product
    X_A = M^-T N_A                      [r, n]; U^T G
    Y_B = f(X_B), Y_A = f(X_A)
    dB  = Y_B L^-1                      so that dB A = Y_B V
    dA  = M^-1 D Y_A                    so that B dA = U D Y_A
    D   = P P^T (P P^T + d^2 I)^-1      with P = M L, whose singular values are those of B A

L and M come from the Gram matrices A A^T and B^T B, in float64. For D = 1 these are the directions of LoRA-Muon (arXiv
2606.12921), for any f. D is ours. LoRA starts at B = 0, where U is not defined. One step later M is as small as the
step, so that without D the change dA would be as large as A itself. d is the root mean square of the singular values of
the step of B alone: while B A is smaller than a step, A changes less. The first step changes B alone.

This was `lora_update: product` of the package until commit edec7ac2, with its sharding and its tests. On a tiny model
of random weights it was a little better than two separate matrices at rank 16 and worse at rank 4, so that it waits
here for a real model.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

CUTOFF = 1e-12
"""Eigenvalues of a Gram matrix below this share of the largest are rounding of float32 factors, and count as zero."""


def product_directions(
    a: Tensor,
    b: Tensor,
    n_a: Tensor,
    n_b: Tensor,
    map_matrix: Callable[[Tensor], Tensor],
    step_size: float,
) -> tuple[Tensor, Tensor]:
    """Return (dA, dB), so that A - step_size dA and B - step_size dB are the next factors. Nothing is modified.

    a, n_a: [r, n]; b, n_b: [m, r]. map_matrix: f. Weight decay of the product: half of it for each factor.
    """
    # In the bases of the other factor, where the momenta do not depend on the choice of the factors.
    a64, b64 = a.double(), b.double()
    gram_a = a64 @ a64.mT
    (_, inverse_a), (root_b, inverse_b) = root(gram_a), root(b64.mT @ b64)
    y_a = map_matrix((inverse_b.mT @ n_a.double()).to(a.dtype)).double()
    y_b = map_matrix((n_b.double() @ inverse_a).to(a.dtype)).double()

    # M^-1 D = A A^T M^T (P P^T + d^2 I)^-1, without the inverse of M, which the first steps do not have.
    squares = root_b @ gram_a @ root_b.mT  # P P^T
    damping = (step_size * y_b.norm()) ** 2 / len(a) + 1e-14 * squares.trace() + 1e-60
    eye = torch.eye(len(a), dtype=squares.dtype, device=squares.device)
    damped_inverse = torch.linalg.solve(squares + damping * eye, root_b @ gram_a).mT
    return (damped_inverse @ y_a).to(a.dtype), (y_b @ inverse_a.mT).to(b.dtype)


def root(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return R with R^T R = gram, and its inverse, 0 on the null space. gram: [r, r], float64."""
    values, vectors = torch.linalg.eigh(gram)
    is_null = values <= CUTOFF * values[-1:]
    roots = values.where(~is_null, 0.0).sqrt()
    inverses = roots.where(~is_null, 1.0).reciprocal().where(~is_null, 0.0)
    return roots[:, None] * vectors.mT, vectors * inverses


def unit_rms(da: Tensor, db: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both directions over one number, so that dB A + B dA has an RMS of 1 (match_rms_measured)."""
    change = db.double() @ a.double() + b.double() @ da.double()
    rms = change.norm() / math.sqrt(change.numel())
    return da / rms.clamp(min=1e-12), db / rms.clamp(min=1e-12)
