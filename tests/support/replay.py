"""Replay a capture of `doctor --capture` in this process: a thread for each rank, in torch's process group of threads.

The tensors of each call of `step()` have the captured shapes and places; weights and gradients are drawn. The replay is
recorded as the captured run was, so that `first_difference` compares records of one form.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from soren_align.optim import local
from soren_align.sharding import DDPStrategy, FSDP2Strategy, ZeroStrategy, capture, flat_partitions, parameter_slices
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed import multi_threaded_pg as threads

WAIT_SECONDS = 60  # after which ranks that have not ended wait for one another


def captured(group, way):
    """The job of a rank: its part of a capture."""
    return capture.captured(way, "cpu")


def replay(content, way):
    """The calls of `step()` of each rank, and the largest difference of a weight from the steps of one process.

    AssertionError with the first collective that is not the captured one, if the ranks cannot end their steps.
    """
    num_ranks, store, excepthook = len(content[way]), dist.HashStore(), sys.excepthook
    calls = [Call(way, of_ranks, content["bucket_mb"]) for of_ranks in zip(*content[way], strict=True)]
    records = [[] for _ in range(num_ranks)]

    def on_rank(rank):
        dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
        try:
            return max(call.step(rank, records[rank]) for call in calls)
        except BaseException as error:
            threads.ProcessLocalGroup.exception_handle(error)  # the other ranks wait for this one
            raise
        finally:
            dist.destroy_process_group()

    threads.ProcessLocalGroup.reset()
    threads._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with ThreadPoolExecutor(num_ranks) as pool:
            futures = [pool.submit(on_rank, rank) for rank in range(num_ranks)]
            if wait(futures, WAIT_SECONDS).not_done:
                threads.ProcessLocalGroup.exception_handle(None)
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        threads._uninstall_threaded_pg()
        sys.excepthook = excepthook  # each group has put its own around it
    records = json.loads(json.dumps(records))
    if errors := [future.exception() for future in futures if future.exception()]:
        # Ranks that waited for one with an error have ended by SystemExit.
        cause = next((error for error in errors if not isinstance(error, SystemExit)), None)
        # Of a step that failed, the collectives alone are known.
        so_far = [[expected | {"collectives": call["collectives"]} for expected, call in zip(*calls, strict=False)]
                  for calls in zip(content[way], records, strict=True)]  # fmt: skip
        raise AssertionError(first_difference(content, way, so_far)) from cause
    return records, max(future.result() for future in futures)


class Call:
    """One call of `step()` on all ranks, and the same step of one process, `expected`.

    weights, gradients, expected: whole, by name. AdamW's flat tensors have one name and one content on all ranks.
    """

    def __init__(self, way, of_ranks, bucket_mb):
        self.way, self.of_ranks, self.bucket_mb = way, of_ranks, bucket_mb
        groups = [(rank, group) for rank, call in enumerate(of_ranks) for group in call["groups"]]
        shards = [(rank, *shard) for rank, group in groups for shard in group.get("shards", ())]
        matrices = {name: shape for _, name, shape, *_ in shards}
        others = {t[0]: t[3] for _, group in groups if group["rule"] == "adamw" for t in group["tensors"]}
        shapes, generator = matrices | others, torch.Generator().manual_seed(0)
        self.weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        self.gradients = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        self.layout = None
        if way == "ZeRO 3":
            self.layout = parameter_slices(matrices, len(of_ranks))
        elif way in ("ZeRO 1", "ZeRO 2") and matrices:
            # Paddings depend on the machine and the version of DeepSpeed: they are read, all else is computed.
            (numel,) = {t[3][0] for _, group in groups if group["rule"] == "spectral" for t in group["tensors"]}
            starts = [rank * numel + start for rank, _, _, offset, start, _ in shards if offset == 0]
            self.layout = flat_partitions(matrices, len(of_ranks), partition_numel=numel, starts=starts)
        parameters = {name: nn.Parameter(weight.clone()) for name, weight in self.weights.items()}
        for name, parameter in parameters.items():
            parameter.grad = self.gradients[name]
        rules = (("spectral", matrices), ("adamw", others))
        optimizer_of([(rule, {name: parameters[name] for name in names}) for rule, names in rules]).step()
        self.expected = {name: parameter.detach() for name, parameter in parameters.items()}

    def step(self, rank, records):
        """The largest difference of a weight on this rank from that of one process; adds the record to `records`."""
        groups, expected = [], []
        for group in self.of_ranks[rank]["groups"]:
            named = {t[0]: nn.Parameter(self.placed(self.weights, t, rank)) for t in group["tensors"]}
            for tensor, parameter in zip(group["tensors"], named.values(), strict=True):
                parameter.grad = self.placed(self.gradients, tensor, rank)
                expected.append((parameter, self.placed(self.expected, tensor, rank)))
            groups.append((group["rule"], named))
        flat = [parameter for rule, named in groups if rule == "spectral" for parameter in named.values()]
        of_zero = partial(ZeroStrategy, dict.fromkeys(flat, self.layout))
        optimizer = optimizer_of(groups)
        strategy = {"DDP": DDPStrategy, "FSDP2": FSDP2Strategy}.get(self.way, of_zero)
        optimizer.strategy = strategy(bucket_mb=self.bucket_mb)
        capture.record(optimizer, records)
        optimizer.step()
        differences = [(local(p.detach()) - local(e)).abs().amax() for p, e in expected if local(e).numel()]
        return float(max(differences, default=0))

    def placed(self, numbers, tensor, rank):
        """The part of the numbers that this rank has in a captured tensor."""
        name, _, _, shape, _ = tensor
        if self.way == "FSDP2":
            mesh = init_device_mesh("cpu", (len(self.of_ranks),))
            return distribute_tensor(numbers[name], mesh, [Shard(0)], src_data_rank=None)
        if name in numbers:
            return numbers[name].clone()
        flat = torch.zeros(shape)
        shards = ((weight.name, *shard) for weight in self.layout.weights for shard in weight.shards)
        for weight, of_rank, offset, start, numel in shards:
            if of_rank == rank:
                flat[start : start + numel] = numbers[weight].view(-1)[offset : offset + numel]
        return flat


def optimizer_of(groups):
    """Soren with the groups (rule, parameters by name), which may be empty or flat."""
    optimizer = capture.soren(*([("", nn.Parameter(torch.ones([1] * ndim)))] for ndim in (2, 1)))
    by_rule = {group["rule"]: group for group in optimizer.param_groups}
    optimizer.param_groups = [
        by_rule[rule] | {"params": [*named.values()], "param_names": [*named]} for rule, named in groups
    ]
    return optimizer


def first_difference(content, way, replayed):
    """A sentence about the first difference of a replay from the capture, on any rank; None if they are equal."""
    differences = []
    for rank, calls in enumerate(zip(content[way], replayed, strict=True)):
        for number, of_both in enumerate(zip_longest(*calls, fillvalue={}), start=1):
            for part, lists in enumerate(zip(*map(parts, of_both), strict=True)):
                pairs = zip_longest(*lists, fillvalue=("", "nothing"))
                for position, (expected, actual) in enumerate(pairs):
                    if expected != actual:
                        place = f"{way}, rank {rank}, call {number} of step(), {expected[0] or actual[0]}"
                        sentence = f"{place}: expected {expected[1]}, found {actual[1]}"
                        differences.append((number, part, position, rank, sentence))
    return min(differences)[-1] if differences else None


def parts(call):
    """The parts of a record, causes before their consequences: lists of a place and what is there."""
    groups, plan = call.get("groups", ()), call.get("plan", ())
    yield [(f"tensor {tensor[0]} of {group['rule']}", tensor) for group in groups for tensor in group["tensors"]]
    yield [(f"shard of {shard[0]}", shard) for group in groups for shard in group.get("shards", ())]
    yield [(f"number {position} of the exchange", [name, bucket]) for position, (name, _, bucket) in enumerate(plan, 1)]
    yield [(f"owner of {name}", f"rank {owner}") for name, owner, _ in plan]
    for part in ("mapped", "collectives"):
        yield [(f"number {position} of {part}", line) for position, line in enumerate(call.get(part, ()), 1)]
