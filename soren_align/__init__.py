"""soren-align: SFT and DPO with Soren, a spectral optimizer, and an evaluation of the result.

The optimizers need only torch and can be used alone:

    from soren_align import Soren, param_groups

They are imported on first use: the command line imports this package without torch.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["HTMuon", "Muon", "Soren", "param_groups"]

if TYPE_CHECKING:
    from .optim import HTMuon, Muon, Soren, param_groups


def __getattr__(name: str):
    if name in __all__:
        from . import optim

        return getattr(optim, name)
    raise AttributeError(f"module 'soren_align' has no attribute {name!r}")
