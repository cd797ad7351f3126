"""Parameters that `model.freeze` names are not trained, and those that get no gradient are named with a remedy."""

import pytest
import torch
from soren_align import recipe
from soren_align.core import errors
from soren_align.planning import plan as planning
from soren_align.planning.flops import Compute
from soren_align.publish.card import card
from soren_align.run.weights import load_model
from soren_align.training.adapters import common_globs
from tests.support.architectures import FROZEN, SETTINGS, config_of
from tests.support.tiny_models import BASE
from tests.support.tiny_run import TinyRun
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.model
BLOCKS = '["model.layers.0.*", "model.embed_tokens.*"]'


def run_of(architecture, folder, *overrides):
    start = folder / "config"
    config_of(architecture).save_pretrained(start)
    AutoTokenizer.from_pretrained(BASE).save_pretrained(start)
    return TinyRun(folder / "run", "sft", *SETTINGS, f"model.name_or_path={start}", *overrides)


def test_frozen_parameters_stay_and_the_others_change(tmp_path):
    run = run_of("qwen3_moe", tmp_path, f"model.freeze={BLOCKS}")
    assert run.train()
    start, end = (load_model(str(f)).state_dict() for f in (run.folder.start, run.folder.model))
    same = {name for name in start if torch.equal(start[name], end[name])}
    frozen = {n for n in start if n.startswith(("model.layers.0.", "model.embed_tokens."))}
    assert same == frozen
    parameters = run.folder.read()["parameters"]
    share = f"{parameters['spectral_share']:.1%} of the trained parameters"
    assert share in " ".join(run.said.getvalue().split())
    assert f" matrices ({share}), learning rate" in card(run.folder, "title")
    assert parameters["total"] - parameters["trainable"] == sum(start[name].numel() for name in frozen)


@pytest.fixture
def quick_plan(monkeypatch):
    """plan_training without the passes, which take seconds."""
    monkeypatch.setattr(planning, "compute", lambda *args: Compute(24, 24.0, 24.0, 24.0, True, None, None, None))
    return planning.plan_training


def test_the_plan_counts_frozen_parameters(tmp_path, quick_plan):
    run = run_of("llama", tmp_path, f"model.freeze={BLOCKS}")
    plan, _ = quick_plan(run.recipe)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("llama"))
    frozen = sum(p.numel() for n, p in model.named_parameters() if ".layers.0." in n or "embed" in n)
    assert plan["processes"]["num_frozen_parameters"] == frozen
    memory = {part["name"]: part["num_bytes"] for part in plan["processes"]["memory"]}
    assert memory["frozen weights"] == 4 * frozen
    assert memory["weights"] == memory["gradients"] == 4 * plan["model"]["num_trained_parameters"]


def test_with_lora_frozen_layers_get_no_factors(tmp_path, quick_plan):
    run = run_of("llama", tmp_path, 'model.freeze=["*.mlp.*"]', "model.lora={r: 2}")
    trained = [name for name, p in run.trainer().model.named_parameters() if p.requires_grad]
    assert trained
    assert not any(".mlp." in name for name in trained)
    plan, _ = quick_plan(run.recipe)
    assert sum(row["tensors"] for row in plan["routing"]) == len(trained)


@pytest.mark.parametrize("lora", ["", pytest.param("model.lora={r: 2}", marks=pytest.mark.slow)])
def test_an_image_encoder_that_text_does_not_reach_is_named_with_the_remedy(tmp_path, lora):
    run = run_of("gemma3", tmp_path, *([lora] if lora else []))
    with pytest.raises(errors.UserError, match="got no gradient") as caught:
        run.train()
    expected = FROZEN["gemma3"] if not lora else FROZEN["gemma3"][:1]
    assert f"model.freeze: {expected}" in str(caught.value)


def test_the_globs_reach_no_parameter_that_has_a_gradient():
    missing = ["a.b.c.weight", "a.b.d.weight", "a.e.f", "g"]
    assert common_globs(missing, ["a.e.h", "i.j"]) == ["a.b.*", "a.e.f", "g"]
    factors = [f"base_model.model.a.b.lora_{kind}.default.weight" for kind in "AB"]
    assert common_globs(factors, ["base_model.model.a.c.lora_A.default.weight"]) == ["a.b.*"]


def test_a_glob_that_matches_nothing_is_refused(tmp_path, quick_plan):
    run = run_of("llama", tmp_path, 'model.freeze=["vision.*"]')
    message = r"'vision.\*' matches no parameter; write names of parameters, such as model.embed_tokens.weight"
    for refused in (lambda: quick_plan(run.recipe), run.trainer):
        with pytest.raises(errors.UserError, match=f"model.freeze: {message}"):
            refused()


def test_an_adapter_that_is_trained_further_cannot_be_frozen(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(errors.UserError, match=r"model\.freeze: .* is a LoRA adapter"):
        recipe.load("quickstart/sft", [f"model.name_or_path={tmp_path}", "model.init_seed=null", 'model.freeze=["a"]'])


@pytest.mark.parametrize(
    ("architecture", "kind"), [("t5", "no causal language model"), ("qwen2_vl", "a model of images and text")]
)
def test_models_of_another_kind_are_refused_in_one_sentence(tmp_path, architecture, kind):
    with pytest.raises(errors.UserError) as caught:
        run_of(architecture, tmp_path).prepare()
    assert f"{architecture} is {kind}" in str(caught.value)
    assert len(str(caught.value)) < 300
