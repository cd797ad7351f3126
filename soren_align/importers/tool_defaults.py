"""Defaults of Axolotl and LLaMA-Factory that differ from TRL's, and how a file of LLaMA-Factory's is recognized."""

from typing import Any

# Axolotl's defaults that differ from TRL's.
AXOLOTL = {
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,
    "max_length": 512,
    "gradient_checkpointing": False,
}

# LLaMA-Factory's (hparams/data_args.py at 072bfe2; bf16 and the learning rate are transformers'). Equal to TRL's are
# 3 epochs, batches of 8, the linear schedule, no warmup, no decay, clipping at 1, beta 0.1 and checkpointing.
LLAMA_FACTORY = {"max_length": 2048, "bf16": False}
LLAMA_FACTORY_LR = 5e-5
SEED = 42
"""Of transformers' TrainingArguments."""
_LLAMA_FACTORY_KEYS = ("finetuning_type", "stage", "cutoff_len", "dataset_dir", "template")


def axolotl(flat: dict[str, Any]) -> dict[str, Any]:
    """AXOLOTL; without the epochs, which have no effect, where the source streams a number of steps."""
    steps_end_it = flat.get("streaming") is True and flat.get("max_steps")
    return {key: value for key, value in AXOLOTL.items() if key != "num_train_epochs" or not steps_end_it}


def is_llama_factory(flat: dict[str, Any]) -> bool:
    """Whether the source is a file of LLaMA-Factory's."""
    return "base_model" not in flat and any(key in flat for key in _LLAMA_FACTORY_KEYS)
