"""`soren-align bench maps`: time, FLOPs and errors of every map on every shape."""

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..spectral.matrices import frobenius_norm
from .accuracy import DECOMPOSITION_ROWS, error_shape, errors, known_matrices
from .candidates import MUON, MUON_FLOAT32, PEERS_OWN, Candidate, candidates, without_decomposed_flops
from .peers import peers
from .shapes import Matrices, Shape
from .timing import Timing, available_bytes, interleaved, machine, matmul_rates, too_slow

NUM_COPIES = 16  # of a matrix in float32: a decomposition holds five in float64, and errors their own three


@torch.no_grad()
def run(matrices: Matrices, device: torch.device, report: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """The results as JSON. `report` is called with the current state, for a spinner."""
    torch.manual_seed(0)
    _check_memory(matrices, device)
    peer_maps, notes = peers(device)
    entries = candidates(device) + [
        Candidate(name, function, PEERS_OWN, None, "polar") for name, function in peer_maps.items()
    ]
    shapes = [_measure(shape, entries, device, report, notes) for shape in matrices.per_layer]
    for entry, count in zip(shapes, matrices.per_layer.values(), strict=True):
        entry["count"] = count * matrices.num_layers
    return {
        "command": "maps",
        "shapes_name": matrices.name,
        "machine": machine(device),
        "input": "independent normal numbers, |x|_F = 1 as after clipping, drawn anew for every call",
        "shapes": shapes,
        "over_all_shapes": _over_all(shapes),
        "notes": list(dict.fromkeys(notes)),
    }


def _check_memory(matrices: Matrices, device: torch.device) -> None:
    available = available_bytes(device)
    for m, n in matrices.per_layer:
        if (needed := 4 * NUM_COPIES * m * n) > available:
            sizes = f"needs about {needed / 1e9:.1f} GB; {available / 1e9:.1f} GB may be used"
            raise UserError(f"--shapes: {m}x{n} {sizes}; write smaller shapes")


def _measure(
    shape: Shape, entries: list[Candidate], device: torch.device, report: Callable[[str], None], notes: list[str]
) -> dict[str, Any]:
    name = "x".join(map(str, shape))

    def make_input() -> Tensor:
        x = torch.randn(shape, device=device)
        return x.div_(frobenius_norm(x))

    report(f"{name}: FLOP/s of matrix products")
    rates = matmul_rates(device)
    report(f"{name}: warm-up")
    quick = [entry for entry in entries if not _too_slow(entry, shape, rates, notes)]
    measured = [
        without_decomposed_flops(entry, make_input)
        for entry in quick
        if _can_run(entry, shape, make_input, device, notes)
    ]
    subjects = {entry.name: entry.function for entry in measured}
    timings = interleaved(
        subjects, make_input, device, lambda done, total: report(f"{name}: round {done + 1} of {total}")
    )

    small = error_shape(shape, device)
    matrices = known_matrices(small, device)
    all_errors = {}
    for entry in measured:
        report(f"{name}: errors of {entry.name}")
        all_errors[entry.name] = {
            spectrum: errors(entry.function, matrix, entry.target) for spectrum, matrix in matrices.items()
        }
    return {
        "shape": list(shape),
        "error_shape": list(small),
        "num_rounds": timings[MUON_FLOAT32].num_rounds,
        "matmul_flops_per_second": rates,
        "maps": [_row(entry, shape, timings, rates) | {"errors": all_errors[entry.name]} for entry in measured],
    }


def _too_slow(entry: Candidate, shape: Shape, rates: dict[str, float], notes: list[str]) -> bool:
    flops = entry.num_flops(shape)
    if flops is None or entry.name == MUON_FLOAT32:
        return False
    name = f"{'x'.join(map(str, shape))}: {entry.name}"
    reason = too_slow(name, flops, entry.dtype, rates)
    notes.extend([reason] if reason else [])
    return reason is not None


def _can_run(
    entry: Candidate, shape: Shape, make_input: Callable[[], Tensor], device: torch.device, notes: list[str]
) -> bool:
    if entry.name == "exact" and min(shape) > DECOMPOSITION_ROWS[device.type]:
        notes.append(f"exact is skipped above {DECOMPOSITION_ROWS[device.type]} rows")
        return False
    if entry.dtype != PEERS_OWN:
        return True
    try:
        entry.function(make_input())
    except Exception as error:  # a peer's failure must not end the benchmark; it is reported
        reason = str(error).strip().splitlines()
        notes.append(f"{entry.name} failed: {type(error).__name__}: {reason[0] if reason else ''}")
        return False
    return True


def _row(entry: Candidate, shape: Shape, timings: dict[str, Timing], rates: dict[str, float]) -> dict[str, Any]:
    timing = timings[entry.name]
    flops = entry.num_flops(shape)
    return {
        "name": entry.name,
        "dtype": entry.dtype,
        "target": entry.target,
        "seconds": asdict(timing),
        "flops": flops,
        "share_of_matmul_rate": flops / timing.median / rates[entry.dtype] if flops else None,
        "ratio_to_muon": timing.median / timings[MUON].median if MUON in timings else None,
        "ratio_to_muon_float32": timing.median / timings[MUON_FLOAT32].median,
    }


def _over_all(shapes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric mean and largest of each map's ratios, for the maps that ran on every shape."""
    rows = []
    for name in [row["name"] for row in shapes[0]["maps"]]:
        same_map = [row for shape in shapes for row in shape["maps"] if row["name"] == name]
        if len(same_map) == len(shapes):
            means = {key: _mean_and_max([row[key] for row in same_map]) for key in _RATIOS}
            rows.append({"name": name, **means})
    return rows


_RATIOS = ("ratio_to_muon", "ratio_to_muon_float32")


def _mean_and_max(ratios: list[float | None]) -> dict[str, float] | None:
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios):
        return None
    return {"geometric_mean": math.exp(statistics.fmean(map(math.log, known))), "max": max(known)}
