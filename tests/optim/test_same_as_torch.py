"""The optimizers against torch's own, which share no code with them but AdamW's functional form."""

import pytest
import torch
from soren_align.optim import AdamW, HTMuon, Muon, Soren, SpectralOptimizer

SHAPES = [(6, 9), (9, 6), (5, 5), (1, 4)]


def parameters(shapes=SHAPES, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def run(optimizer, params, steps=5, scale=1.0):
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        for p in params:
            p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)
        optimizer.step()
    return params


def assert_same_bits(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Plain(SpectralOptimizer):
    """The update path with the identity for a map."""

    def map_matrix(self, x, group, context):
        return x


def test_with_the_identity_for_a_map_it_is_sgd_with_ema_momentum():
    ours, theirs = parameters(dtype=torch.float64), parameters(dtype=torch.float64)
    sgd = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, dampening=0.9)
    for p in theirs:  # torch starts its buffer from the whole first gradient, an average starts from zero
        sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)
    run(Plain(ours, 0.1, momentum=0.9, nesterov=False, weight_decay=0.0), ours)
    run(sgd, theirs)
    assert all((a - b).abs().max() < 1e-14 for a, b in zip(ours, theirs, strict=True))


def test_with_the_identity_for_a_map_it_is_nesterov_sgd_at_a_larger_rate():
    # an average is (1 - momentum) times torch's sum
    ours, theirs = parameters(dtype=torch.float64), parameters(dtype=torch.float64)
    run(Plain(ours, 1.0, momentum=0.9, nesterov=True, weight_decay=0.0), ours)
    run(torch.optim.SGD(theirs, lr=0.1, momentum=0.9, nesterov=True), theirs)
    assert all((a - b).abs().max() < 1e-14 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("lr", [0.02, torch.tensor(0.02), torch.tensor([0.02])])
def test_muon_has_the_bits_of_torch(nesterov, adjust_lr_fn, weight_decay, lr):
    ours, theirs = parameters(), parameters()
    settings = {"lr": lr, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn, "weight_decay": weight_decay}
    run(Muon(ours, **settings), ours)
    run(torch.optim.Muon(theirs, **settings), theirs)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("lr", [0.02, torch.tensor(0.02)])
def test_adamw_has_the_bits_of_torch(dtype, observed, lr):
    shapes = [(6, 9), (9,), (2, 3, 4), ()]
    settings = {"lr": lr, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    ours, theirs = parameters(shapes, dtype), parameters(shapes, dtype)
    optimizer = AdamW(ours, **settings)
    optimizer.update_observers = frozenset({lambda update: None} if observed else ())
    run(optimizer, ours)
    run(torch.optim.AdamW(theirs, fused=True, **settings), theirs)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("optimizer_class", [Soren, Muon, HTMuon])
def test_the_adamw_group_beside_the_matrices_has_the_bits_of_torch(optimizer_class):
    matrices, ours, theirs = parameters(), parameters([(9,), (4, 4)]), parameters([(9,), (4, 4)])
    groups = [{"params": matrices}, {"params": ours, "rule": "adamw", "lr": 3e-3, "weight_decay": 0.01}]
    generator = torch.Generator().manual_seed(7)
    grads = [torch.randn(p.shape, generator=generator) for p in ours]
    optimizer, reference = optimizer_class(groups, lr=0.1), torch.optim.AdamW(theirs, lr=3e-3, fused=True)
    for _ in range(3):
        for p, q, grad in zip(ours, theirs, grads, strict=True):
            p.grad, q.grad = grad.clone(), grad.clone()
        for p in matrices:
            p.grad = torch.ones_like(p)
        optimizer.step()
        reference.step()
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize(
    ("make", "both", "like"), [(Muon, {}, {}), (Muon, {"adjust_lr_fn": None}, {}), (AdamW, {}, {"fused": True})]
)
def test_the_defaults_are_those_of_torch(make, both, like):
    ours, theirs = parameters(), parameters()
    run(make(ours, **both), ours)
    run(getattr(torch.optim, make.__name__)(theirs, **both, **like), theirs)
    assert_same_bits(ours, theirs)
