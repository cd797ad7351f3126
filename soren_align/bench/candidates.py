"""The measured maps and their FLOPs.

FLOPs are counted of matrix products, for an m x n matrix with m <= n: m^2 n multiplications and additions, 2 m^2 n,
for x x^T as for (m x m) x; 2 m^3 for two m x m matrices. So
    Muon      5 steps of x x^T, its square, and their sum times x:    5 (4 m^2 n + 2 m^3)
    SNS       K steps of the sign stream and 2 of the tanh stream, each x x^T and its product with x:  4 m^2 n (K + 2)
    released  as SNS, with another K
    minimax   x x^T, once more after each restart, and a product with x each; about 15 of m x m. Symmetric
              products are computed, and counted, in blocks on one side of the diagonal only
test_counted_flops_are_those_that_torch_sees compares `num_flops` with torch's counter. Decompositions are not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..optimizer_settings import MUON_STEPS, RELEASED_STEPS, RESOLUTION, RESOLUTIONS, SNS_STEPS
from ..spectral import (
    exact_sigmoid,
    minimax_sigmoid,
    newton_schulz,
    num_flops,
    released_sigmoid,
    soft_newton_schulz,
)
from ..spectral.cost import SpectralMap
from ..spectral.matrices import frobenius_norm, from_wide, to_wide
from ..spectral.quintic import EPS, A, B, C, quintic_step
from .peers import DION, scheduled_quintic
from .shapes import Shape

PEERS_OWN = "the peer's own"  # dtype
MUON, MUON_FLOAT32 = "Muon bfloat16", "Muon float32"


@dataclass(frozen=True)
class Candidate:
    """A map to be measured: the dtype of its products, the name for `num_flops`, the target of its singular values."""

    name: str
    function: Callable[[Tensor], Tensor]
    dtype: str
    counted_as: SpectralMap | None = None
    target: Literal["sigmoid", "polar"] = "sigmoid"
    resolution: float = RESOLUTION

    def num_flops(self, shape: Shape) -> int | None:
        """Floating-point operations for one matrix, None where they are not counted."""
        return num_flops(self.counted_as, *shape, resolution=self.resolution) if self.counted_as else None


def candidates(device: torch.device) -> list[Candidate]:
    """This package's maps, including Muon's in two dtypes, the references of the ratios."""
    maps = [
        *(
            Candidate(f"minimax {r:g}", partial(minimax_sigmoid, resolution=r), "float32", "minimax", resolution=r)
            for r in sorted(RESOLUTIONS)
        ),
        Candidate("minimax eigh", lambda x: minimax_sigmoid(x, method="eigh"), "float64"),
        Candidate(f"SNS K={SNS_STEPS}", lambda x: soft_newton_schulz(x, SNS_STEPS), "float32", "sns"),
        Candidate(f"released K={RELEASED_STEPS}", released_sigmoid, "float32", "released"),
        Candidate("exact", exact_sigmoid, "float64"),
        Candidate(MUON, newton_schulz, "bfloat16", "muon", "polar"),
        Candidate(MUON_FLOAT32, newton_schulz_float32, "float32", "muon", "polar"),
        Candidate(DION, scheduled_quintic, "bfloat16", "muon", "polar"),
    ]
    if device.type == "cuda":  # on a CPU narrow factors are emulated
        maps[1:1] = [Candidate(f"minimax {p}", partial(minimax_sigmoid, precision=p), p) for p in ("float16", "tf32")]
    return maps


def newton_schulz_float32(x: Tensor) -> Tensor:
    """Muon's five steps as in `newton_schulz`, iterated in float32."""
    y = to_wide(x, torch.float32)
    y = y / frobenius_norm(y).clamp(min=EPS)
    for _ in range(MUON_STEPS):
        y = quintic_step(y, A, B, C)
    return from_wide(y, x)


def without_decomposed_flops(entry: Candidate, make_input: Callable[[], Tensor]) -> Candidate:
    """The candidate, without FLOPs if it decomposes its input."""
    if entry.counted_as != "minimax":
        return entry
    with _DecompositionDetector() as detector:
        entry.function(make_input())
    return replace(entry, counted_as=None, dtype="float64") if detector.has_decomposed else entry


class _DecompositionDetector(TorchDispatchMode):
    """Detects eigenvalue and singular value decompositions."""

    has_decomposed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_decomposed |= any(word in func.name() for word in ("eigh", "svd"))
        return func(*args, **(kwargs or {}))
