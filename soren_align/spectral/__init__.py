"""Maps of singular values: pure functions on [..., m, n], batched, tall or wide; the input is never modified."""

from .cost import narrow_flops, num_flops, num_workspace_numbers, usual_workspace_numbers
from .exact import distance_from_sigmoid, exact_sigmoid, singular_values, spectral_power
from .matrices import full_precision
from .minimax import guarded_minimax_sigmoid, minimax_sigmoid
from .quintic import newton_schulz
from .sns import guarded_soft_newton_schulz, released_level, released_sigmoid, soft_newton_schulz

__all__ = [
    "distance_from_sigmoid",
    "exact_sigmoid",
    "full_precision",
    "guarded_minimax_sigmoid",
    "guarded_soft_newton_schulz",
    "minimax_sigmoid",
    "narrow_flops",
    "newton_schulz",
    "num_flops",
    "num_workspace_numbers",
    "released_level",
    "released_sigmoid",
    "singular_values",
    "soft_newton_schulz",
    "spectral_power",
    "usual_workspace_numbers",
]
