"""Predictions for H100s, from counts and assumed rates: nothing is measured.

    python docs/predicted_times.py        prints the two tables of docs/benchmarks.md

The first has the seconds of the maps of one step on one GPU. Assumed: dense peaks of NVIDIA's data
sheet for the H100 SXM, of which large products reach SHARE. Elementwise work, small products that
leave multiprocessors idle, and communication come on top.

The second has steps on eight GPUs, by the functions of `soren-align plan`: memory, the optimizer's
part of a step, and the whole step. Assumed: MAPS_FACTOR, as measured on an H200, and BANDWIDTH
between GPUs for what Soren sends; the passes reach the utilization that `plan` assumes.
"""

from functools import partial

from soren_align.bench.shapes import MODELS
from soren_align.core.optimizer_settings import RESOLUTIONS
from soren_align.planning.flops import PEAKS, UTILIZATION
from soren_align.planning.plan import plan_training
from soren_align.recipe.loader import load
from soren_align.spectral import MAPS

PEAK = PEAKS["H100"]
SHARE = 0.6
NARROW = partial(MAPS["minimax"].num_flops, precision="float16")
ROWS = {
    "Muon, as usual": ("bfloat16", MAPS["muon"].num_flops),
    "Muon in float32": ("float32", MAPS["muon"].num_flops),
    **{
        f"minimax {resolution}, `precision: auto`": (
            "float16",
            partial(NARROW, resolution=resolution),
        )
        for resolution in RESOLUTIONS
    },
    "minimax, tf32": ("tf32", NARROW),
    "minimax, float32": ("float32", MAPS["minimax"].num_flops),
    "sns, bfloat16": ("bfloat16", MAPS["sns"].num_flops),
    "sns, `precision: auto`": ("float32", MAPS["sns"].num_flops),
}
NUM_RANKS = 8
SHARDED = {
    "qwen2.5-3b/soren": ("ddp", "zero1", "zero2", "zero3", "fsdp2"),
    "mistral-7b/soren": ("zero1", "zero2", "zero3", "fsdp2"),  # with ddp the states alone are 87 GB
}
MAPS_FACTOR = 1.7
"""The maps of Qwen2.5-3B took so much longer than their products at SHARE (docs/benchmarks.md)."""
BANDWIDTH = 250e9
"""Bytes per second that a GPU sends: the lower end of what all-to-all reaches over NVLink."""


def main() -> None:
    """Print the tables."""
    print_maps()
    print()
    print_steps()


def print_steps() -> None:
    """Memory and times of steps on NUM_RANKS GPUs."""
    heads = (
        "recipe",
        "`run.parallel`",
        "peak memory",
        "maps",
        "sent for the maps",
        "optimizer, s",
        "whole step, s",
    )
    print("| " + " | ".join(heads) + " |\n|---|---|" + "---:|" * 5)
    for name, strategies in SHARDED.items():
        for strategy in strategies:
            plan, _ = plan_training(load(name, [f"run.parallel={strategy}"]), num_ranks=NUM_RANKS)
            ranks, compute = plan["processes"], plan["compute"]
            memory = max(ranks["memory_total"]["device"].values())
            flops, sent = ranks["map_flops"]["busiest_rank"], ranks["bytes_sent"]["max"]
            optimizer = (
                MAPS_FACTOR * flops / (SHARE * PEAK[ranks["map_precision"]]) + sent / BANDWIDTH
            )
            passes = compute["training_flops_per_step"] / (
                NUM_RANKS * UTILIZATION * PEAK["bfloat16"]
            )
            cells = (f"{memory / 1e9:.1f} GB", f"{flops / 1e12:.1f} TFLOP", f"{sent / 1e9:.2f} GB")
            cells += (f"{optimizer:.2f}", f"{passes + optimizer:.2f}")
            print("| " + " | ".join((name, f"`{strategy}`", *cells)) + " |")


def print_maps() -> None:
    """Seconds of the maps on one GPU."""
    models = ("qwen2.5-3b", "mistral-7b")
    print(
        "| map | precision | "
        + " | ".join(f"{name}: TFLOP | {name}: seconds" for name in models)
        + " |"
    )
    print("|---|---|" + "---:|---:|" * len(models))
    for row, (precision, flops) in ROWS.items():
        cells = []
        for name in models:
            per_layer = MODELS[name].per_layer.items()
            total = MODELS[name].num_layers * sum(
                count * flops(*shape) for shape, count in per_layer
            )
            cells += [f"{total / 1e12:.0f}", f"{total / PEAK[precision] / SHARE:.2f}"]
        print(f"| {row} | {precision} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
