"""Null maps, for the question whether the spectrum of an update matters: the directions of x with
other lengths. `pip install -e research` gives them to recipes, as the maps `random` and `shuffled`.

If training with them is as good as with another map, then what that map does to the singular values
is not the reason.
Source: Kaon, arXiv 2605.11181, scrambles the singular values by a chaotic polynomial, which is not
repeatable: rounding decides the result. Here a number of the matrix and the step decides it, so
that any number of ranks computes the same.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from soren_align.spectral.exact import map_singular_values
from soren_align.spectral.maps import IDENTITY, SpectralMap
from soren_align.spectral.matrices import in_full_precision


@in_full_precision
def random_spectrum(x: Tensor, seeds: Sequence[int] = ()) -> Tensor:
    """U R V^T of x = U S V^T: R is drawn uniformly from [0, 1], whatever S is.

    x: [..., m, n], floating point; not modified. seeds: one for each matrix, in order; none: 0 for
    each. Returns [..., m, n] in the dtype of x, with the null space and non-finite matrices as in
    `exact_sigmoid`. Modes of nearly equal singular values have no directions of their own, hence
    rounding of x may exchange their numbers.
    """
    return map_singular_values(x, lambda sigma: drawn_spectra(sigma, seeds))


@in_full_precision
def shuffled_spectrum(x: Tensor, seeds: Sequence[int] = ()) -> Tensor:
    """U P(S) V^T of x = U S V^T: P permutes the singular values that are not 0.
    Arguments as in `random_spectrum`.
    """
    return map_singular_values(x, lambda sigma: shuffled_spectra(sigma, seeds))


def drawn_spectra(sigma: Tensor, seeds: Sequence[int] = ()) -> Tensor:
    """For each spectrum of sigma [..., r] r uniform numbers; the first is of the largest singular
    value, and so on.
    """
    return _by_rank(
        sigma,
        seeds,
        lambda values, generator: torch.rand(len(values), generator=generator).to(values),
    )


def shuffled_spectra(sigma: Tensor, seeds: Sequence[int] = ()) -> Tensor:
    """For each spectrum of sigma [..., r] the numbers above 0, permuted; zeros stay."""

    def permuted(values: Tensor, generator: torch.Generator) -> Tensor:
        num_modes = int((values > 0).sum())
        order = torch.randperm(num_modes, generator=generator).to(values.device)
        return torch.cat([values[:num_modes][order], values[num_modes:]])

    return _by_rank(sigma, seeds, permuted)


def _by_rank(
    sigma: Tensor, seeds: Sequence[int], new_values: Callable[[Tensor, torch.Generator], Tensor]
) -> Tensor:
    """sigma with new_values(a spectrum in descending order, its generator) in the places of that
    order.
    """
    spectra = sigma.reshape(-1, sigma.shape[-1])
    result = torch.empty_like(spectra)
    for row, spectrum, seed in zip(result, spectra, seeds or [0] * len(spectra), strict=True):
        values, order = spectrum.sort(descending=True)
        row[order] = new_values(values, torch.Generator().manual_seed(seed))
    return result.view(sigma.shape)


RANDOM = SpectralMap(
    name="random",
    title="random, a null map",
    label="random",
    doc="A null map for studies: the singular values are replaced by random numbers between 0 and 1, "
    "which are drawn again at each step. This map is slow.",
    source="Kaon, arXiv 2605.11181",
    function=lambda x, *, precision, max_norm, seeds=(): (random_spectrum(x, seeds), 0),
    is_drawn=True,
    is_finite=True,
    target=drawn_spectra,
)
SHUFFLED = SpectralMap(
    name="shuffled",
    title="shuffled, a null map",
    label="shuffled",
    doc="A null map for studies: at each step, the singular values of the momentum are exchanged at "
    "random between its singular vectors. This map is slow.",
    source="ours, after Kaon",
    function=lambda x, *, precision, max_norm, seeds=(): (shuffled_spectrum(x, seeds), 0),
    is_drawn=True,
    is_finite=True,
    target=shuffled_spectra,
    level=IDENTITY.level,
)
