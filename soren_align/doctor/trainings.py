"""Trainings by the command itself: parity of the sharding strategies, DPO's first step, peak memory
and speed.

Each is a process of its own: python -m soren_align sft quickstart/sft --set ...
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..core.files import resolve_path
from ..core.text import count
from ..run.folder import read_metrics
from .findings import Finding, Machine, judged, last_line, skipped

TOLERANCE = 2e-6
"""float32, ten steps: other sums over ranks, magnified by the map's slope at zero
(research/studies/parity.md)."""
NUM_STEPS, PER_DEVICE = 10, 4
SHARDED = ("zero1", "zero2", "zero3", "fsdp2")
QUICK = ("zero2", "fsdp2")
DPO_LOSS = 1e-3
"""The largest difference of DPO's first loss from ln 2, and of its rewards from 0: float32 has
1e-6."""


class TrainingError(Exception):
    """A training that ended with another exit code than 0: the message is the last line of its
    output.
    """


def ranks_of(machine: Machine) -> int:
    """The processes of a training: no more than one per GPU."""
    return (
        min(machine.num_processes, machine.num_gpus) if machine.num_gpus else machine.num_processes
    )


def command(
    machine: Machine, name: str, *more: str, processes: int = 1, task: str = "sft"
) -> list[str]:
    """The words of a training: the same examples in each step on any number of processes, clipped,
    in float32.

    more: further settings, which replace these.
    """
    texts = [
        f"run.output_dir={folder_of(machine, name)}",
        f"trainer.max_steps={NUM_STEPS}",
        "data.eval=null",
    ]
    # At least 32 examples: fewer leave matrices of low rank, of which the map magnifies the
    # rounding.
    divisor = PER_DEVICE * ranks_of(machine)
    texts += [f"run.global_batch_size={-(-32 // divisor) * divisor}"]
    texts += [f"trainer.per_device_train_batch_size={PER_DEVICE}"]
    texts += ["trainer.eval_strategy=no", "trainer.save_strategy=no", "trainer.logging_steps=1"]
    texts += [
        "trainer.warmup_steps=0",
        "trainer.lr_scheduler_type=constant",
        "optimizer.precision=float32",
    ]
    texts += ["trainer.use_cpu=false", "run.num_threads=null"] if machine.num_gpus else []
    words = [sys.executable, "-m", "soren_align", task, f"quickstart/{task}", "--no-eval"]
    words += [word for text in (*texts, *more) for word in ("--set", text)]
    return [*words, "--processes", str(processes)]


def folder_of(machine: Machine, name: str) -> Path:
    """The folder of a run."""
    return machine.folder / "runs" / name


def train(machine: Machine, name: str, *more: str, processes: int = 1, task: str = "sft") -> Path:
    """Train from the start and return the run's folder. Raises TrainingError."""
    checked_output(
        command(machine, name, "run.overwrite=true", *more, processes=processes, task=task)
    )
    return folder_of(machine, name)


def checked_output(words: list[str], subject: str = "") -> str:
    """The standard output of a command.
    Raises TrainingError, which begins with the subject, if the command fails.
    """
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise TrainingError(f"{subject}exit code {done.returncode}: {last_line(done.stderr)}")
    return done.stdout


def furthest(a: Path, b: Path) -> float:
    """The largest difference of any weight between the models of two runs."""
    weights, others = (load_file(run / "model" / "model.safetensors") for run in (a, b))
    assert weights.keys() == others.keys()
    return max(
        float((weights[name].float() - others[name].float()).abs().max()) for name in weights
    )


def parity(machine: Machine) -> Iterator[Finding]:
    """Ten steps under each sharding strategy, against one process."""
    num_ranks = ranks_of(machine)
    alone = train(machine, "alone")
    strategies: Sequence[str] = SHARDED if num_ranks == 1 else ("ddp", *SHARDED)
    runs = [(strategy, num_ranks) for strategy in strategies]
    runs += [("zero2", 1)] if num_ranks > 1 and not machine.quick else []
    # These times do not count, and most of each is the import of libraries, by one core per
    # process.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // (2 * num_ranks))) as pool:
        yield from pool.map(lambda run: compared(machine, run[0], run[1], alone), runs)
    if num_ranks == 1:
        yield skipped("parity ddp", "one process")


def compared(machine: Machine, strategy: str, processes: int, alone: Path) -> Finding:
    """The finding of one strategy, against the run of one process."""
    name = f"parity {strategy}, {count(processes, 'process', 'processes')}"
    if machine.quick and strategy not in QUICK:
        return skipped(name, "--quick leaves it out")
    if strategy == "fsdp2" and not machine.num_gpus:
        return skipped(name, "FSDP2 needs GPUs")
    expected = f"<= {TOLERANCE:g} from one process"
    try:
        run = train(
            machine, f"{strategy}-{processes}", f"run.parallel={strategy}", processes=processes
        )
    except TrainingError as error:
        return Finding(
            name, "an error", expected, "FAILED", f"a training under {strategy} ends with {error}"
        )
    difference = furthest(run, alone)
    reason = (
        f"{strategy} on {processes} processes takes other steps than one process: a weight differs by {difference:.2g} "
        f"after {NUM_STEPS} steps; do not train with {strategy} here"
    )
    return judged(name, f"{difference:.1e}", expected, difference <= TOLERANCE, reason)


def dpo(machine: Machine) -> Iterator[Finding]:
    """The first step of DPO, before any update: the policy is its reference, so rewards are 0 and
    the loss is ln 2.
    """
    start = (
        "model.name_or_path=shipped:recipes/quickstart/base",
        "model.init_seed=1",
        "trainer.max_steps=1",
    )
    run = train(machine, "dpo", *start, task="dpo")
    first = next(log for log in read_metrics(run / "metrics.jsonl") if "loss" in log)
    loss, rewards = first["loss"], [first["rewards/chosen"], first["rewards/rejected"]]
    worst = max(abs(loss - math.log(2)), *map(abs, rewards))
    measured = f"loss {loss:.4f}, rewards {rewards[0]:.1g} and {rewards[1]:.1g}"
    reason = (
        f"DPO's first loss is {loss:.4f}, and its rewards are {rewards[0]:.2g} and {rewards[1]:.2g}: the reference is "
        "not the starting model; do not train DPO here"
    )
    yield judged(
        "DPO's first step",
        measured,
        f"{math.log(2):.4f} and 0, +- {DPO_LOSS:g}",
        worst <= DPO_LOSS,
        reason,
    )


MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 16,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 2,
    "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
"""158 million parameters, so that the constants of CUDA's libraries are a small share of the
peak."""
MEMORY_SHARE, MEMORY_CONSTANT = 0.1, 0.3e9
"""The allowed difference from the plan: a share of it, and the workspaces of CUDA's libraries."""
PACKED = ("trainer.packing=true", "trainer.packing_strategy=wrapped", "trainer.max_length=512",
          "trainer.dataloader_drop_last=true")  # fmt: skip
"""Full sequences in full batches: the data have 33 of them."""
SPEED_SHARE = 0.25
"""Of plan's tokens per second, which are those of a model of billions of parameters: at 1,024
columns, launches of kernels and the maps' small products take longer than their FLOPs."""


def memory(machine: Machine) -> Iterator[Finding]:
    """The peak of a training on the GPU, beside plan's figure."""
    if not machine.num_gpus:
        yield skipped("memory", "no GPU")
        return
    plan, run = planned_and_trained(machine, "memory", "trainer.max_steps=4")
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    planned = max(plan["processes"]["memory_total"]["device"].values())
    peak, allowed = (
        record["training"]["peak_memory_bytes"],
        MEMORY_SHARE * planned + MEMORY_CONSTANT,
    )
    reason = (
        f"a training's peak of memory is {peak / 1e9:.2f} GB, and plan predicts {planned / 1e9:.2f} GB; do not rely on "
        "plan's memory on this machine"
    )
    expected = f"{planned / 1e9:.2f} +- {allowed / 1e9:.2f} GB (plan)"
    yield judged("memory", f"{peak / 1e9:.2f} GB", expected, abs(peak - planned) <= allowed, reason)


def speed(machine: Machine) -> Iterator[Finding]:
    """Tokens per second of a training on the GPU, in full sequences, beside those of plan's
    hours.
    """
    if not machine.num_gpus:
        yield skipped("speed", "no GPU")
        return
    from ..planning.flops import data_sheet

    device = torch.cuda.get_device_name()
    if (chip := data_sheet(device)) is None:
        yield skipped("speed", f"plan has no data sheet of {device}")
        return
    plan, run = planned_and_trained(machine, "speed", "trainer.max_steps=8", *PACKED)
    planned = plan["compute"]["training_tokens"] / plan["compute"]["hours"][chip] / 3600
    # The last step's: the first ones compile and load kernels.
    speeds = [
        log["tokens_per_second"]
        for log in read_metrics(run / "metrics.jsonl")
        if "tokens_per_second" in log
    ]
    reason = (
        f"a training reaches {speeds[-1]:,.0f} tokens per second, and plan assumes {planned:,.0f}; look at other "
        "processes, power and clocks (nvidia-smi -q -d CLOCK,POWER), and multiply plan's hours by the ratio"
    )
    expected = f">= {SPEED_SHARE * planned:,.0f} (plan {planned:,.0f})"
    yield judged(
        "speed",
        f"{speeds[-1]:,.0f} tokens/s",
        expected,
        speeds[-1] >= SPEED_SHARE * planned,
        reason,
    )


def planned_and_trained(machine: Machine, name: str, *more: str) -> tuple[dict[str, Any], Path]:
    """The plan of a training of MODEL_CONFIG on one GPU, and its run's folder."""
    folder = folder_of(machine, "model")
    folder.mkdir(parents=True, exist_ok=True)
    for file in resolve_path("shipped:recipes/quickstart/base").iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    more = (f"model.name_or_path={folder}", "trainer.bf16=true", "trainer.per_device_train_batch_size=32",
            "run.global_batch_size=32", "optimizer.precision=auto", *more)  # fmt: skip
    words = command(machine, name, *more)
    words[3] = "plan"
    words[4:6] = ["quickstart/sft"]  # in place of the recipe and --no-eval
    return json.loads(checked_output([*words, "--json"], "plan: ")), train(machine, name, *more)
