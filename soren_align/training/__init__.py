"""SFT and DPO: TRL's trainers with our optimizers, from a recipe."""

from ..core.silence import silence_missing_kernels

silence_missing_kernels()  # before the import of PEFT

from .trainer import SorenDPOTrainer, SorenSFTTrainer  # noqa: E402

__all__ = ["SorenDPOTrainer", "SorenSFTTrainer"]
