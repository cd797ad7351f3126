"""The toy on ranks whose host wraps model and optimizer, for tests/plugins/test_ranks.py."""

from types import SimpleNamespace

from accelerate import Accelerator
from soren_align.plugins.sharding_callback import ShardingCallback
from torch import nn

from tests.support.toy import NUM_STEPS
from tests.support.toy_jobs import part_of, result


def accelerate(group, run, sets_strategy):
    """DDP by accelerate's `prepare`; the strategy is set as transformers' trainers do, or not at all."""
    accelerator = Accelerator(cpu=True)
    whole = run.model()
    model, optimizer = accelerator.prepare(whole, run.optimizer(whole))
    if sets_strategy:
        ShardingCallback().on_train_begin(None, SimpleNamespace(), None, optimizer=optimizer, model=model)
    for step in range(NUM_STEPS):
        for tokens in run.batches(step):
            accelerator.backward(model(part_of(tokens, group)) / 2)
        accelerator.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad()
    inner = optimizer.optimizer
    weights = dict(whole.named_parameters())
    if sets_strategy:
        return result(inner, weights)
    return {name: weight.detach().clone() for name, weight in weights.items()}, inner.num_maps


def refusal_of_fsdp1(group):
    """The error of an optimizer that is built for a model in FSDP1, and of a step of one that was built before."""
    from soren_align import build_optimizer
    from soren_align.sharding import set_strategy
    from torch.distributed.fsdp import FullyShardedDataParallel

    errors, settings = [], {"name": "soren", "lr": 1e-3, "adjust_lr_fn": "original"}
    for is_built_before in (False, True):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(2)])
        optimizer = build_optimizer(model, **settings) if is_built_before else None
        sharded = FullyShardedDataParallel(model, use_orig_params=True, device_id="cpu")
        try:
            if optimizer is None:
                optimizer = build_optimizer(sharded, **settings)
            set_strategy(optimizer)
            sharded(model[0][0].weight.new_ones(2, 8)).sum().backward()
            optimizer.step()
        except ValueError as error:
            errors.append(str(error))
    return errors
