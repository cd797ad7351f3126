"""The jobs of test_devices.py: steps on the device of fake_gpu.py, beside the same steps on the CPU."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from soren_align import optim
from soren_align.optim import ShardingStrategy
from soren_align.optim import adamw as adamw_step
from soren_align.sharding import DDPStrategy, ZeroStrategy, flat_partitions
from soren_align.sharding.gather import RankStrategy
from torch import nn

from tests.support.fake_gpu import GPU, OnGPU, WrongDevice, host_reads

SHAPES = {"a": (6, 9), "b": (9, 6), "c": (6, 9), "norm": (9,), "scale": ()}
MATRICES = ("a", "b", "c")
NUM_STEPS = 2


def drawn(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def on_gpu(tensor):
    return OnGPU(tensor.clone())


def on_cpu(tensor):
    return tensor.clone()


def trained(name, put, strategy=None, observed=False, fused=False, **settings):
    """The weights after NUM_STEPS with parameters where `put` puts them; AdamW by one kernel on both devices."""
    dtype = torch.bfloat16 if settings.get("compensation") == "kahan" else torch.float32
    parameters = {key: nn.Parameter(put(weight)) for key, weight in drawn(0, dtype).items()}
    lr = settings.pop("lr", 0.02)
    if name == "AdamW":
        groups = [{"params": [*parameters.items()]}]
    else:
        others = {"rule": "adamw", "lr": lr, "params": [(k, p) for k, p in parameters.items() if k not in MATRICES]}
        groups = [{"params": [(key, parameters[key]) for key in MATRICES]}, others]
    optimizer = getattr(optim, name)(groups, lr=lr, **settings)
    optimizer.strategy = strategy or ShardingStrategy()
    if observed:
        optimizer.update_observers = optimizer.map_observers = frozenset({lambda seen: None})
    with patch.object(adamw_step, "FUSED", ("cpu", "gpu") if fused else ()):
        for step in range(NUM_STEPS):
            for key, grad in drawn(1 + step, dtype).items():
                parameters[key].grad = put(grad)
            optimizer.step()
    return [getattr(p.detach(), "contents", p.detach()) for p in parameters.values()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def one_process(group, name, compensation, lr):
    def rate(put):
        return {"float": 0.02, "on the CPU": torch.tensor(0.02), "on the GPU": put(torch.tensor(0.02))}[lr]

    settings = {"compensation": compensation, "observed": group.rank() == 1}
    wanted = trained(name, on_cpu, lr=rate(on_cpu), **settings)
    with GPU():
        return same(trained(name, on_gpu, lr=rate(on_gpu), **settings), wanted)


def reads(group, name, settings, lr, sharded, norm=0.3):
    """The reads of the host in a step on 252 matrices, as Qwen2.5-3B has them, with the first step before it."""
    shapes = [(8, 8), (4, 8), (4, 8), (8, 8), (12, 8), (12, 8), (8, 12)] * 36
    with GPU():
        rate = on_gpu(torch.tensor(lr)) if settings.pop("tensor_lr", False) else lr
        matrices = [nn.Parameter(on_gpu(torch.ones(shape))) for shape in shapes]
        others = {"rule": "adamw", "lr": rate, "params": [nn.Parameter(on_gpu(torch.ones(8))) for _ in range(4)]}
        optimizer = getattr(optim, name)([{"params": matrices}, others], lr=rate, **settings)
        optimizer.strategy = DDPStrategy(group) if sharded else ShardingStrategy()
        for _ in range(2):
            for i, parameter in enumerate([*matrices, *others["params"]]):
                grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
                parameter.grad = on_gpu(grad.mul_(norm / grad.norm()))
            host_reads.clear()
            optimizer.step()
        return list(host_reads)


def replicas(group, name, as_before=False):
    strategy = DDPStrategy(group)
    if as_before:
        strategy.check_gradients = lambda *arguments: RankStrategy.check_gradients(strategy, *arguments)
    try:
        with GPU():
            found = trained(name, on_gpu, strategy)
    except WrongDevice as error:
        return "a group of NCCL alone" if "NCCL" in str(error) else str(error)
    return same(found, trained(name, on_cpu))


def early_error(group):
    with GPU():
        parameter = nn.Parameter(on_gpu(torch.ones(3)))
        error, sums = ValueError("a rank's own error") if group.rank() else None, torch.zeros(2, dtype=torch.float64)
        try:
            DDPStrategy(group).check_gradients([("x", parameter)], error, sums)
        except ValueError as error:
            return " ".join(str(error).split()[:3])


def flat_shards(group, offload):
    """Soren over one flat shard per rank, as ZeRO 2 has it."""
    put = on_cpu if offload else on_gpu
    layout = flat_partitions({name: SHAPES[name] for name in MATRICES}, group.size())
    with GPU():
        flat = nn.Parameter(put(shard(drawn(0), group)))
        optimizer = optim.Soren([nn.Parameter(torch.ones(2, 2))], lr=0.02)
        optimizer.param_groups[0]["params"] = [flat]
        optimizer.strategy = ZeroStrategy({flat: layout}, group, torch.device("gpu"))
        for step in range(NUM_STEPS):
            flat.grad = put(shard(drawn(1 + step), group))
            optimizer.step()
        found = getattr(flat.detach(), "contents", flat.detach())
    wanted = dict(zip(SHAPES, trained("Soren", on_cpu), strict=True))
    return torch.allclose(found, shard(wanted, group), rtol=1e-5, atol=1e-6)  # other matrices are mapped in one batch


def shard(tensors, group):
    return torch.cat([tensors[name].reshape(-1) for name in MATRICES]).chunk(group.size())[group.rank()]


def fused(group):
    """AdamW by the fused kernel."""
    with GPU():
        found = trained("AdamW", on_gpu, observed=group.rank() == 1, fused=True)
    return same(found, trained("AdamW", on_cpu, fused=True))


def measured(group):
    """A step's measurements, the end's and the export's, as of a run on one GPU."""
    from dataclasses import replace
    from types import SimpleNamespace

    from soren_align.sharding.ranks import Ranks
    from soren_align.training.lost_updates import FirstStepCheck, LostUpdatesPolicy, change_after_saving
    from soren_align.training.measure.measurements import Measurements
    from soren_align.training.saving import export_weights
    from soren_align.training.trained_optimizer import AttachedOptimizer, OptimizerCheck, StartingWeights

    def run(put):
        dtype = torch.bfloat16 if group.rank() else torch.float32
        matrix, vector = nn.Parameter(put(drawn(0, dtype)["a"])), nn.Parameter(put(drawn(0, dtype)["norm"]))
        groups = [{"params": [matrix], "param_names": ["a"]}, {"params": [vector], "param_names": ["norm"]}]
        groups[1] |= {"rule": "adamw", "lr": 0.02}
        optimizer = optim.Soren(groups, lr=0.02, compensation="kahan")
        attached = AttachedOptimizer(optimizer, [], optimizer, "fsdp2", [[matrix], [vector]], Ranks())
        start = StartingWeights([(0, matrix), (1, vector)])
        measurements = Measurements(attached, start)
        first_step = FirstStepCheck(attached, LostUpdatesPolicy("warn", lambda groups, warnings: None))
        state = SimpleNamespace(global_step=0, logging_steps=1, stateful_callbacks=None)
        args = SimpleNamespace(fp16=False)
        callbacks = (OptimizerCheck(attached), measurements, first_step)
        for event in ("on_train_begin", "on_step_begin"):
            for each in callbacks:
                getattr(each, event)(args, state, None)
        matrix.grad, vector.grad = put(drawn(1, dtype)["a"]), put(drawn(1, dtype)["norm"])
        optimizer.step()
        for each in callbacks:
            each.on_optimizer_step(args, state, None)
        values = {key: value for key, value in measurements.values(1).items() if key != "tokens_per_second"}
        two = SimpleNamespace(num_ranks=2, gather=lambda norm: [norm, norm], sums=list)
        replace(attached, ranks=two).refuse_unaveraged_gradients(1)
        named = [
            (name, p.detach(), optimizer.state[p].get("compensation")) for name, p in {"a": matrix, "b": vector}.items()
        ]
        exported = export_weights(named, torch.float16).values()
        saved = change_after_saving(start, attached, torch.bfloat16)
        return values, first_step.groups, saved, [tensor.tolist() for tensor in exported]

    with GPU():
        there = run(on_gpu)
    return there, run(on_cpu)


def refusals(group):
    """What must not be done -> whether it was refused."""
    with GPU():
        here, there = torch.ones(3), torch.ones(3, device="gpu")
        scalar, step = torch.tensor(2.0), torch.tensor(1.0)
        acts = {
            "sum of both": lambda: here + there,
            "written scalar": lambda: scalar.add_(there.sum()),
            "stack": lambda: torch.stack([scalar, there.sum()]),
            "matrix product": lambda: torch.ones(3, 3, device="gpu") @ here,
            "collective on the CPU": lambda: dist.all_reduce(here, group=group),
            "step on the CPU": lambda: torch._fused_adamw_(
                [there], [there], [there], [there], [], [step], lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0,
                eps=1e-8, amsgrad=False, maximize=False,
            ),
        }  # fmt: skip
        assert torch.equal((there * scalar).cpu(), 2 * here)
        dist.all_reduce(there, group=group)
        assert there.cpu().tolist() == [2.0] * 3
        return {name: refused(act) for name, act in acts.items()}


def refused(act):
    try:
        act()
    except WrongDevice:
        return True
    return False
