"""A step that is given the norm of its gradients reads neither them nor the momenta, and gives the same bits."""

import pytest
import torch
from soren_align.optim import OPTIMIZERS
from soren_align.optim.gradients import LOOSE_NORM
from soren_align.spectral import minimax_sigmoid
from torch.utils._python_dispatch import TorchDispatchMode

NORMS = [0.5, 0.9, 40.0, 3.0, 0.1, 1.0, 1.0]  # of the gradients of each step, a spike among them


class Norms(TorchDispatchMode):
    """Counts the norms computed of lists of tensors: those of gradients and momenta."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._foreach_norm.Scalar
        return func(*args, **(kwargs or {}))


def build(name="soren"):
    torch.manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 24), (16, 16))]
    others = [torch.nn.Parameter(torch.randn(7))]
    groups = [{"params": others, "rule": "adamw", "lr": 0.02}]
    if name != "adamw":
        groups.insert(0, {"params": matrices})
    return OPTIMIZERS[name](groups, lr=0.02)


def set_gradients(optimizer, norm, seed):
    """Gradients of this norm together; returns it as a tensor."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    torch.nn.utils.clip_grad_norm_(parameters, norm)
    return torch.tensor(norm * 1.001)


def weights(optimizer):
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("name", ["soren", "muon", "adamw"])
def test_a_known_norm_changes_no_bit(name):
    plain, informed = build(name), build(name)
    for seed, norm in enumerate(NORMS):
        set_gradients(plain, norm, seed)
        informed.gradient_norm = set_gradients(informed, norm, seed)
        plain.step()
        informed.step()
        assert informed.gradient_norm is None
        assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(informed), strict=True))


def test_gradients_and_momenta_are_read_only_where_the_bound_does_not_serve():
    optimizer, counts = build(), []
    for seed, norm in enumerate(NORMS):
        optimizer.gradient_norm = set_gradients(optimizer, norm, seed)
        with Norms() as norms:
            optimizer.step()
        counts.append(norms.count > 0)
    # The first step, since the momenta are not known; the spike; and until gradient and momentum are small again.
    assert counts == [True, False, True, True, True, False, False]


def test_momenta_in_bfloat16_are_always_read():
    """Their rounding may add to the norm, so that the gradients that they average bound it no more."""
    matrix = torch.nn.Parameter(torch.randn(16, 16))
    optimizer = OPTIMIZERS["soren"]([{"params": [matrix]}], lr=0.02, momentum_dtype="bfloat16")
    for seed in range(3):
        optimizer.gradient_norm = set_gradients(optimizer, 0.5, seed)
        with Norms() as norms:
            optimizer.step()
        assert norms.count > 0


def test_momenta_of_a_loaded_state_are_read():
    optimizer, large = build(), build()
    set_gradients(large, 1e3, 0)
    large.step()
    optimizer.gradient_norm = set_gradients(optimizer, 0.5, 1)
    optimizer.step()
    optimizer.load_state_dict(large.state_dict())
    optimizer.gradient_norm = set_gradients(optimizer, 0.5, 2)
    with Norms() as norms:
        optimizer.step()
    assert norms.count > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_names_the_parameter_and_changes_nothing(value):
    optimizer = build()
    optimizer.gradient_norm = set_gradients(optimizer, 0.5, 0)
    optimizer.step()
    before = weights(optimizer)
    set_gradients(optimizer, 0.5, 1)
    optimizer.param_groups[0]["params"][1].grad[3, 4] = value
    optimizer.gradient_norm = torch.tensor(value)
    with pytest.raises(FloatingPointError, match="gradient of"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(optimizer), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_that_overflows_is_named_and_changes_nothing(dtype):
    """Clipping by it has made the gradients zero, which are finite."""
    matrix = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = OPTIMIZERS["soren"]([matrix], lr=0.02, momentum_dtype=dtype)
    matrix.grad = torch.ones(4, 4)
    optimizer.step()
    before = matrix.detach().clone()
    matrix.grad.zero_()
    optimizer.gradient_norm = torch.tensor(float("inf"))
    with pytest.raises(FloatingPointError, match="the norm of the gradients overflows"):
        optimizer.step()
    assert torch.equal(matrix, before)


def test_no_map_distinguishes_norms_below_the_limit():
    """Neither where the host knows the bound alone, nor in one path of the sigmoid and the other."""
    x = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(0))
    x *= LOOSE_NORM / x.flatten(1).norm(dim=1).max()
    outputs = [minimax_sigmoid(x, max_norm=norm) for norm in (None, LOOSE_NORM, 30.0)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
