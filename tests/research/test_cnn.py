"""The study of the maps on a CNN's gradients: the figures on its page."""

from pathlib import Path

import pytest
from research.studies import cnn
from soren_align.spectral import soft_newton_schulz

pytestmark = pytest.mark.rest
PAGE = (Path(__file__).parents[2] / "research/studies/cnn.md").read_text(encoding="utf-8")


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
