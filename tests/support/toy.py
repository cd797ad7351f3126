"""A language model of 14 matrices, and the plain loop on one process that every kind of sharding must follow."""

from dataclasses import dataclass, field
from typing import Any

import torch
from soren_align.optim import Soren, build_optimizer
from torch import nn

from research import nulls

HIDDEN, BATCH = 48, 12
NUM_STEPS = 10
RATES = {"lr": 0.02, "aux_lr": 1e-3, "weight_decay": 0.1, "adjust_lr_fn": "original"}


class Block(nn.Module):
    """Two streams instead of attention, to be quick; the shapes are those of a Llama block with grouped queries."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.q, self.o = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN, bias=False)
        self.k, self.v = nn.Linear(HIDDEN, 20, bias=False), nn.Linear(HIDDEN, 20, bias=False)
        self.gate, self.up = nn.Linear(HIDDEN, 131, bias=False), nn.Linear(HIDDEN, 131, bias=False)
        self.down = nn.Linear(131, HIDDEN, bias=False)

    def forward(self, x):
        y = self.norm(x)
        mixed = torch.tanh(y @ self.k.weight.T).cumsum(1) * self.v(y)
        x = x + self.o(self.q(y) * mixed.mean(-1, keepdim=True)) + mixed @ self.k.weight
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


class Adapted(nn.Module):
    """A frozen linear layer and an update of rank 4, which alone is trained: LoRA, with PEFT's names."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(4, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x):
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


class Toy(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embedding = nn.Embedding(vocab, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(HIDDEN, vocab, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(x[:, :-1]).flatten(0, 1)
        wide = torch.promote_types(logits.dtype, torch.float32)  # as models do: bfloat16's losses differ by 1/64
        return nn.functional.cross_entropy(logits.to(wide), tokens[:, 1:].flatten())


# The default map's slope at zero, 5000, magnifies the last bit of a sum beyond the tolerance where gradients are
# rank-deficient; that of this one is 178. The default map is compared on gradients of full rank.
MINIMAX = {"name": "minimax", "resolution": 0.01}


@dataclass(frozen=True)
class Run:
    """What may differ between runs of the toy; `settings` go to build_optimizer."""

    settings: dict[str, Any] = field(default_factory=lambda: {"map": MINIMAX})
    frozen: tuple[str, ...] = ()  # parts of names
    clip: float = 0.5
    dtype: torch.dtype = torch.float32
    bucket_mb: float = 0.05  # one to three of the toy's matrices: several rounds
    lora: bool = False
    # Of 40 words most gradients have singular values below 1e-8 of the largest, where the maps must do no harm; of 96
    # words in rows of 16 none below 1e-4 (test_full_rank_is_full_rank).
    full_rank: bool = False
    null_map: str = ""  # RANDOM or SHUFFLED, which draw numbers by a matrix's name and the step: ranks draw the same
    float64_map: bool = False  # Muon iterates in bfloat16, where the last bit of a float32 moves the output by 1e-2

    def model(self):
        torch.manual_seed(0)
        model = Toy(96 if self.full_rank else 40)
        for block in model.blocks if self.lora else ():
            for name in ("q", "o", "v", "gate", "up", "down"):
                setattr(block, name, Adapted(getattr(block, name)))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".lora_" in name if self.lora else not any(part in name for part in self.frozen))
        return model.to(self.dtype)

    def optimizer(self, model):
        settings = {**RATES, "name": "soren", **self.settings}
        if self.lora:  # build_optimizer refuses factors
            factors = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            optimizer = Soren([{"params": factors}], **{k: settings[k] for k in ("lr", "map", "adjust_lr_fn")})
        else:
            optimizer = build_optimizer(model, **{"aux": ("lm_head.weight",), **settings})
        if self.null_map:
            optimizer.map_of = lambda group: (getattr(nulls, self.null_map), {})
        if self.float64_map:
            map_matrix = optimizer.map_matrix
            optimizer.map_matrix = lambda x, *more: map_matrix(x.double(), *more).to(x.dtype)
        return optimizer

    def batches(self, step):
        """Two micro-batches of one step."""
        vocab, length = (96, 16) if self.full_rank else (40, 8)
        tokens = torch.randint(vocab, (BATCH, length), generator=torch.Generator().manual_seed(1000 + step))
        return tokens.chunk(2)


def one_process(run):
    """The weights after the plain loop, the gradient norms before clipping, and the optimizer."""
    model = run.model()
    optimizer, norms = run.optimizer(model), []
    for step in range(NUM_STEPS):
        for tokens in run.batches(step):
            (model(tokens) / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), run.clip)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, norms, optimizer
