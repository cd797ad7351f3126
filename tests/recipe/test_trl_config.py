"""The fields of TRL's config classes are those of the installed version, and wrong keys are named with their remedy."""

import json

import pytest
from soren_align.recipe import trl
from tests.support.pages import script


def test_the_recorded_fields_are_those_of_the_installed_classes():
    """If not: python docs/make_trl_fields.py."""
    assert json.loads(trl.FILE.read_text(encoding="utf-8")) == script("docs/make_trl_fields.py").content()


def test_the_fields_of_other_versions_are_read_from_their_classes(monkeypatch):
    recorded = trl.fields("dpo")
    monkeypatch.setattr(trl, "versions", lambda: {"trl": "0"})
    trl.fields.cache_clear()
    try:
        assert trl.fields("dpo") == recorded
    finally:
        trl.fields.cache_clear()


def test_a_key_of_other_versions_is_refused_with_them(monkeypatch):
    tested, known = trl.recorded()["versions"], trl.fields("sft").keys() - {"packing"}
    monkeypatch.setattr(trl, "versions", lambda: tested | {"trl": "1.15.0"})
    monkeypatch.setattr(trl, "fields", lambda task: known)
    remedy = "(1.15.0 is installed); remove this key, or install that version"
    assert trl.problems("sft", {"packing": True}) == {"packing": f"needs trl {tested['trl']} {remedy}"}


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_no_default_is_called_wrong(task):
    for name, field in trl.fields(task).items():
        if name not in trl.ELSEWHERE and field.default is not None:
            assert trl.problems(task, {name: field.default}) == {}, name


def test_enums_and_choices_are_those_of_the_libraries():
    from transformers.trainer_utils import SchedulerType

    assert set(trl.fields("sft")["lr_scheduler_type"].choices) == {s.value for s in SchedulerType}
    assert set(trl.fields("sft")["packing_strategy"].choices) == {"bfd", "bfd_split", "wrapped"}
    assert {"sigmoid", "ipo", "apo_zero"} <= set(trl.fields("dpo")["loss_type"].choices)


def test_every_key_that_belongs_elsewhere_is_one_of_trls():
    known = set(trl.fields("sft")) | set(trl.fields("dpo"))
    assert set(trl.ELSEWHERE) - known == set()
    assert set(trl.RENAMED) & known == set()


@pytest.mark.parametrize(("task", "key", "value", "message"), [
    ("sft", "learning_rate", 1e-3, "write optimizer.lr"), ("sft", "beta", 0.1, "DPOConfig"),
    ("dpo", "packing", True, "SFTConfig"), ("sft", "max_lenght", 5, "did you mean 'max_length'"),
    ("sft", "warmup_ratio", 0.1, "warmup_steps"), ("sft", "packing_strategy", "bdf", "did you mean 'bfd'"),
    ("sft", "eval_strategy", "step", "did you mean 'steps'"),
    ("dpo", "loss_type", ["sigmod"], "did you mean 'sigmoid'"), ("sft", "max_steps", "many", "a whole number"),
    ("sft", "packing", 1, "true or false"), ("sft", "max_length", "None", "null"),
    ("sft", "per_device_train_batch_size", 0, "at least 1"), ("dpo", "beta", -1, "a number above 0"),
    ("sft", "seed", True, "a whole number"),
])  # fmt: skip
def test_a_wrong_key_or_value_is_named_with_its_remedy(task, key, value, message):
    assert message in trl.problems(task, {key: value})[key]


@pytest.mark.parametrize(("key", "remedy"), [
    ("epochs", "write num_train_epochs"),
    ("batch_size", "write per_device_train_batch_size, or run.global_batch_size"),
])  # fmt: skip
def test_short_names_are_answered_with_trls(key, remedy):
    assert trl.problems("sft", {key: 3})[key] == f"is no key of TRL's SFTConfig; {remedy}"
