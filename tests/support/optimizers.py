"""The optimizers of the conformance tables, on a model with matrices and biases."""

import pytest
import torch
from soren_align.optim import AdamW, HTMuon, Muon, Soren
from soren_align.spectral import SOREN_MAPS

OPTIMIZERS = {
    **{
        f"Soren {name}": lambda params, lr=0.05, name=name, **kw: Soren(params, lr, map=name, **kw)
        for name in SOREN_MAPS
    },
    "Muon": lambda params, lr=0.05, **kw: Muon(params, lr, **kw),
    "HTMuon": lambda params, lr=0.05, **kw: HTMuon(params, lr, **kw),
    "AdamW": lambda params, lr=0.05, **kw: AdamW(params, lr, **kw),
}
EVERY_OPTIMIZER = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
BFLOAT16_MAPS = [OPTIMIZERS["Muon"]]
"""Their maps compute in bfloat16 unless the input is float64."""


def small_model(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)


def groups(model, named=True):
    """The matrices, and the biases for AdamW."""
    parts = [[(n, p) for n, p in model.named_parameters() if (p.ndim == 2) == matrices] for matrices in (True, False)]
    matrices, biases = parts if named else [[p for _, p in part] for part in parts]
    return [{"params": matrices}, {"params": biases, "rule": "adamw", "lr": 0.01}]


def gradients(model, seed):
    """Make the gradients of one step, the same for every model of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = (torch.randn(p.shape, generator=generator) / 10).to(p.dtype)


def trained(make, steps, model=None, before_step=lambda optimizer, step: None):
    """The model and its optimizer after `steps`."""
    model = model or small_model()
    optimizer = make(groups(model))
    for step in range(steps):
        gradients(model, step)
        before_step(optimizer, step)
        optimizer.step()
    return model, optimizer


def assert_same_weights(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
