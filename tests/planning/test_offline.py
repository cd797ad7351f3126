"""A plan asks the hub once whether it answers, and then does without it."""

from pathlib import Path
from types import SimpleNamespace

import datasets.config
import huggingface_hub
import pytest
from huggingface_hub import constants
from soren_align import recipe
from soren_align.core import shipped
from soren_align.planning import offline
from soren_align.recipe.model import refuse_unreachable
from tests.support import command


@pytest.fixture
def hub(monkeypatch):
    """hub(head) replaces the request by `head`, in online mode."""

    def replace(head, is_offline=False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", is_offline)
        monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))

    return replace


def refused(*_, **__):
    raise OSError("no route to host")


def unasked(*_, **__):
    pytest.fail("a request")


def answer(status):
    def head(url, timeout):
        assert timeout <= 5, "the hub's own client would retry for half a minute"
        return SimpleNamespace(status_code=status)

    return head


@pytest.mark.parametrize(("head", "was_offline", "is_offline"), [
    pytest.param(refused, False, True, id="no answer"), pytest.param(answer(503), False, True, id="a proxy"),
    pytest.param(answer(200), False, False, id="the hub"), pytest.param(unasked, True, True, id="offline mode"),
])  # fmt: skip
def test_without_an_answer_of_the_hub_itself_a_plan_is_in_offline_mode(hub, head, was_offline, is_offline):
    hub(head, was_offline)
    with offline.offline_without_hub():
        assert constants.HF_HUB_OFFLINE is datasets.config.HF_HUB_OFFLINE is is_offline
    assert constants.HF_HUB_OFFLINE is was_offline


@pytest.fixture
def new_recipe(tmp_path, monkeypatch):
    """new_recipe(model): in the folder of the recipe that `new` writes for a model."""

    def write(model):
        command.run("new", "mine", "--model", model, cwd=tmp_path, code=0)
        monkeypatch.chdir(tmp_path / "mine")

    return write


@pytest.mark.parametrize("words", [["plan", "sft.yaml"], ["sft", "sft.yaml"], ["plan", "sft.yaml", "--json"]])
@pytest.mark.parametrize("is_offline", [True, False])
def test_a_model_of_the_hub_alone_is_refused_at_once_with_the_command_that_downloads_it(
    hub, new_recipe, monkeypatch, words, is_offline
):
    new_recipe("owner/model")
    hub(refused, is_offline)
    for name in ("planning.plan.plan_training", "launch.commands.train_here"):
        monkeypatch.setattr(f"soren_align.{name}", lambda *_, **__: pytest.fail("work"))
    done = command.run(*words)
    reason = "HF_HUB_OFFLINE or run.offline is set" if is_offline else f"{constants.ENDPOINT} does not answer"
    assert (done.returncode, done.stdout) == (2, "")
    assert f"owner/model: is neither a folder nor in the cache, and {reason}; run" in done.stderr
    assert "run `hf download owner/model --local-dir FOLDER` on a machine with a network" in done.stderr
    assert not Path("runs").exists()


def test_a_cached_model_is_not_asked_for(hub, new_recipe, monkeypatch):
    new_recipe("owner/model")
    hub(unasked)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: "config.json")
    refuse_unreachable(recipe.load("sft.yaml"))


@pytest.mark.model
def test_a_model_in_a_folder_is_planned_without_the_hub(hub, new_recipe):
    new_recipe(str(shipped.ROOT / "configs/models/tiny"))
    hub(refused)
    done = command.run("plan", "sft.yaml", "--set", "model.init_seed=1", code=0)
    assert done.stdout.endswith("next      soren-align sft sft.yaml model.init_seed=1\n")
