"""Keys of second moments and of the scale in a recipe: a wrong combination gets one sentence."""

import math

import pytest
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.recipe import OPTIMIZER_SECTIONS


def load(*overrides):
    return recipe.load("quickstart/sft", overrides=list(overrides))


@pytest.mark.parametrize(("overrides", "message"), [
    (("optimizer.second_moment=columns",), "second_moment"),
    (("optimizer.states=8bit",), "optimizer.states: unknown key; remove it, .* `momentum_dtype: bfloat16`"),
    (("optimizer.second_moment_beta=0.9",), "has no effect without a second moment"),
    (("optimizer.match_rms=0.3", "optimizer.adjust_lr_fn=original"), "has no effect with `adjust_lr_fn: original`"),
    (("optimizer.name=adamw", "optimizer.second_moment=rows"), "second_moment"),
])  # fmt: skip
def test_a_wrong_combination_gets_one_sentence(overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        load(*overrides)
    assert len(str(caught.value).splitlines()) == 1


def test_a_description_names_what_differs_from_the_optimizer():
    keys = {"name": "muon", "lr": 0.1, "second_moment": "elements", "map_input": "sign", "match_rms": "adamw"}
    section = OPTIMIZER_SECTIONS["muon"].model_validate(keys)
    expected = "muon (map of signs; second moment of elements; scale match_rms_measured, RMS 0.229)"
    assert section.description == expected
    assert section.rms == pytest.approx(math.sqrt(0.1 / 1.9))


def test_removed_keys_that_had_no_effect_are_read_in_recipes_of_earlier_run_folders():
    assert load("optimizer.states=float32", "optimizer.lora_update=null").optimizer == load().optimizer
