"""Collectives between processes of this machine: gloo on CPUs, NCCL on GPUs, right to the bit,
their bandwidth, and ten sharded steps beside those of one process.

A rank is a process of its own: python -m soren_align.doctor.ranks DEVICE FILE [capture], with RANK
and the like set.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.text import count
from .checks import Finding, Machine, judged, last_line, skipped

NUM_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements of a tensor in float32."""
NUM_ROUNDS = {"cpu": 5, "cuda": 10}
RANKS_SECONDS = 100.0
"""The limit of all ranks, of which importing torch on a busy machine takes a minute."""
CAPTURE_SECONDS = 200.0
"""The same for a capture, which starts DeepSpeed too."""
MAX_FLAG_SECONDS = 0.1
"""The limit of the small all-reduce of each training step; on one machine it takes less than 1
ms."""
TOLERANCE = 2e-6
"""float32, ten steps: other sums over ranks, magnified by the map's slope at zero
(research/studies/parity.md)."""
NUM_STEPS = 10
MIN_BANDWIDTH = 20e9
"""Bytes per second between GPUs, of PCIe 4; NVLink reaches 250 to 350 GB/s on eight H100s."""


def ranks(machine: Machine) -> Iterator[Finding]:
    """Collectives of gloo, and of NCCL on each GPU."""
    yield from _collectives("gloo", "cpu", max(2, machine.num_processes), machine.folder)
    if machine.num_gpus:
        yield from _collectives(
            "NCCL", "cuda", min(machine.num_processes, machine.num_gpus), machine.folder
        )
    else:
        yield skipped("NCCL", "no GPUs")


def capture(machine: Machine) -> Iterator[Finding]:
    """Write `machine.capture`: a step of each sharding strategy (sharding/capture.py)."""
    backend, device, num_ranks = "gloo", "cpu", max(2, machine.num_processes)
    if machine.num_gpus:
        backend, device, num_ranks = "NCCL", "cuda", min(machine.num_processes, machine.num_gpus)
    file = Path(machine.capture)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # of an earlier capture
    problem = _run_ranks(num_ranks, [device, str(file), "capture"], CAPTURE_SECONDS)
    reason = f"{problem}; report this line with the file, which has the strategies before"
    name = f"capture, {backend}, {count(num_ranks, 'process', 'processes')}"
    yield judged(name, file.name, "a step of each strategy", not problem, reason)


def _collectives(backend: str, device: str, num_ranks: int, folder: Path) -> Iterator[Finding]:
    output = folder / "ranks.json"
    output.unlink(missing_ok=True)
    problem = _run_ranks(num_ranks, [device, str(output)], RANKS_SECONDS)
    if problem or not output.is_file():
        name = f"{backend}, {count(num_ranks, 'process', 'processes')}"
        reason = f"{backend} fails between {num_ranks} processes ({problem}); set"
        reason += " GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that connects them"
        yield Finding(name, "an error", "results of each rank", "FAILED", reason)
        return
    results = json.loads(output.read_text())
    output.unlink()
    yield from judged_results(backend, device, num_ranks, results)


def _run_ranks(num_ranks: int, arguments: Sequence[str], seconds: float) -> str:
    """Run `main` with these arguments on each rank; return the first rank's problem, or ""."""
    # A port that is free now: another job of this machine may hold a fixed one.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    env |= {"ACCELERATE_USE_CPU": "true"} if arguments[0] == "cpu" else {}
    # A rank is a process without a launcher: what is tested is the network, not torchrun.
    processes = []
    for rank in range(num_ranks):
        command = [sys.executable, "-m", "soren_align.doctor.ranks", *arguments]
        own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True))
    end, problems = time.monotonic() + seconds, []
    for rank, process in enumerate(processes):
        try:
            errors = process.communicate(timeout=max(0.1, end - time.monotonic()))[1]
            if code := process.returncode:
                problems.append(f"rank {rank}, exit code {code}: {last_line(errors)}")
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            problems.append(f"rank {rank} did not end within {seconds:.0f} s")
    return problems[0] if problems else ""


def judged_results(
    backend: str, device: str, num_ranks: int, results: dict[str, Any]
) -> Iterator[Finding]:
    """The findings of what the first rank has written."""
    megabytes = f"{4 * NUM_ELEMENTS[device] / 1e6:.0f} MB"
    has_bandwidth = device == "cuda" and num_ranks > 1
    expected = "exact" + (f", >= {MIN_BANDWIDTH / 1e9:.0f} GB/s" if has_bandwidth else "")
    for name in ("all_reduce", "all_to_all"):
        is_right, bandwidth = results[name]["is_right"], results[name]["bytes_per_second"]
        measured = f"{megabytes}, {bandwidth / 1e9:.3g} GB/s" if num_ranks > 1 else megabytes
        problem = (
            f"{name} of {backend} is slow: {bandwidth / 1e9:.1f} GB/s; look at nvidia-smi topo -m"
        )
        if not is_right:
            problem = (
                f"{name} of {backend} returns wrong sums or elements; do not train with several"
                " processes"
            )
        passes = is_right and not (has_bandwidth and bandwidth < MIN_BANDWIDTH)
        line = f"{backend} {name}, {count(num_ranks, 'process', 'processes')}"
        yield judged(line, measured, expected, passes, problem)
    if (difference := results.get("difference")) is not None:
        reason = f"{NUM_STEPS} steps with matrices sharded by {backend} are others than those of"
        reason += f" one process: a weight differs by {difference:.2g}; train with one process"
        name = f"parity, {backend}, {count(num_ranks, 'process', 'processes')}"
        expected = f"<= {TOLERANCE:g} from one process"
        yield judged(name, f"{difference:.1e}", expected, difference <= TOLERANCE, reason)
    if device == "cpu":
        seconds = results["flag_seconds"]
        reason = f"a small all-reduce of gloo takes {1e3 * seconds:.0f} ms, and each step has one"
        expected = f"< {1e3 * MAX_FLAG_SECONDS:.0f} ms"
        yield judged(
            "gloo latency", f"{1e3 * seconds:.2f} ms", expected, seconds < MAX_FLAG_SECONDS, reason
        )


def sharded_difference(device: str) -> float:
    """Return the largest difference of a weight between steps with matrices sharded over the ranks
    and the same steps of this process alone.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ..optim import Soren
    from ..sharding import FSDP2Strategy

    weights: list[list[torch.Tensor]] = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        layers = (torch.nn.Linear(64, 97, bias=False), torch.nn.Linear(97, 64, bias=False))
        model = torch.nn.Sequential(*layers).to(device)
        if is_sharded:
            fully_shard(model, mesh=init_device_mesh(device, (torch.distributed.get_world_size(),)))
        # Equal steps, not equal losses: a wrong shard shows in a weight first.
        optimizer = Soren(model.named_parameters(), lr=0.005)
        if is_sharded:
            optimizer.strategy = FSDP2Strategy()
        for _ in range(NUM_STEPS):
            # All ranks have the same inputs, so that the mean of their gradients is that of one.
            inputs = torch.randn(256, 64).to(device)
            (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        # Any: a DTensor has `full_tensor`, a plain parameter has not.
        parameters: list[Any] = [parameter.detach() for parameter in model.parameters()]
        weights.append([p.full_tensor() if is_sharded else p for p in parameters])
    return max(float((a - b).abs().max()) for a, b in zip(*weights, strict=True))


def main(arguments: list[str]) -> None:
    """One rank. The first writes what all have measured, or captured."""
    import torch
    import torch.distributed as dist

    from ..sharding.ranks import current_ranks, init_process_group

    device, output, *jobs = arguments
    if jobs:
        from ..sharding.capture import captures

        init_process_group(CAPTURE_SECONDS)
        group = current_ranks()
        # After each strategy: ranks that fail leave those before it.
        for content in captures(device):
            if group.is_first:
                Path(output).write_text(json.dumps(content) + "\n")
        group.destroy()
        return
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    init_process_group(RANKS_SECONDS)
    group = current_ranks()
    num_ranks, numel = group.num_ranks, NUM_ELEMENTS[device] // group.num_ranks * group.num_ranks
    # Small whole numbers: their sums are exact in any order.
    index = torch.arange(numel, dtype=torch.int64) % 1000
    results = {}
    # The sum of gradients, and the exchange by which matrices reach their owners.
    for name in ("all_reduce", "all_to_all"):
        own = (index + group.rank).float().to(device)
        if name == "all_reduce":
            expected = num_ranks * index + num_ranks * (num_ranks - 1) // 2
            share = 2 * (num_ranks - 1) / num_ranks
        else:
            part = index.view(num_ranks, -1)[group.rank]
            expected = torch.cat([part + sender for sender in range(num_ranks)])
            share = (num_ranks - 1) / num_ranks
        received, seconds = torch.empty_like(own), []
        for _ in range(1 + NUM_ROUNDS[device]):
            # all_reduce replaces its input: each round must begin with the same numbers.
            received.copy_(own)
            synchronize()
            group.barrier()
            begin = time.perf_counter()
            if name == "all_reduce":
                dist.all_reduce(received)
            else:
                dist.all_to_all_single(received, own)
            synchronize()
            seconds.append(time.perf_counter() - begin)
        is_right = not group.any(not torch.equal(received.cpu(), expected.float()))
        # The first round makes connections, and other work slows some: the fastest is the network's
        # own.
        fastest = min(seconds[1:])
        results[name] = {"is_right": is_right, "bytes_per_second": 4 * numel * share / fastest}
    # The flag that all ranks agree on in each step: whether one of them stops.
    begin = time.perf_counter()
    for _ in range(20):
        group.any(False)
    results["flag_seconds"] = (time.perf_counter() - begin) / 20
    # Wrong collectives make wrong steps, or none: they are judged alone.
    if all(result["is_right"] for result in (results["all_reduce"], results["all_to_all"])):
        results["difference"] = sharded_difference(device)
    if group.is_first:
        Path(output).write_text(json.dumps(results))
    group.destroy()


if __name__ == "__main__":
    main(sys.argv[1:])
