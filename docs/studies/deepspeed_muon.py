"""DeepSpeed's own Muon beside ours under ZeRO 1, 2 and 3, on the toy model of tests/sharding, 2
ranks with gloo.

    python docs/studies/deepspeed_muon.py        prints the table of docs/studies/parity.md; three minutes

Ten steps of two micro-batches, float32, gradients clipped to 0.5 in every step, learning rate 0.02,
and AdamW at 1e-3 for embeddings, head, norms and biases. DeepSpeed's Muon iterates in float32 on a
CPU; ours, which has the bits of torch's and iterates in bfloat16, iterates in float64 here, because
rounding would hide the differences.
"""

import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from soren_align.sharding import set_zero_strategy
from tests.support import toy_jobs as jobs
from tests.support.rank_pool import ENVIRONMENT, RankPool
from tests.support.toy import NUM_STEPS, RATES, Run, one_process

RUN = Run({"name": "muon"}, float64_map=True)
STAGES = (1, 2, 3)
BETAS, EPS = (0.9, 0.999), 1e-8
DEEPSPEEDS_MUON = {
    "type": "Muon",
    "params": {
        **{
            "lr": RATES["lr"],
            "adam_lr": RATES["aux_lr"],
            "momentum": 0.95,
            "betas": BETAS,
            "eps": EPS,
        },
        "weight_decay": RATES["weight_decay"],
    },
}


class BytesSent(TorchDispatchMode):
    """Counts the bytes that a rank sends, on average over the ranks, with ring algorithms, which
    are optimal.
    """

    def __init__(self, num_ranks):
        super().__init__()
        self.others, self.num_ranks, self.total = num_ranks - 1, num_ranks, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.total += self.sent(func.name().split("::")[1].split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def sent(self, name, args):
        """Bytes of one collective, by the name of torch's operator; Raises ValueError if it is
        unknown.
        """
        if name in ("barrier", "monitored_barrier_"):
            return 0
        if "allreduce" in name:
            return 2 * self.others / self.num_ranks * num_bytes(args[0])
        if "allgather" in name:  # (output, input, ...)
            return self.others * num_bytes(args[1])
        if "reduce_scatter" in name:
            return self.others * num_bytes(args[0])
        if name in ("broadcast_", "reduce_"):
            return self.others / self.num_ranks * num_bytes(args[0])
        if name == "alltoall_base_":  # equal parts in the toy's case
            return num_bytes(args[1]) * (
                self.others / self.num_ranks if not args[4] else self.share(args[4])
            )
        raise ValueError(f"{name}: unknown collective; add its bytes here")

    def share(self, splits):
        """The share of a buffer with these splits that is sent to other ranks."""
        return 1 - splits[torch.distributed.get_rank()] / max(sum(splits), 1)


def num_bytes(tensors):
    """Of a tensor, or of lists of them."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(num_bytes, tensors))


def train(group, stage, kind, folder):
    """Ten steps of "ours", "DeepSpeed's" or "AdamW": weights, reported norms, bytes sent a step;
    and a checkpoint.
    """
    config, make_optimizer = {}, Run.optimizer
    if kind == "DeepSpeed's":
        config = {"optimizer": DEEPSPEEDS_MUON, "zero_optimization": {"reduce_scatter": stage < 3}}
        make_optimizer = no_optimizer
        refuse_to_compile_adam()
    elif kind == "AdamW":
        make_optimizer = adamw
    engine, _ = jobs.deepspeed_engine(group, stage, RUN, config, make_optimizer)
    if kind == "ours":
        set_zero_strategy(engine.optimizer)
    norms, sent = [], []
    for step in range(NUM_STEPS):
        with BytesSent(group.size()) as counter:
            for tokens in RUN.batches(step):
                engine.backward(engine(jobs.part_of(tokens, group)))
                engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        sent.append(counter.total)
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    engine.save_checkpoint(folder, tag="checkpoint")
    return weights, norms, sum(sent[1:]) / (NUM_STEPS - 1)


def no_optimizer(run, model):
    """None: DeepSpeed makes its own."""
    return None


def adamw(run, model):
    """torch's AdamW for the same groups as ours."""
    return torch.optim.AdamW(
        [{"params": group["params"]} for group in run.optimizer(model).param_groups]
    )


def refuse_to_compile_adam():
    """DeepSpeed's Muon then takes its other Adam, written in Python."""
    import deepspeed.ops.adam

    def refuse(self, *args, **kwargs):
        raise RuntimeError("not compiled here")

    deepspeed.ops.adam.FusedAdam.__init__ = refuse


def one_process_of_deepspeeds_muon(clip_first):
    """Weights and true gradient norms of its arithmetic in a plain loop, clipped before
    Newton-Schulz or after it.
    """
    from deepspeed.runtime.zero.muon.original_muon import adam_update, muon_update

    model, norms = RUN.model(), []
    is_matrix = {
        name: p.ndim == 2 and not any(word in name for word in ("embed", "lm_head"))
        for name, p in model.named_parameters()
    }
    state = {
        name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()
    }
    for step in range(NUM_STEPS):
        for tokens in RUN.batches(step):
            (model(tokens) / 2).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        if clip_first:
            nn.utils.clip_grad_norm_(model.parameters(), RUN.clip)
        for name, p in model.named_parameters():
            if is_matrix[name]:
                p.grad.copy_(muon_update(p.grad, state[name][0]))
        if not clip_first:
            nn.utils.clip_grad_norm_(model.parameters(), RUN.clip)
        with torch.no_grad():
            for name, p in model.named_parameters():
                lr = RATES["lr" if is_matrix[name] else "aux_lr"]
                update = (
                    p.grad
                    if is_matrix[name]
                    else adam_update(p.grad, *state[name], step + 1, BETAS, EPS)
                )
                p.mul_(1 - lr * RATES["weight_decay"]).add_(update, alpha=-lr)
        model.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def universal(folder):
    """Whether DeepSpeed's own tool converts the checkpoint: "yes", or the error's last line."""
    command = [
        sys.executable,
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        "--inject_missing_state",
    ]
    command += ["--input_folder", f"{folder}/checkpoint", "--output_folder", f"{folder}/universal"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}
    )
    return (
        "yes"
        if done.returncode == 0
        else re.findall(r"^\w+Error.*$", done.stderr, re.MULTILINE)[-1]
    )


def main():
    """Run all combinations, then print the tables."""
    os.environ.update(ENVIRONMENT)
    warnings.simplefilter("ignore", FutureWarning)
    ours, true_norms, _ = one_process(RUN)
    clip_first, _ = one_process_of_deepspeeds_muon(clip_first=True)
    clip_last, its_true_norms = one_process_of_deepspeeds_muon(clip_first=False)
    with tempfile.TemporaryDirectory() as temporary:
        ranks = RankPool(2, Path(temporary))
        try:
            results = {
                (kind, stage): ranks.run(train, stage, kind, f"{temporary}/{kind} {stage}")
                for kind in ("AdamW", "ours", "DeepSpeed's")
                for stage in STAGES
            }
        finally:
            ranks.stop()
        converted = {key: universal(f"{temporary}/{' '.join(map(str, key))}") for key in results}

    print(
        f"Python {platform.python_version()}, torch {version('torch')}, deepspeed {version('deepspeed')}, 2 ranks"
    )
    adamw_sent = [mean_sent(results["AdamW", stage]) for stage in STAGES]
    for kind, norms, expected in (
        ("ours", true_norms, {"clip, then map": ours}),
        (
            "DeepSpeed's",
            its_true_norms,
            {"clip, then map": clip_first, "map, then clip": clip_last},
        ),
    ):
        runs = [results[kind, stage] for stage in STAGES]
        print()
        line(f"Muon, {kind}", [f"ZeRO {stage}" for stage in STAGES])
        for order, weights in expected.items():
            far = [max(farthest(result[0], weights) for result in run) for run in runs]
            line(f"difference from one process: {order}", [f"{value:.1e}" for value in far])
        line("gradient norm, true", 3 * [span(norms)])
        line("gradient norm, reported", [span(run[0][1]) for run in runs])
        extra = [mean_sent(run) - sent for run, sent in zip(runs, adamw_sent, strict=True)]
        line("kB sent a step, beyond AdamW's", [f"{value / 1000:.1f}" for value in extra])
        for stage in STAGES:
            print(f"universal checkpoint, ZeRO {stage}: {converted[kind, stage]}")
    print()
    line("kB sent a step by AdamW", [f"{sent / 1000:.1f}" for sent in adamw_sent])
    numel = sum(math.prod(p.shape) for name, p in ours.items() if "blocks" in name and p.ndim == 2)
    print(
        f"the 14 matrices of the blocks: {4 * numel / 1000:.1f} kB; universal checkpoint of AdamW: ",
        end="",
    )
    print(", ".join(sorted({converted["AdamW", stage] for stage in STAGES})))


def line(name, cells):
    """Print one row."""
    print(f"{name:<44}" + "".join(f"{cell:>12}" for cell in cells))


def farthest(weights, expected):
    """The largest difference of any weight."""
    return max(float((weights[name] - expected[name]).abs().max()) for name in expected)


def mean_sent(run):
    """Bytes a step, on average over the ranks."""
    return sum(sent for _, _, sent in run) / len(run)


def span(norms):
    """Smallest and largest, as text."""
    return f"{min(norms):.2f}-{max(norms):.2f}"


if __name__ == "__main__":
    main()
