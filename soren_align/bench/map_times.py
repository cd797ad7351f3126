"""`soren-align bench maps`: every map on every shape, in time, in FLOPs and in error."""

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..spectral import num_flops
from ..spectral.matrices import frobenius_norm
from .accuracy import DECOMPOSITION_ROWS, errors, problems, stand_in
from .candidates import MUON, MUON_FLOAT32, PEERS_OWN, SNS_STEPS, Candidate, as_it_runs, candidates
from .peers import peers
from .shapes import Matrices, Shape
from .timing import Timing, free_bytes, interleaved, machine, matmul_rates, too_slow

NUM_COPIES = 16  # of a matrix in float32: a decomposition holds five in float64, and errors their own three


@torch.no_grad()
def run(matrices: Matrices, device: torch.device, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """What the command prints, as JSON. `say` gets a line on what is being measured."""
    torch.manual_seed(0)
    here = machine(device)
    _refuse_what_is_too_large(matrices, device)
    foreign, notes = peers(device)
    entries = candidates(device) + [
        Candidate(name, function, PEERS_OWN, None, "polar") for name, function in foreign.items()
    ]
    shapes = [_measure(shape, entries, device, say, notes) for shape in matrices.per_layer]
    for entry, count in zip(shapes, matrices.per_layer.values(), strict=True):
        entry["count"] = count * matrices.num_layers
    return {
        "command": "maps",
        "shapes_name": matrices.name,
        "machine": here,
        "input": "independent normal numbers, |x|_F = 1 as after clipping, drawn anew for every call",
        "shapes": shapes,
        "over_all_shapes": _over_all(shapes),
        "notes": list(dict.fromkeys(notes)),
    }


def _refuse_what_is_too_large(matrices: Matrices, device: torch.device) -> None:
    room = free_bytes(device)
    for m, n in matrices.per_layer:
        if (needed := 4 * NUM_COPIES * m * n) > room:
            found, there = needed / 1e9, room / 1e9
            raise UserError(f"--shapes: {m}x{n} needs about {found:.1f} GB; {there:.1f} GB may be used")


def _measure(
    shape: Shape, entries: list[Candidate], device: torch.device, say: Callable[[str], None], notes: list[str]
) -> dict[str, Any]:
    name = "x".join(map(str, shape))

    def fresh() -> Tensor:
        x = torch.randn(shape, device=device)
        return x.div_(frobenius_norm(x))

    say(f"{name}: the rate of matrix products")
    rates = matmul_rates(device)
    say(f"{name}: warming up")
    quick = [entry for entry in entries if not _too_slow(entry, shape, rates, notes)]
    chosen = [as_it_runs(entry, fresh) for entry in quick if _can_run(entry, shape, fresh, device, notes)]
    subjects = {entry.name: entry.function for entry in chosen}
    timings = interleaved(subjects, fresh, device, lambda done, of: say(f"{name}: round {done + 1} of {of}"))

    small = stand_in(shape, device)
    known = problems(small, device)
    found = {}
    for entry in chosen:
        say(f"{name}: the errors of {entry.name}")
        found[entry.name] = {
            spectrum: errors(entry.function, problem, entry.target) for spectrum, problem in known.items()
        }
    return {
        "shape": list(shape),
        "error_shape": list(small),
        "num_rounds": timings[MUON_FLOAT32].num_rounds,
        "matmul_flops_per_second": rates,
        "maps": [_row(entry, shape, timings, rates) | {"errors": found[entry.name]} for entry in chosen],
    }


def _too_slow(entry: Candidate, shape: Shape, rates: dict[str, float], notes: list[str]) -> bool:
    if entry.counted_as is None or entry.name == MUON_FLOAT32:
        return False
    name = f"{'x'.join(map(str, shape))}: {entry.name}"
    reason = too_slow(name, num_flops(entry.counted_as, *shape, steps=SNS_STEPS), entry.dtype, rates)
    notes.extend([reason] if reason else [])
    return reason is not None


def _can_run(
    entry: Candidate, shape: Shape, fresh: Callable[[], Tensor], device: torch.device, notes: list[str]
) -> bool:
    if entry.name == "exact" and min(shape) > DECOMPOSITION_ROWS[device.type]:
        notes.append(f"exact is left out above {DECOMPOSITION_ROWS[device.type]} rows")
        return False
    if entry.dtype != PEERS_OWN:
        return True
    try:
        entry.function(fresh())
    except Exception as error:  # a peer's trouble must not stop ours; it is reported
        reason = str(error).strip().splitlines()
        notes.append(f"{entry.name} failed: {type(error).__name__}: {reason[0] if reason else ''}")
        return False
    return True


def _row(entry: Candidate, shape: Shape, timings: dict[str, Timing], rates: dict[str, float]) -> dict[str, Any]:
    timing = timings[entry.name]
    flops = num_flops(entry.counted_as, *shape, steps=SNS_STEPS) if entry.counted_as else None
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
        found = [row for shape in shapes for row in shape["maps"] if row["name"] == name]
        if len(found) == len(shapes):
            means = {key: _mean_and_max([row[key] for row in found]) for key in _RATIOS}
            rows.append({"name": name, **means})
    return rows


_RATIOS = ("ratio_to_muon", "ratio_to_muon_float32")


def _mean_and_max(ratios: list[float | None]) -> dict[str, float] | None:
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios):
        return None
    return {"geometric_mean": math.exp(statistics.fmean(map(math.log, known))), "max": max(known)}
