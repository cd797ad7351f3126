"""`data.streaming`: its forms, the keys that it excludes, and the part of it that a resume compares."""

import pytest
from soren_align import recipe
from soren_align.core.errors import UserError

SECTIONS = {"data": {"train": "{path: org/data}", "streaming": "true"}, "trainer": {"max_steps": "3"}}


@pytest.fixture
def load(tmp_path):
    """load(data={...}, trainer={...}, task=...): the recipe with these keys over SECTIONS."""

    def make(data=(), trainer=(), task="sft"):
        sections = {"data": SECTIONS["data"] | dict(data), "trainer": SECTIONS["trainer"] | dict(trainer)}
        text = f"task: {task}\nmodel: {{name_or_path: org/model}}\noptimizer: {{name: adamw, lr: 1e-6}}\n"
        text += "run: {output_dir: runs/x}\n"
        for name, keys in sections.items():
            text += f"{name}:\n" + "".join(f"  {key}: {value}\n" for key, value in keys.items() if value)
        file = tmp_path / "my.yaml"
        file.write_text(text)
        return recipe.load(str(file))

    return make


@pytest.mark.parametrize(("value", "buffer"), [("true", 10_000), ("{}", 10_000), ("{shuffle_buffer: 7}", 7)])
def test_true_is_a_section_of_defaults(load, value, buffer):
    streaming = load({"streaming": value}).data.streaming
    assert streaming.shuffle_buffer == buffer
    written = recipe.to_yaml(load({"streaming": value}))
    assert recipe.load_text(written).data.streaming == streaming


@pytest.mark.parametrize("value", ["false", "null"])
def test_false_is_the_same_as_without(load, value):
    assert load({"streaming": value}).data.streaming is None


@pytest.mark.parametrize(("data", "trainer", "message"), [
    ({}, {"max_steps": ""}, "trainer.max_steps: is required with data.streaming"),
    ({}, {"max_steps": "-1"}, "trainer.max_steps: is required with data.streaming"),
    ({}, {"num_train_epochs": "2"}, "trainer.num_train_epochs: with data.streaming, the number of examples is unknown"),
    ({}, {"dataloader_num_workers": "4"}, "trainer.dataloader_num_workers: with data.streaming, the training"),
    ({}, {"save_strategy": "epoch"}, "trainer.save_strategy: with data.streaming, a run has no epochs"),
    ({}, {"shuffle_dataset": "true"}, "trainer.shuffle_dataset: with data.streaming, data.streaming.shuffle_buffer"),
    ({"eval": "{examples: 9}"}, {}, "data.eval: needs all examples before training"),
    ({"train": '{path: org/data, split: "train[:9%]"}'}, {}, "data.train.split: only a whole split can be streamed"),
    ({"train": "{path: org/data, streaming: true}"}, {}, "data.train.streaming: is a key of `data`, not of one split"),
    ({"streaming": "{shuffle_buffer: 0}"}, {}, "data.streaming.shuffle_buffer"),
    ({"streaming": "{buffer: 9}"}, {}, "data.streaming.buffer: unknown key"),
    ({"streaming": "9"}, {}, "data.streaming"),
])  # fmt: skip
def test_keys_that_need_all_examples_are_refused_with_the_remedy(load, data, trainer, message):
    with pytest.raises(UserError) as error:
        load(data, trainer)
    assert any(message in problem for problem in error.value.problems), error.value.problems
    if "streaming" not in message.split(":")[0]:  # nothing is wrong with it otherwise
        load(data | {"streaming": "false"}, {"max_steps": "3"} | {k: v for k, v in trainer.items() if k != "max_steps"})


def test_references_are_not_computed_before_training(load):
    with pytest.raises(UserError, match=r"trainer.precompute_ref_log_probs: needs all examples before training"):
        load(trainer={"precompute_ref_log_probs": "true"}, task="dpo")


def test_a_resumed_stream_may_drop_what_it_refused(load):
    sources = [{"train": f"{{path: org/data, bad_examples: {rule}}}"} for rule in ("refuse", "drop")]
    first, second = (recipe.training_part(load(source)) for source in sources)
    assert first == second
    whole = [recipe.training_part(load(source | {"streaming": "false"})) for source in sources]
    assert whole[0] != whole[1]
