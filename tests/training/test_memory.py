"""Walks over weights hold a bounded number of bytes beside them, whatever the size of a tensor.

A flat shard of ZeRO is one tensor of all that a rank steps, so that a temporary of its size can be larger than all that
is free.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from soren_align.optim import AdamW
from soren_align.planning.flops import Meter
from soren_align.sharding.ranks import Ranks
from soren_align.training.lost_updates import FirstStepCheck, LostUpdatesPolicy, change_after_saving
from soren_align.training.measure.measurements import Measurements
from soren_align.training.saving import export_weights
from soren_align.training.trained_optimizer import AttachedOptimizer, OptimizerCheck, StartingWeights, compact_copies

MB = 2**20
MOST = 128 * MB
NUMELS = (10**7, 2 * 10**7)  # 3 chunks and 5
WALKS = ("log", "end", "step", "export", "drift", "start")
STATE = SimpleNamespace(global_step=0, logging_steps=1, stateful_callbacks=None)
ARGS = SimpleNamespace(logging_first_step=True, fp16=False)


class Shard:
    """A flat shard with its optimizer, and all that measures it."""

    def __init__(self, numel, dtype):
        self.flat = torch.nn.Parameter(torch.full((numel,), 0.02, dtype=dtype))
        self.flat.grad = torch.full_like(self.flat, 1e-3)
        compensation = "kahan" if dtype == torch.bfloat16 else "none"
        self.optimizer = AdamW([self.flat], lr=1e-3, compensation=compensation)
        self.optimizer._complete_state(self.optimizer.param_groups[0])
        self.attached = AttachedOptimizer(self.optimizer, [], self.optimizer, "fsdp2", [[self.flat]], Ranks())
        self.starting_weights = StartingWeights([(0, self.flat)])
        self.measurements = Measurements(self.attached, self.starting_weights)
        self.first_step = FirstStepCheck(self.attached, LostUpdatesPolicy("warn", lambda groups, warnings: None))
        self.callbacks = (OptimizerCheck(self.attached), self.measurements, self.first_step)

    def log(self):
        """The first step, of which everything is measured that is ever measured of a step, and its log."""
        for event in ("on_train_begin", "on_step_begin"):
            for callback in self.callbacks:
                getattr(callback, event)(ARGS, STATE, None)
        self.optimizer.step()
        for callback in self.callbacks:
            callback.on_optimizer_step(ARGS, STATE, None)
        assert self.measurements.values(1)["relative_change"] > 0
        assert self.first_step.groups["matrices"]["fraction_changed"] == 1

    def end(self):
        change = change_after_saving(self.starting_weights, self.attached, torch.bfloat16)
        assert change["matrices"]["fraction_changed"] > 0.9

    def step(self):
        self.optimizer.step()

    def export(self):
        compensation = self.optimizer.state[self.flat].get("compensation")
        return export_weights([("flat", self.flat.detach(), compensation)], torch.float16).values()

    def drift(self):
        two = SimpleNamespace(num_ranks=2, gather=lambda value: [value, value])
        replace(self.attached, ranks=two).refuse_unaveraged_gradients(1)

    def start(self):
        return compact_copies([self.flat.detach()])


def extra(shard, walk):
    """The most bytes that a walk held at once, but for its result."""
    with Meter() as meter:
        result = getattr(shard, walk)()
    return meter.peak - sum(tensor.nbytes for tensor in result or ())


@pytest.mark.rest
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "kahan"])
def test_a_walks_memory_is_bounded_and_does_not_grow_with_the_shard(dtype):
    small, large = ({walk: extra(shard, walk) for walk in WALKS} for shard in (Shard(n, dtype) for n in NUMELS))
    for walk in WALKS:
        print(f"\n{walk} of {dtype}: {small[walk] / MB:.1f} and {large[walk] / MB:.1f} MB")
    assert max(large.values()) <= MOST
    assert all(abs(large[walk] - small[walk]) < MB for walk in WALKS), "a bit of each further weight would be 1.2 MB"
