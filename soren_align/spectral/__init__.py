"""Maps of singular values: pure functions on [..., m, n], batched, tall or wide; the input is never modified.

`maps` is the registry, which needs no torch; the functions are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .maps import MAPS, SOREN_MAPS, SpectralMap

if TYPE_CHECKING:
    from .exact import distance_from_sigmoid, exact_sigmoid, identity, singular_values, spectral_power
    from .matrices import full_precision
    from .minimax import guarded_minimax_sigmoid, minimax_sigmoid, num_workspace_numbers
    from .nulls import random_spectrum, shuffled_spectrum
    from .powers import rational_power
    from .quintic import high_pass, newton_schulz
    from .sns import guarded_soft_newton_schulz, released_level, released_sigmoid, soft_newton_schulz

__all__ = [
    "MAPS",
    "SOREN_MAPS",
    "SpectralMap",
    "distance_from_sigmoid",
    "exact_sigmoid",
    "full_precision",
    "guarded_minimax_sigmoid",
    "guarded_soft_newton_schulz",
    "high_pass",
    "identity",
    "minimax_sigmoid",
    "newton_schulz",
    "num_workspace_numbers",
    "random_spectrum",
    "rational_power",
    "released_level",
    "released_sigmoid",
    "shuffled_spectrum",
    "singular_values",
    "soft_newton_schulz",
    "spectral_power",
]


def __getattr__(name: str) -> Any:
    for module in ("exact", "matrices", "minimax", "nulls", "powers", "quintic", "sns") if name in __all__ else ():
        if hasattr(loaded := import_module(f".{module}", __name__), name):
            return getattr(loaded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
