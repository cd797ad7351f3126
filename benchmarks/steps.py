"""`python -m benchmarks step`: time and memory of an optimizer step on a model's matrices, compared
with torch's.

All optimizers share the parameters and the gradients, in float32; each has its own state. Gradients
are sampled for every step and have a norm of 1 over all matrices, as after clipping.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from soren_align.core.errors import UserError
from soren_align.optim import HTMuon, MapContext, Muon, Soren
from soren_align.spectral.maps import MUON, SOREN_MAPS, sigmoid

from .maps import DION, MUON_FLOAT32, newton_schulz_float32, scheduled_quintic
from .shapes import Matrices, Shape
from .timing import available_bytes, interleaved, machine, matmul_rates, too_slow

LR = 1e-3
# float32 parameters, gradients, two moments of AdamW, one of each of up to nine others
NUM_COPIES = 13
# On a CPU a subset of the layers is measured above this number: 100M parameters take SNS about half
# a minute.
CPU_PARAMETERS = 100_000_000
# Largest matrices, in rows, of models that are decomposed in float64; with larger ones a step takes
# minutes.
DECOMPOSED_ROWS = 512
TORCH_MUON, FUSED_ADAMW = "torch.optim.Muon", "fused AdamW"


class MuonFloat32(Muon):
    """Muon with its iteration in float32: bfloat16 products are much faster than float32 on some
    CPUs only.
    """

    def map_matrix(
        self, x: torch.Tensor, group: dict[str, Any], context: MapContext, **state: torch.Tensor
    ) -> torch.Tensor:
        """As in Muon, in five steps."""
        return newton_schulz_float32(x)


class DionsMuon(Muon):
    """Muon's step with the iteration of dion and Emerging-Optimizers."""

    def map_matrix(
        self, x: torch.Tensor, group: dict[str, Any], context: MapContext, **state: torch.Tensor
    ) -> torch.Tensor:
        """In five steps, bfloat16."""
        return scheduled_quintic(x)


def optimizers(parameters: list[torch.nn.Parameter]) -> dict[str, torch.optim.Optimizer]:
    """The optimizers, and Soren's sigmoids; those that decompose matrices only if these are
    small.
    """
    small = max(min(p.shape) for p in parameters) <= DECOMPOSED_ROWS
    return {
        **{
            f"Soren {spectral_map.label.format(**spectral_map.defaults)}": Soren(
                parameters, LR, map=name, adjust_lr_fn="none"
            )
            for name, spectral_map in SOREN_MAPS.items()
            if spectral_map.target is sigmoid and (small or spectral_map.flops)
        },
        "Muon": Muon(parameters, LR),
        MUON_FLOAT32: MuonFloat32(parameters, LR),
        TORCH_MUON: torch.optim.Muon(parameters, LR),
        DION: DionsMuon(parameters, LR),
        **({"HTMuon": HTMuon(parameters, LR, adjust_lr_fn="original")} if small else {}),
        FUSED_ADAMW: torch.optim.AdamW(parameters, LR, fused=True),
    }


def run(
    matrices: Matrices,
    device: torch.device,
    num_tokens: int,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The results as JSON.

    num_tokens: of a training step, whose time is estimated on a GPU only. `report` is called with
    the current state.
    """
    torch.manual_seed(0)
    report("FLOP/s of matrix products")
    rates = matmul_rates(device)
    num_layers, notes = _layers_that_fit(matrices, device)
    parameters = _parameters(matrices, num_layers, device)
    subjects = optimizers(parameters)
    flops = sum(
        MUON.num_flops(parameter.shape[0], parameter.shape[1]) or 0 for parameter in parameters
    )
    if reason := too_slow("Muon in bfloat16 (torch's and ours)", flops, "bfloat16", rates):
        del subjects["Muon"], subjects[TORCH_MUON], subjects[DION]
        notes.append(reason)

    # bytes of the state, and the peak with temporary tensors
    memory: dict[str, tuple[int, int | None]] = {}
    for name, optimizer in subjects.items():
        report(f"{name}: first step")
        optimizer.step()  # creates the state; the peak is that of a second step
        tensors = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value)
        ]
        num_bytes, peak = sum(tensor.numel() * tensor.element_size() for tensor in tensors), None
        if device.type == "cuda":
            _fill_gradients(parameters)
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            optimizer.step()
            torch.cuda.synchronize(device)
            peak = num_bytes + torch.cuda.max_memory_allocated(device) - before
        memory[name] = num_bytes, peak
    timings = interleaved(
        {
            name: lambda _, optimizer=optimizer: optimizer.step()
            for name, optimizer in subjects.items()
        },
        lambda: _fill_gradients(parameters),
        device,
        lambda done, total: report(f"round {done + 1} of {total}"),
    )
    if not {"Soren exact", "HTMuon"} & subjects.keys():
        notes.append(
            "the exact map and HTMuon decompose each matrix, and are not measured, because a matrix has more than "
            f"{DECOMPOSED_ROWS} rows"
        )

    scale, rows = matrices.num_layers / num_layers, []
    training = (
        6 * matrices.num_parameters * num_tokens / rates["bfloat16"]
        if device.type == "cuda"
        else None
    )
    for name, (state, peak) in memory.items():
        seconds, median = asdict(timings[name]), timings[name].median
        seconds |= {key: seconds[key] * scale for key in ("median", "low", "high")}
        rows.append(
            {
                "name": name,
                "seconds": seconds,
                "ratio_to_torch_muon": median / timings[TORCH_MUON].median
                if TORCH_MUON in timings
                else None,
                "ratio_to_muon_float32": median / timings[MUON_FLOAT32].median,
                "ratio_to_fused_adamw": median / timings[FUSED_ADAMW].median,
                "share_of_training_step": seconds["median"] / (seconds["median"] + training)
                if training
                else None,
                "state_bytes": round(state * scale),
                "peak_bytes": None if peak is None else round(peak * scale),
            }
        )
    return {
        "command": "step",
        "shapes_name": matrices.name,
        "machine": machine(device),
        "num_parameters": matrices.num_parameters,
        "num_layers": {"measured": num_layers, "of": matrices.num_layers},
        "num_rounds": timings[FUSED_ADAMW].num_rounds,
        "matmul_flops_per_second": rates,
        "num_tokens": num_tokens,
        "training_seconds": training,
        "optimizers": rows,
        "notes": notes,
    }


def _layers_that_fit(matrices: Matrices, device: torch.device) -> tuple[int, list[str]]:
    """(number of measured layers, notes on the others)."""
    available = available_bytes(device)
    bytes_per_layer = 4 * NUM_COPIES * matrices.layer_size
    if bytes_per_layer > available:
        sizes = f"needs {bytes_per_layer / 1e9:.1f} GB of memory, but only {available / 1e9:.1f} GB are free"
        raise UserError(
            f"--shapes: one layer of {matrices.name} {sizes}; write a smaller model or shapes"
        )
    num_layers, reason = available // bytes_per_layer, "memory is short"
    quick = max(1, CPU_PARAMETERS // matrices.layer_size)
    if device.type == "cpu" and quick < num_layers:
        num_layers, reason = quick, "measuring all would take minutes"
    if num_layers >= matrices.num_layers:
        return matrices.num_layers, []
    return num_layers, [
        f"{num_layers} of {matrices.num_layers} layers were measured because {reason}; times and bytes are scaled"
    ]


def _parameters(
    matrices: Matrices, num_layers: int, device: torch.device
) -> list[torch.nn.Parameter]:
    shapes: list[Shape] = [
        shape for shape, count in matrices.per_layer.items() for _ in range(count)
    ] * num_layers
    parameters = [
        torch.nn.Parameter(torch.randn(shape, device=device).mul_(0.02)) for shape in shapes
    ]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    _fill_gradients(parameters)
    return parameters


def _fill_gradients(parameters: list[torch.nn.Parameter]) -> None:
    scale = sum(p.numel() for p in parameters) ** -0.5
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.normal_(std=scale)
