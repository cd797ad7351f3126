"""Trainings of the quickstart's model by the command itself: parity of the sharding strategies.

Each is a process of its own: python -m soren_align sft quickstart/sft --set ...
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors.torch import load_file

from .findings import Finding, Machine, judged, skipped

TOLERANCE = 2e-6
"""float32, ten steps: other sums over ranks, magnified by the map's slope at zero (docs/studies/parity.md)."""
NUM_STEPS = 10
SHARDED = ("zero1", "zero2", "zero3", "fsdp2")
QUICK = ("zero2", "fsdp2")


class TrainingError(Exception):
    """A training that ended with another exit code than 0: the message is the last line of its output."""


def settings(machine: Machine, num_ranks: int, folder: Path) -> list[str]:
    """Those of all trainings: the same examples in each step on any number of processes, clipped, in float32."""
    texts = [f"run.output_dir={folder}", "run.overwrite=true", f"trainer.max_steps={NUM_STEPS}"]
    texts += [f"run.global_batch_size={4 * num_ranks}", "trainer.per_device_train_batch_size=2", "data.eval=null"]
    texts += ["trainer.eval_strategy=no", "trainer.save_strategy=no", "trainer.logging_steps=1"]
    texts += ["trainer.warmup_steps=0", "trainer.lr_scheduler_type=constant", "optimizer.precision=float32"]
    return texts + (["trainer.use_cpu=false", "run.num_threads=null"] if machine.num_gpus else [])


def train(name: str, machine: Machine, num_ranks: int, *more: str, processes: int = 1, task: str = "sft") -> Path:
    """Train and return the run's folder. num_ranks: of the global batch. Raises TrainingError."""
    folder = machine.folder / "runs" / name
    texts = [*settings(machine, num_ranks, folder), *more]
    command = [sys.executable, "-m", "soren_align", task, f"quickstart/{task}", "--no-eval"]
    command += [word for text in texts for word in ("--set", text)]
    command += ["--processes", str(processes)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise TrainingError(last_words(done.stderr, done.returncode))
    return folder


def last_words(errors: str, code: int) -> str:
    """The last line of a training's output that is not empty."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return f"exit code {code}: {lines[-1] if lines else 'no output'}"[:600]


def furthest(a: Path, b: Path) -> float:
    """The largest difference of any weight between the models of two runs."""
    weights, others = (load_file(run / "model" / "model.safetensors") for run in (a, b))
    assert weights.keys() == others.keys()
    return max(float((weights[name].float() - others[name].float()).abs().max()) for name in weights)


def parity(machine: Machine) -> Iterator[Finding]:
    """Ten steps under each sharding strategy, against one process."""
    num_ranks = min(machine.num_processes, machine.num_gpus) if machine.num_gpus else machine.num_processes
    alone = train("alone", machine, num_ranks)
    strategies: Sequence[str] = SHARDED if num_ranks == 1 else ("ddp", *SHARDED)
    for strategy in strategies:
        name = f"parity {strategy}, {num_ranks} {'process' if num_ranks == 1 else 'processes'}"
        if machine.quick and strategy not in QUICK:
            yield skipped(name, "--quick leaves it out")
        elif strategy == "fsdp2" and not machine.num_gpus:
            yield skipped(name, "FSDP2 needs GPUs")
        else:
            yield compared(name, strategy, machine, num_ranks, num_ranks, alone)
    if num_ranks == 1:
        yield skipped("parity ddp", "one GPU")
    elif not machine.quick:
        yield compared("parity zero2, 1 process", "zero2", machine, num_ranks, 1, alone)


def compared(name: str, strategy: str, machine: Machine, num_ranks: int, processes: int, alone: Path) -> Finding:
    """The finding of one strategy."""
    expected = f"<= {TOLERANCE:g} from one process"
    try:
        run = train(f"{strategy}-{processes}", machine, num_ranks, f"run.parallel={strategy}", processes=processes)
    except TrainingError as error:
        return Finding(name, "an error", expected, "FAILED", f"training under {strategy} ends with {error}")
    difference = furthest(run, alone)
    reason = (
        f"{strategy} on {processes} processes takes other steps than one process: a weight differs by {difference:.2g} "
        f"after {NUM_STEPS} steps; do not train with {strategy} here"
    )
    return judged(name, f"{difference:.1e}", expected, difference <= TOLERANCE, reason)
