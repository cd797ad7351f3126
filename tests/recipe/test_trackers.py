"""A tracker that is misspelt or not installed is a mistake in the recipe, found before torch is there."""

import pytest
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.launch.environment import library_environment
from soren_align.recipe import trl


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Make empty modules of these names importable."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(*names):
        for name in names:
            (tmp_path / f"{name}.py").write_text("")

    return make


def test_the_words_are_those_of_the_installed_transformers():
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    assert trl.TRACKERS.keys() == INTEGRATION_TO_CALLBACK.keys()


@pytest.mark.parametrize("nothing", [None, "none", ["none"], []])
def test_none_is_the_default_and_may_be_said(nothing):
    assert trl.fields("sft")["report_to"].default == "none"
    assert trl.problems("sft", {"report_to": nothing}) == {}


@pytest.mark.parametrize("asked", ["dvclive", ["dvclive"], ["dvclive", "swanlab"]])
def test_what_is_installed_may_be_named(installed, asked):
    installed("dvclive", "swanlab")
    assert trl.problems("dpo", {"report_to": asked}) == {}


@pytest.mark.parametrize(("asked", "message"), [
    ("swanlab", "swanlab needs swanlab; run `pip install swanlab`, or write none"),
    (["dvclive", "swanlab"], "swanlab needs swanlab"),
    ("dagshub", "dagshub needs dagshub, mlflow; run `pip install dagshub mlflow`"),
    ("azure_ml", "azure_ml needs azureml.core; run `pip install azureml-core`"),
    ("wandbb", "did you mean 'wandb'?"), (["tensorbord"], "did you mean 'tensorboard'?"),
    ("non", "did you mean 'none'?"), ("all", "write a list of trackers"), (["dvclive", "none"], "write none alone"),
    ([3], "found 3; write none, or one of azure_ml,"), (3, "found 3; write a list or a text or null"),
])  # fmt: skip
def test_what_is_not_there_is_named_with_its_remedy(installed, asked, message):
    installed("dvclive")
    assert message in trl.problems("sft", {"report_to": asked})["report_to"]


def test_the_place_in_the_recipe_is_told():
    with pytest.raises(UserError, match=r"trainer.report_to: found 'trakio'.*did you mean 'trackio'\?"):
        recipe.load("quickstart/sft", ["trainer.report_to=trakio"])


@pytest.mark.parametrize("key", ["push_to_hub", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"])
def test_nothing_is_uploaded_while_training(key):
    assert "`soren-align push RUN OWNER/NAME`" in trl.problems("sft", {key: True})[key]


def test_a_private_repository_is_for_a_space_of_trackio(installed):
    installed("trackio")
    assert "soren-align push" in trl.problems("sft", {"hub_private_repo": True})["hub_private_repo"]
    assert trl.problems("sft", {"hub_private_repo": True, "report_to": ["trackio"]}) == {}


def test_tensorboards_files_lie_in_the_run_folder(installed, tmp_path):
    installed("tensorboard")
    made = recipe.load("quickstart/sft", ["trainer.report_to=[tensorboard]", f"run.output_dir={tmp_path}/run"])
    assert library_environment(made)["TENSORBOARD_LOGGING_DIR"] == f"{tmp_path}/run/tensorboard"
    plain = recipe.load("quickstart/sft", [])
    assert "TENSORBOARD_LOGGING_DIR" not in library_environment(plain)
