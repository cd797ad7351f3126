"""Benchmarks run from their command line, and measure what they name."""

import json

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.maps import errors, known_matrices
from benchmarks.trl_tests import outcomes
from soren_align.spectral import exact_sigmoid
from soren_align.spectral.maps import sigmoid

from benchmarks import timing

pytestmark = pytest.mark.rest
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    monkeypatch.setattr(timing, "MAX_ROUNDS", 3)


def run(capsys, *arguments):
    assert main([*arguments, "--shapes", "16x16,8x24", "--device", "cpu"]) == 0
    return capsys.readouterr().out


def test_the_maps_are_timed_counted_and_compared(capsys):
    results = json.loads(run(capsys, "maps", "--json"))
    assert [shape["shape"] for shape in results["shapes"]] == [[16, 16], [8, 24]]
    for shape in results["shapes"]:
        rows = {row["name"]: row for row in shape["maps"]}
        muon = rows["Muon bfloat16"]["seconds"]["median"]
        assert all(row["ratio_to_muon"] == row["seconds"]["median"] / muon for row in rows.values())
        largest = {name: row["errors"]["flat"]["max"] for name, row in rows.items()}
        assert largest["exact"] < 1e-6 < largest["minimax 0.0004"] < 0.01 < largest["SNS K=15"] < 0.05
    lines = run(capsys, "maps").splitlines()
    assert max(map(len, lines)) <= 80


def test_the_steps_are_timed_and_their_states_counted(capsys):
    results = json.loads(run(capsys, "step", "--json"))
    rows = {row["name"]: row for row in results["optimizers"]}
    one_moment = 4 * results["num_parameters"]
    assert one_moment <= rows["Soren SNS K=15"]["state_bytes"] < one_moment + 100
    assert 2 * one_moment <= rows["fused AdamW"]["state_bytes"] < 2 * one_moment + 100
    assert rows["Muon"]["ratio_to_torch_muon"] > 0
    assert max(map(len, run(capsys, "step").splitlines())) <= 80


def test_a_wrong_map_has_its_error():
    for matrix in known_matrices((8, 24), CPU).values():
        assert errors(exact_sigmoid, matrix, sigmoid)["max"] < 1e-6
        wrong = errors(lambda x: 1.25 * exact_sigmoid(x), matrix, sigmoid)
        assert wrong == pytest.approx({"max": 0.25, "mean": 0.25}, rel=1e-5)


def test_the_outcomes_of_trls_tests_are_read(tmp_path):
    ends = ["", '<failure message="ValueError: a&#10;b"/>', '<error message="no fixture"/>']
    ends += ['<skipped message="needs a GPU"/>', '<skipped message="not run: []"/>']
    cases = [f'<testcase classname="t" name="{i}">{end}</testcase>' for i, end in enumerate(ends)]
    (tmp_path / "x.xml").write_text(f"<testsuite>{''.join(cases)}</testsuite>")
    assert [*outcomes(tmp_path / "x.xml").values()] == [
        ("passes", ""), ("fails", "ValueError: a"), ("fails", "no fixture"),
        ("skipped", "needs a GPU"), ("not run", "not run: []"),
    ]  # fmt: skip
