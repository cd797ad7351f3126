"""`soren_align.testing.check_map` finds what is wrong with a map; tests/spectral/test_maps.py passes it our own."""

from dataclasses import replace

import pytest
import torch
from soren_align.spectral import MAPS, exact_sigmoid
from soren_align.testing import check_map

SIGMOID = MAPS["exact"]


def modifies_its_input(x):
    exact = exact_sigmoid(x)
    x.add_(1)
    return exact


def mixes_a_batch(x):
    return exact_sigmoid(x) + (0 if x.ndim == 2 else x.mean() * 0 + 1e-3)


def refuses_nothing(x):
    return exact_sigmoid(x) if x.ndim > 1 and x.is_floating_point() else x


FAULTS = {
    "rotated": lambda x: exact_sigmoid(x) + 1e-6 * x.sign(),
    "transposed": lambda x: exact_sigmoid(x) * (1 if x.shape[-1] > x.shape[-2] else 1 + 1e-3),
    "batch": mixes_a_batch,
    "input is modified": modifies_its_input,
    "becomes torch.float64": lambda x: exact_sigmoid(x.double()),
    "zero does not map to zero": lambda x: exact_sigmoid(x) + 1e-3,
    "does not map to NaN": lambda x: exact_sigmoid(x).nan_to_num(0.0),
    "is accepted": refuses_nothing,
    "from those of `target`": lambda x: 1.1 * exact_sigmoid(x),
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_faulty_map_is_named_with_its_fault(words):
    faulty = replace(SIGMOID, name="mine", function=lambda x, *, precision, max_norm: (FAULTS[words](x), 0))
    with pytest.raises(AssertionError, match=f"map 'mine': .*{words}"):
        check_map(faulty)


def test_flops_of_the_longer_side_are_a_fault():
    faulty = replace(MAPS["identity"], flops=lambda m, n, precision: m, level=None)
    check_map(faulty)  # num_flops sorts the sides
    with pytest.raises(AssertionError, match="guarded"):
        check_map(replace(SIGMOID, function=lambda x, *, precision, max_norm: (exact_sigmoid(x), torch.tensor(1))))
