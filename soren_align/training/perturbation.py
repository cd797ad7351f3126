"""Perturb the starting weights by as much as rounding does: another draw of a chaotic training (run.perturb).

The random numbers are a hash of seed, parameter name and position, in integers: they are the same on every device, in
every version of torch, and for a shard as for the whole parameter.
"""

import hashlib

import torch
from torch import Tensor, nn

from ..sharding.ranks import current_ranks

# SplitMix64 (Steele et al. 2014), as signed 64-bit numbers.
_STEP, _MIXES = 0x9E3779B97F4A7C15 - 2**64, (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
CHUNK = 2**22
"""Elements of a chunk: 32 MB for each of three temporaries."""


@torch.no_grad()
def perturb_(model: nn.Module, size: float, seed: int) -> None:
    """Multiply every parameter w by 1 + size u, with u uniform in [-1, 1], rounded to float32.

    model: its parameters are float32; under ZeRO 3 each rank changes its shards. A tied parameter has its first name.
    """
    rank = current_ranks().rank
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}"
        if parameter.is_meta:  # of the other ranks under FSDP2, which get the first one's weights
            continue
        shard = getattr(parameter, "ds_tensor", parameter)
        first = rank * shard.numel() if hasattr(parameter, "ds_tensor") else 0
        flat = shard.reshape(-1)
        for start in range(0, flat.numel(), CHUNK):
            part = flat[start : start + CHUNK]
            u = uniform(seed, name, first + start, part.numel(), part.device)
            part.copy_(part.double() * (1 + size * u))
        shard.copy_(flat.view_as(shard))  # flat is a copy if the strides are not those of a flat tensor


def uniform(seed: int, name: str, first: int, number: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the random numbers of a parameter's positions first, first + 1, ...: [number], float64, in [-1, 1)."""
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little", signed=True)
    state = torch.arange(first + 1, first + number + 1, device=device).mul_(_STEP).add_(key)
    for shift, mix in zip((30, 27), _MIXES, strict=True):
        state = _shifted(state, shift).bitwise_xor_(state).mul_(mix)
    return _shifted(state, 31).bitwise_xor_(state).double().mul_(2.0**-63)


def _shifted(state: Tensor, shift: int) -> Tensor:
    """Return a logical shift to the right; torch's is arithmetic."""
    return (state >> shift).bitwise_and_(2 ** (64 - shift) - 1)
