"""Capture a step under each strategy: who has which elements, who maps which matrix, and the order
of the collectives; no data.

`doctor --capture` writes this for the ranks of any machine. The tests replay it in one process
(tests/support/replay.py), so that the layouts of GPUs that we do not have are tried here.
"""

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ..optim import Soren
from ..optim.group_settings import names_of
from ..optim.layout import local
from .collectives import recorded
from .ddp import DDPStrategy
from .engine import start_deepspeed
from .fsdp import FSDP2Strategy
from .ranks import current_ranks
from .zero import set_zero_strategy

WAYS = ("DDP", "FSDP2", "ZeRO 1", "ZeRO 2", "ZeRO 3")
"""ZeRO 3 is the last: it replaces torch's `linear`."""
BUCKET_MB = 0.02
"""One to three of the matrices below: several buckets."""
SIZES = (48, 97, 48, 97, 131, 20, 5, 48)
"""Features of the model's layers: odd ones, two matrices of one shape, and 5 rows, of which not
every rank of eight has one. A layer of 48 inputs has a bias too."""


def captures(device: str) -> Iterator[dict[str, Any]]:
    """The capture so far, after each strategy: versions, and the calls of `step` by rank.
    Collective.
    """
    packages = ["torch", *(["deepspeed"] if find_spec("deepspeed") else [])]
    content: dict[str, Any] = {package: version(package) for package in packages}
    content |= {"backend": str(dist.get_backend_config()), "device": device, "bucket_mb": BUCKET_MB}
    for way in WAYS if "deepspeed" in packages else WAYS[:2]:
        content[way] = current_ranks().gather(captured(way, device))
        yield content


def captured(way: str, device: str) -> list[dict[str, Any]]:
    """The calls of Soren's `step` in one step of a small model on this rank. Collective.

    way: one of WAYS; DeepSpeed calls `step` several times. device: "cpu" or "cuda".
    """
    torch.manual_seed(0)
    layers = [nn.Linear(n, m, bias=n == SIZES[0]) for n, m in pairwise(SIZES)]
    model: Any = nn.Sequential(*layers).to(device)
    if way == "FSDP2":
        fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
    optimizer = soren(*([p for p in model.named_parameters() if p[1].ndim == n] for n in (2, 1)))
    engine: Any = None
    if way.startswith("ZeRO"):
        start_deepspeed(on_cpu=device == "cpu")
        import deepspeed  # pyright: ignore[reportMissingImports]

        zero = {"stage": int(way[-1]), "overlap_comm": False, "reduce_bucket_size": 100_000}
        config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        set_zero_strategy(engine.optimizer, BUCKET_MB)
    else:
        optimizer.strategy = {"DDP": DDPStrategy, "FSDP2": FSDP2Strategy}[way](bucket_mb=BUCKET_MB)
    calls: list[dict[str, Any]] = []
    record(optimizer, calls)
    # All ranks have the same inputs, so that replicas need no average.
    loss = (engine or model)(torch.randn(2, SIZES[0]).to(device)).square().mean()
    if engine is None:
        loss.backward()
        optimizer.step()
    else:
        engine.backward(loss)
        engine.step()
        engine.destroy()
    return calls


def soren(matrices: Sequence[Any], others: Sequence[Any]) -> Soren:
    """Soren for named matrices, with AdamW for the other parameters."""
    groups = [{"params": matrices}, {"rule": "adamw", "lr": 1e-3, "params": others}]
    return Soren(groups, lr=0.02, adjust_lr_fn="original")


def record(optimizer: Soren, calls: list[dict[str, Any]]) -> None:
    """Add a record to `calls` at each call of `step` from now on, of names and numbers:

    groups: rule, tensors [name, dtype, placement, shape, shape on this rank], shards here [weight,
    shape, offset, start, numel]. plan: [weight, owner, bucket] in the order of the exchange.
    mapped: the matrices in the order in which this rank maps them. collectives: in their order.
    """
    step = optimizer.step

    def recorded_step() -> None:
        groups, plan, mapped = [], [], []
        optimizer.map_observers = frozenset({lambda applied: mapped.append(applied.name)})
        with recorded() as collectives:
            # Before the step: of one that fails, it has the collectives so far.
            call = {"groups": groups, "plan": plan, "mapped": mapped, "collectives": collectives}
            calls.append(call)
            step()
        for group in optimizer.param_groups:
            named = list(zip(names_of(group), group["params"], strict=True))
            groups.append({"rule": group["rule"], "tensors": [_tensor(*pair) for pair in named]})
            if named and group["rule"] == "spectral":
                exchange: Any = optimizer.strategy.plan(named, {}, {})  # that of the step
                weights, owners = exchange.plan.layout.weights, exchange.plan.owners
                groups[-1]["shards"] = [
                    [weight.name, weight.shape, shard.offset, shard.start, shard.numel]
                    for weight in weights
                    for shard in weight.shards
                    if shard.rank == exchange.rank
                ]
                buckets = [("local", exchange.plan.local), *enumerate(exchange.plan.buckets)]
                plan += [[weights[i].name, owners[i], b] for b, indices in buckets for i in indices]

    optimizer.step = recorded_step  # type: ignore[method-assign]


def _tensor(name: str, tensor: Tensor) -> list[Any]:
    placement = "plain"
    if isinstance(tensor, DTensor):
        placement = f"{', '.join(map(str, tensor.placements))} of {tensor.device_mesh.size()}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [name, dtype, placement, [*tensor.shape], [*local(tensor).shape]]
