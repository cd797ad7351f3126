"""The study of the maps on a CNN's gradients: its errors, and the figures on its page."""

from pathlib import Path

import numpy as np
import pytest
import torch
from research.studies import cnn
from soren_align.spectral import soft_newton_schulz

pytestmark = pytest.mark.rest
PAGE = (Path(__file__).parents[2] / "research/studies/cnn.md").read_text(encoding="utf-8")


def test_errors_are_those_of_a_loop_over_singular_values():
    matrix = torch.randn(4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, sigma, vh = np.linalg.svd(matrix.numpy())
    output = soft_newton_schulz(matrix, 5).numpy()
    differences = [abs(u[:, i] @ output @ vh[i] - 1 / (1 + np.exp(-sigma[i]))) for i in range(4)]
    relative = [difference * (1 + np.exp(-s)) for difference, s in zip(differences, sigma, strict=True)]
    expected = [sum(differences) / 4, max(differences), max(relative)]
    error = cnn.errors(matrix[None], lambda x: soft_newton_schulz(x, 5))[0]
    assert error.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("steps", [5, 10, 15, 20])
def test_every_k_has_a_spectrum_with_the_papers_figures(steps):
    spectrum = cnn.spectrum_of(*cnn.PAPER[2], steps)
    assert spectrum.norm().item() == pytest.approx(1, abs=1e-9)
    error = cnn.errors(spectrum.diag()[None], lambda x: soft_newton_schulz(x, steps))[0]
    assert error[:2].tolist() == pytest.approx(cnn.PAPER[2], abs=5e-5)
    assert f"| {steps} | {' | '.join(f'{x:.3g}' for x in spectrum[[0, 1, 8]].tolist())} |" in PAGE
