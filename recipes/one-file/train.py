"""A small GPT on the characters of a text, trained by Soren alone, without soren-align:

soren-align export optimizer > soren.py     beside this file
python train.py TEXT.txt [STEPS]
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from soren import Soren
from torch import nn

text = Path(sys.argv[1]).read_text(encoding="utf-8")
num_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 500
vocabulary = sorted(set(text))
data = torch.tensor([vocabulary.index(character) for character in text])
WIDTH, HEADS, BLOCKS, LENGTH, BATCH = 128, 4, 4, 128, 16
torch.manual_seed(0)


class Block(nn.Module):
    """Causal attention and an MLP, each added to its input."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        """Return x [batch, length, WIDTH] after the block."""
        y = self.norms[0](x)
        heads = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


tokens, places = nn.Embedding(len(vocabulary), WIDTH), nn.Embedding(LENGTH, WIDTH)
blocks, head = nn.Sequential(*(Block() for _ in range(BLOCKS))), nn.Linear(WIDTH, len(vocabulary))
model = nn.ModuleList([tokens, places, blocks, head])

# Soren takes the matrices inside the blocks, AdamW all others.
matrices = [parameter for parameter in blocks.parameters() if parameter.ndim == 2]
chosen = set(map(id, matrices))
others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
optimizers = [Soren(matrices, lr=5e-3), torch.optim.AdamW(others, lr=5e-3)]

for step in range(num_steps):
    starts = torch.randint(len(data) - LENGTH - 1, (BATCH, 1))
    batch = data[starts + torch.arange(LENGTH + 1)]
    logits = head(blocks(tokens(batch[:, :-1]) + places.weight))
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as Soren's max_grad_norm
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if step % 50 == 0 or step == num_steps - 1:
        print(f"step {step}: loss {loss.item():.3f}")
