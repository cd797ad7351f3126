"""Maps of singular values: pure functions on [..., m, n], batched, tall or wide; the input is never
modified.

`maps` is the registry, which needs no torch; the functions are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .maps import MAPS, SOREN_MAPS, SpectralMap

if TYPE_CHECKING:
    from .exact import (
        distance_from_sigmoid,
        exact_sigmoid,
        identity,
        singular_values,
        spectral_power,
    )
    from .iterate import guarded_minimax_sigmoid, high_pass, minimax_sigmoid, newton_schulz
    from .matrices import full_precision
    from .powers import rational_power
    from .sns import (
        guarded_soft_newton_schulz,
        released_level,
        released_sigmoid,
        soft_newton_schulz,
    )

_FILES = {
    "exact": (
        "distance_from_sigmoid",
        "exact_sigmoid",
        "identity",
        "singular_values",
        "spectral_power",
    ),
    "iterate": ("guarded_minimax_sigmoid", "high_pass", "minimax_sigmoid", "newton_schulz"),
    "matrices": ("full_precision",),
    "powers": ("rational_power",),
    "sns": (
        "guarded_soft_newton_schulz",
        "released_level",
        "released_sigmoid",
        "soft_newton_schulz",
    ),
}
"""The functions of each file, which is imported when one of them is used."""


def __getattr__(name: str) -> Any:
    for file, functions in _FILES.items():
        if name in functions:
            return getattr(import_module(f".{file}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
