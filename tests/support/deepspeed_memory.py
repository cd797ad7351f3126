"""Memory under DeepSpeed: every storage that is alive on a rank when the optimizer steps."""

import gc
import time
import warnings
from unittest.mock import patch

import torch
import torch.distributed as dist
from soren_align.sharding import set_zero_strategy
from torch.utils._pytree import tree_leaves

from tests.support.toy_jobs import deepspeed_engine, part_of

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")


def under_deepspeed(group, stage, run, config):
    """Bytes of all new tensors at the start of the optimizer's second step, when its states exist."""
    before = storages()
    with patch.multiple(dist, **{name: released(getattr(dist, name)) for name in COLLECTIVES}):
        engine, optimizer = deepspeed_engine(group, stage, run, config)
        set_zero_strategy(engine.optimizer, run.bucket_mb)
        seen = []

        def look(*_):
            if not seen:  # ZeRO steps its groups one after another: at the first, the gradients of all are there
                seen.append(sum(storage.nbytes() for place, storage in storages().items() if place not in before))

        for step in range(2):
            if step == 1:
                optimizer.register_step_pre_hook(look)
            for tokens in run.batches(step):
                engine.backward(engine(part_of(tokens, group)))
                engine.step()
    return seen[0]


def released(collective):
    """A synchronous `collective` that returns when gloo has released its tensors.

    gloo's thread reports the result first and drops its references afterwards. If it is preempted in between, as on a
    busy machine, a buffer of the passes is still alive when the optimizer steps: with stage 1 and float32 accumulation
    one of 115,848 bytes.
    """

    def call(*args, **kwargs):
        counts = [(t, t._use_count()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        work = collective(*args, **kwargs)
        while work is None and any(tensor._use_count() > count for tensor, count in counts):
            time.sleep(0.001)
        return work

    return call


def storages():
    """Every storage in memory by its place; holding them keeps a place from being taken again."""
    gc.collect()
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # objects with properties that warn
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        for tensor in [*tensors, *(t.grad for t in tensors if t.grad is not None)]:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage
    return found
