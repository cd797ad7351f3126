"""How far an update can be from Muon's: the theorem, and the numbers on recorded momenta."""

import json
from pathlib import Path
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from research.contrast import LOWEST_COSINE_OF_THE_SIGMOID, contrast
from research.recorded import recorded_spectra
from tests.support.run_folders import finished_run
from tests.support.spectra import singular_vectors

from research import contrast as command

pytestmark = pytest.mark.rest
PAGE = Path(__file__).parents[2] / "research/studies/theorems.md"
SPECTRUM = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40)


@given(SPECTRUM, st.floats(1e-6, 1e6))
def test_no_temperature_takes_the_sigmoid_further_from_muon_than_the_theorem_allows(sigma, temperature):
    sigma = torch.tensor(sigma, dtype=torch.float64)
    found = contrast(sigma, torch.sigmoid(sigma / temperature))
    assert LOWEST_COSINE_OF_THE_SIGMOID - 1e-12 <= found.to_muon <= 1 + 1e-12
    assert found.ratio <= 2


def test_the_numbers_are_those_of_the_matrices():
    u, v = singular_vectors((6, 9), 5)
    sigma, values = torch.tensor([3.0, 1, 0.5, 0.1, 0]).double(), torch.tensor([0.9, 0.5, 0.3, 0.2, 0.7]).double()
    momentum, muon, output = ((u[:, :4] * s[:4]) @ v[:, :4].mT for s in (sigma, torch.ones(5), values))
    found = contrast(sigma, values)  # the value of the null mode does not count
    cosine = lambda a, b: float((a * b).sum() / a.norm() / b.norm())  # noqa: E731
    assert found.to_muon == pytest.approx(cosine(output, muon), abs=1e-12)
    assert found.to_momentum == pytest.approx(cosine(output, momentum), abs=1e-12)
    assert found.ratio == pytest.approx(0.9 / 0.3)  # the lower median


def of_recorded_momenta(function):
    """The median over the recorded momenta of each number of a map's contrast."""
    spectra = [spectrum.without_null_space for spectrum in recorded_spectra() if spectrum.nu]
    found = [contrast(sigma, function(sigma)) for sigma in spectra]
    assert len(found) == 126
    return [[getattr(c, name) for c in found] for name in ("ratio", "to_muon", "to_momentum")]


def q90(sigma):
    return sigma[sigma > 0].quantile(0.9)


TABLE = {
    "the sigmoid": torch.sigmoid,
    "the sigmoid with T = median / 0.405": lambda sigma: torch.sigmoid(sigma * 0.405 / sigma[sigma > 0].median()),
    "tanh(sigma / the 90% quantile)": lambda sigma: torch.tanh(sigma / q90(sigma)),
    "sigma / sqrt(sigma^2 + q^2)": lambda sigma: sigma / (sigma.square() + q90(sigma) ** 2).sqrt(),
    "sigma: momentum SGD": lambda sigma: sigma,
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_the_page_is_that_of_the_recorded_momenta(name):
    """It follows from a file, and depends on no machine."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith((f"| {name} |", f"| {name}, "))]
    (cells,) = [[float(cell) for cell in row.split("|")[2:5]] for row in rows]
    medians = [median(numbers) for numbers in of_recorded_momenta(TABLE[name])]
    assert cells == pytest.approx(medians, rel=0.012)  # to two digits


def test_the_command_shows_the_map_of_the_run_first(tmp_path, monkeypatch, capsys):
    folder, sigma = finished_run(tmp_path / "run"), [0.1 / i for i in range(1, 25)]
    lines = [{"step": 1, "name": name, "shape": [24, 40], "singular_values": values}
             for name, values in {"a.q_proj.weight": sigma, "a.zero.weight": [0.0] * 24}.items()]  # fmt: skip
    folder.spectra.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr("sys.argv", ["contrast", str(folder.path), "--json"])
    command.main()
    found = json.loads(capsys.readouterr().out)
    assert (found["num_momenta"], found["num_zero"]) == (1, 1)
    own, *others = found["maps"]
    assert own["map"] == "this run: minimax 0.0004"
    assert all(row["to_muon"] < own["to_muon"] for row in others)
    monkeypatch.setattr("sys.argv", ["contrast", str(folder.path)])
    command.main()
    assert "at least 0.943" in " ".join(capsys.readouterr().out.split())
