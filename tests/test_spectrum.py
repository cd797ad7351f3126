"""`soren-align spectrum`: numbers equal those of whole matrices with the recorded singular values."""

import json

import pytest
import torch
from soren_align.core.files import contents
from soren_align.optim import Soren
from soren_align.spectral import exact_sigmoid, minimax_sigmoid, newton_schulz, soft_newton_schulz

from tests.support import command
from tests.support.run_folders import finished_run
from tests.support.spectra import matrix_of
from tests.support.tiny_run import flip_bit

SHAPE = (24, 40)
NAMES = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
FUNCTIONS = {"muon": newton_schulz, "minimax 0.01": lambda x: minimax_sigmoid(x, resolution=0.01),
             "minimax 0.001": lambda x: minimax_sigmoid(x, resolution=0.001), "sns 15": soft_newton_schulz,
             "exact": exact_sigmoid}  # fmt: skip


def spectrum(layer, step):
    """A long tail, longer in later layers and at later steps."""
    return 0.1 / torch.arange(1, 25, dtype=torch.float64) ** (1 + layer + step / 10)


def record(layer, step):
    values = spectrum(layer, step).tolist()
    return {"step": step, "name": NAMES[layer], "shape": list(SHAPE), "singular_values": values}


@pytest.fixture
def run(tmp_path):
    """A run with recorded spectra of two matrices at two steps."""
    folder = finished_run(tmp_path / "run")
    lines = [json.dumps(record(layer, step)) for step in (1, 12) for layer in (0, 1)]
    folder.spectra.write_text("\n".join(lines) + "\n")
    return folder


def shown(run, *options):
    return json.loads(command.run("spectrum", run.path, "--json", *options, code=0).stdout)


def refusal(run, *options):
    """The message of a refusal, in one line."""
    return " ".join(command.run("spectrum", run.path, *options, code=2).stderr.split())


def test_every_map_is_as_far_from_the_sigmoid_as_on_a_matrix_with_these_singular_values(run):
    found = shown(run)["spectra"]
    assert [(line["step"], line["name"]) for line in found] == [(s, n) for s in (1, 12) for n in NAMES]
    for line in found:
        sigma = spectrum(NAMES.index(line["name"]), line["step"])
        (x, _, _), nu = matrix_of(sigma, SHAPE), float(sigma.pow(8).sum().pow(1 / 8))
        assert line["nu"] == pytest.approx(nu)
        assert line["below"] == {
            "0.01": float((sigma < 0.01 * nu).sum()) / 24,
            "0.001": float((sigma < 0.001 * nu).sum()) / 24,
        }
        exact = exact_sigmoid(x)
        assert FUNCTIONS.keys() <= line["maps"].keys()
        for label, function in FUNCTIONS.items():
            level = 1 if label == "muon" else 0.5
            output = function(x) * 0.5 / level  # in float64, where the command computes in float32, Muon in bfloat16
            rough = {"abs": 0.03 if label == "muon" else 1e-4}
            numbers = line["maps"][label]
            assert numbers["distance"] == pytest.approx(float((output - exact).norm() / exact.norm()), **rough)
            cosine = float((output * exact).sum() / output.norm() / exact.norm())
            assert numbers["cosine"] == pytest.approx(cosine, **rough)
            assert numbers["size"] == pytest.approx(float(output.norm()) / (0.5 * 24**0.5), **rough)


def test_a_zero_momentum_has_no_cosine_and_is_left_out_of_the_means(run):
    zero = {**record(0, 1), "name": "model.layers.0.self_attn.zero.weight", "singular_values": [0.0] * 24}
    run.spectra.write_text(json.dumps(zero) + "\n" + json.dumps(record(0, 1)) + "\n")
    first, _ = shown(run)["spectra"]
    assert (first["largest"], first["nu"]) == (0, 0)
    assert {*first["below"].values()} == {None}
    assert all({*numbers.values()} == {None} for numbers in first["maps"].values())


def test_globs_choose_matrices(run):
    assert {line["name"] for line in shown(run, "--matrices", "*.1.*")["spectra"]} == {NAMES[1]}
    message = "none of a matrix with a name like *query*; write a name such as model.layers.0.self_attn.q_proj.weight"
    assert message in refusal(run, "--matrices", "*query*")


def test_without_records_the_momentum_of_the_last_checkpoint_is_shown(run):
    run.spectra.unlink()
    matrix = torch.nn.Parameter(torch.zeros(SHAPE))
    vector = torch.nn.Parameter(torch.zeros(3))
    others = {"params": [("norm", vector)], "rule": "adamw", "lr": 0.1}
    optimizer = Soren([{"params": [(NAMES[0], matrix)]}, others], 0.1)
    matrix.grad, vector.grad = matrix_of(spectrum(0, 1), SHAPE)[0].float(), torch.ones(3)
    optimizer.step()
    for step in (9, 10):
        checkpoint = run.checkpoints / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        torch.save(optimizer.state_dict(), checkpoint / "optimizer.pt")
        (content,) = contents([checkpoint / "optimizer.pt"])
        seal = {"step": step, "origin": {}, "files": {"optimizer.pt": content}}
        (checkpoint / "soren_align.json").write_text(json.dumps(seal))
    found = shown(run)
    source = "the momentum in checkpoint-10, without the part that Nesterov's method adds from the next gradient"
    assert found["source"] == source
    (line,) = found["spectra"]
    assert (line["name"], line["step"], line["largest"]) == (NAMES[0], 10, pytest.approx(0.1 * 0.05, rel=1e-5))
    flip_bit(checkpoint / "optimizer.pt")
    assert "checkpoint-10/optimizer.pt: the content differs from what was saved" in refusal(run)


def test_a_run_without_records_and_whole_momentum_is_refused(run):
    run.spectra.unlink()
    assert "train with --set run.log_spectra.steps=[1,100]" in refusal(run)


@pytest.mark.parametrize("change", [
    {"singular_values": [0.1]}, {"singular_values": None}, {"singular_values": [-1.0] * 24},
    {"singular_values": [float("nan")] * 24}, {"shape": [24]}, {"step": "first"},
])  # fmt: skip
def test_a_damaged_record_is_refused_with_its_line(run, change):
    run.spectra.write_text(json.dumps(record(0, 1)) + "\n" + json.dumps({**record(0, 1), **change}) + "\n")
    message = refusal(run)
    assert "spectra.jsonl:2" in message
    assert "invalid spectrum; restore the fields name, step, shape" in message
