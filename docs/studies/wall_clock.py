"""The paper's table of training times, by count and measured: the tables of
docs/studies/wall-clock.md.

    python docs/studies/wall_clock.py             counts, some seconds
    python docs/studies/wall_clock.py measure     and times: two minutes, 5 GB, on a machine without other work

A micro-batch and an optimizer step of LLaMA-60M are measured; a training step of 512 sequences is
computed from them.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from soren_align import HTMuon, Muon, Soren, param_groups
from soren_align.bench.shapes import MODELS, Shape
from soren_align.bench.steps import MuonFloat32
from soren_align.bench.timing import interleaved, machine
from soren_align.core.optimizer_settings import RESOLUTIONS
from soren_align.optim import AdamW
from soren_align.planning.flops import PEAKS, Passes
from soren_align.spectral import MAPS

MINUTES = {  # the paper's
    "llama-60m": {"AdamW": 23, "Muon": 28, "HTMuon": 124, "Soren": 39},
    "qwen2.5-3b": {"AdamW": 323, "Muon": 333, "HTMuon": 338, "Soren": 333},
    "mistral-7b": {"AdamW": 603, "Muon": 611, "HTMuon": 679, "Soren": 629},
}
LLAMA_60M = LlamaConfig(
    hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8
)
SEQUENCES, LENGTH, STEPS = 512, 256, 5000  # the paper's batch and steps for LLaMA-60M
NARROW = partial(MAPS["minimax"].num_flops, precision="float16")
COUNTED: dict[str, Callable[[int, int], int | None]] = {
    "Muon": MAPS["muon"].num_flops,
    **{
        f"Soren minimax {r:g}": partial(
            MAPS["minimax"].num_flops, precision="float16", resolution=r
        )
        for r in sorted(RESOLUTIONS)
    },
    "Soren sns K = 15": MAPS["sns"].num_flops,
    "Soren sns K = 16": partial(MAPS["sns"].num_flops, steps=16),
    "Soren released (K = 5)": MAPS["released"].num_flops,
}


def shapes(name: str) -> list[Shape]:
    """All matrices of the matrix optimizer in the paper: for LLaMA also the embedding and the
    head.
    """
    blocks = [s for s, number in MODELS[name].per_layer.items() for _ in range(number)] * MODELS[
        name
    ].num_layers
    return blocks + [(LLAMA_60M.vocab_size, LLAMA_60M.hidden_size)] * 2 * (name == "llama-60m")


def implied_steps(matrices: Sequence[Shape], ratio: float) -> tuple[float, float]:
    """K for which SNS has `ratio` times the FLOPs of Muon: by the paper's formula for Muon, and
    with all its products.

    With thin = sum m^2 n and square = sum m^3 over the matrices (m <= n): SNS has 4 (K + 2) thin,
    Muon 20 thin in the paper and 20 thin + 10 square in truth, since each of its five steps also
    squares an m x m matrix.
    """
    thin = sum(min(s) ** 2 * max(s) for s in matrices)
    square = sum(min(s) ** 3 for s in matrices)
    return 5 * ratio - 2, ratio * (20 * thin + 10 * square) / (4 * thin) - 2


def training_flops(config: LlamaConfig, num_sequences: int, length: int) -> int:
    """FLOPs of the forward and backward passes, of all matrix products, attention without its
    mask.
    """

    def build(blocks: Sequence[int]) -> tuple[nn.Module, Callable]:
        model = LlamaForCausalLM(
            LlamaConfig.from_dict({**config.to_dict(), "num_hidden_layers": len(blocks)})
        )
        return model, lambda tokens: model(input_ids=tokens, labels=tokens)

    return num_sequences * Passes(build, [range(config.num_hidden_layers)], None).num_flops(
        1, length
    )


def optimizers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Every optimizer on the same model: matrices inside the blocks by the map, other parameters by
    AdamW.
    """
    groups = partial(param_groups, model, aux_lr=1e-3)
    maps = {f"minimax {r:g}": {"name": "minimax", "resolution": r} for r in sorted(RESOLUTIONS)}
    maps |= {"sns K = 15": "sns", "released (K = 5)": "released", "exact": "exact"}
    return {
        "AdamW": AdamW(model.parameters(), lr=1e-3),
        "Muon": Muon(groups(), lr=1e-3),
        "Muon in float32": MuonFloat32(groups(), lr=1e-3),
        "HTMuon": HTMuon(groups(), lr=1e-3),
        **{
            f"Soren {name}": Soren(groups(), lr=1e-3, map=spectral_map)
            for name, spectral_map in maps.items()
        },
    }


def measure(
    config: LlamaConfig, num_sequences: int, length: int, seconds: float
) -> dict[str, tuple[float, int]]:
    """{name: (median seconds, bytes of state)} of a micro-batch in float32 and in bfloat16, and of
    each step.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    tokens = torch.randint(config.vocab_size, (num_sequences, length))

    def run_micro_batch(in_bfloat16: bool) -> None:
        with torch.autocast("cpu", enabled=in_bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()

    run_micro_batch(in_bfloat16=False)
    steps = optimizers(model)
    calls = {
        name: lambda _, optimizer=optimizer: optimizer.step() for name, optimizer in steps.items()
    }
    calls |= {
        "float32": lambda _: run_micro_batch(False),
        "bfloat16": lambda _: run_micro_batch(True),
    }
    clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)
    timings = interleaved(calls, clip, torch.device("cpu"), seconds=seconds)
    num_bytes = {
        n: sum(v.nbytes for s in o.state.values() for v in s.values() if v.ndim)
        for n, o in steps.items()
    }
    return {name: (timing.median, num_bytes.get(name, 0)) for name, timing in timings.items()}


def print_row(*cells: object, is_head: bool = False) -> None:
    """Print a row of a table; a head is followed by its line."""
    print(f"| {' | '.join(map(str, cells))} |" + ("\n|" + "---|" * len(cells)) * is_head)


def main(*arguments: str) -> None:
    """Print the tables."""
    print_row(
        "extra minutes",
        "Muon",
        "Soren",
        "ratio",
        "K, paper's formula",
        "K, all products",
        is_head=True,
    )
    for name, minutes in MINUTES.items():
        muon, soren = (minutes[other] - minutes["AdamW"] for other in ("Muon", "Soren"))
        # Each time is rounded to a minute, so that each difference is up to a minute off.
        low, high = (implied_steps(shapes(name), (soren + x) / (muon - x))[1] for x in (-1, 1))
        formula, exact = implied_steps(shapes(name), soren / muon)
        print_row(
            name,
            muon,
            soren,
            f"{soren / muon:.2f}",
            f"{formula:.1f}",
            f"{exact:.1f} ({low:.1f} to {high:.1f})",
        )
    training = training_flops(LLAMA_60M, SEQUENCES, LENGTH)
    seconds = MINUTES["llama-60m"]["AdamW"] * 60 / STEPS
    print(
        f"\ntraining step: {training / 1e12:.1f} TFLOP, in the paper's {seconds * 1e3:.0f} ms",
        end=" ",
    )
    print(
        f"{training / seconds / 1e12:.0f} TFLOP/s, {training / seconds / PEAKS['H100']['bfloat16']:.0%} of the peak\n"
    )
    choices = "blocks", "all 2-D"
    heads = [
        f"{quantity}, {choice}"
        for quantity in ("TFLOP", "time / AdamW's time")
        for choice in choices
    ]
    print_row("map", *heads, is_head=True)
    blocks, everything = shapes("llama-60m")[:-2], shapes("llama-60m")
    for name, count in COUNTED.items():
        tera = [
            sum(count(*shape) for shape in matrices) / 1e12 for matrices in (blocks, everything)
        ]
        print_row(
            name, *(f"{x:.3f}" for x in tera), *(f"{1 + x * 1e12 / training:.3f}" for x in tera)
        )
    if arguments == ("measure",):
        print(
            {
                key: machine(torch.device("cpu"))[key]
                for key in ("device", "num_threads", "versions", "load")
            }
        )
        print_times(measure(LLAMA_60M, 4, LENGTH, 90.0), SEQUENCES // 4)


def print_times(measured: dict[str, tuple[float, int]], num_micro_batches: int) -> None:
    """Print the table of measured times; a training step has so many micro-batches."""
    passes = [measured.pop(name)[0] for name in ("float32", "bfloat16")]
    print(f"\na micro-batch: float32 {passes[0] * 1e3:.0f} ms, bfloat16 {passes[1] * 1e3:.0f} ms\n")
    heads = [f"training step / AdamW's, passes in {dtype}" for dtype in ("float32", "bfloat16")]
    print_row("optimizer", "update, ms", *heads, "optimizer state, MB", is_head=True)
    for name, (seconds, num_bytes) in measured.items():
        adamw = measured["AdamW"][0]
        ratios = [
            (num_micro_batches * x + seconds) / (num_micro_batches * x + adamw) for x in passes
        ]
        print_row(
            name, f"{seconds * 1e3:.0f}", *(f"{x:.3f}" for x in ratios), f"{num_bytes / 1e6:.0f}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
