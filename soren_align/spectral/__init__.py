"""Maps of singular values: pure functions on [..., m, n], batched, tall or wide; the input is never modified."""

from .exact import exact_sigmoid, spectral_power
from .quintic import newton_schulz
from .sns import guarded_soft_newton_schulz, soft_newton_schulz

__all__ = [
    "exact_sigmoid",
    "guarded_soft_newton_schulz",
    "newton_schulz",
    "soft_newton_schulz",
    "spectral_power",
]
