"""The kernels that a map launches on a GPU, and the bytes that its elementwise kernels move: counted on meta tensors.

A matrix of 2048 x 11008 once had 562 launches and 9.3 GB, 2.1 times as many bytes as now; Muon has 20 and 0.41 GB.
"""

import pytest
import torch
from soren_align.spectral import factors, guarded_minimax_sigmoid, newton_schulz, products
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = {"alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "t", "transpose",
         "unsqueeze", "squeeze", "view", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty",
         "lift_fresh"}  # fmt: skip
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}


class Counts(TorchDispatchMode):
    """Launches, products among them, and the bytes that the others read and write."""

    def __init__(self):
        super().__init__()
        self.launches = self.products = self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, name = function(*args, **(kwargs or {})), function._schema.name.partition("::")[2]
        if name in VIEWS:
            return result
        self.launches += 1
        if name in PRODUCTS:
            self.products += 1
            return result
        read, written = (
            sum(map(moved, (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))))
            for tree in (args, result)
        )
        if name in ("copy_", "zero_", "fill_"):
            read -= moved(args[0])
        self.bytes += read + written
        return result


def moved(tensor):
    """Bytes of a tensor; an expanded dimension counts once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.element_size()


@pytest.fixture
def count(monkeypatch):
    def add_product_(c, a, b, alpha=1.0):  # torch has no baddbmm of meta tensors with an out_dtype
        factors.multiply(a, b, torch.empty_like(c))
        return c

    for module in (factors, products):
        monkeypatch.setattr(module, "add_product_", add_product_)

    def call(function, *shape):
        with Counts() as counts:
            function(torch.empty(*shape, device="meta"))
        return counts

    return call


def minimax(x):
    return guarded_minimax_sigmoid(x, precision="float16", max_norm=1.0)


def test_the_counter_counts(count):
    counts = count(lambda x: (x @ x.mT).add_(1.0), 6, 8)
    assert (counts.launches, counts.products, counts.bytes) == (2, 1, 2 * 36 * 4)


@pytest.mark.parametrize(("shape", "launches", "gigabytes"), [
    ((9, 2048, 2048), 152, 2.25),
    ((2048, 11008), 152, 4.16),
    ((4096, 4096), 257, 9.47),
    ((4096, 14336), 257, 13.9),
    ((256, 2048), 152, 0.09),
], ids=str)  # fmt: skip
def test_launches_and_elementwise_traffic_do_not_grow(count, shape, launches, gigabytes):
    counts = count(minimax, *shape)
    num_matrices = shape[0] if len(shape) == 3 else 1
    assert counts.launches <= launches
    assert counts.bytes / num_matrices <= gigabytes * 1e9


def test_blocks_are_launches(count, monkeypatch):
    before = count(minimax, 1024, 2048).launches
    monkeypatch.setattr(products, "block_size", lambda num_rows, device_type: num_rows // 8)
    assert count(minimax, 1024, 2048).launches > before + 100


def test_muon_has_a_tenth(count):
    counts = count(newton_schulz, 2048, 11008)
    assert counts.launches == 20
    assert 0.3e9 < counts.bytes < 0.5e9
