"""Streaming in the files of TRL, Axolotl and LLaMA-Factory."""

import pytest

from soren_align.importers.engine import convert
from soren_align.recipe.checks import streaming_problems

TRL = {"dataset_name": "trl-lib/tldr", "model_name_or_path": "m", "dataset_streaming": True}
AXOLOTL = {"base_model": "m", "datasets": [{"path": "d", "type": "chat_template"}], "streaming": True}
FACTORY = {"model_name_or_path": "m", "finetuning_type": "full", "stage": "sft", "dataset_name": "d", "streaming": True}


@pytest.mark.parametrize("source", [TRL, AXOLOTL, FACTORY])
def test_a_source_that_names_its_steps_is_streamed(source):
    keys = {"max_steps": 500, "num_train_epochs": 3.0, "dataloader_num_workers": 4, "save_strategy": "epoch"}
    made = convert({**source, **keys, "buffer_size": 16384}, "sft")
    notes = {note.key: note for note in made.notes}
    assert made.recipe["data"]["streaming"] == {"shuffle_buffer": 16384}
    assert notes["num_train_epochs"].explanation == "with data.streaming, the number of examples is unknown"
    assert list(streaming_problems(made.recipe["data"], made.recipe["trainer"])) == []


@pytest.mark.parametrize("source", [TRL, AXOLOTL, FACTORY])
def test_without_a_number_of_steps_it_is_loaded_whole(source):
    made = convert({**source, "num_train_epochs": 3.0}, "sft")
    assert "streaming" not in made.recipe["data"]
    assert made.recipe["trainer"]["num_train_epochs"] == 3
