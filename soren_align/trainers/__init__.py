"""SFT and DPO: TRL's trainers with our optimizers, from a recipe."""

from ..silence import silence_missing_kernels

silence_missing_kernels()  # before the import of PEFT

from .trl_trainers import SorenDPOTrainer, SorenSFTTrainer  # noqa: E402

__all__ = ["SorenDPOTrainer", "SorenSFTTrainer"]
