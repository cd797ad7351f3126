"""The study of the maps on a CNN's gradients: its errors, its images, and the figures on its page."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from research.studies import cnn
from soren_align.spectral import soft_newton_schulz

pytestmark = pytest.mark.rest
PAGE = (Path(__file__).parents[2] / "research/studies/cnn.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def gradients():
    """Of two mini-batches, after an epoch on few images."""
    ((_, by_layer),) = cnn.training(0, *cnn.drawn(0, num_images=256, num_validation=256), epochs=[1])
    return by_layer


def test_errors_are_those_of_a_loop_over_singular_values():
    matrix = torch.randn(4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, sigma, vh = np.linalg.svd(matrix.numpy())
    output = soft_newton_schulz(matrix, 5).numpy()
    differences = [abs(u[:, i] @ output @ vh[i] - 1 / (1 + np.exp(-sigma[i]))) for i in range(4)]
    relative = [difference * (1 + np.exp(-s)) for difference, s in zip(differences, sigma, strict=True)]
    expected = [sum(differences) / 4, max(differences), max(relative)]
    error = cnn.errors(matrix[None], lambda x: soft_newton_schulz(x, 5))[0]
    assert error.tolist() == pytest.approx(expected, rel=1e-9)


def test_the_order_of_the_errors_is_that_of_the_page():
    """On a head of rank 9 and norm 1: singular values of 0.7 to 0.0014, so that K = 15 has not lifted all of them.

    A gradient in training has whatever singular values rounding leads to; where K = 10 lifts all, K = 11 is no better.
    """
    sigma = torch.logspace(0, -2.7, 9, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, 9, dtype=torch.float64, generator=generator))[0] for n in (10, 84))
    head = (u * (sigma / sigma.norm()) @ v.mT).float()[None]
    mean = {name: cnn.errors(head, spectral_map).mean(0) for name, spectral_map in cnn.MAPS.items()}
    order = ["SNS K = 5", "SNS K = 10", "SNS K = 11", "SNS K = 15", "minimax 0.001", "minimax 0.0004"]
    for worse, better in itertools.pairwise(order):
        assert (mean[worse] > 1.05 * mean[better]).all(), (worse, better)


def test_the_head_lacks_one_direction_and_the_exact_sigmoid_of_it_would_be_half(gradients):
    head = gradients["head"]
    assert head.sum(-2).abs().max() < 1e-6  # softmax: the gradients of the ten classes sum to zero
    assert torch.linalg.matrix_rank(head.double(), rtol=1e-5).tolist() == [9, 9]
    without, counted = (cnn.errors(head, soft_newton_schulz, with_null_space=x) for x in (False, True))
    torch.testing.assert_close(counted[:, 0] * 10, without[:, 0] * 9 + 0.5, atol=1e-3, rtol=0)


@pytest.mark.parametrize("steps", [5, 10, 15, 20])
def test_every_k_has_a_spectrum_with_the_papers_figures(steps):
    spectrum = cnn.spectrum_of(*cnn.PAPER[2], steps)
    assert spectrum.norm().item() == pytest.approx(1, abs=1e-9)
    error = cnn.errors(spectrum.diag()[None], lambda x: soft_newton_schulz(x, steps))[0]
    assert error[:2].tolist() == pytest.approx(cnn.PAPER[2], abs=5e-5)
    assert f"| {steps} | {' | '.join(f'{x:.3g}' for x in spectrum[[0, 1, 8]].tolist())} |" in PAGE


def test_the_script_prints_the_tables_of_the_page(capsys):
    cnn.tables(0, *cnn.drawn(0, num_images=128, num_validation=256))
    printed, on_page = ([line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
                        for text in (capsys.readouterr().out, PAGE))  # fmt: skip
    assert printed == [row for row in on_page if row in printed]
