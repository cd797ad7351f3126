"""Walks over weights hold a bounded number of bytes beside them, whatever the size of a tensor.

A flat shard of ZeRO is one tensor of all that a rank steps, so that a temporary of its size can be larger than all that
is free.
"""

from types import SimpleNamespace

import pytest
import torch

from soren_align.optim import AdamW
from soren_align.planning.meter import Meter
from soren_align.sharding import Sharding
from soren_align.sharding.ranks import Ranks
from soren_align.trainers.lost_updates import Resolution, survival
from soren_align.trainers.measurements import Watch
from soren_align.trainers.trl_trainers import _exported

MB = 2**20
MOST = 128 * MB
STATE = SimpleNamespace(global_step=0, logging_steps=1)
ARGS = SimpleNamespace(logging_first_step=True, fp16=False)


class Shard:
    """A flat shard with its state, and what watches it."""

    def __init__(self, numel, dtype):
        self.flat = torch.nn.Parameter(torch.full((numel,), 0.02, dtype=dtype))
        self.flat.grad = torch.full_like(self.flat, 1e-3)
        compensation = "kahan" if dtype == torch.bfloat16 else "none"
        self.optimizer = AdamW([self.flat], lr=1e-3, compensation=compensation)
        self.optimizer._complete_state(self.optimizer.param_groups[0])
        self.watch = Watch(self.optimizer, Ranks())
        self.watch.recognise(self.optimizer)
        self.watch.begin(Sharding("fsdp2", [[self.flat]]))
        self.watch.on_train_begin(ARGS, STATE, None)
        self.resolution = Resolution(self.watch, "warn", lambda found, warnings: None)

    def log(self):
        """The first step, of which everything is measured that is ever measured of a step, and its log."""
        self.resolution.on_train_begin(ARGS, STATE, None)
        for watch in (self.watch, self.resolution):
            watch.on_step_begin(ARGS, STATE, None)
        self.optimizer.step()
        for watch in (self.watch, self.resolution):
            watch.on_optimizer_step(ARGS, STATE, None)
        assert self.watch.measures(1)["relative_change"] > 0
        assert self.resolution.found["matrices"]["fraction"] == 1

    def end(self):
        assert survival(self.watch, torch.bfloat16)["matrices"]["entries"] > 0.9

    def step(self):
        self.optimizer.step()

    def export(self):
        return [
            _exported("flat", self.flat.detach(), self.optimizer.state[self.flat].get("compensation"), torch.float16)
        ]

    def drift(self):
        self.watch.ranks = SimpleNamespace(num_ranks=2, min_and_max=lambda value: (value, value))
        self.watch.refuse_drift(1)

    def start(self):
        self.watch._remember([(0, self.flat)])
        return [start for *_, start in self.watch._weights]


def extra(shard, walk):
    """The most bytes that a walk held at once, but for its result."""
    with Meter() as meter:
        result = getattr(shard, walk)()
    return meter.peak - sum(tensor.nbytes for tensor in result or ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "kahan"])
@pytest.mark.parametrize(
    ("sizes", "walks"),
    [((10**7, 10**8), ("log", "end", "step", "export")), ((10**7, 2 * 10**7), ("drift", "start"))],
    ids=["10M and 100M", "10M and 20M"],
)
def test_what_a_walk_holds_is_bounded_and_does_not_grow_with_the_shard(dtype, sizes, walks):
    small, large = ({walk: extra(shard, walk) for walk in walks} for shard in (Shard(n, dtype) for n in sizes))
    for walk in walks:
        print(f"\n{walk} of {dtype}: {small[walk] / MB:.1f} and {large[walk] / MB:.1f} MB")
    assert max(large.values()) <= MOST
    assert all(abs(large[walk] - small[walk]) < MOST / 2 for walk in walks)
