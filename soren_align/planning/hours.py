"""Hours of a run on one GPU, or one CPU core, from counted FLOPs and assumed rates: nothing is measured."""

from typing import Any

PEAKS: dict[str, dict[str, float]] = {
    "H100": {"float32": 67e12, "tf32": 494e12, "float16": 989e12, "bfloat16": 989e12},
    "A100": {"float32": 19.5e12, "tf32": 156e12, "float16": 312e12, "bfloat16": 312e12},
}
"""FLOP/s by the precision of the factors, dense, of the SXM modules' data sheets."""
UTILIZATION = 0.4
"""Of the peak, by models of billions of parameters: an assumption. The paper's 23 minutes for 5,000 steps of
LLaMA-60M are 0.14 at most (recipes/llama-c4)."""
CORE_FLOPS = 40e9
"""FLOP/s of a CPU core in float32: LoRA on SmolLM2-135M, 477 GFLOP in 11 s of a core (recipes/studies/README.md)."""


def hours_of_run(passes: tuple[float, str], maps: tuple[float, str], *, on_cpu: bool) -> dict[str, Any]:
    """The keys `hours`, by device, and `hours_assume`, of a plan. passes, maps: (FLOPs of the run, precision)."""
    if on_cpu:
        hours = {"CPU core": (passes[0] + maps[0]) / CORE_FLOPS / 3600}
        return {"hours": hours, "hours_assume": f"{CORE_FLOPS / 1e9:g} GFLOP/s"}
    hours = {
        name: sum(flops / (UTILIZATION * peaks[precision]) for flops, precision in (passes, maps)) / 3600
        for name, peaks in PEAKS.items()
    }
    return {"hours": hours, "hours_assume": f"{UTILIZATION:.0%} of the peak"}
