"""What lm-eval does with a model, and what it leaves as it is: facts that a comparison of two models rests on."""

import shutil

import pytest
from tests.support.edited_files import edit
from tests.support.lm_eval_reference import plain

pytestmark = pytest.mark.model

GENERATED = {"gen_kwargs": {"max_gen_toks": 16}}


@pytest.fixture(scope="module")
def gsm8k(reader, data_root):
    return plain(reader, {"gsm8k": 5}, data_root, **GENERATED)


def generated(found):
    return [s["resps"][0][0] for s in found["samples"]["gsm8k"] if s["filter"] == "strict-match"]


@pytest.mark.parametrize(("setting", "changes"), [
    ({"repetition_penalty": 1.05}, True),  # Qwen2.5-Instruct's
    ({"no_repeat_ngram_size": 3}, True),
    ({"max_new_tokens": 2}, True),
    ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}, False),
])  # fmt: skip
def test_a_models_own_generation_config_reaches_its_answers(reader, data_root, gsm8k, tmp_path, setting, changes):
    """lm-eval turns sampling off and leaves the rest of generation_config.json in force."""
    other = shutil.copytree(reader, tmp_path / "other")
    edit(other / "generation_config.json", **setting)
    found = plain(other, {"gsm8k": 5}, data_root, **GENERATED)
    assert (generated(found) != generated(gsm8k)) == changes
