"""Jobs about step plans: steps that cannot be planned, and how many plans are cached."""

import copy

import torch
from soren_align.optim import Soren
from soren_align.sharding import DDPStrategy, FSDP2Strategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.toy_jobs import error_of


def unplannable_step(group, fault):
    """What the step of two groups says of the second on this rank, and whether anything has changed, momentum too."""
    torch.manual_seed(0)
    broken = fault == "two dtypes" or group.rank() == 1
    dtype = torch.float64 if fault != "another model" and broken else torch.float32
    a, b, c = (
        nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(5, 5).to(dtype)),
    )  # fmt: skip
    name = "d" if fault == "another model" and broken else "c"
    optimizer = Soren([{"params": [("a", a)]}, {"params": [("b", b), (name, c)]}], lr=0.1)
    optimizer.strategy = DDPStrategy()
    for matrix in (a, b, c):
        matrix.grad = torch.ones_like(matrix)
    before = copy.deepcopy([a, b, c])
    message = error_of(optimizer.step)
    unchanged = all(torch.equal(p, q) for p, q in zip((a, b, c), before, strict=True))
    return message, unchanged and not any(state["exp_avg"].any() for state in optimizer.state.values())


def replicated_shards(group, with_gradient):
    """The error of a step of HSDP."""
    model = nn.Linear(6, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1, group.size()), mesh_dim_names=("replicate", "shard")))
    optimizer = Soren(model.named_parameters(), lr=0.1)
    optimizer.strategy = FSDP2Strategy()
    if with_gradient:
        model(torch.ones(3, 6)).sum().backward()
    return error_of(optimizer.step)


def many_subsets(group, num_plans):
    """The difference to one process after steps of all pairs of matrices, and how many plans and tensors are kept."""
    matrices, alone = ([nn.Parameter(torch.eye(4, 5) * i) for i in range(1, 5)] for _ in range(2))
    # One by one: in batches the maps differ by rounding.
    optimizer, reference = (Soren(params, lr=0.1, workspace_mb=0) for params in (matrices, alone))
    optimizer.strategy = DDPStrategy()
    optimizer.strategy.max_plans = num_plans
    most = 0
    for first in range(4):
        for second in range(4):
            for i, (p, q) in enumerate(zip(matrices, alone, strict=True)):
                p.grad = torch.full((4, 5), 0.1) if i in (first, second) else None
                q.grad = p.grad
            optimizer.step()
            reference.step()
            most = max(most, len(optimizer.strategy.exchanges))
    return max(float((p - q).detach().abs().max()) for p, q in zip(matrices, alone, strict=True)), most
