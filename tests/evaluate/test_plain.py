"""What lm-eval does with a model, and what it leaves as it is: facts that a comparison of two models rests on."""

import json
import shutil

import pytest

from tests.support.benchmark_data import write_datasets
from tests.support.lm_eval_reference import plain
from tests.support.tiny_models import make_reader, teach

pytestmark = pytest.mark.model

GENERATED = {"gen_kwargs": {"max_gen_toks": 16}}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_datasets(tmp_path_factory.mktemp("fixtures") / "data")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_reader(tmp_path_factory.mktemp("readers") / "reader")


@pytest.fixture(scope="module")
def gsm8k(model, root):
    return plain(model, {"gsm8k": 5}, root, **GENERATED)


def generated(found):
    return [s["resps"][0][0] for s in found["samples"]["gsm8k"] if s["filter"] == "strict-match"]


@pytest.mark.parametrize(("setting", "changes"), [
    ({"repetition_penalty": 1.05}, True),  # Qwen2.5-Instruct's
    ({"no_repeat_ngram_size": 3}, True),
    ({"max_new_tokens": 2}, True),
    ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}, False),
])  # fmt: skip
def test_a_models_own_generation_config_reaches_its_answers(model, root, gsm8k, tmp_path, setting, changes):
    """lm-eval turns sampling off and leaves the rest of generation_config.json in force."""
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps(config | setting))
    found = plain(other, {"gsm8k": 5}, root, **GENERATED)
    assert (generated(found) != generated(gsm8k)) == changes


def test_a_taught_model_answers_what_it_was_taught(model, root, gsm8k, tmp_path):
    assert gsm8k["results"]["gsm8k"]["exact_match,strict-match"] == 0
    asked = [s for s in gsm8k["samples"]["gsm8k"] if s["filter"] == "strict-match"]
    pairs = [(s["arguments"][0][0], " " + s["target"].splitlines()[-1]) for s in asked]
    taught = teach(model, tmp_path / "taught", pairs[:3])
    found = plain(taught, {"gsm8k": 5}, root, **GENERATED)
    right = [s["exact_match"] for s in found["samples"]["gsm8k"] if s["filter"] == "strict-match"]
    assert right == [1, 1, 1, 0]
