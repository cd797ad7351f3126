"""The map of the authors' released code: another function of the singular values than the paper's text.

    (Q_K + T_2) / 2,    Q_0 = x / (|x|_F + 1e-8),  T_0 = x / (4 |x|_F),  K = 5

The steps are those of `sns`. Both branches are divided by the norm, so that the result does not depend on the
gradient's scale, and five steps multiply a small singular value by 1.5^5 = 7.6 only. Up to 0.1 |x|_F, where most of a
large matrix's singular values are, the map is within 13% of 4.08 S / |x|_F: momentum SGD, normalised.
"""

import torch
from torch import Tensor

from ..optimizer_settings import RELEASED_STEPS
from .matrices import frobenius_norm, from_wide, replace_zeros, to_wide
from .precision import in_full_precision
from .sns import T_LIMIT, T_STEPS, cubic_iteration

EPS = 1e-8


@in_full_precision
def released_sigmoid(x: Tensor, steps: int = RELEASED_STEPS) -> Tensor:
    """U f(S / |x|_F) V^T of x = U S V^T: with 5 steps f(0.1) is 0.36, f(0.2) 0.53, f(1) 0.76.

    x: [..., m, n], floating point; not modified. steps: K.
    Returns [..., m, n] in the dtype of x. Zero for zero; a matrix that contains a NaN or an infinity gives all NaN. No
    singular value is out of range, and the host reads nothing.
    Source: muon.py of github.com/PhiVanDat123/sigmoid_muon, commit c72cda5, its formulas written anew.
    """
    if steps < 0:
        raise ValueError(f"steps: found {steps}; write 0 or more")
    wide = to_wide(x, torch.float64 if x.dtype == torch.float64 else torch.float32)
    # Entries up to 1, so that no norm overflows or vanishes. NaN and infinity make the whole matrix NaN.
    largest = replace_zeros(torch.linalg.vector_norm(wide, torch.inf, dim=(-2, -1), keepdim=True))
    unit = wide / largest
    norm = replace_zeros(frobenius_norm(unit))
    # Both starts have names, so that they live equally long whether or not CPython inlines the call, and the memory is
    # that of `usual_workspace_numbers`: without, it was once one matrix more, in a process that had run other tests.
    q, t = unit / (norm + EPS / largest), unit / (T_LIMIT * norm)
    del unit
    q, t = cubic_iteration(q, steps), cubic_iteration(t, T_STEPS)
    return from_wide(q.add_(t).mul_(0.5), x)


def released_level(num_rows: int, num_columns: int, steps: int = RELEASED_STEPS) -> float:
    """The value to which `released_sigmoid` maps the singular values of a matrix whose singular values are all equal.

    A matrix with any other spectrum gets a smaller update, in the Frobenius norm.
    """
    spectrum = torch.eye(1, dtype=torch.float64) / min(num_rows, num_columns) ** 0.5
    return float(cubic_iteration(spectrum, steps) + cubic_iteration(spectrum / T_LIMIT, T_STEPS)) / 2
