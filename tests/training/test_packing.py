"""Packing as counted before training, compared with the sequences and steps of the run."""

import itertools
import json
from types import SimpleNamespace

import pytest
from datasets import Dataset
from soren_align.core.errors import UserError
from soren_align.data import LossMasks
from soren_align.planning import plan as planning
from soren_align.planning.flops import Compute
from soren_align.training.packing import pack
from soren_align.training.setup import check_attention
from tests.support.published_data import ANIMALS
from tests.support.tiny_models import BASE
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, OPTConfig
from trl import pack_dataset

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
    monkeypatch.setattr(planning, "compute", lambda *_: Compute(*[NUM_TOKENS] * 4, True, None, None, None))

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


@pytest.mark.rest
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_steps_and_tokens_are_those_of_the_run(packed, strategy):
    run, plan = packed(f"trainer.packing_strategy={strategy}")
    trainer = run.trainer()
    sequences, packing = trainer.train_dataset, plan["data"]["packing"]
    assert packing["num_sequences"] == len(sequences)
    assert packing["num_tokens"] == sum(len(ids) for ids in sequences["input_ids"])
    assert packing["num_trained_tokens"] == sum(label != -100 for row in sequences["labels"] for label in row)
    assert run.train()
    record = run.folder.read()
    assert record["training"]["steps"] == plan["steps"]["total"]
    assert record["data"]["train"]["packing"] == packing
    assert max(log["num_tokens"] for log in run.metrics() if "num_tokens" in log) == packing["num_tokens"]
    said = " ".join(run.said.getvalue().split())
    assert f"packing {strategy}: {len(sequences)} sequences of up to {NUM_TOKENS} tokens" in said
    assert ("packing_strategy bfd drops" in said) == (strategy == "bfd") == (packing["num_lost_tokens"] > 0)
    assert ("attend to the examples before them" in said) == (strategy == "wrapped")


def test_by_default_every_token_is_packed(packed):
    run, plan = packed()
    assert run.recipe.trainer["packing_strategy"] == "bfd_split"
    assert plan["data"]["packing"]["num_lost_tokens"] == plan["data"]["num_truncated"] == 0
    _, whole = packed("trainer.packing=false", "trainer.max_length=null")
    assert plan["data"]["packing"]["num_tokens"] == whole["data"]["num_tokens"]


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("num_processes", [None, 3])
def test_lost_and_divided_tokens_are_those_of_packed_numbers(strategy, num_processes):
    """Against a dataset in which every token is numbered by its example and its place."""
    lengths = [1 + (37 * i) % 50 for i in range(1300)]  # more than the thousand that TRL packs at a time
    masks = LossMasks()
    for i, length in enumerate(lengths):
        masks.add([(i + j) % 3 == 0 for j in range(length)])
    args = SimpleNamespace(max_length=16, packing_strategy=strategy, shuffle_dataset=True, seed=5)
    args.dataset_num_proc = num_processes
    packing = pack(masks, args)
    numbered = {"token": [[64 * i + j for j in range(length)] for i, length in enumerate(lengths)]}
    dataset = Dataset.from_dict(numbered).shuffle(seed=5)
    shards = [dataset.shard(num_processes or 1, i, contiguous=True) for i in range(num_processes or 1)]
    sequences = [row for shard in shards for row in pack_dataset(shard, 16, strategy)]
    tokens = [token for row in sequences for token in row["token"]]
    parts = []
    for row in sequences:
        ends = [0, *itertools.accumulate(row.get("seq_lengths", [len(row["token"])]))]
        parts += [row["token"][start:end] for start, end in itertools.pairwise(ends)]
    assert packing.num_sequences == len(sequences)
    assert packing.num_lost_tokens == sum(lengths) - len(tokens)
    assert packing.num_trained_tokens == sum((t // 64 + t % 64) % 3 == 0 for t in tokens)
    assert packing.num_continuations == sum(part[0] % 64 > 0 for part in parts)
    assert packing.num_long_examples == sum(length > 16 for length in lengths)


def test_a_model_that_mixes_packed_examples_is_refused_before_the_first_step(packed, tmp_path):
    config = OPTConfig(vocab_size=121, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4)
    config.update({"word_embed_proj_dim": 32, "pad_token_id": 0})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "opt")
    AutoTokenizer.from_pretrained(BASE).save_pretrained(tmp_path / "opt")
    start = (f"model.name_or_path={tmp_path / 'opt'}", "model.init_seed=null")
    run, _ = packed(*start)
    with pytest.raises(UserError, match=r"trainer.packing: .*OPTForCausalLM .*flash_attention_2 .*packing: false"):
        run.train()
    assert not run.folder.metrics.exists()
    run, _ = packed(*start, "trainer.packing_strategy=wrapped", "trainer.max_steps=1", name="wrapped")
    assert run.train()  # with a notice


def test_attention_is_passed_on_and_one_that_is_missing_is_refused(packed):
    run, _ = packed("model.attn_implementation=eager")
    assert run.trainer().model.config._attn_implementation == "eager"
    run, plan = packed("model.attn_implementation=flash_attention_2", "trainer.use_cpu=false", name="flash")
    words = "training would not start on this machine: model.attn_implementation: flash"
    assert words in "\n".join(plan["notices"])
    with pytest.raises(UserError, match=r"attn_implementation: flash_attention_2 cannot be used: .*flash-attn"):
        check_attention(run.recipe, AutoConfig.from_pretrained(BASE))
