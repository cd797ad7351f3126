"""The blocks of a model: their kinds, and small models made of a few of them.

Blocks are of one kind if their parameters have the same names and shapes, and the same ones are frozen: DeepSeek-V3's
first three have no experts, and one in four of Qwen3-Next has attention in place of a recurrence.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..errors import as_user_error
from ..trainers.freezing import freeze


def build_model(
    config: Any,
    blocks: Sequence[int] | None,
    dtype: torch.dtype,
    frozen: Sequence[str] = (),
    attention: str | None = None,
) -> PreTrainedModel:
    """A model with random weights; blocks: positions in the whole model of those that it has, None: all.

    frozen: globs of the parameters that are not trained. attention: eager needs memory for the scores; the others are
    measured by transformers' own choice. Call it on the meta device: a model whose blocks are not the
    first ones is built whole before.
    """
    config = deepcopy(config)
    text_config = config.get_text_config()  # of a model of text and images
    num_blocks = getattr(text_config, "num_hidden_layers", 0)
    are_first = blocks is not None and [*blocks] == [i % num_blocks for i in range(len(blocks))]
    if blocks is not None and are_first:
        _select(text_config, blocks)
    with as_user_error("no model can be built from config.json", Exception):  # transformers checks few of its values
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention if attention == "eager" else None
        )
    freeze(model, frozen)
    if blocks is None or are_first:
        return model
    path, chain = _chain_of_blocks(model, num_blocks)
    model.set_submodule(path, nn.ModuleList(deepcopy(chain[i]) for i in blocks))
    _select(model.config.get_text_config(), blocks)
    return model


def kinds_of_blocks(model: PreTrainedModel) -> list[list[int]]:
    """The positions of the blocks of each kind; no kind if the model's config has no number of blocks."""
    num_blocks = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    path, chain = _chain_of_blocks(model, num_blocks)
    kinds: dict[Any, list[int]] = {}
    for position in range(num_blocks):
        parameters = chain[position].named_parameters() if path else ()
        kinds.setdefault(tuple((name, p.shape, p.requires_grad) for name, p in parameters), []).append(position)
    return list(kinds.values())


def _chain_of_blocks(model: nn.Module, num_blocks: int) -> tuple[str, nn.ModuleList]:
    """The list of the decoder's blocks, and its path; an empty path if there is none."""
    whole: Any = model
    decoder = whole.get_decoder() if hasattr(whole, "get_decoder") else whole
    inside = {id(module) for module in decoder.modules()}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_blocks and id(module) in inside:
            return path, module
    return "", nn.ModuleList()


def _select(config: Any, blocks: Sequence[int]) -> None:
    """Set the number of blocks, and in each list with an entry per block (`layer_types`, ...) those of `blocks`."""
    before = config.num_hidden_layers
    config.num_hidden_layers = len(blocks)
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == before:
            setattr(config, key, [value[i % before] for i in blocks])
