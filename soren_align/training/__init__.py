"""SFT, DPO and KTO: TRL's trainers with our optimizers, from a recipe."""

import logging

_KERNELS = "Failed to load CPU gemm_4bit_forward"
"""Begins bitsandbytes' warning about a package of optional kernels, which the import of PEFT
prints."""
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not record.getMessage().startswith(_KERNELS)
)

from .head import use_plain_loss  # noqa: E402
from .trainer import SorenDPOTrainer, SorenKTOTrainer, SorenSFTTrainer  # noqa: E402

use_plain_loss()

__all__ = ["SorenDPOTrainer", "SorenKTOTrainer", "SorenSFTTrainer"]
