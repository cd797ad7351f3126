"""NorMuon in small, to show a rule whose map has a state: the second moment of the rows of its output."""

import torch
from soren_align.core.optimizer_settings import COEFFICIENT
from soren_align.optim import SpectralOptimizer
from soren_align.optim.group_settings import number
from soren_align.sharding import DDPStrategy, ZeroStrategy, flat_partitions
from torch import nn

SHAPES = {"a": (6, 9), "b": (9, 6), "c": (5, 7), "d": (64, 80)}


class NorMuon(SpectralOptimizer):
    """O / sqrt(v), v the moving average of the mean squares of O's rows. For O a matrix over its norm, not Muon's."""

    map_settings = {"beta2": number(COEFFICIENT)}  # noqa: RUF012
    map_state = {"row_moment": lambda m, n: (m, 1)}  # noqa: RUF012

    def map_matrix(self, x, group, context, row_moment):
        """x: [..., m, n]; row_moment: [..., m, 1], changed in place."""
        output = x / x.norm(dim=(-2, -1), keepdim=True)
        row_moment.lerp_(output.square().mean(-1, keepdim=True), 1 - group["beta2"])
        return output / row_moment.sqrt().add(1e-8)


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def trained(num_steps=3, **settings):
    """The parameters and their optimizer on one process."""
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    optimizer = NorMuon(parameters.items(), lr=0.1, beta2=0.9, **settings)
    step_(optimizer, parameters, range(num_steps))
    return parameters, optimizer


def step_(optimizer, parameters, seeds):
    for seed in seeds:
        for name, grad in gradients(seed).items():
            parameters[name].grad = grad
        optimizer.step()


def replicas(group):
    """The weights and row moments on this rank after three steps of DDP."""
    parameters, optimizer = trained(0)
    optimizer.strategy = DDPStrategy(group)
    step_(optimizer, parameters, range(3))
    flat = torch.cat([p.detach().flatten() for p in parameters.values()])
    return flat, torch.cat([optimizer.state[p]["row_moment"] for p in parameters.values()])


def flat_shards(group, momentum_dtype):
    """The weights and row moments in this rank's flat shard after three steps, as ZeRO 2 has them."""
    layout = flat_partitions(SHAPES, group.size())

    def shard(tensors):
        whole = torch.cat([tensors[name].flatten() for name in SHAPES])
        padded = torch.nn.functional.pad(whole, (0, -whole.numel() % group.size()))
        return padded.chunk(group.size())[group.rank()]

    flat = nn.Parameter(shard({name: torch.ones(shape) for name, shape in SHAPES.items()}).clone())
    optimizer = NorMuon([nn.Parameter(torch.ones(2, 2))], lr=0.1, beta2=0.9, momentum_dtype=momentum_dtype)
    optimizer.param_groups[0]["params"] = [flat]
    optimizer.strategy = ZeroStrategy({flat: layout}, group, torch.device("cpu"))
    for step in range(3):
        flat.grad = shard(gradients(step)).clone()
        optimizer.step()
    return flat.detach(), optimizer.state[flat]["row_moment"]
