"""LoRA's product: the change of B A is the same for every pair of factors."""

import torch
from research.product import product_directions, unit_rms
from soren_align.spectral import exact_sigmoid


def test_the_change_of_the_product_does_not_depend_on_its_factors():
    torch.manual_seed(0)
    a, b, gradient = (torch.randn(shape, dtype=torch.float64) for shape in ((4, 12), (9, 4), (9, 12)))
    q = torch.randn(4, 4, dtype=torch.float64)
    changes = []
    for a_, b_ in ((a, b), (q @ a, b @ q.inverse())):
        da, db = product_directions(a_, b_, b_.mT @ gradient, gradient @ a_.mT, exact_sigmoid, 0.01)
        da, db = unit_rms(da, db, a_, b_)
        changes.append(db @ a_ + b_ @ da)
    torch.testing.assert_close(changes[0], changes[1], rtol=1e-9, atol=1e-9)
    assert abs(changes[0].square().mean().sqrt() - 1) < 1e-9
