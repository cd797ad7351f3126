"""Two checks of what a training does here: ZeRO 2 takes the steps of one process, and the default
map is about as fast as its matrix products.

`pytest -m gpu` has the trainings of all strategies, of DPO, of memory and of interruptions.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .checks import Finding, Machine, judged, last_line

TOLERANCE = 2e-6
"""float32, ten steps: other sums over ranks, magnified by the map's slope at zero
(research/studies/parity.md)."""
NUM_STEPS = 10
STRATEGY = "zero2"
MATRICES = {"cuda": (4, 2048, 2048), "cpu": (4, 512, 1376)}
AT_MOST = {"cuda": 5.0, "cpu": 30.0}
"""Times the products alone; on an H200 2.7 for minimax in float16, 1.5 in float32."""


def train(machine: Machine, name: str, *settings: str, processes: int = 1) -> Path:
    """Train the quickstart and return the run's folder: the same examples in each step on any
    number of processes, clipped, in float32.

    Raises RuntimeError with the last line of the output if the training fails.
    """
    folder = machine.folder / "runs" / name
    # At least 32 examples: fewer leave matrices of low rank, of which the map magnifies the
    # rounding.
    divisor = 4 * machine.num_processes
    texts = [f"run.output_dir={folder}", "run.overwrite=true", "data.eval=null"]
    texts += [f"run.global_batch_size={-(-32 // divisor) * divisor}"]
    texts += ["trainer.per_device_train_batch_size=4", f"trainer.max_steps={NUM_STEPS}"]
    # No warm-up and no decay: ten steps at the full rate, in which a wrong shard shows.
    texts += ["trainer.eval_strategy=no", "trainer.save_strategy=no", "trainer.warmup_steps=0"]
    texts += ["trainer.lr_scheduler_type=constant", "optimizer.precision=float32"]
    texts += ["trainer.use_cpu=false", "run.num_threads=null"] if machine.num_gpus else []
    words = [sys.executable, "-m", "soren_align", "sft", "quickstart/sft", "--no-eval"]
    words += [word for text in (*texts, *settings) for word in ("--set", text)]
    words += ["--processes", str(processes)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {last_line(done.stderr)}")
    return folder


def parity(machine: Machine) -> Iterator[Finding]:
    """Ten steps under ZeRO 2, against one process."""
    from safetensors.torch import load_file

    num, limit = machine.num_processes, machine.num_gpus or machine.num_processes
    num = min(num, limit)
    # Equal steps, not equal losses: weights differ by a wrong shard even where losses look alike.
    runs = [
        train(machine, "alone"),
        train(machine, STRATEGY, f"run.parallel={STRATEGY}", processes=num),
    ]
    weights, others = (load_file(run / "model" / "model.safetensors") for run in runs)
    difference = max(
        float((weights[name].float() - others[name].float()).abs().max()) for name in weights
    )
    reason = f"{STRATEGY} on {num} processes takes other steps than one process: a weight differs "
    reason += f"by {difference:.2g} after {NUM_STEPS} steps; do not train with {STRATEGY} here"
    expected = f"<= {TOLERANCE:g} from one process"
    name = f"parity {STRATEGY}, {num} process{'es' if num > 1 else ''}"
    yield judged(name, f"{difference:.1e}", expected, difference <= TOLERANCE, reason)


def speed(machine: Machine) -> Iterator[Finding]:
    """Time the default map of a batch of matrices, beside its products at the device's own rate."""
    import torch
    from torch.utils.benchmark import Timer

    from ..spectral import MAPS
    from .maps import mapped

    minimax, shape = MAPS["minimax"], MATRICES[machine.device]
    precision = "float16" if machine.num_gpus else "float32"  # which CPUs emulate
    # The products alone are what the map cannot save; other time is launches and memory traffic.
    x = torch.randn(*shape, device=machine.device)
    x /= x.norm()
    factor = x.to(getattr(torch, precision))
    names = {"x": x, "factor": factor, "run": lambda: mapped(minimax, x, precision)}
    product, seconds = (
        Timer(line, globals=names, num_threads=torch.get_num_threads()).blocked_autorange().median
        for line in ("factor @ factor.mT", "run()")
    )
    num, num_rows, num_columns = shape
    rate = 2 * num * num_rows**2 * num_columns / product
    alone = num * (minimax.num_flops(num_rows, num_columns, precision) or 0) / rate
    most = AT_MOST[machine.device] * alone
    measured = f"minimax {1e3 * seconds:.3g} ms, {num} x {num_rows} x {num_columns}, {precision}"
    expected = f"<= {1e3 * most:.3g} ms (products {1e3 * alone:.3g})"
    reason = f"the map takes {1e3 * seconds:.3g} ms, and its products {1e3 * alone:.3g} ms; end "
    reason += "other processes on the device, and look at power and clocks (nvidia-smi -q)"
    yield judged("speed", measured, expected, seconds <= most, reason)
