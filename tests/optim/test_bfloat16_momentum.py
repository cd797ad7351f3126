"""momentum_dtype: bfloat16 stores the momentum of matrices in half of the memory, and learns as float32 does."""

import copy

import pytest
import torch
from soren_align.optim import Muon, Soren
from torch import nn


def momenta(num_steps, gradient, shape=(64, 80)):
    """The momentum of a matrix in bfloat16 and in float32 after steps with the same gradients."""
    found = []
    for dtype in ("bfloat16", "float32"):
        weight = nn.Parameter(torch.zeros(shape))
        optimizer = Muon([weight], 0.01, momentum_dtype=dtype)
        for step in range(num_steps):
            weight.grad = gradient(step)
            optimizer.step()
        found.append(optimizer.state[weight]["exp_avg"])
        assert found[-1].dtype == getattr(torch, dtype)
    return found[0].float(), found[1]


def test_noise_dithers_the_rounding():
    """A number changes by 5% of its distance from the gradient, and half an ulp is 0.2 to 0.4% of it."""
    mean, *noise = torch.randn(61, 64, 80, generator=torch.Generator().manual_seed(0)) / 10
    narrow, wide = momenta(60, lambda step: mean + noise[step])
    assert (narrow - wide).norm() < 0.02 * wide.norm()


def test_without_noise_a_momentum_stops_within_eight_percent_of_a_constant_gradient():
    """0.05 |g - m| is below half an ulp, at most 2^-8 |m|, from |g - m| = 0.08 |m| on. Its direction is the gradient's."""
    constant = torch.randn(64, 80, generator=torch.Generator().manual_seed(0))
    narrow, wide = momenta(300, lambda step: constant)
    assert ((narrow - wide).abs() <= 0.08 * wide.abs() + 1e-6).all()
    assert torch.cosine_similarity(narrow.flatten(), wide.flatten(), 0) > 0.999


def test_a_float64_matrix_keeps_its_momentum():
    weight = nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
    optimizer = Soren([weight], 0.1, momentum_dtype="bfloat16")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float64


def test_a_checkpoint_keeps_the_dtype_and_another_one_is_refused():
    def optimizer_of(dtype):
        weight = nn.Parameter(torch.ones(4, 6))
        weight.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        return Muon([weight], 0.1, momentum_dtype=dtype), weight

    optimizer, weight = optimizer_of("bfloat16")
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    second, other = optimizer_of("bfloat16")
    second.load_state_dict(saved)
    assert torch.equal(second.state[other]["exp_avg"], optimizer.state[weight]["exp_avg"])
    assert second.state[other]["exp_avg"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="group 0 momentum_dtype: bfloat16 in the checkpoint, float32"):
        optimizer_of("float32")[0].load_state_dict(saved)
    saved["param_groups"][0]["states"] = "8bit"  # of an earlier version
    with pytest.raises(ValueError, match=r"8-bit optimizer states, .*; resume with the version .* bfloat16"):
        second.load_state_dict(saved)
