"""What steps is what the recipe names, and what is logged is what happened."""

import json
import math
import shutil

import pytest
import torch
import trl
from datasets import Dataset
from safetensors.torch import load_file
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.optim import gradients
from soren_align.planning.plan import plan_training
from soren_align.training import run as training
from soren_align.training.model import load_model
from soren_align.training.setup import trl_arguments
from soren_align.training.trained_optimizer import OptimizerMismatch
from soren_align.training.trainer import SorenTrainerMixin
from tests.support.tiny_run import same
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

pytestmark = pytest.mark.model


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    ("name", "cls"), [("soren", "Soren"), ("muon", "Muon"), ("htmuon", "HTMuon"), ("adamw", "AdamW")]
)
def test_run_json_proves_which_optimizer_stepped_and_how_often(tiny_run, name, cls, accumulation):
    run = tiny_run("sft", f"optimizer.name={name}", f"trainer.gradient_accumulation_steps={accumulation}")
    assert run.train()
    proof = run.folder.read()["optimizer"]
    matrices = 0 if name == "adamw" else 14
    assert (proof["class"], proof["chain"][-1]) == (cls, cls)
    assert (proof["num_matrices"], proof["maps_per_step"]) == (matrices, matrices)
    assert run.losses()[-1] < run.losses()[0]
    table = run.folder.read()["routing"]
    assert sum(row["numel"] for row in table) == run.folder.read()["parameters"]["trainable"]


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_the_model_is_saved_with_the_recipes_template_and_stop_token(tiny_run, task):
    model = ("model.chat_template=zephyr", "model.eos_token=<|user|>")
    run = tiny_run(task, *model, "trainer.max_steps=1", "trainer.save_strategy=no")
    assert run.train()
    tokenizer = AutoTokenizer.from_pretrained(run.folder.model)
    assert tokenizer.eos_token == "<|user|>"
    assert tokenizer.chat_template == shipped.templates()["zephyr"].read_text()
    old = AutoTokenizer.from_pretrained(run.folder.start).eos_token_id
    assert json.loads((run.folder.model / "config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
    generation = json.loads((run.folder.model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [tokenizer.eos_token_id, old]


def test_an_optimizer_that_is_not_the_recipes_stops_the_run(tiny_run):
    trainer = tiny_run().trainer()
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters())
    with pytest.raises(OptimizerMismatch, match="the recipe's optimizer is Soren, but the trainer would use AdamW"):
        trainer.train()


def test_a_map_that_did_not_run_stops_the_run(tiny_run, monkeypatch):
    trainer = tiny_run().trainer()
    monkeypatch.setattr("soren_align.optim.optimizer.spectral_step_", lambda *a, **k: None)
    with pytest.raises(OptimizerMismatch, match="0 spectral maps in one optimizer step for 14 matrices"):
        trainer.train()


def test_the_logged_numbers_are_those_of_the_weights(tiny_run):
    run = tiny_run("sft", "trainer.save_steps=1", "trainer.save_total_limit=10")
    run.train()
    start = load_file(run.folder.start / "model.safetensors")

    def weights(step):
        return load_file(run.folder.checkpoints / f"checkpoint-{step}" / "model.safetensors")

    matrices = [n for n, w in start.items() if w.ndim == 2 and "layers" in n]
    rest = [n for n in start if n not in matrices]
    assert len(matrices) == 14
    before, after = weights(3), weights(4)
    line = run.metrics()[3]
    assert line["step"] == 4
    for names, prefix in ((matrices, ""), (rest, "aux_")):
        change = torch.cat([(after[n] - before[n]).double().flatten() for n in names])
        moved = torch.cat([(after[n] - start[n]).double().flatten() for n in names])
        norm = torch.cat([start[n].double().flatten() for n in names]).norm()
        assert line[f"{prefix}update_rms"] == pytest.approx(float(change.square().mean().sqrt()), rel=1e-4)
        assert line[f"{prefix}relative_change"] == pytest.approx(float(moved.norm() / norm), rel=1e-4)
    for line in run.metrics()[:6]:  # of the update alone; the decay adds lr * 0.1 * weights, which is 0.1% of that
        assert line["update_rms"] == pytest.approx(0.2 * line["learning_rate"], rel=0.01)
    line = run.metrics()[3]
    assert 0 < line["map_min_singular_value"] < line["map_max_singular_value"] < 1
    assert line["num_out_of_range"] == 0
    assert line["tokens_per_second"] > 0


PLAIN = """\
{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""
"""As ChatML: without marks, and with a line break after the stop token."""


def test_on_the_same_tokens_the_losses_are_plain_trls(tiny_run, tmp_path):
    """docs/data.md, Beside plain TRL: the tokens differ in the line break after the stop token alone."""
    turns = [{"prompt": [{"role": "user", "content": f"Question {i}?"}],
              "completion": [{"role": "assistant", "content": "word " * (2 if i % 2 else 40)}]}
             for i in range(8)]  # fmt: skip
    (tmp_path / "turns.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    (tmp_path / "plain.jinja").write_text(PLAIN)
    run = tiny_run(
        "sft",
        *("model.name_or_path=shipped:configs/models/tiny", f"model.chat_template={tmp_path}/plain.jinja"),
        *(f"data.train.path={tmp_path}/turns.jsonl", "data.eval=null", "trainer.per_device_train_batch_size=2"),
        *("trainer.max_length=64", "trainer.max_steps=4", "trainer.save_strategy=no"),
        *("optimizer.name=adamw", "optimizer.weight_decay=0"),
    )
    setup = run.prepare()
    tokens = setup.tokens.train

    def plain_trl(dataset):
        args = trl_arguments(run.recipe, tmp_path / "out", run.ranks)
        args.learning_rate, args.weight_decay, args.assistant_only_loss = run.recipe.optimizer.lr, 0.0, False
        model = AutoModelForCausalLM.from_pretrained(setup.start, dtype=torch.float32)
        return trl.SFTTrainer(model, args, train_dataset=dataset, processing_class=setup.tokenizer)

    stop, line_break = setup.tokenizer.eos_token_id, setup.tokenizer("\n")["input_ids"][-1]
    for i, (ours, theirs) in enumerate(zip(tokens, plain_trl(Dataset.from_list(turns)).train_dataset, strict=True)):
        ids, labels = (ours[column][:64] for column in ("input_ids", "labels"))
        assert ids == theirs["input_ids"]
        differ = [k for k, pair in enumerate(zip(labels, theirs["labels"], strict=True)) if len({*pair}) > 1]
        assert len(differ) == i % 2  # the long answers are truncated before it
        assert [ids[k - 1 : k + 1] for k in differ] == [[stop, line_break]] * len(differ)

    theirs = plain_trl(tokens.select_columns(["input_ids", "labels"]))
    theirs.train()
    assert training.train(setup, run.folder, run.console, run.ranks)
    expected = [log["loss"] for log in theirs.state.log_history if "loss" in log]
    assert len(expected) == 4
    # Both sum the norm of the gradients for clipping in an order of their own.
    assert run.losses() == pytest.approx(expected, rel=1e-6)


def test_the_logged_rates_are_those_of_the_plan(tiny_run):
    run = tiny_run("sft", "optimizer.aux_lr=1e-4")
    planned, counted = plan_training(run.recipe)
    trainer = run.trainer()
    assert counted.num_kept == len(trainer.train_dataset)
    trainer.train()
    assert planned["steps"]["total"] == trainer.state.max_steps == 6
    logged = {line["step"]: line for line in run.metrics() if "loss" in line}
    for rate in planned["learning_rates"]:
        assert logged[rate["step"]]["learning_rate"] == pytest.approx(rate["lr"])
        assert logged[rate["step"]]["aux_learning_rate"] == pytest.approx(rate["aux_lr"])


@pytest.mark.parametrize("epochs", [pytest.param(1, marks=pytest.mark.slow), 2.5])
def test_the_plan_counts_steps_as_transformers_does(tiny_run, epochs):
    overrides = ["trainer.max_steps=-1", f"trainer.num_train_epochs={epochs}", "data.train.limit=50"]
    run = tiny_run("sft", *overrides, "trainer.gradient_accumulation_steps=4", "trainer.warmup_steps=0")
    planned, _ = plan_training(run.recipe)
    trainer = run.trainer()
    trainer.train()
    assert planned["steps"]["total"] == trainer.state.global_step


def test_a_gradient_that_is_not_finite_ends_the_run_with_its_name_and_the_step(tiny_run, monkeypatch):
    def poisoned(self, model, inputs, *args, **kwargs):
        return next(model.parameters()).sum() * math.nan

    monkeypatch.setattr(SorenTrainerMixin, "compute_loss", poisoned, raising=False)
    with pytest.raises(UserError, match=r"step 1: .*(not finite|NaN)"):
        tiny_run().train()


@pytest.mark.rest
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_the_norm_computed_for_clipping_saves_reading_the_gradients_and_changes_no_bit(tiny_run, monkeypatch, clip):
    def weights_and_counts(name):
        counts, compute = [], gradients._squared_norms
        monkeypatch.setattr(gradients, "_squared_norms", lambda *a: counts.append(1) or compute(*a))
        run = tiny_run("sft", f"trainer.max_grad_norm={clip}", "trainer.max_steps=4", name=name)
        assert run.train()
        monkeypatch.setattr(gradients, "_squared_norms", compute)
        return run.weights(), len(counts)

    informed, few = weights_and_counts("informed")
    monkeypatch.setattr(SorenTrainerMixin, "_get_grad_norm", Trainer._get_grad_norm)
    plain, every = weights_and_counts("plain")
    assert every == 4
    assert few < 4 if clip else few <= 4  # without clipping norms may be above 1.5
    assert same(informed, plain)


def test_the_model_folder_is_plain_hugging_face(tiny_run):
    run = tiny_run()
    run.train()
    model = AutoModelForCausalLM.from_pretrained(run.folder.model)
    assert next(model.parameters()).dtype == torch.float32
    assert AutoTokenizer.from_pretrained(run.folder.model).chat_template
    assert not list(run.folder.model.glob("*.bin"))


def test_pickled_weights_are_never_loaded(tiny_run, tmp_path):
    run = tiny_run()
    start = shutil.copytree(run.prepare().start, tmp_path / "pickled")
    weights = start / "model.safetensors"
    torch.save(load_file(weights), start / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(UserError, match="safetensors"):
        load_model(run.recipe, str(start))
