"""The padding of an epoch's batches, simulated with the sampler of training."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from ..recipe import Recipe, trainer_value

GROUPED = "group_by_length"


def padded_tokens(
    recipe: Recipe, lengths: Sequence[int], global_batch: int, strategy: str
) -> float:
    """The mean tokens of an example in the batches of an epoch, with those that fill each to the
    longest of its micro-batch.

    lengths: the tokens of each example; of a pair of its longer side, to which both are filled.
    strategy: `trainer.train_sampling_strategy`.
    """
    tokens = np.asarray(lengths)
    if recipe.trainer.get("padding_free") or recipe.trainer.get("packing") or not len(tokens):
        return float(tokens.mean()) if len(tokens) else 0.0
    order: Sequence[int] = range(len(tokens))
    generator = torch.Generator().manual_seed(0)
    if strategy == GROUPED:
        order = get_length_grouped_indices(tokens.tolist(), global_batch, generator=generator)
    elif strategy == "random":
        order = torch.randperm(len(tokens), generator=generator).tolist()
    size = trainer_value(recipe, "per_device_train_batch_size")
    starts = np.arange(0, len(tokens), size)
    longest = np.maximum.reduceat(tokens[list(order)], starts)
    multiple = recipe.trainer.get("pad_to_multiple_of") or 1
    longest = -(-longest // multiple) * multiple
    sizes = np.minimum(size, len(tokens) - starts)
    return float((longest * sizes).sum() / len(tokens))
