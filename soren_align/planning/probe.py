"""Probe whether a model can be trained on packed sequences, from its config alone.

Training probes the model itself before its first step (`training.packing`). Here the same probe runs on a random model
of the architecture with one block of each type, few tokens and narrow MLPs, none of which decides how a model separates
examples.
"""

import re
from copy import deepcopy
from typing import Any

import torch

from ..core.errors import UserError, in_one_line
from ..training.packing import refuse_mixing_in
from .flops import build_model, kinds_of_blocks, select_blocks

VOCAB_SIZE = 64
"""Above the probe's tokens."""
_WIDTH = re.compile(r"(intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|n_inner|ffn_hidden_dim)$")
MLP_WIDTH = 16
MAX_PARAMETERS = 2 * 10**8
"""Of the random model: more would take more than a few seconds."""


def probe_packing(config: Any, outline: Any, attention: str | None = None) -> tuple[bool | None, str]:
    """Return whether packed examples stay separate, and a sentence; None if this cannot be probed.

    config: the model's. outline: the whole model without weights. attention: see `build_model`.
    """
    small = deepcopy(config)
    text_config = small.get_text_config()
    types = getattr(text_config, "layer_types", None)
    firsts: dict[Any, int] = {}
    for number, positions in enumerate(kinds_of_blocks(outline)):
        for position in positions:
            firsts.setdefault((number, types and types[position]), position)
    blocks = sorted(firsts.values()) if types else [*range(1 + max(firsts.values(), default=0))]
    try:
        if firsts:
            select_blocks(text_config, blocks)
        _shrink(small)
        with torch.device("meta"):
            numel = sum(p.numel() for p in build_model(small, None, torch.float32, (), attention).parameters())
        if numel > MAX_PARAMETERS:
            return None, f"not tested here, because a model of one block of each type already has {numel:,} parameters"
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            refuse_mixing_in(build_model(small, None, torch.float32, (), attention), "trainer.packing")
    except UserError as error:
        return (False, str(error)) if str(error).startswith("trainer.packing") else (None, f"not tested here: {error}")
    except Exception as error:  # an architecture's code need not run with these sizes; training may work
        return None, f"not tested here: {in_one_line(error, 120)}"
    return True, "packed examples stay separate (tested with random weights and one block of each type)"


def _shrink(config: Any) -> None:
    """Narrow the MLPs and the vocabulary of a config and of those inside, in place."""
    for key, value in [*vars(config).items()]:
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shrink(value)
        elif _WIDTH.search(key) and isinstance(value, int | None):
            setattr(config, key, MLP_WIDTH)
        elif key == "vocab_size":
            setattr(config, key, VOCAB_SIZE)
        elif key.endswith("_token_id") and isinstance(value, int | list):
            setattr(config, key, 0)
