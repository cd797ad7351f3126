"""With match_rms_measured every optimizer and map moves a matrix by the same RMS, whatever the momentum's spectrum."""

import pytest
import torch
from soren_align.core.optimizer_settings import RESOLUTIONS
from soren_align.optim import HTMuon, Muon, Soren
from soren_align.optim.step import with_unit_rms
from soren_align.spectral import SOREN_MAPS
from tests.support.spectra import matrix_of

SHAPES = ((64, 96), (96, 64), (64, 64))
SPECTRA = {"flat": torch.ones(64, dtype=torch.float64), "1/i": 1 / torch.arange(1, 65, dtype=torch.float64),
           "rank 16": (torch.arange(64) < 16).double()}  # fmt: skip
SPELLINGS = [*({"name": name} for name in SOREN_MAPS), *({"name": "minimax", "resolution": r} for r in RESOLUTIONS)]
OPTIMIZERS = {**{str(m): lambda params, m=m, **settings: Soren(params, map=m, **settings) for m in SPELLINGS},
              "Soren, one by one": lambda params, **settings: Soren(params, workspace_mb=0, **settings), "muon": Muon,
              "htmuon": HTMuon}  # fmt: skip


def gradient(shape, spectrum, seed):
    """With these singular values, times 1e-3, and random directions."""
    return matrix_of(1e-3 * SPECTRA[spectrum], shape, seed)[0].float()


def rms(x):
    return x.double().square().mean().sqrt()


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_the_update_is_the_maps_output_at_an_rms_of_a_fifth_of_lr(make, spectrum):
    """Against float64, from the outputs that the map's observer sees."""
    matrices, outputs = [torch.nn.Parameter(torch.randn(shape)) for shape in (*SHAPES, SHAPES[0])], []
    optimizer = make(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_measured")
    optimizer.map_observers = frozenset({lambda applied: outputs.append(applied.output.double())})
    for step in range(3):
        for seed, matrix in enumerate(matrices):
            matrix.grad = gradient(matrix.shape, spectrum, seed + 4 * (step % 2))
        before = [matrix.detach().double() for matrix in matrices]
        optimizer.step()
        mapped = dict(zip((0, 3, 1, 2), outputs[-4:], strict=True))  # equal shapes together
        for number, (matrix, start) in enumerate(zip(matrices, before, strict=True)):
            update = matrix.detach() - start * (1 - 0.01 * 0.1)
            assert rms(update) == pytest.approx(0.2 * 0.01, rel=1e-4)
            expected = -0.01 * 0.2 * mapped[number] / rms(mapped[number])
            assert (update - expected).abs().max() < 1e-6  # float32 weights of up to 5


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_zero_momentum_leaves_only_the_decay_also_in_a_batch(make):
    still, moving = (torch.nn.Parameter(torch.ones(64, 96)) for _ in range(2))
    still.grad, moving.grad = torch.zeros(64, 96), gradient((64, 96), "flat", 0)
    make([still, moving], lr=0.5, weight_decay=0.1, adjust_lr_fn="match_rms_measured").step()
    assert torch.equal(still, torch.full((64, 96), 1 - 0.5 * 0.1))
    assert rms(moving.detach() - 0.95) == pytest.approx(0.1, rel=1e-3)


def test_the_rms_is_exact_for_large_matrices_and_tiny_outputs_are_not_amplified():
    large = torch.randn(2, 2048, 2048, generator=torch.Generator().manual_seed(0))
    large *= torch.tensor([1e-4, 3.0])[:, None, None]
    before = large.clone()
    assert [float(rms(matrix)) for matrix in with_unit_rms(large)] == pytest.approx([1, 1], rel=1e-5)
    assert torch.equal(large, before)
    assert with_unit_rms(torch.full((8, 8), 1e-30)).max() < 1e-17
