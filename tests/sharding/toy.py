"""A language model of 14 matrices, and the plain loop on one process that every kind of sharding must follow."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from soren_align.optim import build_optimizer

VOCAB, HIDDEN, BATCH, LENGTH = 40, 48, 12, 8
NUM_STEPS = 10
RATES = {"lr": 0.02, "aux_lr": 1e-3, "weight_decay": 0.1, "adjust_lr_fn": "original"}


class Block(nn.Module):
    """Two streams instead of attention, to be quick; the shapes are those of a Llama block with grouped queries."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k, self.v = nn.Linear(HIDDEN, 20, bias=False), nn.Linear(HIDDEN, 20, bias=False)
        self.gate, self.up = nn.Linear(HIDDEN, 131, bias=False), nn.Linear(HIDDEN, 131, bias=False)
        self.down = nn.Linear(131, HIDDEN, bias=False)

    def forward(self, x):
        y = self.norm(x)
        mixed = torch.tanh(y @ self.k.weight.T).cumsum(1) * self.v(y)
        x = x + self.o(self.q(y) * mixed.mean(-1, keepdim=True)) + mixed @ self.k.weight
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, :-1]).flatten(0, 1)
        wide = torch.promote_types(logits.dtype, torch.float32)  # as models do: bfloat16's losses differ by 1/64
        return nn.functional.cross_entropy(logits.to(wide), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Run:
    """What may differ between runs of the toy; `settings` go to build_optimizer."""

    settings: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()  # parts of names
    clip: float = 0.5
    dtype: torch.dtype = torch.float32
    round_mb: float = 0.05  # one to three of the toy's matrices: several rounds
    num_sub_groups: int = 1  # of ZeRO 3

    def model(self):
        torch.manual_seed(0)
        model = Toy().to(self.dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in self.frozen))
        return model

    def optimizer(self, model):
        return build_optimizer(model, aux=("head.weight",), **{**RATES, "name": "soren", **self.settings})


def batches(step):
    """Two micro-batches of one step."""
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1000 + step))
    return tokens.chunk(2)


def one_process(run):
    """The weights after the plain loop, the gradient norms, and how many matrices were mapped."""
    model = run.model()
    optimizer, norms = run.optimizer(model), []
    for step in range(NUM_STEPS):
        for tokens in batches(step):
            (model(tokens) / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), run.clip)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, norms, optimizer.num_maps
