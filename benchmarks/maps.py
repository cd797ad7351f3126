"""`python -m benchmarks maps`: time, FLOPs and errors of every map on every shape.

FLOPs are counted of matrix products, for an m x n matrix with m <= n: m^2 n multiplications and
additions, 2 m^2 n, for x x^T as for (m x m) x; 2 m^3 for two m x m matrices, symmetric ones too.
Decompositions are not counted. test_counted_flops_are_those_that_torch_sees compares the records of
`spectral.maps` with torch's counter.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from soren_align.core.errors import UserError
from soren_align.core.optimizer_settings import MUON_STEPS, FactorPrecision
from soren_align.spectral import MAPS, SOREN_MAPS, SpectralMap, newton_schulz
from soren_align.spectral.coefficients import MUON as MUON_STEP
from soren_align.spectral.iterate import EPS, iterate
from soren_align.spectral.maps import polar, sigmoid
from soren_align.spectral.matrices import frobenius_norm, from_wide, multiply_add, to_wide

from .shapes import Matrices, Shape
from .timing import available_bytes, interleaved, machine, matmul_rates, too_slow

# of a matrix in float32: a decomposition holds five in float64, and errors their own three
NUM_COPIES = 16
# Rows of the largest float64 decomposition. At 1024 one takes seconds on two CPU cores, at 2048 on
# a GPU.
DECOMPOSITION_ROWS = {"cpu": 1024, "cuda": 2048}
MUON, MUON_FLOAT32 = "Muon bfloat16", "Muon float32"
DION = "dion, Emerging"
Map = Callable[[Tensor], Tensor]


@torch.no_grad()
def run(
    matrices: Matrices, device: torch.device, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """The results as JSON. `report` is called with the current state, for a spinner."""
    torch.manual_seed(0)
    available = available_bytes(device)
    for m, n in matrices.per_layer:
        if (needed := 4 * NUM_COPIES * m * n) > available:
            sizes = f"needs about {needed / 1e9:.1f} GB of memory, but only {available / 1e9:.1f} GB are free"
            raise UserError(f"--shapes: {m}x{n} {sizes}; write smaller shapes")
    notes: list[str] = []
    entries, shapes = benchmarked_maps(device), []
    for shape, count in matrices.per_layer.items():
        shapes.append(
            _measure(shape, entries, device, report, notes) | {"count": count * matrices.num_layers}
        )

    # geometric mean and largest of each map's ratios, for the maps that ran on every shape
    over_all = []
    for name in [row["name"] for row in shapes[0]["maps"]]:
        same_map = [row for shape in shapes for row in shape["maps"] if row["name"] == name]
        if len(same_map) < len(shapes):
            continue
        entry: dict[str, Any] = {"name": name}
        for key in ("ratio_to_muon", "ratio_to_muon_float32"):
            ratios = [row[key] for row in same_map]
            is_known = None not in ratios
            entry[key] = (
                {"geometric_mean": geometric_mean(ratios), "max": max(ratios)} if is_known else None
            )
        over_all.append(entry)
    return {
        "command": "maps",
        "shapes_name": matrices.name,
        "machine": machine(device),
        "input": "new matrices of independent normal numbers for every call, with |x|_F = 1 as after clipping",
        "shapes": shapes,
        "over_all_shapes": over_all,
        "notes": list(dict.fromkeys(notes)),
    }


def _measure(
    shape: Shape,
    entries: list["BenchmarkedMap"],
    device: torch.device,
    report: Callable[[str], None],
    notes: list[str],
) -> dict[str, Any]:
    name = "x".join(map(str, shape))

    def make_input() -> Tensor:
        x = torch.randn(shape, device=device)
        return x.div_(frobenius_norm(x))

    report(f"{name}: FLOP/s of matrix products")
    rates = matmul_rates(device)
    report(f"{name}: warm-up")
    measured = []
    for entry in entries:
        reason, flops = None, entry.num_flops(shape)
        if flops is not None and entry.dtype in rates and entry.name != MUON_FLOAT32:
            reason = too_slow(f"{name}: {entry.name}", flops, entry.dtype, rates)
        decomposes = entry.counted_as is not None and flops is None
        if decomposes and min(shape) > DECOMPOSITION_ROWS[device.type]:
            reason = (
                f"{entry.name} decomposes each matrix, and is not measured for matrices of more than "
                f"{DECOMPOSITION_ROWS[device.type]} rows, because this would take too long"
            )
        if reason is None:
            measured.append(entry)
        else:
            notes.append(reason)
    subjects = {entry.name: entry.function for entry in measured}
    timings = interleaved(
        subjects,
        make_input,
        device,
        lambda done, total: report(f"{name}: round {done + 1} of {total}"),
    )

    small = error_shape(shape, device)
    matrices, rows = known_matrices(small, device), []
    for entry in measured:
        report(f"{name}: errors of {entry.name}")
        target, flops = partial(entry.target, **entry.settings), entry.num_flops(shape)
        median = timings[entry.name].median
        rows.append(
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "target": entry.target.__name__,
                "seconds": asdict(timings[entry.name]),
                "flops": flops,
                "share_of_matmul_rate": flops / median / rates[entry.dtype]
                if flops and entry.dtype in rates
                else None,
                "ratio_to_muon": median / timings[MUON].median if MUON in timings else None,
                "ratio_to_muon_float32": median / timings[MUON_FLOAT32].median,
                "errors": {
                    key: errors(entry.function, matrix, target) for key, matrix in matrices.items()
                },
            }
        )
    return {
        "shape": list(shape),
        "error_shape": list(small),
        "num_rounds": timings[MUON_FLOAT32].num_rounds,
        "matmul_flops_per_second": rates,
        "maps": rows,
    }


@dataclass(frozen=True)
class BenchmarkedMap:
    """A map to be measured.

    dtype: of its products. counted_as: the record with the same FLOPs; None if they are not
    counted. target: see `SpectralMap`. settings: of both.
    """

    name: str
    function: Map
    dtype: str
    counted_as: SpectralMap | None = None
    target: Callable[..., Tensor] = sigmoid
    settings: dict[str, Any] = field(default_factory=dict)

    def num_flops(self, shape: Shape) -> int | None:
        """Floating-point operations for one matrix, None where they are not counted."""
        return self.counted_as.num_flops(*shape, **self.settings) if self.counted_as else None


def benchmarked_maps(device: torch.device) -> list[BenchmarkedMap]:
    """This package's maps, including Muon's in two dtypes, the references of the ratios."""

    def entry(
        spectral_map: SpectralMap, settings: dict[str, Any], precision: FactorPrecision
    ) -> BenchmarkedMap:
        def function(x: Tensor) -> Tensor:
            return spectral_map.function(x, precision=precision, max_norm=None, **settings)[0]

        # A power is in float64 for the most part, whether it decomposes or not.
        is_counted = spectral_map.num_flops(64, 64, precision, **settings) is not None
        is_wide, dtype = precision == "float32", precision if is_counted else "float64"
        name = (
            spectral_map.label.format(**settings) if is_wide else f"{spectral_map.name} {precision}"
        )
        return BenchmarkedMap(
            name, function, dtype, spectral_map if is_wide else None, spectral_map.target, settings
        )

    entries = []
    for spectral_map in SOREN_MAPS.values():
        # has no function that errors could be measured from, and is no faster than "exact"
        if spectral_map.is_drawn:
            continue
        for settings in spectral_map.variants():
            entries.append(entry(spectral_map, settings, "float32"))
            # a CPU emulates float16
            narrow: FactorPrecision = "float16" if device.type == "cuda" else "bfloat16"
            if narrow in spectral_map.precisions and settings == spectral_map.defaults:
                entries.append(entry(spectral_map, settings, narrow))
    return [
        *entries,
        BenchmarkedMap(MUON, newton_schulz, "bfloat16", MAPS["muon"], polar),
        BenchmarkedMap(MUON_FLOAT32, newton_schulz_float32, "float32", MAPS["muon"], polar),
        BenchmarkedMap(DION, scheduled_quintic, "bfloat16", MAPS["muon"], polar),
    ]


def newton_schulz_float32(x: Tensor) -> Tensor:
    """Muon's five steps as in `newton_schulz`, iterated in float32."""
    y = to_wide(x, torch.float32)
    y = y / frobenius_norm(y).clamp(min=EPS)
    for _ in range(MUON_STEPS):  # written out: `iterate` saves a copy in float32
        gram = y @ y.mT
        a, b, c = MUON_STEP
        y = multiply_add(y, multiply_add(gram, gram, gram, beta=b, alpha=c), y, beta=a, alpha=1.0)
    return from_wide(y, x)


# You Jiacheng's five steps, of microsoft/dion and of NVIDIA's Emerging-Optimizers ("quintic", its
# default).
SCHEDULE = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def scheduled_quintic(x: Tensor) -> Tensor:
    """The iteration of dion and Emerging-Optimizers in bfloat16: a quintic whose coefficients
    change step by step.

    Written anew from their published coefficients, as the two packages are not on every registry.
    """
    y = to_wide(x, torch.bfloat16)
    y = y / (torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True) + EPS)
    return from_wide(iterate(y, SCHEDULE), x)


@dataclass(frozen=True)
class KnownMatrix:
    """x = u diag(sigma) vh: x in float32, its decomposition in float64."""

    x: Tensor
    u: Tensor
    sigma: Tensor
    vh: Tensor


def error_shape(shape: Shape, device: torch.device) -> Shape:
    """`shape`, or a smaller one of the same aspect ratio where its decomposition would take too
    long.
    """
    scale = min(1.0, DECOMPOSITION_ROWS[device.type] / min(shape))
    return (round(shape[0] * scale), round(shape[1] * scale))


def known_matrices(shape: Shape, device: torch.device) -> dict[str, KnownMatrix]:
    """A matrix of `shape` for each spectrum, whose largest singular value is 1.

    In "flat" all are 1; "power law" is 1/i; "gaussian" is the spectrum of independent normal
    numbers.
    """
    m, n = shape
    r = min(shape)
    normal = {"dtype": torch.float64, "device": device}
    u = torch.linalg.qr(torch.randn(m, r, **normal)).Q
    vh = torch.linalg.qr(torch.randn(n, r, **normal)).Q.mT
    index = torch.arange(1, r + 1, **normal)
    x = torch.randn(m, n, **normal)
    gaussian = torch.linalg.svd(x / torch.linalg.matrix_norm(x, 2), full_matrices=False)
    # Rounding x to float32 moves its singular values by less than 1e-8: no need to decompose it
    # again.
    parts = {
        "flat": (u, torch.ones_like(index), vh),
        "power law": (u, 1 / index, vh),
        "gaussian": gaussian,
    }
    return {
        name: KnownMatrix(((u * sigma) @ vh).float(), u, sigma, vh)
        for name, (u, sigma, vh) in parts.items()
    }


def errors(
    function: Callable[[Tensor], Tensor], matrix: KnownMatrix, target: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """{"max", "mean"} relative error of the output along the input's singular vectors, over all
    modes.

    Those below a map's accurate range count too. target: of the singular values; below 1% of its
    largest value the error is relative to this 1%, for maps that fall to 0.
    """
    output = function(matrix.x).double()
    values = ((matrix.u.mT @ output) * matrix.vh).sum(dim=-1)
    exact = target(matrix.sigma)
    relative = (values - exact).abs() / exact.clamp(min=0.01 * exact.max())
    return {"max": relative.max().item(), "mean": relative.mean().item()}
