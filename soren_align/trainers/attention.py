"""The attention implementation of a recipe: installed here, and supported by the architecture."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..errors import UserError, in_one_line
from ..recipe import Recipe


def check_attention(recipe: Recipe, config: Any) -> None:
    """Raise UserError if model.attn_implementation is not installed, or the architecture does not have it.

    config: the model's. transformers itself checks, on a model without weights. Hub kernels are downloaded.
    """
    name = recipe.model.attn_implementation
    if name is None:
        return
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, attn_implementation=name)
    except Exception as error:  # of the config too
        reason = in_one_line(error, 300).partition(" Please request")[0].rstrip(".")
        raise UserError(
            f"model.attn_implementation: {name} cannot be used here: {reason}. Leave it out for transformers' own "
            "choice; flash attention is in the packages flash-attn and kernels"
        ) from error
