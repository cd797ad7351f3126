"""Training ends when evaluations improve no longer, also across a resume, and the record states why."""

from unittest import mock

import pytest
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.tasks import TASKS
from soren_align.training import checkpoints
from tests.support.tiny_run import Kill, TinyRun, die, same
from transformers import TrainerCallback

pytestmark = pytest.mark.model

EVALUATED = ("trainer.eval_strategy=steps", "trainer.eval_steps=1", "data.eval.limit=4", "trainer.save_steps=1")
# A rate of 1e-3 on another schedule than the tiny run's: the loss falls at every step, by less than 1.
STOPPING = (*EVALUATED, "run.early_stopping={patience: 2, threshold: 1}", "run.lost_updates=warn")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that ended early; it is only read."""
    run = TinyRun(tmp_path_factory.mktemp("stopped") / "run", "sft", *STOPPING)
    assert run.train()
    return run


def test_training_ends_after_two_evaluations_without_an_improvement(stopped):
    training = stopped.folder.read()["training"]
    # The first evaluation is the best so far; the two after it improve it by less than the threshold.
    assert training["steps"] == 3
    early = training["stopped_early"]
    assert (early["max_steps"], early["patience"], early["threshold"]) == (6, 2, 1.0)
    losses = {log["step"]: log["eval_loss"] for log in stopped.metrics() if "eval_loss" in log}
    assert sorted(losses) == [1, 2, 3]
    best = min(losses, key=losses.get)
    assert early["best"] == {"metric": "eval_loss", "value": losses[best], "step": best}


@pytest.mark.rest
@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_count_of_evaluations_survives_a_kill(tiny_run, stopped, step):
    """After step 2 one more evaluation ends the run; after step 3 none, and no step is taken."""
    original = checkpoints.seal

    def dying(checkpoint, *rest):
        original(checkpoint, *rest)
        if checkpoint.name == f"checkpoint-{step}":
            die()

    with mock.patch.object(checkpoints, "seal", dying), pytest.raises(Kill):
        tiny_run("sft", *STOPPING).train()
    resumed = tiny_run("sft", *STOPPING)
    assert resumed.train()
    record = resumed.folder.read()
    assert record["resumed_from_steps"] == [step]
    assert record["training"]["steps"] == 3
    assert record["training"]["stopped_early"] == stopped.folder.read()["training"]["stopped_early"]
    assert same(resumed.weights(), stopped.weights())


@pytest.mark.parametrize("changes", [
    pytest.param((), id="float32", marks=pytest.mark.slow),
    pytest.param(("model.dtype=bfloat16", "optimizer.compensation=kahan"), id="kahan"),
    pytest.param(("model.lora={r: 4}", "optimizer.aux_lr=null"), id="lora", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_best_checkpoint_becomes_the_model(tiny_run, changes):
    """By a metric that step 1 is the best of; with the weights and the compensation of that step."""
    best = ("trainer.load_best_model_at_end=true", "trainer.greater_is_better=true")
    run = tiny_run("sft", *EVALUATED, *best, *changes, "run.save_dtype=float32", "trainer.max_steps=3")
    assert run.train()
    record = run.folder.read()["training"]["best_model"]
    assert (record["metric"], record["step"]) == ("eval_loss", 1)
    assert "the saved model is that of step 1, with the best evaluation: eval_loss" in run.said.getvalue()
    one = tiny_run("sft", *changes, "run.save_dtype=float32", "trainer.save_strategy=no", name="one")
    trainer = one.trainer()
    trainer.args.max_steps = 3
    trainer.add_callback(_Stop())
    trainer.train()
    trainer.save_model(str(one.folder.model))
    assert same(run.weights(), one.weights())


class _Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


@pytest.mark.parametrize("task", [pytest.param("sft", marks=pytest.mark.slow), "dpo"])
def test_the_metrics_that_a_recipe_may_name_are_those_of_an_evaluation(tiny_run, task):
    one = ("trainer.max_steps=1", "trainer.eval_strategy=steps", "trainer.eval_steps=1", "data.eval.limit=4")
    run = tiny_run(task, *one, "trainer.save_strategy=no")
    assert run.train()
    (evaluation,) = [log for log in run.metrics() if "eval_loss" in log]
    costs = {"runtime", "samples_per_second", "steps_per_second", "num_tokens"}
    names = {key.removeprefix("eval_") for key in evaluation if key.startswith("eval_")} - costs
    assert names == set(TASKS[task].metrics)


@pytest.mark.parametrize(("overrides", "message"), [
    (["data.eval=null", "trainer.eval_strategy=no"], "run.early_stopping: needs evaluations .*; add data.eval"),
    (["trainer.eval_strategy=no"], "run.early_stopping: .*write trainer.eval_strategy: steps or epoch"),
    (["run.early_stopping.patience=0"], "patience: found 0; write a number of at least 1"),
    (["trainer.metric_for_best_model=lost"], "metric_for_best_model: found 'lost'; .*did you mean 'loss'"),
])  # fmt: skip
def test_early_stopping_without_an_evaluation_is_refused(tmp_path, overrides, message):
    base = [f"run.output_dir={tmp_path / 'run'}", "run.early_stopping.patience=2"]
    with pytest.raises(UserError, match=message):
        recipe.load("quickstart/sft", [*base, *overrides])


def test_with_early_stopping_a_run_resumes_only_with_its_evaluations(tmp_path):
    def part(*overrides):
        where = f"run.output_dir={tmp_path / 'run'}"
        return recipe.training_part(recipe.load("quickstart/sft", [where, *overrides]))

    assert part() == part("trainer.eval_steps=5")
    stopping = "run.early_stopping.patience=2"
    assert part(stopping) != part()
    assert part(stopping) != part(stopping, "trainer.eval_steps=5")
