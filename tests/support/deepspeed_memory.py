"""Memory under DeepSpeed: every storage that is alive on a rank when the optimizer steps."""

import gc
import warnings

import torch

from soren_align.sharding import attach_zero
from tests.support.toy_jobs import deepspeed_engine, part_of


def under_deepspeed(group, stage, run, config):
    """Bytes of all tensors that came to be, as the optimizer begins its second step: then its states are there."""
    before = storages()
    engine, optimizer = deepspeed_engine(group, stage, run, config)
    attach_zero(engine.optimizer, run.round_mb)
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
