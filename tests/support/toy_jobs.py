"""Jobs that train the toy for ten steps, sharded in each way. Each returns its rank's `Result`."""

import os
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from soren_align.optim import Soren, build_optimizer
from soren_align.optim.step import spectral_step_
from soren_align.planning.flops import Meter
from soren_align.recipe import parallel
from soren_align.sharding import DDPStrategy, FSDP2Strategy, set_zero_strategy, start_deepspeed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.toy import NUM_STEPS, Run


@dataclass
class Result:
    weights: dict[str, torch.Tensor]
    num_maps: int
    state_numel: int  # of the momentum
    weights_numel: int  # that the spectral groups hold here
    bytes_sent: int
    peak_bytes: int
    plans: list[Any]
    momentum_dtypes: set[torch.dtype]
    losses: list[float] = field(default_factory=list)


def result(optimizer, weights):
    spectral = [p for g in optimizer.param_groups if g["rule"] == "spectral" for p in g["params"]]
    here = [getattr(p, "_local_tensor", p) for p in spectral]
    momenta = [optimizer.state[p]["exp_avg"] for p in spectral]
    exchanges = list(optimizer.strategy.exchanges.values())
    return Result(
        {name: weight.detach().clone() for name, weight in weights.items()}, optimizer.num_maps,
        sum(getattr(m, "_local_tensor", m).numel() for m in momenta), sum(p.numel() for p in here),
        sum(e.bytes_sent for e in exchanges), max((e.peak_bytes for e in exchanges), default=0),
        [e.plan for e in exchanges], {momentum.dtype for momentum in momenta},
    )  # fmt: skip


def part_of(tokens, group):
    """This rank's rows of a micro-batch."""
    return tokens.chunk(group.size())[group.rank()]


def train(model, optimizer, group, run):
    """The steps of a model that averages its own gradients over the ranks."""
    for step in range(NUM_STEPS):
        for tokens in run.batches(step):
            (model(part_of(tokens, group)) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad()


def ddp(group, run):
    model = run.model()
    optimizer = run.optimizer(model)
    optimizer.strategy = DDPStrategy(bucket_mb=run.bucket_mb)
    wrapped = nn.parallel.DistributedDataParallel(model)
    train(wrapped, optimizer, group, run)
    return result(optimizer, dict(model.named_parameters()))


def fsdp2(group, run):
    model = run.model()
    mesh = init_device_mesh("cpu", (group.size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = run.optimizer(model)
    optimizer.strategy = FSDP2Strategy(run.bucket_mb)
    train(model, optimizer, group, run)
    return result(optimizer, {name: p.full_tensor() for name, p in model.named_parameters()})


def refused_step(group, fault):
    """What a step says on this rank when rank 1 has the fault, and whether it changed anything."""
    torch.manual_seed(0)
    matrices = {"a": nn.Parameter(torch.randn(4, 6)), "b": nn.Parameter(torch.randn(6, 4))}
    optimizer = Soren(matrices.items(), lr=0.1)
    optimizer.strategy = DDPStrategy()
    for matrix in matrices.values():
        matrix.grad = torch.ones_like(matrix)
    if group.rank() == 1:
        if fault == "nan":
            matrices["b"].grad[2, 3] = torch.nan
        elif fault == "no gradient":
            matrices["b"].grad = None
        elif fault == "another model":
            optimizer.param_groups[0]["param_names"] = ["a", "c"]
    before = [matrix.detach().clone() for matrix in matrices.values()]
    try:
        optimizer.step()
    except (ValueError, FloatingPointError) as error:
        unchanged = all(torch.equal(m, b) for m, b in zip(matrices.values(), before, strict=True))
        return type(error).__name__, str(error), unchanged
    return None


def unused_parameter(group):
    """Whether a matrix without a gradient on any rank stays, and the other moves, alike on all ranks."""
    still, moving = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4, 6))
    optimizer = Soren([still, moving], lr=0.1)
    optimizer.strategy = DDPStrategy()
    moving.grad = torch.ones(4, 6)
    optimizer.step()
    return still.detach(), moving.detach()


def observed_step(group):
    """What an observer sees of one step of fully sharded matrices."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 1, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (group.size(),)))
    optimizer, seen = Soren(model.named_parameters(), lr=0.1, weight_decay=0.0), []

    def see(update):
        changed = any(bool((before != after).any()) for before, after, _ in update.applied())
        seen.append((update.name, tuple(update.weight.shape), changed))

    optimizer.strategy = FSDP2Strategy()
    optimizer.update_observers = frozenset({see})
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    return seen


def error_of(call, *arguments):
    """The message of the ValueError that the call raises; None if it raises none."""
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return None


def transposed_step(shape, group=None):
    """A weight [inputs, outputs] after a step with moments of rows, on one process or under FSDP2."""
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(shape))
    if group:
        fully_shard(model, mesh=init_device_mesh("cpu", (group.size(),)))
    groups = [{"params": [("w", model.w)], "weight_layouts": {"w": "transposed"}}]
    optimizer = Soren(groups, lr=0.1, second_moment="rows", adjust_lr_fn="match_rms_measured")
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 0, shape[1])
    if group:
        optimizer.strategy = FSDP2Strategy()
        grad = distribute_tensor(grad, model.w.device_mesh, model.w.placements)
    model.w.grad = grad
    optimizer.step()
    return model.w.detach()


def transposed_under_fsdp2(group, shape):
    """The whole weight after a `transposed_step`, or its error."""
    try:
        return transposed_step(shape, group).full_tensor()
    except ValueError as error:
        return str(error)


def second_moments_of_replicas(group, settings):
    """The second moments on this rank after two steps of DDP; group None: on one process."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((6, 9), (9, 6), (5, 7))]
    optimizer = Soren(parameters, lr=0.1, adjust_lr_fn="original", **settings)
    if group:
        optimizer.strategy = DDPStrategy(group)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    states = [optimizer.state[parameter] for parameter in parameters]
    moments = [state[key] for state in states for key in sorted(state) if key.startswith("exp_avg_sq")]
    return torch.cat([moment.flatten() for moment in moments])


def sharded_without_placement(group):
    """The error of a step of DTensors whose place nobody named."""
    model = nn.Linear(6, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (group.size(),)))
    optimizer = Soren(model.named_parameters(), lr=0.1)
    model(torch.ones(3, 6)).sum().backward()
    return error_of(optimizer.step)


def deepspeed(group, stage, run, config=None):
    """The toy under DeepSpeed; `config` adds to that of `deepspeed_engine`."""
    engine, optimizer = deepspeed_engine(group, stage, run, config or {})
    from deepspeed.utils import safe_get_full_fp32_param

    set_zero_strategy(engine.optimizer, run.bucket_mb)
    losses = []
    for step in range(NUM_STEPS):
        for tokens in run.batches(step):
            loss = engine(part_of(tokens, group))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    weights = {name: safe_get_full_fp32_param(p) if p.requires_grad else p.detach()
               for name, p in engine.module.named_parameters()}  # fmt: skip
    if stage == 3:  # which empties the groups between steps
        for i, flat in enumerate(engine.optimizer.fp32_partitioned_groups_flat):
            optimizer.param_groups[engine.optimizer.sub_group_to_group_id[i]]["params"].append(flat)
    found = result(optimizer, weights)
    found.losses = losses
    return found


def measured_exchange(group, stage, run):
    """The most bytes that the exchange of a step held beside the optimizer's tensors, and what it says that it held.

    The map is left out: it returns its input.
    """
    engine, optimizer = deepspeed_engine(group, stage, run, {})
    set_zero_strategy(engine.optimizer, run.bucket_mb)
    optimizer.map_matrix, optimizer.workspace_mb = lambda x, group, context: x, 0
    meter = Meter()

    def metered(*arguments, **settings):
        with meter:
            spectral_step_(*arguments, **settings)

    with patch("soren_align.optim.optimizer.spectral_step_", metered):
        for tokens in run.batches(0):
            engine.backward(engine(part_of(tokens, group)))
            engine.step()
    return meter.peak, max(exchange.peak_bytes for exchange in optimizer.strategy.exchanges.values())


def refused_deepspeed(group, stage, config, fault=None):
    """Why set_zero_strategy refuses, on this rank; `fault` is a change to the ZeRO optimizer of rank 1 before it."""
    engine, _ = deepspeed_engine(group, stage, Run(), config)
    if fault == "a number changed" and group.rank() == 1:
        flats = engine.optimizer.fp32_partitioned_groups_flat if stage == 3 else None
        (flats or engine.optimizer.single_partition_of_fp32_groups)[0].data[7] += 1
    elif fault == "another optimizer":
        engine.optimizer.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    return error_of(set_zero_strategy, engine.optimizer)


def deepspeed_engine(group, stage, run, config, make_optimizer=lambda run, model: run.optimizer(model)):
    """The toy's engine and its optimizer. make_optimizer may return None: then it is that of `config`."""
    os.environ.update(RANK=str(group.rank()), LOCAL_RANK=str(group.rank()), WORLD_SIZE=str(group.size()))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    start_deepspeed(on_cpu=True)
    import deepspeed

    model = run.model()
    optimizer = make_optimizer(run, model)
    zero_config = {"stage": stage, "overlap_comm": False}
    settings = {
        "train_micro_batch_size_per_gpu": 6 // group.size(), "gradient_accumulation_steps": 2,
        "gradient_clipping": run.clip, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        **config, "zero_optimization": {**zero_config, **config.get("zero_optimization", {})},
    }  # fmt: skip
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=parameters, config=settings)
    return engine, optimizer


class GradientDtypes(TorchDispatchMode):
    """Counts the numbers that collectives of more than 100 sum over the ranks, by dtype."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and "reduce" in func.name():
            for tensor in tree_leaves(args[:2]):
                if isinstance(tensor, torch.Tensor) and tensor.numel() > 100:
                    self.counts[tensor.dtype] += tensor.numel()
        return func(*args, **(kwargs or {}))


def gradient_dtypes(group, name):
    """The dtypes in which the gradients of a bfloat16 model are averaged with the shipped config `name`."""
    config = {key: value for key, value in parallel(name).config.items() if value != "auto"}
    zero = {key: value for key, value in config["zero_optimization"].items() if value != "auto"}
    zero |= {"reduce_bucket_size": 7000}
    config |= {"bf16": {"enabled": True}, "gradient_accumulation_steps": 1, "zero_optimization": zero}
    run = Run(dtype=torch.bfloat16)
    engine, _ = deepspeed_engine(group, zero["stage"], run, config)
    with GradientDtypes() as dtypes:
        engine.backward(engine(part_of(next(iter(run.batches(0))), group)))
    return dtypes.counts


def _product(module, step):
    """A loss whose gradients are multiples of 3/64, so that sums over 2 or 3 ranks are exact."""
    generator, total = torch.Generator().manual_seed(int(step)), 0
    for parameter in module.parameters(recurse=False):
        total += (parameter * torch.randint(-64, 65, parameter.shape, generator=generator) * 3 / 64).sum()
    return total


class GivenLinear(nn.Linear):
    forward = _product


class GivenEmbedding(nn.Embedding):
    forward = _product


class Given(nn.Module):
    """Parameters with exact gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = GivenEmbedding(96, 64)
        shapes = ((96, 64), (128, 80), (20, 48), (131, 48), (64, 97), (20, 48), (131, 48), (64, 97))
        self.layers = nn.ModuleList(GivenLinear(n, m, bias=m == 96) for m, n in shapes)
        self.lm_head = GivenLinear(64, 80, bias=False)

    def forward(self, step):
        return sum(module(step + i) for i, module in enumerate((self.embedding, *self.layers, self.lm_head)))


def with_exact_gradients(group, way, name, num_steps=6, more=None):
    """The weights of Given after steps with more settings. way: None, "DDP", "FSDP2", ZeRO's stage."""
    model = Given()

    def make_optimizer(_, model):
        settings = {} if name == "adamw" else {"adjust_lr_fn": "original"}
        return build_optimizer(model, name=name, lr=0.02, aux_lr=0.01, **settings | (more or {}))

    if isinstance(way, int):
        made = SimpleNamespace(model=lambda: model, clip=0.0)
        config = {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 1}
        engine, _ = deepspeed_engine(group, way, made, config, make_optimizer)
        from deepspeed.utils import safe_get_full_fp32_param

        set_zero_strategy(engine.optimizer, bucket_mb=0.05)
        for step in range(num_steps):
            engine.backward(engine(torch.tensor(step)))
            engine.step()
        return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    if way == "FSDP2":
        mesh = init_device_mesh("cpu", (group.size(),))
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
    optimizer: Any = make_optimizer(None, model)
    if way in ("DDP", "FSDP2"):
        optimizer.strategy = DDPStrategy() if way == "DDP" else FSDP2Strategy(bucket_mb=0.05)
    for step in range(num_steps):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
    weights = dict(model.named_parameters())
    return {name: (p.full_tensor() if way == "FSDP2" else p).detach().clone() for name, p in weights.items()}
