"""`spectrum --advise`: the numbers are those of the maps, and the text fits a terminal."""

import json

import pytest
import torch
from soren_align.optim.optimizers import complete_map
from soren_align.spectral import minimax_sigmoid
from soren_align.spectral.contrast import LOWEST_COSINE_OF_THE_SIGMOID, contrast
from tests.support import command
from tests.support.run_folders import finished_run

SIGMA = 0.1 / torch.arange(1, 25, dtype=torch.float64)


@pytest.fixture
def run(tmp_path):
    """A run with a recorded spectrum and a zero momentum."""
    folder = finished_run(tmp_path / "run")
    spectra = {"a.q_proj.weight": SIGMA.tolist(), "a.zero.weight": [0.0] * 24}
    lines = [{"step": 1, "name": name, "shape": [24, 40], "singular_values": v} for name, v in spectra.items()]
    folder.spectra.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_first_row_is_the_map_of_the_run(run):
    found = json.loads(command.run("spectrum", run.path, "--advise", "--json", code=0).stdout)
    assert (found["num_momenta"], found["num_zero"]) == (1, 1)
    assert found["sigmoids_lowest_cosine_to_muon"] == LOWEST_COSINE_OF_THE_SIGMOID
    own, *others = found["maps"]
    tau = float(SIGMA.quantile(0.9) / torch.linalg.vector_norm(SIGMA, 8))
    assert found["tau"] == pytest.approx(tau, rel=0.05)
    assert complete_map({"name": "soft_sign", "tau": found["tau"]})["tau"] == found["tau"]
    assert own["map"] == "this run: minimax 0.0004"
    expected = contrast(SIGMA, minimax_sigmoid(SIGMA.diag()).diagonal())
    assert own["to_muon"]["median"] == pytest.approx(expected.to_muon, abs=1e-5)
    assert own["to_momentum"]["median"] == pytest.approx(expected.to_momentum, abs=1e-5)
    identity = next(row for row in others if row["map"].startswith("identity"))
    assert identity["to_momentum"]["median"] == pytest.approx(1)
    assert identity["ratio"]["median"] == pytest.approx(float(SIGMA[0] / SIGMA.median()))
    assert all(row["to_muon"]["median"] < own["to_muon"]["median"] for row in others)


def test_the_table_fits_a_terminal(run):
    done = command.run("spectrum", run.path, "--advise", code=0)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "this run: minimax 0.0004" in done.stdout
    assert "at least 0.943" in " ".join(done.stdout.split())


def test_only_zero_momenta_give_an_empty_table(run):
    run.spectra.write_text(run.spectra.read_text().splitlines()[1] + "\n")
    assert json.loads(command.run("spectrum", run.path, "--advise", "--json").stdout)["maps"] == []
    command.run("spectrum", run.path, "--advise", code=0)


def test_options_that_advice_has_not_are_refused(run):
    assert "--full" in command.run("spectrum", run.path, "--advise", "--full", code=2).stderr
