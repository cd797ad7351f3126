"""Checks of a spectral map: what holds for all maps, whatever they do to the singular values.
For third parties too.

    from soren_align.testing import check_map
    check_map(MY_MAP)          # a soren_align.spectral.SpectralMap, in a test

A map of another package is a `SpectralMap` under the entry point group `soren_align.maps`
(docs/library.md).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .spectral import SpectralMap


def check_map(spectral_map: SpectralMap, settings: dict[str, Any] | None = None) -> None:
    """Raise AssertionError, with all that does not hold, unless the map is what its record states.

    settings: those that are not the defaults. Checked: rotations and transposes of the input rotate
    and transpose the output; a batch is mapped matrix by matrix; the input is not modified; shape
    and dtype stay; zero maps to zero, and a matrix with a NaN or an infinity to NaN; what is no
    floating-point matrix is refused; the output has the singular values of `target` (within half of
    the largest for approximations); the FLOPs are those that torch counts; with `is_finite`, finite
    matrices of any size have finite outputs.
    """
    complete = {**spectral_map.defaults, **(settings or {})}

    def function(x: Tensor) -> Tensor:
        return spectral_map.function(x, precision="float32", max_norm=None, **complete)[0]

    problems = [problem for check in CHECKS for problem in check(function)]
    problems += _target_problems(spectral_map, complete)
    if spectral_map.is_finite:
        problems += _infinities(function)
    assert not problems, f"map {spectral_map.name!r}: " + "; ".join(problems)


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Gaussian numbers of a seed, drawn in float64."""
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)


def _rotations(function: Callable[[Tensor], Tensor]) -> Iterator[str]:
    u, v = (torch.linalg.qr(randn(size, size, seed=size))[0] for size in (6, 9))
    # Singular values far below 1, as momenta have them, and large ones.
    for scale in (0.01, 3.0):
        x = randn(6, 9) * scale
        if (error := float((function(u @ x @ v) - u @ function(x) @ v).abs().max())) > 1e-9:
            yield (
                f"a rotated matrix has another output than the rotated output (by {error:.1g}, at"
                f" scale {scale:g})"
            )


def _transposes(function: Callable[[Tensor], Tensor]) -> Iterator[str]:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for x in (randn(6, 9, dtype=dtype), randn(2, 9, 4, dtype=dtype)):
            if not torch.equal(function(x.mT), function(x).mT):
                yield f"a transposed matrix has another output than the transposed output ({dtype})"


def _batches(function: Callable[[Tensor], Tensor]) -> Iterator[str]:
    x = randn(2, 3, 8, 5) * torch.logspace(-3, 2, 3, dtype=torch.float64)[:, None, None]
    one_by_one = torch.stack([function(matrix) for matrix in x.flatten(0, 1)]).unflatten(0, (2, 3))
    if (function(x) - one_by_one).abs().max() > 1e-12:
        yield "a batch [2, 3, m, n] has other outputs than its matrices alone"


def _shapes_and_dtypes(function: Callable[[Tensor], Tensor]) -> Iterator[str]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for shape in ((6, 9), (9, 6), (5, 5), (2, 6, 9)):
            x = randn(*shape, dtype=dtype)
            before = x.clone()
            result = function(x)
            if not torch.equal(x, before) or result.data_ptr() == x.data_ptr():
                yield f"the input is modified, or returned ({dtype}, {shape})"
            if (result.dtype, result.shape) != (dtype, x.shape):
                yield (
                    f"{dtype} of shape {shape} becomes {result.dtype} of shape"
                    f" {tuple(result.shape)}"
                )


def _zeros_and_nan(function: Callable[[Tensor], Tensor]) -> Iterator[str]:
    for dtype in (torch.float32, torch.float64):
        if (function(torch.zeros(4, 6, dtype=dtype)) != 0).any():
            yield f"zero does not map to zero ({dtype})"
        for bad in (torch.nan, torch.inf):
            x = randn(2, 4, 6, dtype=dtype)
            x[0, 1, 2] = bad
            result = function(x)
            if not result[0].isnan().all():
                yield f"a matrix with {bad} does not map to NaN throughout ({dtype})"
            if not result[1].isfinite().all():
                yield f"a matrix with {bad} changes another matrix of its batch ({dtype})"


def _refusals(function: Callable[[Tensor], Tensor]) -> Iterator[str]:
    for x in (torch.ones(3), torch.tensor(1.0), torch.ones(2, 3, dtype=torch.int64)):
        try:
            function(x)
        except ValueError:
            continue
        yield f"{x.dtype} of shape {tuple(x.shape)} is accepted; raise ValueError"


def _infinities(function: Callable[[Tensor], Tensor]) -> Iterator[str]:
    one_entry = torch.zeros(6, 9, dtype=torch.float64)
    one_entry[1, 2] = 1
    inputs = {
        "full rank": randn(6, 9) / 9,
        "rank 1": randn(6, 1) @ randn(1, 9) / 99,
        "one entry": one_entry,
    }
    for name, x in inputs.items():
        for scale in (1e-44, 1e-38, 1e-20, 1.0, 1e20, 3e38):
            if not function((x * scale).float()).isfinite().all():
                yield f"a finite matrix of size {scale:g} ({name}) has an output that is not finite"


CHECKS: Sequence[Callable[[Callable[[Tensor], Tensor]], Iterator[str]]] = (
    _rotations, _transposes, _batches, _shapes_and_dtypes, _zeros_and_nan, _refusals
)  # fmt: skip
"""Checks of a function of matrices alone: each yields what does not hold."""


def _target_problems(spectral_map: SpectralMap, settings: dict[str, Any]) -> Iterator[str]:
    sigma = torch.linspace(1.0, 0.5, 4, dtype=torch.float64) / 2
    output, num_guarded = spectral_map.function(
        sigma.diag(), precision="float32", max_norm=None, **settings
    )
    target = spectral_map.target(sigma, **settings)
    # Muon's values are within about [0.7, 1.2] of 1; the released map is another function, below
    # the sigmoid's by less.
    bound = (1e-6 if spectral_map.num_flops(4, 4, **settings) is None else 0.5) * float(
        target.abs().max()
    )
    if (error := float((output.diagonal() - target).abs().max())) > bound:
        yield f"the singular values {sigma.tolist()} are {error:.2g} from those of `target`"
    if int(num_guarded):
        yield f"{int(num_guarded)} matrix with singular values up to 0.5 is counted as guarded"
    if spectral_map.num_flops(8, 24, **settings) != spectral_map.num_flops(24, 8, **settings):
        yield "the FLOPs of 8 x 24 and 24 x 8 differ"
