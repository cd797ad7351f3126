"""Whatever precision the process has set for its model, a map computes in float32."""

import inspect
import threading

import pytest
import torch
from soren_align.spectral import (
    exact_sigmoid,
    full_precision,
    guarded_minimax_sigmoid,
    guarded_soft_newton_schulz,
    minimax_sigmoid,
    newton_schulz,
    released_sigmoid,
    soft_newton_schulz,
    spectral_power,
)
from torch.utils._python_dispatch import TorchDispatchMode

MAPS = {
    "minimax": minimax_sigmoid, "minimax 0.001": lambda x: minimax_sigmoid(x, resolution=0.001),
    "sns": soft_newton_schulz, "released": released_sigmoid, "exact": exact_sigmoid,
    "muon": newton_schulz, "htmuon": lambda x: spectral_power(x, 0.125),
}  # fmt: skip
EVERY_MAP = pytest.mark.parametrize("spectral_map", MAPS.values(), ids=MAPS.keys())
CUDA, CPU = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


@pytest.fixture(autouse=True)
def default_precision():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = CUDA.fp32_precision = CPU.fp32_precision = "none"
    CUDA.allow_fp16_accumulation = False
    CUDA.allow_fp16_reduced_precision_reduction = CUDA.allow_bf16_reduced_precision_reduction = True


def low_rank(rows=256, columns=384):
    """Of rank m/8, as small as a clipped gradient: most of R's eigenvalues are rounding noise."""
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(*shape, generator=generator) for shape in ((rows, rows // 8), (rows // 8, columns))]
    return factors[0] @ factors[1] / 1000


class OnAGpu(TorchDispatchMode):
    """Rounds float32 factors of products to TF32's 11 bits where cuBLAS would."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.split("::")[1] in ("mm", "bmm", "addmm", "baddbmm") and CUDA.fp32_precision == "tf32":
            first = len(args) - 2  # addmm and baddbmm add to their first argument, in float32
            args = (*args[:first], *map(self.rounded, args[first:]))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def rounded(factor):
        return ((factor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize(("resolution", "error"), [(0.01, 0.001), (0.001, 0.005)])
def test_tf32_would_be_off_in_a_matrix_of_low_rank_and_is_not_used(resolution, error):
    x = low_rank()
    expected = minimax_sigmoid(x, resolution=resolution)
    CUDA.fp32_precision = "tf32"
    with OnAGpu():
        unpinned, _ = inspect.unwrap(guarded_minimax_sigmoid)(x, resolution)
        assert (unpinned - expected).norm() > error * expected.norm()
        assert torch.equal(minimax_sigmoid(x, resolution=resolution), expected)


@EVERY_MAP
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_map_has_the_same_bits_in_any_matmul_precision(spectral_map, precision):
    x = low_rank(128, 192)
    expected = spectral_map(x)
    torch.set_float32_matmul_precision(precision)  # "medium" is bfloat16 on CPUs that multiply it
    assert torch.equal(spectral_map(x), expected)
    assert torch.get_float32_matmul_precision() == precision


@EVERY_MAP
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_map_has_the_same_bits_within_autocast(spectral_map, dtype):
    x = low_rank(128, 192)
    expected = spectral_map(x)
    with torch.autocast("cpu", dtype):
        assert torch.equal(spectral_map(x), expected)
        assert (x @ x.mT).dtype == dtype  # on again


def set_by_set_float32_matmul_precision():
    torch.set_float32_matmul_precision("medium")


def set_by_allow_tf32():
    CUDA.allow_tf32 = True


def set_by_backend():
    CUDA.fp32_precision, CPU.fp32_precision = "tf32", "bf16"


def set_for_all_backends():
    torch.backends.fp32_precision = "tf32"


@pytest.mark.parametrize(
    "set_", [set_by_set_float32_matmul_precision, set_by_allow_tf32, set_by_backend, set_for_all_backends]
)
def test_the_setting_is_pinned_within_and_restored_after_an_error(set_):
    set_()
    before = CUDA.fp32_precision, CPU.fp32_precision
    assert before[0] == "tf32"

    def step():
        with full_precision(["cpu"]):
            for _ in range(2):
                assert CUDA.fp32_precision == "ieee"
                assert CPU.fp32_precision in ("ieee", "none")
                with full_precision(["cpu"]):  # as a map within a step
                    pass
            raise KeyError

    with pytest.raises(KeyError):
        step()
    assert (CUDA.fp32_precision, CPU.fp32_precision) == before


SUMS = ("fp16_accumulation", "fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction")


@pytest.mark.parametrize("name", SUMS)
def test_sums_in_16_bits_are_off_within_and_on_again_afterwards(name):
    name = f"allow_{name}"
    setattr(CUDA, name, True)
    with full_precision(["cpu"]):
        with full_precision(["cpu"]):
            assert not getattr(CUDA, name)
        assert not getattr(CUDA, name)
    assert getattr(CUDA, name)
    setattr(CUDA, name, False)
    with full_precision(["cpu"]):
        pass
    assert not getattr(CUDA, name)


def test_a_setting_of_all_backends_is_still_inherited_afterwards():
    torch.backends.fp32_precision = "tf32"
    with full_precision(["cpu"]):
        pass
    torch.backends.fp32_precision = "ieee"
    assert (CUDA.fp32_precision, CPU.fp32_precision) == ("ieee", "ieee")


def test_the_last_of_several_threads_restores_the_setting():
    CUDA.fp32_precision, CUDA.allow_fp16_accumulation = "tf32", True
    entered, leave = threading.Event(), threading.Event()

    def other():
        with full_precision(["cpu"]):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with full_precision(["cpu"]):
        thread.start()
        assert entered.wait(10)
    assert (CUDA.fp32_precision, CUDA.allow_fp16_accumulation) == ("ieee", False)  # the other is still inside
    leave.set()
    thread.join()
    assert (CUDA.fp32_precision, CUDA.allow_fp16_accumulation) == ("tf32", True)


@pytest.mark.rest
@pytest.mark.parametrize("spectral_map", [minimax_sigmoid, soft_newton_schulz])
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a")
@torch._dynamo.config.patch(disable=False)  # in case that the environment says TORCH_COMPILE_DISABLE
def test_a_compiled_map_is_pinned_too(spectral_map):
    x = low_rank(128, 192)
    expected = spectral_map(x)
    torch.set_float32_matmul_precision("medium")
    torch._dynamo.reset()
    assert torch.equal(torch.compile(spectral_map, backend="eager")(x), expected)
    assert torch.get_float32_matmul_precision() == "medium"
    assert CUDA.fp32_precision == "tf32"  # and nothing is left pinned


GRAPHS = {
    "minimax": (guarded_minimax_sigmoid, {"max_norm": 1.0}),
    "minimax 0.01": (guarded_minimax_sigmoid, {"max_norm": 1.0, "resolution": 0.01}),
    "minimax guarded": (guarded_minimax_sigmoid, {"max_norm": 30.0}),
    "sns": (guarded_soft_newton_schulz, {"max_norm": 1.0}),
    "released": (released_sigmoid, {}),
    "muon": (newton_schulz, {}),
}


@pytest.mark.rest
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a")
@torch._dynamo.config.patch(disable=False)
def test_a_map_of_known_norm_compiles_to_one_graph(graph):
    """All but the pin around it, which a step sets once for all maps."""
    spectral_map, settings = GRAPHS[graph]
    x = low_rank(128, 192)
    x *= 0.9 * settings.get("max_norm", 1.0) / x.norm()
    torch._dynamo.reset()
    compiled = torch.compile(inspect.unwrap(spectral_map), backend="aot_eager", fullgraph=True)
    found, expected = compiled(x, **settings), spectral_map(x, **settings)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found, expected, strict=True))
