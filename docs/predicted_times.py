"""Predicted seconds of the maps of one step on one H100, from counted FLOPs and assumed rates: nothing is measured.

    python docs/predicted_times.py        prints the table of docs/benchmarks.md

Assumed: dense peaks of NVIDIA's data sheet for the H100 SXM, of which large products reach SHARE. Elementwise work,
small products that leave multiprocessors idle, and communication come on top.
"""

from functools import partial

from soren_align.bench.shapes import MODELS
from soren_align.core.optimizer_settings import RESOLUTIONS
from soren_align.planning.flops import PEAKS
from soren_align.spectral import MAPS

PEAK = PEAKS["H100"]
SHARE = 0.6
NARROW = partial(MAPS["minimax"].num_flops, precision="float16")
ROWS = {
    "Muon, as usual": ("bfloat16", MAPS["muon"].num_flops),
    "Muon in float32": ("float32", MAPS["muon"].num_flops),
    **{
        f"minimax {resolution}, `precision: auto`": ("float16", partial(NARROW, resolution=resolution))
        for resolution in RESOLUTIONS
    },
    "minimax, tf32": ("tf32", NARROW),
    "minimax, float32": ("float32", MAPS["minimax"].num_flops),
    "sns, bfloat16": ("bfloat16", MAPS["sns"].num_flops),
    "sns, `precision: auto`": ("float32", MAPS["sns"].num_flops),
}


def main() -> None:
    """Print the table."""
    models = ("qwen2.5-3b", "mistral-7b")
    print("| map | precision | " + " | ".join(f"{name}: TFLOP | {name}: seconds" for name in models) + " |")
    print("|---|---|" + "---:|---:|" * len(models))
    for row, (precision, flops) in ROWS.items():
        cells = []
        for name in models:
            per_layer = MODELS[name].per_layer.items()
            total = MODELS[name].num_layers * sum(count * flops(*shape) for shape, count in per_layer)
            cells += [f"{total / 1e12:.0f}", f"{total / PEAK[precision] / SHARE:.2f}"]
        print(f"| {row} | {precision} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
