"""The learning rate of an equal distance is that of an equal walk; a walk is the norm of correlated steps."""

import json
import math

import pytest
import torch
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.planning import distance
from soren_align.recipe import to_yaml
from soren_align.run.folder import RunFolder
from tests.support import command


def test_a_walk_is_the_mean_distance_of_steps_that_are_averages_of_noise():
    torch.manual_seed(0)
    memory, num_steps, size = 0.9, 200, 0.01
    average, position = torch.randn(20_000) / math.sqrt(1.9 / 0.1), torch.zeros(20_000)
    for _ in range(num_steps):  # the exponential average of noise, in its stationary state
        position += size * average * math.sqrt((1 + memory) / (1 - memory))
        average = memory * average + (1 - memory) * torch.randn(20_000)
    # 20,000 walks: 1% is two standard errors of their RMS
    assert float(position.square().mean().sqrt()) == pytest.approx(distance.walk([size] * num_steps, memory), rel=0.02)
    assert distance.walk([1.0, 2.0, 3.0], 0.0) == pytest.approx(math.sqrt(14))
    assert distance.walk([1.0, 2.0, 3.0], 1.0) == pytest.approx(6.0)
    assert distance.walk([1.0, 2.0, 3.0], 0.0, [0.5, 0.5, 0.5]) == pytest.approx(math.sqrt(1 / 16 + 1 + 9))
    assert distance.walk([1.0, 1.0], 1.0, [0.9, 0.9]) == pytest.approx(1.9)
    assert distance.walk([1.0, 2.0], 0.5) == pytest.approx(math.sqrt(1 + 4 + 2 * 0.5 * 2))


@pytest.fixture
def run(tmp_path):
    """A made-up finished run with AdamW of 100 steps of RMS 1e-4, logged every tenth."""
    folder = RunFolder(tmp_path / "adamw")
    folder.path.mkdir()
    loaded = recipe.load("quickstart/sft", ["optimizer.name=adamw", "optimizer.lr=1e-3", "run.output_dir=runs/adamw"])
    folder.recipe.write_text(to_yaml(loaded))
    training = {"steps": 100, "first_loss": 1.0, "last_loss": 0.5, "relative_change": 0.25}
    folder.replace(status="finished", task="sft", versions={"soren-align": "0"}, training=training)
    line = {"loss": 1.0, "update_rms": 1e-4, "learning_rate": 1e-3}
    folder.metrics.write_text("".join(json.dumps({"step": step, **line}) + "\n" for step in range(10, 101, 10)))
    return folder


def test_the_learning_rate_gives_a_walk_of_the_same_length(run):
    measured = distance.distance_of(run)
    assert measured["walk"] == pytest.approx(distance.walk([1e-4] * 100, 0.9, [1 - 1e-3 * 0.1] * 100))
    assert (measured["optimizer"], measured["lr"], measured["relative_change"]) == ("adamw", 1e-3, 0.25)
    soren = recipe.load("quickstart/sft", ["optimizer.lr=3e-3"]).optimizer
    sizes = [{"shape": (64, 64), "tensors": 2, "update_rms": 6e-4}, {"shape": None, "tensors": 9, "update_rms": 7.0}]
    rates = [3e-3 * (step + 1) / 50 for step in range(50)]
    section = distance.as_far_as(measured, sizes, soren, rates)
    equal = [rate * section["lr"] / 3e-3 for rate in rates]
    walk = 0.2 * distance.walk(equal, soren.momentum, [1 - rate * soren.weight_decay for rate in equal])
    assert walk == pytest.approx(measured["walk"], rel=1e-9)


def test_runs_without_an_end_or_with_few_logs_are_refused(run):
    run.metrics.write_text("".join(run.metrics.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(UserError, match=r"logged only 3 updates .*; train it again with a smaller trainer.logging"):
        distance.distance_of(run)
    run.update(training={"steps": 1, "first_loss": None, "last_loss": None})
    with pytest.raises(UserError, match="has no finished training; name the folder of a finished run"):
        distance.distance_of(run)


def test_the_memory_is_the_momentum_or_adamws_first_beta():
    for name, memory in (("adamw", 0.9), ("soren", 0.95)):
        section = recipe.load("quickstart/sft", [f"optimizer.name={name}", "optimizer.betas=[0.9, 0.99]"]).optimizer
        assert distance.memory_of(section) == memory


@pytest.mark.rest
@pytest.mark.process
def test_on_the_quickstart_the_printed_rate_goes_as_far_as_adamw_within_a_tenth(tmp_path):
    def change(name, lr):
        settings = {"optimizer.name": name, "optimizer.lr": lr, "run.output_dir": tmp_path / name, "eval": "null"}
        command.run_process("sft", "quickstart/sft", *(f"{key}={value}" for key, value in settings.items()), code=0)
        return RunFolder(tmp_path / name).record()["training"]["relative_change"]

    adamw = change("adamw", 5e-3)
    done = command.run_process("plan", "quickstart/sft", "--as-far-as", tmp_path / "adamw", "--json")
    assert change("soren", json.loads(done.stdout)["as_far_as"]["lr"]) == pytest.approx(adamw, rel=0.1)
