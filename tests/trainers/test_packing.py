"""Packing as counted before training, compared with the sequences and steps of the run."""

import itertools
import json

import pytest

from soren_align.planning import plan as planning
from soren_align.planning.compute import Compute
from tests.support.published_data import ANIMALS

pytestmark = pytest.mark.model
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def long_texts(tmp_path_factory):
    """60 texts of one to forty sentences: some much longer than NUM_TOKENS."""
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    sentences = [f"The {animal} sees the {other}." for animal, other in itertools.pairwise(ANIMALS * 3)]
    texts = [" ".join(sentences[: 1 + (7 * i) % 40]) for i in range(60)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(file)


@pytest.fixture
def packed(tiny_run, long_texts, monkeypatch):
    """packed(*overrides): a run over one epoch of packed texts, and its plan without passes."""
    monkeypatch.setattr(planning, "compute", lambda *_: Compute(NUM_TOKENS, NUM_TOKENS, True, None, None, None))

    def make(*overrides, name="run"):
        run = tiny_run(
            "sft",
            *(f"data.train.path={long_texts}", "data.eval=null", "trainer.assistant_only_loss=false"),
            *(f"trainer.max_length={NUM_TOKENS}", "trainer.packing=true", "trainer.max_steps=-1"),
            *("trainer.num_train_epochs=1", "trainer.save_strategy=no", "run.global_batch_size=null"),
            *("trainer.gradient_accumulation_steps=2", "trainer.per_device_train_batch_size=4", *overrides),
            name=name,
        )
        plan, _ = planning.plan_training(run.recipe)
        return run, plan

    return make


@pytest.mark.parametrize("strategy", [None, "bfd", "bfd_split", "wrapped"])
def test_steps_and_tokens_are_those_of_the_run(packed, strategy):
    run, plan = packed(*([] if strategy is None else [f"trainer.packing_strategy={strategy}"]))
    trainer = run.trainer()
    sequences, packing = trainer.train_dataset, plan["data"]["packing"]
    assert packing["strategy"] == strategy or (strategy is None and packing["strategy"] == "bfd_split")
    assert packing["num_sequences"] == len(sequences)
    assert packing["num_tokens"] == sum(len(ids) for ids in sequences["input_ids"])
    assert packing["num_trained_tokens"] == sum(label != -100 for row in sequences["labels"] for label in row)
    assert run.train()
    record = run.folder.read()
    assert record["training"]["steps"] == plan["steps"]["total"]
    assert record["data"]["train"]["packing"] == packing
    logged = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    assert max(log["num_tokens"] for log in logged if "num_tokens" in log) == packing["num_tokens"]
