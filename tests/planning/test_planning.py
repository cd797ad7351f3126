"""The plan of several processes needs neither them, nor the model's weights, nor the machine that would train."""

import io
import json
import os

import pytest
from rich.console import Console

from soren_align import errors, recipe, shipped
from tests.support.command import overrides, run

pytestmark = pytest.mark.model

MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """Overrides of the quickstart: a config and a tokenizer, no weights; no GPU here, and no word about a CPU."""
    folder = tmp_path_factory.mktemp("mistral-7b")
    (folder / "config.json").write_text(json.dumps(MISTRAL_7B))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((shipped.ROOT / "recipes/quickstart/base" / name).read_bytes())
    model = [f"model.name_or_path={folder}", "model.init_seed=0"]
    return [*model, "trainer.use_cpu=false", "trainer.bf16=true", "trainer.per_device_train_batch_size=2"]


def plan(name, overrides, num_ranks):
    from soren_align.planning import display
    from soren_align.planning import plan as planning

    found, counted = planning.plan(recipe.load(name, overrides), num_ranks=num_ranks)
    said = io.StringIO()
    display.show(found, counted, Console(file=said, width=80))
    return found, said.getvalue()


def test_mistral_7b_on_eight_ranks_by_zero_3_is_planned_by_the_command(mistral, tmp_path):
    arguments = ("--processes", "8", "--json", *overrides(*mistral, "run.parallel=zero3"))
    before = os.times()
    ran = run("plan", "quickstart/sft", *arguments, cwd=tmp_path)
    after = os.times()
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)["processes"]
    assert (found["number"], found["started"]) == (8, "8 by ZeRO 3, started by torchrun")
    assert (found["matrices"], found["travelling"]) == (224, 224)
    assert found["max_over_mean_load"] <= 1.01
    assert found["bytes_sent"]["most"] == pytest.approx(6.1e9, rel=0.01)  # 2 x 7/8 of an eighth of 6.98e9, float32
    assert found["map_flops"]["all_ranks"] == pytest.approx(307e12, rel=0.01)
    sizes = {part["name"]: part["num_bytes"] / 7_241_732_096 * 8 for part in found["memory"]}
    assert sizes["weights"] == pytest.approx(2, rel=1e-3)
    assert sizes["float32 masters"] == sizes["gradients"] == pytest.approx(4, rel=1e-3)
    assert list(tmp_path.iterdir()) == []
    # 7 billion random weights would take minutes; a plan takes its imports and a few seconds
    assert after.user - before.user < 60


@pytest.mark.parametrize("mode", ["zero1", "zero2"])
def test_under_zero_1_and_2_no_matrix_of_mistral_7b_straddles_eight_ranks(mistral, mode):
    found, said = plan("quickstart/sft", [*mistral, f"run.parallel={mode}"], 8)
    found = found["processes"]
    assert (found["matrices"], found["travelling"]) == (224, 0)
    assert found["max_over_mean_load"] <= 1.01
    assert found["bytes_sent"] == {"most": 0, "mean": 0}
    assert "none of them travel" in said
    assert max(len(line) for line in said.splitlines()) <= 80
    assert "needs trainer.use_cpu: true" in said  # on a machine without a GPU, as those of the tests are


def test_an_offload_shows_both_memories(mistral):
    found, said = plan("quickstart/sft", [*mistral, "run.parallel=zero3-offload"], 8)
    of_the_cpu = {part["name"] for part in found["processes"]["memory"] if part["where"] == "cpu"}
    assert {"weights", "float32 masters", "optimizer states"} <= of_the_cpu
    assert "memory per rank, of the CPU" in said
    assert max(len(line) for line in said.splitlines()) <= 80


def test_steps_and_batch_are_those_of_the_processes():
    small = ["trainer.per_device_train_batch_size=8", "trainer.max_steps=-1", "trainer.num_train_epochs=2"]
    alone, _ = plan("quickstart/sft", small, 1)
    found, said = plan("quickstart/sft", small, 3)
    rows = found["data"]["kept"]
    assert alone["steps"] == {"batch": 8, "per_epoch": rows // 8, "total": rows // 4, "epochs": 2.0}
    assert found["steps"] == {"batch": 24, "per_epoch": rows // 24, "total": rows // 12, "epochs": 2.0}
    assert "batch of 3 processes x 8 rows x accumulation 1" in said
    assert alone["processes"]["started"] == "1"
    fixed, _ = plan("quickstart/sft", [*small, "run.global_batch_size=48"], 3)
    assert (fixed["steps"]["batch"], fixed["steps"]["per_epoch"]) == (48, rows // 48)


@pytest.mark.parametrize("num_rows", [96, 97, 111, 113, 120])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_batches_of_an_epoch_are_counted_as_accelerate_deals_them(num_rows, num_ranks):
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, SequentialSampler

    from soren_align.planning.processes import steps_per_epoch

    batches = BatchSampler(SequentialSampler(range(num_rows)), 8, drop_last=False)
    dealt = [len([*BatchSamplerShard(batches, num_ranks, rank)]) for rank in range(num_ranks)]
    assert dealt == [steps_per_epoch(num_rows, 8, 1, num_ranks)] * num_ranks
    assert steps_per_epoch(num_rows, 8, 4, num_ranks) == -(-dealt[0] // 4)


def test_dpo_holds_a_reference_model_and_adamw_maps_nothing():
    start = ["model.name_or_path=shipped:recipes/quickstart/base", "model.init_seed=0"]
    found, _ = plan("quickstart/dpo", start, 2)
    sizes = {part["name"]: part["num_bytes"] for part in found["processes"]["memory"]}
    assert sizes["reference model"] == sizes["weights"] == 4 * found["model"]["parameters"]
    found, said = plan("quickstart/sft", ["optimizer.name=adamw", "optimizer.adjust_lr_fn=null"], 2)
    assert (found["processes"]["matrices"], found["processes"]["map_flops"]) == (0, None)
    sizes = {part["name"]: part["num_bytes"] for part in found["processes"]["memory"]}
    assert sizes["optimizer states"] == 2 * sizes["weights"]
    assert "workspace of the map" not in sizes
    assert "of maps" not in said


def test_packed_rows_are_full_and_steps_are_by_them():
    loose, _ = plan("quickstart/sft", ["trainer.max_steps=-1", "trainer.num_train_epochs=1"], 1)
    packing = ["trainer.packing=true", "trainer.max_length=256", "trainer.max_steps=-1", "trainer.num_train_epochs=1"]
    found, said = plan("quickstart/sft", packing, 1)
    tokens = loose["compute"]["tokens_per_row"] * loose["data"]["kept"]
    assert found["steps"]["total"] == -(-round(tokens / 256 + 0.5) // 64)
    assert found["compute"]["tokens_per_row"] == 256
    assert "trainer.packing makes about" in said


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "constant"])
def test_a_schedule_that_follows_the_loss_is_planned_at_its_peak(schedule):
    found, _ = plan("quickstart/sft", [f"trainer.lr_scheduler_type={schedule}", "trainer.warmup_steps=0"], 1)
    assert {rate["lr"] for rate in found["learning_rates"]} == {3e-3}


def test_a_schedule_that_lacks_its_settings_is_refused_in_words():
    with pytest.raises(errors.UserError, match=r"trainer\.lr_scheduler_type"):
        plan("quickstart/sft", ["trainer.lr_scheduler_type=warmup_stable_decay"], 1)


def written_down(tmp_path, **config):
    """Overrides of the quickstart for a model of that config, without weights."""
    small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "eos_token_id": 2, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(small | config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((shipped.ROOT / "recipes/quickstart/base" / name).read_bytes())
    return [f"model.name_or_path={tmp_path}", "model.init_seed=0", "data.train.limit=20"]


def test_an_architecture_whose_pass_needs_contents_is_planned_without_its_activations(tmp_path):
    """The experts' products read from the tokens which goes where."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    overrides = written_down(tmp_path, architectures=["MixtralForCausalLM"], model_type="mixtral", **experts)
    found, said = plan("quickstart/sft", [*overrides, "trainer.bf16=true"], 1)
    assert found["compute"]["training_flops"] is None
    assert found["processes"]["memory_total"]["device"]["passes"] is None
    assert "compute   not known for this architecture" in said
    assert "activations and operations are not known for this architecture" in said


@pytest.mark.parametrize(("strategy", "words"), [("epoch", "every epoch"), ("best", "at the best"), ("no", "none on")])
def test_when_checkpoints_are_written_is_said_in_words(tmp_path, strategy, words):
    overrides = [*written_down(tmp_path, architectures=["MistralForCausalLM"], model_type="mistral")]
    overrides += [f"trainer.save_strategy={strategy}", "trainer.metric_for_best_model=loss"]
    overrides += ["data.eval={path: shipped:recipes/quickstart/data/chat_test.jsonl}", "trainer.eval_strategy=epoch"]
    _, said = plan("quickstart/sft", overrides, 1)
    assert words in said
    assert "SaveStrategy" not in said


def test_rows_longer_than_the_models_positions_are_told(tmp_path):
    shape = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 8}
    found, _ = plan("quickstart/sft", written_down(tmp_path, **shape), 1)
    assert any("and the model has 8 positions; see trainer.max_length" in notice for notice in found["notices"])
