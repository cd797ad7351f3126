"""The recipes of qwen3-0.6b: both readings of the paper's zero-shot table, and their plans without the hub."""

import pytest
from soren_align import recipe
from soren_align.core import shipped
from soren_align.planning import plan as planning
from soren_align.planning.flops import Compute

pytestmark = pytest.mark.model
RATES = {"adamw": 1e-3, "muon": 0.01, "htmuon": 0.03, "soren": 0.03, "released-soren": 0.03, "released-exact": 0.03}
READINGS = ("scratch", "pretrained")
NAMES = [f"qwen3-0.6b/{reading}-{name}" for reading in READINGS for name in RATES]
QUICK = ("qwen3-0.6b/scratch-released-soren", "qwen3-0.6b/pretrained-soren")


def test_each_optimizer_has_both_readings():
    assert sorted(NAMES) == [name for name in shipped.recipes() if name.startswith("qwen3-0.6b/")]


@pytest.mark.parametrize("name", RATES)
def test_the_settings_are_those_of_the_released_scripts(name):
    loaded = recipe.load(f"qwen3-0.6b/scratch-{name}")
    optimizer, trainer = loaded.optimizer, loaded.trainer
    assert optimizer.lr == RATES[name]
    assert optimizer.weight_decay == optimizer.aux_weight_decay == 0.1
    assert (optimizer.aux_lr, optimizer.matrices) == (1e-3, "all-2d")
    assert (trainer["max_steps"], trainer["warmup_steps"], trainer["max_length"]) == (5000, 0.1, 256)
    assert (loaded.run.global_batch_size, loaded.model.dtype, loaded.model.init_seed) == (512, "bfloat16", 5)
    assert (loaded.eval.suite, loaded.eval.published) == ("commonsense-zero-shot", ["paper/zero-shot"])
    if name != "adamw":
        assert optimizer.nesterov
        assert optimizer.adjust_lr_fn == ("none" if name == "soren" else "original")


@pytest.mark.parametrize("name", RATES)
def test_the_readings_differ_in_the_starting_weights_alone(name):
    def other_settings(reading):
        values = recipe.load(f"qwen3-0.6b/{reading}-{name}").model_dump(exclude={"extends"})
        del values["run"]["output_dir"], values["model"]["name_or_path"]
        return values, [values["model"].pop(key) for key in ("init_seed", "tokenizer")]

    (scratch, random), (pretrained, trained) = map(other_settings, READINGS)
    assert scratch == pretrained
    assert (random, trained) == ([5, "Qwen/Qwen3-0.6B"], [None, None])


@pytest.mark.parametrize("name", QUICK)
def test_a_plan_needs_no_hub(name, monkeypatch):
    monkeypatch.setattr(planning, "compute", lambda *_: Compute(256, 256, 256, 256, False, 10**9, 10**9, 10**14))
    plan = planning.plan_training(recipe.load(name))[0]
    assert plan["model"]["num_parameters"] == 596_049_920  # as published, tied
    assert plan["steps"]["total"] == 5000
    assert plan["evaluation"]["num_requests_per_model"] == 62_566
    reasons = {row["reason"]: row["tensors"] for row in plan["routing"] if row["rule"] == "spectral"}
    embedding = "input embedding, tied to lm_head.weight"
    assert reasons == {"linear layer": 7 * 28, embedding: 1}
