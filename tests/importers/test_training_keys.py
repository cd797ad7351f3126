"""Attention, packing and streaming in the files of TRL, Axolotl and LLaMA-Factory."""

import pytest
from soren_align.importers.engine import convert
from soren_align.recipe.checks import streaming_problems

TRL = {"dataset_name": "trl-lib/tldr", "model_name_or_path": "m"}
AXOLOTL = {"base_model": "m", "datasets": [{"path": "d", "type": "chat_template"}]}
FACTORY = {"model_name_or_path": "m", "finetuning_type": "full", "stage": "sft", "dataset_name": "d"}
STREAMED = [TRL | {"dataset_streaming": True}, AXOLOTL | {"streaming": True}, FACTORY | {"streaming": True}]


def converted(source, **keys):
    """The recipe's sections, and the note on the last key."""
    made = convert({**source, **keys}, "sft")
    return made.recipe, next(note for note in made.notes if note.key == [*keys][-1])


@pytest.mark.parametrize(("source", "keys", "attention"), [
    (TRL, {"attn_implementation": "flash_attention_3"}, "flash_attention_3"),
    (TRL, {"attn_implementation": "kernels-community/vllm-flash-attn3"}, "kernels-community/vllm-flash-attn3"),
    (TRL, {"attn_implementation": "someone/kernel"}, None),
    (TRL, {"use_cpu": True, "attn_implementation": "flash_attention_2"}, None),
    (AXOLOTL, {"flash_attention": True}, "flash_attention_2"),
    (AXOLOTL, {"flash_attention": False}, None),
    (AXOLOTL, {"sdp_attention": True}, "sdpa"),
    (AXOLOTL, {"eager_attention": True}, "eager"),
    (AXOLOTL, {"attn_implementation": "flex"}, "flex_attention"),
    (AXOLOTL, {"flex_attention": True}, "flex_attention"),
    (FACTORY, {"flash_attn": "fa2"}, "flash_attention_2"),
    (FACTORY, {"flash_attn": "disabled"}, "eager"),
    (FACTORY, {"flash_attn": "auto"}, None),
])  # fmt: skip
def test_attention_arrives_under_the_recipes_name(source, keys, attention):
    made, note = converted(source, **keys)
    assert made["model"].get("attn_implementation") == attention
    assert note.outcome == ("dropped" if attention is None else "renamed")
    assert not note.changes_training


@pytest.mark.parametrize(("source", "keys", "strategy", "words"), [
    (TRL, {"max_length": 64, "packing": True}, "bfd", ""),
    (TRL, {"packing_strategy": "bfd_split", "packing": True}, "bfd_split", ""),
    (AXOLOTL, {"sample_packing": True}, None, "drops examples longer than max_length, but soren-align divides"),
    (AXOLOTL, {"sample_packing": True, "excess_length_strategy": "truncate"}, "bfd", "bfd, which truncates"),
    (FACTORY, {"packing": True}, "bfd", "attend to each other in LLaMA-Factory, but not in TRL"),
    (FACTORY, {"packing": True, "neat_packing": True}, "bfd", "trainer.packing"),
])  # fmt: skip
def test_packing_keeps_or_cuts_long_examples_as_the_source(source, keys, strategy, words):
    made, note = converted(source, **keys)
    assert (made["trainer"]["packing"], made["trainer"].get("packing_strategy")) == (True, strategy)
    assert words in note.explanation


@pytest.mark.parametrize("key", ["eval_packing", "eval_sample_packing"])
def test_held_out_examples_are_not_packed_alone(key):
    made, note = converted(AXOLOTL if key == "eval_sample_packing" else TRL, max_length=64, **{key: True})
    assert "eval_packing" not in made["trainer"]
    assert "would attend to each other" in note.explanation
    assert converted(TRL, packing=True, eval_packing=True)[0]["trainer"]["eval_packing"] is True


@pytest.mark.parametrize("key", ["packing", "neat_packing"])
def test_pairs_are_not_packed(key):
    made = convert({**FACTORY, "stage": "dpo", key: 1}, "dpo")
    assert "packing" not in made.recipe["trainer"]
    assert next(note for note in made.notes if note.key == key).outcome == "dropped"


@pytest.mark.parametrize("source", STREAMED, ids=["TRL", "Axolotl", "LLaMA-Factory"])
def test_a_source_that_names_its_steps_is_streamed(source):
    keys = {"max_steps": 500, "num_train_epochs": 3.0, "dataloader_num_workers": 4, "save_strategy": "epoch"}
    made = convert({**source, **keys, "buffer_size": 16384}, "sft")
    notes = {note.key: note for note in made.notes}
    assert made.recipe["data"]["streaming"] == {"shuffle_buffer": 16384}
    assert notes["num_train_epochs"].explanation == "with data.streaming, the number of examples is unknown"
    assert list(streaming_problems(made.recipe["data"], made.recipe["trainer"])) == []


@pytest.mark.parametrize("source", STREAMED, ids=["TRL", "Axolotl", "LLaMA-Factory"])
def test_without_a_number_of_steps_it_is_loaded_whole(source):
    made, _ = converted(source, num_train_epochs=3.0)
    assert "streaming" not in made["data"]
    assert made["trainer"]["num_train_epochs"] == 3
