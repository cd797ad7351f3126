"""soren-align: SFT, DPO and KTO with Soren, a spectral optimizer, and an evaluation of the result.

The optimizers need only torch and can be used alone; the trainers are TRL's with these optimizers
(docs/library.md):

    from soren_align import Soren, SorenSFTTrainer, param_groups

They are imported on first use: the command line imports this package without torch.
"""

from typing import TYPE_CHECKING

from .core.version import __version__ as __version__

__all__ = [
    "AdamW",
    "HTMuon",
    "Muon",
    "OptimizerFactory",
    "Soren",
    "SorenDPOTrainer",
    "SorenKTOTrainer",
    "SorenSFTTrainer",
    "build_optimizer",
    "param_groups",
]

if TYPE_CHECKING:
    from .optim import AdamW, HTMuon, Muon, OptimizerFactory, Soren, build_optimizer, param_groups
    from .training import SorenDPOTrainer, SorenKTOTrainer, SorenSFTTrainer


def __getattr__(name: str):
    if name.endswith("Trainer"):
        from . import training

        return getattr(training, name)
    if name in __all__:
        from . import optim

        return getattr(optim, name)
    raise AttributeError(f"module 'soren_align' has no attribute {name!r}")
