"""What `bench maps` counts, compares and returns."""

import io
import json
import math

import pytest
import torch
from rich.console import Console
from soren_align.bench import maps, shapes, show, timing
from soren_align.bench.maps import MUON, MUON_FLOAT32, BenchmarkedMap, benchmarked_maps, newton_schulz_float32
from soren_align.core.errors import UserError
from soren_align.core.optimizer_settings import RESOLUTIONS
from soren_align.spectral import MAPS, minimax_sigmoid, newton_schulz, released_sigmoid, soft_newton_schulz
from soren_align.spectral.maps import polar
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def results():
    timing.ROUNDS_SECONDS, before = 0.2, timing.ROUNDS_SECONDS
    yield maps.run(shapes.parse("16x16,24x8,16x16"), CPU)
    timing.ROUNDS_SECONDS = before


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (40, 9)], ids=str)
@pytest.mark.parametrize(("name", "function", "settings"), [
    ("muon", newton_schulz, {}), ("muon", newton_schulz_float32, {}), ("sns", soft_newton_schulz, {}),
    ("sns", soft_newton_schulz, {"steps": 3}), ("released", released_sigmoid, {}),
    ("minimax", lambda x: minimax_sigmoid(x, method="products"), {}),
])  # fmt: skip
def test_counted_flops_are_those_that_torch_sees(name, function, settings, shape):
    x = torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        function(x / x.norm(), **settings)
    assert MAPS[name].num_flops(*shape, **settings) == counter.get_total_flops()


@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_the_flops_of_a_candidate_are_those_of_its_resolution(resolution):
    (entry,) = [entry for entry in benchmarked_maps(CPU) if entry.name == f"minimax {resolution:g}"]
    for shape in ((8, 24), (150, 150), (150, 300)):
        x = torch.randn(shape)
        with FlopCounterMode(display=False) as counter:
            entry.function(x / x.norm())
        assert entry.num_flops(shape) == pytest.approx(counter.get_total_flops(), rel=1e-6)


@pytest.mark.parametrize("shape", [(16, 16), (24, 8)], ids=str)
def test_the_float32_reference_is_muons_iteration(shape):
    x = torch.randn(shape)
    assert torch.allclose(newton_schulz_float32(x), newton_schulz(x.double()).float(), atol=1e-5)
    # bfloat16 has 8 bits, and the iteration's slope multiplies its rounding.
    assert (newton_schulz_float32(x) - newton_schulz(x)).norm() < 0.1 * newton_schulz_float32(x).norm()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_candidate_maps_a_matrix(kind):
    for entry in benchmarked_maps(torch.device(kind)):
        assert entry.function(torch.randn(8, 24)).shape == (8, 24), entry.name


def test_a_map_that_decomposes_is_not_counted_as_products():
    class Detector(TorchDispatchMode):
        has_decomposed = False

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.has_decomposed |= any(word in func.name() for word in ("eigh", "svd"))
            return func(*args, **(kwargs or {}))

    x = torch.randn(8, 24)
    for entry in benchmarked_maps(CPU):
        with Detector() as detector:
            entry.function(x / x.norm())
        assert (entry.num_flops((8, 24)) is None) == detector.has_decomposed == (entry.dtype == "float64"), entry.name


@pytest.mark.rest
def test_the_results_are_json_with_these_keys(results):
    results = json.loads(json.dumps(results, allow_nan=False))
    assert set(results) == {"command", "shapes_name", "machine", "input", "shapes", "over_all_shapes", "notes"}
    assert [(shape["shape"], shape["count"]) for shape in results["shapes"]] == [([16, 16], 2), ([24, 8], 1)]
    for shape in results["shapes"]:
        keys = {"shape", "error_shape", "count", "num_rounds", "matmul_flops_per_second", "maps"}
        assert set(shape) == keys
        assert {MUON, MUON_FLOAT32, "minimax 0.0004", "minimax 0.001", "minimax 0.01", "minimax eigh", "SNS K=15",
                "released K=5", "exact"} <= {row["name"] for row in shape["maps"]}  # fmt: skip
        for row in shape["maps"]:
            assert set(row) == {*("name", "dtype", "target", "seconds", "flops", "share_of_matmul_rate"),
                                *("ratio_to_muon", "ratio_to_muon_float32", "errors")}  # fmt: skip
            assert set(row["errors"]) == {"flat", "power law", "gaussian"}
            assert row["seconds"]["num_rounds"] == shape["num_rounds"]


def test_ratios_and_shares_are_of_the_medians(results):
    for shape in results["shapes"]:
        rows = {row["name"]: row for row in shape["maps"]}
        for row in rows.values():
            median = row["seconds"]["median"]
            assert row["ratio_to_muon"] == median / rows[MUON]["seconds"]["median"]
            assert row["ratio_to_muon_float32"] == median / rows[MUON_FLOAT32]["seconds"]["median"]
            if row["flops"]:
                rate = shape["matmul_flops_per_second"][row["dtype"]]
                assert row["share_of_matmul_rate"] == pytest.approx(row["flops"] / median / rate)
    (overall,) = [row for row in results["over_all_shapes"] if row["name"] == "SNS K=15"]
    ratios = [row["ratio_to_muon"] for s in results["shapes"] for row in s["maps"] if row["name"] == "SNS K=15"]
    assert overall["ratio_to_muon"]["geometric_mean"] == pytest.approx(math.sqrt(ratios[0] * ratios[1]))
    assert overall["ratio_to_muon"]["max"] == max(ratios)


def test_errors_tell_the_maps_apart(results):
    for shape in results["shapes"]:
        errors = {row["name"]: row["errors"]["flat"]["max"] for row in shape["maps"]}
        assert errors["exact"] < 1e-6 < errors["minimax 0.0004"] < 0.01 < errors["SNS K=15"] < 0.05 < errors[MUON]


@pytest.mark.rest
def test_every_call_has_fresh_input_that_is_not_zero(monkeypatch):
    seen = []

    def keep(x):
        seen.append(x.clone())
        return newton_schulz(x)

    entries = [BenchmarkedMap(name, keep, "bfloat16", MAPS["muon"], polar) for name in (MUON, MUON_FLOAT32)]
    monkeypatch.setattr(maps, "benchmarked_maps", lambda device: entries)
    monkeypatch.setattr(timing, "MAX_ROUNDS", 4)
    maps.run(shapes.parse("8x24"), CPU)
    timed = [x for x in seen if x.norm().item() == pytest.approx(1.0, abs=1e-5)]
    assert len(timed) >= 2 * (1 + 4)
    assert len({x.sum().item() for x in timed}) == len(timed)


def test_a_peer_that_fails_is_reported_and_left_out(monkeypatch):
    def fail(x):
        raise RuntimeError("no kernel\nand much more")

    monkeypatch.setattr(maps, "peers", lambda device: ({"Peer": fail}, []))
    monkeypatch.setattr(timing, "MAX_ROUNDS", 3)
    found = maps.run(shapes.parse("8x24"), CPU)
    assert "Peer failed: RuntimeError: no kernel" in found["notes"]
    assert "Peer" not in [row["name"] for row in found["over_all_shapes"]]


def test_a_matrix_beyond_memory_is_refused():
    with pytest.raises(UserError, match=r"90000000x90000000 needs about .* GB"):
        maps.run(shapes.parse("90000000x90000000"), CPU)


def test_the_tables_fit_into_80_columns(results):
    console = Console(width=80, file=io.StringIO())
    large = json.loads(json.dumps(results).replace("minimax 0.001", "gram-newton-schulz"))
    large["shapes"][0]["shape"] = [14336, 14336]
    for row in large["shapes"][0]["maps"]:
        row |= {"flops": 123456e9, "share_of_matmul_rate": 0.99, "ratio_to_muon": 123.0}
        row["seconds"] |= {"median": 123.456, "low": 100.0, "high": 140.0}
    console.print(show.terminal(large), highlight=False)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    wide = [line.split() for line in lines if line.startswith("Muon bfloat16")]
    assert wide[0] == ["Muon", "bfloat16", "123456", "16%", "123456", "99%", "123.00", *wide[0][7:]]


def test_the_page_keeps_the_parts_of_others_and_replaces_its_own(results, tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text("# Mine\n\nWords before.\n")
    show.update_page(results, page)
    other = {**results, "shapes_name": "another"}
    show.update_page(other, page)
    first = page.read_text()
    assert first.startswith("# Mine\n\nWords before.\n")
    assert "| minimax 0.0004 | " in first
    show.update_page(results, page)
    assert page.read_text() == first
    show.update_page({**results, "notes": ["a new note"]}, page)
    assert page.read_text().count("a new note") == 1
    assert page.read_text().count("## `soren-align bench maps") == 2


def test_what_would_take_minutes_is_left_out_and_said(monkeypatch):
    monkeypatch.setattr(timing, "MAX_ROUNDS", 3)
    monkeypatch.setattr(maps, "matmul_rates", lambda device: {"float32": 1e11, "float64": 5e10, "bfloat16": 1e3})
    found = maps.run(shapes.parse("8x24"), CPU)
    rows = {row["name"]: row for row in found["over_all_shapes"]}
    assert MUON not in rows
    assert rows["minimax 0.0004"]["ratio_to_muon"] is None
    assert rows["minimax 0.0004"]["ratio_to_muon_float32"]["geometric_mean"] > 0
    assert any("8x24: Muon bfloat16 is skipped: at 0 GFLOP/s" in note for note in found["notes"])
    console = Console(file=io.StringIO(), width=80)
    console.print(show.terminal(found))
    assert console.file.getvalue().count(" - ") >= 3


def test_times_in_tables_have_three_digits():
    values = (None, 0.01234, 4.567, 1234.5)
    assert [show._scaled(value, 1.0) for value in values] == ["-", "0.0123", "4.57", "1234"]
