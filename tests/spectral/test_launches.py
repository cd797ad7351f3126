"""The kernels that a map launches on a GPU, and the bytes that it reads and writes: counted on meta tensors.

An addmm of torch copies its first argument into the result before the product; the copy is counted.
"""

import pytest
import torch
from soren_align.spectral import guarded_minimax_sigmoid, iterate, newton_schulz
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = {"alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "t", "transpose",
         "unsqueeze", "squeeze", "view", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty",
         "lift_fresh"}  # fmt: skip
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}


class Counts(TorchDispatchMode):
    """Launches, products and others of matrices among them, and the bytes that the others read and write."""

    def __init__(self):
        super().__init__()
        self.launches = self.products = self.on_matrices = self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, name = function(*args, **(kwargs or {})), function._schema.name.partition("::")[2]
        if name in VIEWS:
            return result
        self.launches += 1
        if name in PRODUCTS:
            self.products += 1
            in_place = any(result is leaf for leaf in tree_leaves(kwargs))
            self.bytes += 0 if in_place or name in ("mm", "bmm") else 2 * moved(args[0])
            return result
        self.on_matrices += any(leaf.numel() > 2**16 for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
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
    def add_product_(c, a, b, *, beta, alpha):  # torch has no baddbmm of meta tensors with an out_dtype
        iterate._wide_product(a, b)
        return c

    monkeypatch.setattr(iterate, "_add_wide_product_", add_product_)

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


@pytest.mark.parametrize("shape", [(9, 2048, 2048), (2048, 11008), (4096, 4096), (4096, 14336), (256, 2048)], ids=str)
def test_seven_steps_launch_and_move_what_muons_five_do_and_little_more(count, shape):
    ours, muons = count(minimax, *shape), count(newton_schulz, *shape)
    assert (ours.products, muons.products) == (21, 15)
    assert ours.products + ours.on_matrices <= 30
    assert ours.launches <= 43  # with those of single numbers and of diagonals
    assert ours.bytes <= 1.21 * muons.bytes


def test_a_library_of_symmetric_products_takes_all_but_those_with_x(monkeypatch):
    """As QuACK's gemm_symmetric, with its keywords; and the result stays."""
    shapes = []

    def kernel(a, b, C=None, out=None, *, alpha, beta):
        shapes.append((tuple(a.shape), C is None))
        product = alpha * (a.double() @ b.double())
        out.copy_(product if C is None else beta * C.double() + product)

    x = torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(0)) / 100
    expected = iterate.minimax_sigmoid(x), newton_schulz(x.double())
    monkeypatch.setattr(iterate, "_symmetric_kernel", lambda y: kernel)
    found = iterate.minimax_sigmoid(x), newton_schulz(x.double())
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()
    assert shapes.count(((3, 16, 24), True)) == 12
    assert shapes.count(((3, 16, 16), False)) == 11


def test_no_kernel_is_asked_for_on_a_cpu():
    assert iterate._symmetric_kernel(torch.zeros(16, 16, dtype=torch.float16)) is None
