"""A ZeRO optimizer of DeepSpeed that cannot be placed is refused before anything is communicated."""

from types import SimpleNamespace

import pytest
import torch
from soren_align.optim import Soren
from soren_align.sharding import set_zero_strategy


def zero(**attributes):
    """The attributes of a ZeRO optimizer without a flat tensor."""
    return SimpleNamespace(optimizer=Soren([torch.nn.Parameter(torch.ones(2, 3))], lr=0.1), **attributes)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [({"round_robin_gradients": True}, "round_robin_gradients is not supported, .* wrong universal checkpoints"),
     ({"zenflow": True}, "zenflow is not supported, because this option updates parameters outside of the optimizer"),
     ({"swap_optimizer": True}, "swap_optimizer is not supported, .* \(offload to cpu"),
     ({"partial_offload": 0.5}, r"offload_optimizer\.ratio is 0\.5, but only 1 is supported"),
     ({}, "SimpleNamespace is an unknown ZeRO optimizer; use DeepSpeed's ZeRO stage 1, 2 or 3"),
     ({"fp32_partitioned_groups_flat": []}, "DeepSpeed has 0 data-parallel groups")],
    ids=lambda value: next(iter(value), "unknown") if isinstance(value, dict) else None,
)  # fmt: skip
def test_it_is_refused_with_the_option(attributes, message):
    with pytest.raises(ValueError, match=message):
        set_zero_strategy(zero(**attributes))
