"""spectra.jsonl holds the singular values of the momenta, and map_error is the distance that an SVD gives."""

import json
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
import torch
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.optim import AdamW, Muon, Soren, SpectralOptimizer
from soren_align.optim.step import nesterov
from soren_align.recipe.schema import LogSpectra
from soren_align.run.folder import read_metrics
from soren_align.run.spectra import spectra_of_run
from soren_align.sharding.ranks import Ranks
from soren_align.spectral import exact_sigmoid, minimax_sigmoid
from soren_align.training.measure.measurements import MeasurementLog, Measurements, SpectraRecorder
from soren_align.training.trained_optimizer import AttachedOptimizer, StartingWeights
from tests.support.tiny_run import TinyRun, spectra, stop_after
from torch.optim.optimizer import register_optimizer_step_post_hook

pytestmark = pytest.mark.model

GLOBS = ("*.0.*q_proj*", "*down_proj*")
RECORDED = ("run.log_spectra.steps=[5,1,3,99]", f"run.log_spectra.matrices={json.dumps(GLOBS)}")


@contextmanager
def seen_in_steps(look):
    """A list that gets {name: look(optimizer, parameter)} of the mapped matrices after every step."""
    steps = []

    def hook(optimizer, *_):
        if isinstance(optimizer, SpectralOptimizer):
            group = optimizer.param_groups[0]
            named = zip(group["param_names"], group["params"], strict=True)
            steps.append({name: look(optimizer, parameter).clone() for name, parameter in named})

    handle = register_optimizer_step_post_hook(hook)
    try:
        yield steps
    finally:
        handle.remove()


def map_input(optimizer, parameter):
    """Computed from the optimizer's state after the step."""
    return nesterov(optimizer.state[parameter]["exp_avg"], parameter.grad, optimizer.param_groups[0]["momentum"])


def assert_spectra(lines, matrices):
    """That each record has the singular values of its matrix by an SVD in float64; matrices: by step and name."""
    assert len(lines) == 9
    for line in lines:
        matrix = matrices[line["step"] - 1][line["name"]]
        assert line["shape"] == list(matrix.shape)
        values = torch.tensor(line["singular_values"], dtype=torch.float64)
        sigma = torch.linalg.svdvals(matrix.double())
        # Seven digits, and 1e-8 of the largest from the Gram matrix.
        assert torch.allclose(values, sigma, rtol=1e-6, atol=3e-8 * float(sigma[0]))


def logs(run):
    return [line for line in read_metrics(run.metrics) if "loss" in line]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run, and the inputs of its maps."""
    run = TinyRun(tmp_path_factory.mktemp("recorded") / "run", "sft", *RECORDED)
    with seen_in_steps(map_input) as inputs:
        assert run.train()
    return run.folder, inputs


def test_recorded_spectra_are_those_of_an_svd_in_float64(recorded):
    folder, inputs = recorded
    names = [name for name in inputs[0] if any(fnmatchcase(name, glob) for glob in GLOBS)]
    lines = spectra(folder)
    assert [(line["step"], line["name"]) for line in lines] == [(step, name) for step in (1, 3, 5) for name in names]
    assert_spectra(lines, inputs)


def test_gradients_are_recorded_beside_momenta_as_the_optimizer_gets_them(tmp_path):
    run = TinyRun(tmp_path / "run", "sft", *RECORDED, "run.log_spectra.of=[gradient, momentum]")
    with seen_in_steps(lambda _, parameter: parameter.grad) as gradients:
        assert run.train()
    momenta, recorded = ([r for r in spectra(run.folder) if ("of" in r) == is_of] for is_of in (False, True))
    assert [(r["step"], r["name"]) for r in momenta] == [(r["step"], r["name"]) for r in recorded]
    assert_spectra(recorded, gradients)
    source, read = spectra_of_run(run.folder, of="gradient")
    assert (len(read), {s.of for s in read}) == (9, {"gradient"})
    assert "gradients" in source
    assert {s.of for s in spectra_of_run(run.folder)[1]} == {"momentum"}


@pytest.mark.parametrize(("key", "message"), [
    ("run.parallel=zero2", "gradients are whole with run.parallel ddp alone"),
    ("trainer.fp16=true", "fp16 scales the gradients"),
])  # fmt: skip
def test_sharded_or_scaled_gradients_are_refused_before_training(key, message):
    with pytest.raises(UserError) as error:
        recipe.load("quickstart/sft", ["run.log_spectra.of=[gradient]", key])
    assert message in str(error.value)


def test_map_error_is_the_distance_of_one_matrix_after_the_other(recorded):
    folder, inputs = recorded
    names = list(inputs[0])
    lines = logs(folder)
    assert len(lines) == len(inputs) == 6
    for line in lines:
        assert line["map_error_matrix"] == line["step"] % len(names)
        x = inputs[line["step"] - 1][names[line["map_error_matrix"]]]
        exact = exact_sigmoid(x)
        distance = float((minimax_sigmoid(x) - exact).double().norm() / exact.double().norm())
        assert line["map_error"] == pytest.approx(distance, rel=1e-3, abs=1e-5)  # maps in batches round otherwise
    assert max(line["map_error"] for line in lines) > 0.01


def attached_to(optimizer):
    return AttachedOptimizer(optimizer, [], optimizer, "ddp", [[*optimizer.param_groups[0]["params"]]], Ranks())


def measured(optimizer, log=MeasurementLog()):
    """The measurements of one step of an optimizer of one matrix."""
    (matrix,) = optimizer.param_groups[0]["params"]
    callback = Measurements(attached_to(optimizer), StartingWeights([(0, matrix)]), log)
    state, args = SimpleNamespace(global_step=0, logging_steps=1), SimpleNamespace()
    callback.on_step_begin(args, state, None)
    matrix.grad = torch.randn(*matrix.shape, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    callback.on_optimizer_step(args, state, None)
    return callback.values(1, 0)


def new(optimizer_class, shape=(8, 12), **settings):
    return optimizer_class([("matrix", torch.nn.Parameter(torch.zeros(shape)))], 0.1, **settings)


@pytest.mark.unit
def test_map_error_is_measured_of_approximate_sigmoids_only_and_unless_it_is_off():
    assert {"map_error", "map_error_matrix"} <= measured(new(Soren)).keys()
    assert {"map_error", "map_error_matrix"} <= measured(new(Soren, map="sns")).keys()
    for optimizer in (new(Soren, map="exact"), new(Muon), new(AdamW)):
        assert "map_error" not in measured(optimizer)
    assert "map_error" not in measured(new(Soren), MeasurementLog(section=LogSpectra(map_error=False)))


@pytest.mark.rest
def test_a_resumed_run_records_what_an_uninterrupted_one_does(tiny_run, recorded):
    whole, _ = recorded
    stop_after(lambda: tiny_run("sft", *RECORDED), 3)  # the checkpoint is of step 2
    assert {line["step"] for line in spectra(tiny_run().folder)} == {1, 3}
    with tiny_run().folder.spectra.open("a") as file:
        file.write('{"step": 3, "na')  # truncated by a kill
    resumed = tiny_run("sft", *RECORDED)
    assert resumed.train()
    assert resumed.folder.spectra.read_bytes() == whole.spectra.read_bytes()
    keys = ("step", "map_error", "map_error_matrix")
    again, expected = ([[line[k] for k in keys] for line in logs(folder)] for folder in (resumed.folder, whole))
    assert again == expected


@pytest.mark.unit
def test_a_name_that_matches_no_matrix_is_refused():
    SpectraRecorder(attached_to(new(Soren)), MeasurementLog(section=LogSpectra(steps=[1], matrices=["mat*"])))
    for optimizer, glob in ((new(Soren), "*query*"), (new(AdamW), "*")):
        message = r"run.log_spectra.matrices: '.*' matches no matrix; run `soren-align plan`"
        section = LogSpectra(steps=[1], matrices=["*", glob])
        with pytest.raises(UserError, match=message):
            SpectraRecorder(attached_to(optimizer), MeasurementLog(section=section))
