"""The reading of TRL's config classes without importing them agrees with the classes themselves."""

import dataclasses
import enum

import pytest
from soren_align.recipe import trl


@pytest.fixture(scope="module")
def real():
    from trl import DPOConfig, SFTConfig

    return {"sft": SFTConfig, "dpo": DPOConfig}


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_the_same_fields_as_the_installed_class(real, task):
    assert set(trl.fields(task)) == {f.name for f in dataclasses.fields(real[task]) if f.init}


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_the_same_defaults_and_no_default_is_called_wrong(real, task):
    skipped = 0
    for field in dataclasses.fields(real[task]):
        ours = trl.fields(task)[field.name]
        if field.default is dataclasses.MISSING:
            continue
        default = field.default.value if isinstance(field.default, enum.Enum) else field.default
        if ours.default is None and default is not None:
            skipped += 1  # an expression, not a literal
        else:
            assert ours.default == default, field.name
        if field.name not in trl.ELSEWHERE:
            assert trl.problems(task, {field.name: default}) == {}, field.name
    assert skipped < 10


def test_enums_and_choices_are_those_of_the_libraries():
    from transformers.trainer_utils import SchedulerType

    assert set(trl.fields("sft")["lr_scheduler_type"].choices) == {s.value for s in SchedulerType}
    assert set(trl.fields("sft")["packing_strategy"].choices) == {"bfd", "bfd_split", "wrapped"}
    assert {"sigmoid", "ipo", "apo_zero"} <= set(trl.fields("dpo")["loss_type"].choices)


def test_every_key_that_belongs_elsewhere_is_one_of_trls(real):
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
