"""A run folder is begun, gone on with or refused, never written over silently."""

import pytest

from soren_align import launch, recipe
from soren_align.recipe import UserError
from soren_align.report import RunFolder


@pytest.fixture
def make(tmp_path):
    def _make(*overrides):
        out = f"run.output_dir={tmp_path / 'run'}"
        return recipe.load("quickstart/sft", [out, *overrides]), RunFolder(tmp_path / "run")

    return _make


def begin(made, checkpoint=False):
    recipe_, folder = made
    launch.prepare(folder, recipe_)
    if checkpoint:
        (folder.checkpoints / "checkpoint-5").mkdir(parents=True, exist_ok=True)
        (folder.checkpoints / "checkpoint-5" / "soren_align.json").write_text("{}")
    return folder


def test_a_new_folder_holds_the_resolved_recipe_and_a_manifest(make):
    folder = begin(make())
    assert recipe.load(str(folder.recipe)) == make()[0]
    run = folder.read()
    assert run["status"] == "training"
    assert run["versions"]["torch"]


def test_the_same_command_goes_on_and_another_recipe_is_refused_with_its_differences(make):
    begin(make(), checkpoint=True)
    begin(make("trainer.logging_steps=3"))
    with pytest.raises(UserError) as error:
        begin(make("optimizer.lr=0.5", "trainer.seed=9"))
    assert "optimizer.lr: 0.003 there, 0.5 here" in str(error.value) or "there, 0.5 here" in str(error.value)
    assert "trainer.seed: 0 there, 9 here" in str(error.value)


def test_a_finished_run_is_not_overwritten_unless_told(make):
    folder = begin(make())
    folder.update(status="finished")
    folder.evaluation("quickstart").mkdir(parents=True)
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds a finished run"):
        begin(make())
    begin(make("run.overwrite=true"))
    assert folder.read()["status"] == "training"
    assert (folder.path / "notes.txt").read_text() == "mine"


def test_without_a_checkpoint_there_is_nothing_to_protect(make):
    """A mistake found before the first checkpoint is mended, and the same folder is used again."""
    begin(make()).update(last_error="5 of 6 rows cannot be used")
    folder = begin(make("data.train.bad_rows=drop"))
    assert recipe.load(str(folder.recipe)).data.train.bad_rows == "drop"
    assert "last_error" not in folder.read()


def test_a_folder_in_which_a_process_runs_is_refused(make):
    folder = begin(make())
    with folder.alone(), pytest.raises(UserError, match="another process is running this run"):
        begin(make("run.overwrite=true"))


def test_a_run_finished_without_evaluation_can_be_evaluated(make):
    folder = begin(make("eval=null"))
    folder.update(status="finished")
    begin(make())
    assert folder.read()["status"] == "trained"


def test_resume_never_refuses_an_unfinished_run(make):
    begin(make(), checkpoint=True)
    with pytest.raises(UserError, match=r"unfinished run and run.resume is never"):
        begin(make("run.resume=never"))


def test_a_folder_of_something_else_is_left_alone(make, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not empty and not a run folder"):
        begin(make())
    with pytest.raises(UserError, match="not empty and not a run folder"):
        begin(make("run.overwrite=true"))


def test_metrics_of_steps_to_be_taken_again_are_dropped(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 3, "lo')
    folder.forget_metrics_after(1)
    assert folder.metrics.read_text() == '{"step": 1, "loss": 3}\n'


def test_the_environment_keeps_what_the_user_set(make, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert launch.environment(make()[0])["OMP_NUM_THREADS"] == "1"
    assert launch.environment(make()[0])["HF_HUB_OFFLINE"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launch.environment(make()[0])["OMP_NUM_THREADS"] == "7"
