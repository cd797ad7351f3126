"""SFT and DPO: TRL's trainers with our optimizers, from a recipe."""

from .trl_trainers import SorenDPOTrainer, SorenSFTTrainer

__all__ = ["SorenDPOTrainer", "SorenSFTTrainer"]
