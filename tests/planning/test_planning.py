"""The plan of several processes needs neither them, nor the model's weights, nor the machine that would train."""

import io
import json

import pytest
import torch
from rich.console import Console
from soren_align import recipe
from soren_align.core import shipped
from soren_align.planning.show import print_plan
from transformers import MixtralModel

pytestmark = pytest.mark.model

MISTRAL_7B = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32000,
              "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
              "num_key_value_heads": 8, "tie_word_embeddings": False, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """Overrides of the quickstart: a config and a tokenizer, no weights; no GPU here, and no word about a CPU."""
    model = model_of(tmp_path_factory.mktemp("mistral-7b"), MISTRAL_7B)
    return [*model, "trainer.use_cpu=false", "trainer.bf16=true", "trainer.per_device_train_batch_size=2"]


def model_of(folder, config):
    """Overrides for a model of that config, without weights."""
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((shipped.ROOT / "recipes/quickstart/base" / name).read_bytes())
    return [f"model.name_or_path={folder}", "model.init_seed=0"]


def summary_of(plan):
    screen = io.StringIO()
    print_plan(plan, None, Console(file=screen, width=80))
    return screen.getvalue()


@pytest.mark.rest
def test_mistral_7b_on_eight_ranks_by_zero_3(planned, mistral):
    plan, text = planned("quickstart/sft", *mistral, "run.parallel=zero3", num_ranks=8)
    section = plan["processes"]
    assert (section["num_processes"], section["parallel"]) == (8, "ZeRO 3")
    assert "processes 8, ZeRO 3, started by torchrun" in text
    assert (section["num_matrices"], section["num_exchanged_matrices"]) == (224, 224)
    assert section["max_over_mean_flops"] <= 1.01
    assert section["bytes_sent"]["max"] == pytest.approx(6.1e9, rel=0.01)  # 2 x 7/8 of an eighth of 6.98e9, float32
    num_micro_batches = section["global_batch_size"] // (8 * 2)  # each ends with a reduce-scatter in float32
    sent = num_micro_batches * 4 * 7_241_732_096 * 7 // 8
    assert section["gradient_bytes_sent"] == {"per_step": sent, "dtype": "float32"}
    assert section["map_flops"]["all_ranks"] == pytest.approx(932e12, rel=0.01)
    sizes = {part["name"]: part["num_bytes"] / 7_241_732_096 * 8 for part in section["memory"]}
    assert sizes["weights"] == pytest.approx(2, rel=1e-3)
    assert sizes["float32 master weights"] == sizes["gradients"] == pytest.approx(4, rel=1e-3)


@pytest.mark.rest
@pytest.mark.parametrize("mode", ["zero1", "zero2"])
def test_under_zero_1_and_2_no_matrix_of_mistral_7b_straddles_eight_ranks(planned, mistral, mode):
    plan, text = planned("quickstart/sft", *mistral, f"run.parallel={mode}", num_ranks=8)
    section = plan["processes"]
    assert (section["num_matrices"], section["num_exchanged_matrices"]) == (224, 0)
    assert section["max_over_mean_flops"] <= 1.01
    assert section["bytes_sent"] == {"max": 0, "mean": 0}
    assert "matrices exchanged between ranks: 0\n" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "this machine has no GPU" in text  # on a machine without a GPU, as those of the tests are


def test_steps_and_batch_are_those_of_the_processes(planned):
    small = ["trainer.per_device_train_batch_size=8", "trainer.max_steps=-1", "trainer.num_train_epochs=2"]
    alone, _ = planned("quickstart/sft", *small)
    plan, text = planned("quickstart/sft", *small, num_ranks=3)
    number = plan["data"]["num_kept"]
    steps = {"per_epoch": number // 8, "total": number // 4, "num_epochs": 2.0}
    schedule = {"lr_scheduler_type": "cosine", "num_warmup_steps": 20}
    assert alone["steps"] == {"global_batch_size": 8, **steps, **schedule}
    steps = {"per_epoch": number // 24, "total": number // 12, "num_epochs": 2.0}
    assert plan["steps"] == {"global_batch_size": 24, **steps, **schedule}
    _, factors = recipe.global_batch(recipe.load("quickstart/sft", small), 3)
    assert f"global batch size 24: {factors}" in text
    assert (alone["processes"]["num_processes"], alone["processes"]["parallel"]) == (1, "DDP")
    fixed, _ = planned("quickstart/sft", *small, "run.global_batch_size=48", num_ranks=3)
    assert (fixed["steps"]["global_batch_size"], fixed["steps"]["per_epoch"]) == (48, number // 48)


@pytest.mark.parametrize("num_examples", [96, 97, 111, 113, 120])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_batches_of_an_epoch_are_counted_as_accelerate_deals_them(num_examples, num_ranks):
    from accelerate.data_loader import BatchSamplerShard
    from soren_align.planning.plan import steps_per_epoch
    from torch.utils.data import BatchSampler, SequentialSampler

    for drops in (False, True):
        batches = BatchSampler(SequentialSampler(range(num_examples)), 8, drops)
        assigned = [len([*BatchSamplerShard(batches, num_ranks, rank)]) for rank in range(num_ranks)]
        assert assigned == [steps_per_epoch(num_examples, 8, 1, num_ranks, drops)] * num_ranks
        assert steps_per_epoch(num_examples, 8, 4, num_ranks, drops) == -(-assigned[0] // 4)


@pytest.mark.rest
def test_dpo_has_a_reference_model_and_adamw_no_maps(planned):
    start = ["model.name_or_path=shipped:recipes/quickstart/base", "model.init_seed=0"]
    plan, _ = planned("quickstart/dpo", *start, num_ranks=2)
    sizes = {part["name"]: part["num_bytes"] for part in plan["processes"]["memory"]}
    assert sizes["reference model"] == sizes["weights"] == 4 * plan["model"]["num_parameters"]
    plan, text = planned("quickstart/sft", "optimizer.name=adamw", num_ranks=2)
    assert (plan["processes"]["num_matrices"], plan["processes"]["map_flops"]) == (0, None)
    sizes = {part["name"]: part["num_bytes"] for part in plan["processes"]["memory"]}
    assert sizes["optimizer states"] == 2 * sizes["weights"]
    assert "map workspace" not in sizes
    assert "spectral maps" not in text


def test_packed_sequences_are_full_and_determine_the_steps(planned):
    loose, _ = planned("quickstart/sft", "trainer.max_steps=-1", "trainer.num_train_epochs=1")
    packing = ["trainer.packing=true", "trainer.max_length=256", "trainer.max_steps=-1", "trainer.num_train_epochs=1"]
    plan, text = planned("quickstart/sft", *packing)
    packed = plan["data"]["packing"]
    assert packed["num_tokens"] == loose["data"]["num_tokens"] + loose["data"]["num_truncated_tokens"]
    assert plan["steps"]["total"] == -(-packed["num_sequences"] // 64)
    assert plan["compute"]["tokens_per_example"] == 256
    assert f"packing bfd_split: {packed['num_sequences']} sequences of up to 256 tokens" in text


@pytest.mark.slow
def test_packed_sequences_of_a_micro_batch_are_joined_without_flash_attention(planned):
    packing = ("eval=null", "trainer.packing=true", "trainer.max_length=256", "trainer.per_device_train_batch_size=32")
    joined, text = planned("quickstart/sft", *packing)
    apart, plain_text = planned("quickstart/sft", *packing, "trainer.packing_strategy=wrapped")
    assert joined["compute"]["training_flops_per_step"] > 2 * apart["compute"]["training_flops_per_step"]
    memory = [{part["name"]: part["num_bytes"] for part in each["processes"]["memory"]} for each in (joined, apart)]
    assert memory[0]["activations"] - memory[1]["activations"] >= (32 * 256) ** 2  # the mask
    assert "the 32 sequences of a micro-batch are one sequence of 8,192 tokens" in " ".join(text.split())
    assert "sequences of a micro-batch are one sequence of" not in plain_text


@pytest.mark.parametrize(("settings", "number"), [
    ("trainer.packing=true", 64), ("trainer.padding_free=true", 64), ("trainer.packing_strategy=wrapped", 1),
    ("trainer.packing=false", 1), ("model.attn_implementation=flash_attention_2", 1),
])  # fmt: skip
def test_micro_batches_are_joined_by_packing_and_without_padding(settings, number):
    from soren_align.planning.flops import joined_sequences

    packing = () if "padding_free" in settings else ("trainer.packing=true",)
    loaded = recipe.load("quickstart/sft", [*packing, "trainer.use_cpu=false", settings])
    assert joined_sequences(loaded) == number


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "constant"])
def test_a_schedule_that_follows_the_loss_is_planned_at_its_peak(planned, schedule):
    plan, text = planned("quickstart/sft", f"trainer.lr_scheduler_type={schedule}", "trainer.warmup_steps=0")
    assert {rate["lr"] for rate in plan["learning_rates"]} == {5e-3}
    assert f"schedule: {schedule}\n" in text
    assert "schedule: cosine after 20 steps of warmup\n" in planned("quickstart/sft")[1]


def small_model(folder, **config):
    small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "eos_token_id": 2, "pad_token_id": 0}
    return [*model_of(folder, small | config), "data.train.limit=20"]


def test_an_architecture_whose_pass_cannot_be_measured_is_planned_without_its_activations(
    planned, tmp_path, monkeypatch
):
    """An error of its code, as where an operation needs the contents of tensors."""
    monkeypatch.setattr(MixtralModel, "forward", lambda *args, **kwargs: torch.empty(1, device="meta").item())
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    overrides = small_model(tmp_path, architectures=["MixtralForCausalLM"], model_type="mixtral", **experts)
    plan, text = planned("quickstart/sft", *overrides, "trainer.bf16=true")
    assert plan["compute"]["training_flops"] is None
    assert plan["processes"]["memory_total"]["device"]["forward_backward"] is None
    assert "compute   unknown for this architecture" in text
    assert "activations and FLOPs are unknown for this architecture" in text


def test_examples_longer_than_the_models_positions_make_a_notice(planned, tmp_path):
    shape = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 8}
    plan, _ = planned("quickstart/sft", *small_model(tmp_path, **shape))
    assert any("but the model has 8 positions; lower trainer.max_length" in notice for notice in plan["notices"])


def test_every_source_of_a_mixture_has_its_number_of_examples_and_its_weight(planned):
    chats = [f"shipped:recipes/quickstart/data/chat_{name}.jsonl" for name in ("train", "test")]
    sources = [{"path": chats[0], "weight": 0.25}, {"path": chats[1]}]
    data = [f"data.train={json.dumps(sources)}", "data.eval=null", "trainer.eval_strategy=no"]
    plan, text = planned("quickstart/sft", *data, "eval=null")
    assert plan["data"]["num_kept_by_source"] == [240, 240]
    said = " ".join(text.split())
    assert f"{chats[0]}: 240 of 960 examples (weight 0.25), 240 used" in said
    assert f"{chats[1]}: 240 of 240 examples (weight 1), 240 used" in said


@pytest.mark.rest
def test_an_adapters_factors_have_no_typical_weight(planned):
    plan, text = planned("quickstart/sft-lora", "eval=null")
    assert plan["typical_weight"] is None
    assert {size["relative_update"] for size in plan["update_sizes"]} == {None}
    assert all(size["update_sum"] > 100 * size["update_rms"] for size in plan["update_sizes"])  # of 600 steps
    assert "typical weight" not in text
    assert "update RMS sum soren" in " ".join(text.split())
    assert "(RMS of the change of a factor)" in summary_of(plan)
    whole, _ = planned("quickstart/sft", "eval=null")
    assert whole["typical_weight"] == 0.02
