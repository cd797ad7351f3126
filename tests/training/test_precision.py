"""An update that would be rounded away is noticed at the first step; one that is kept is still there in the end."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from soren_align.core.errors import UserError
from soren_align.core.files import resolve_path
from soren_align.optim import build_optimizer
from soren_align.run.folder import RunFolder
from soren_align.sharding.ranks import Ranks
from soren_align.training.lost_updates import FirstStepCheck, LostUpdatesPolicy
from tests.support.tiny_run import same
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

JOB = "precision"
# The paper's settings for SFT, and what a tiny model needs.
PAPER = ("optimizer.name=soren", "optimizer.lr=1e-6", "optimizer.aux_lr=3e-5", "optimizer.adjust_lr_fn=none")
PAPER += ("optimizer.weight_decay=0.1", "trainer.lr_scheduler_type=cosine", "trainer.warmup_steps=0.1")
PAPER += ("trainer.save_strategy=no", "model.init_seed=null", "trainer.max_grad_norm=1.0")
NARROW, KAHAN = "model.dtype=bfloat16", ("model.dtype=bfloat16", "optimizer.compensation=kahan")
SHORT_REACH = "optimizer.map={name: minimax, resolution: 0.01}"
LOST = ("model.dtype=bfloat16", "optimizer.compensation=none")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A Qwen2 of hidden size 64 as it would be published: in bfloat16."""
    folder = tmp_path_factory.mktemp("qwen")
    base = resolve_path("shipped:recipes/quickstart/base")
    # transformers puts Qwen2's own class in the place of the quickstart's tokenizer: words become byte pairs.
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    rows = resolve_path("shipped:recipes/quickstart/data/chat_train.jsonl").read_text().splitlines()
    said = [turn["content"] for row in rows for turn in json.loads(row)["messages"]]
    special = [token["content"] for token in json.loads((base / "tokenizer.json").read_text())["added_tokens"]]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    words.train_from_iterator(said, trainer)
    tokenizer = Qwen2Tokenizer(tokenizer_object=words, eos_token="<|end|>", pad_token="<|pad|>", unk_token=None)
    tokenizer.chat_template = (base / "chat_template.jinja").read_text()
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def paper(tiny_run, qwen):
    """A run of paper-soren's settings."""

    def make(*overrides, task="sft", name="run"):
        is_adamw = "optimizer.name=adamw" in overrides  # which has no adjust_lr_fn
        settings = [setting for setting in PAPER if not (is_adamw and "adjust_lr_fn" in setting)]
        return tiny_run(task, *settings, f"model.name_or_path={qwen}", *overrides, name=name)

    return make


def first_step(run):
    return run.folder.read()["first_step"]


def test_in_bfloat16_the_papers_updates_are_lost_and_the_run_stops_at_its_first_step(paper):
    run = paper(*LOST)
    with pytest.raises(UserError) as refused:
        run.train()
    said = " ".join(refused.value.problems)
    fraction = first_step(run)["matrices"]["fraction_changed"]
    assert 0 < fraction < 0.05
    assert "step 1: rounding loses most updates of the matrices" in said
    assert f"{fraction:.2%} of the entries change in bfloat16" in said
    for remedy in ("float32", "kahan", "a larger optimizer.lr", "match_rms_measured", "run.lost_updates: warn"):
        assert remedy in said
    seen = first_step(run)["matrices"]
    assert seen["lr"] == 1e-6, "the peak: warm-up takes step 1 at 0"
    assert seen["update_rms"] == pytest.approx(0.5e-6 / 64**0.5, rel=0.7)
    assert seen["ulp"] == 2.0**-13, "of 0.02 in bfloat16"
    assert not run.folder.model.exists()
    assert not run.folder.complete_checkpoints()


def test_in_float32_the_papers_updates_arrive(paper):
    run = paper("run.lost_updates=warn")
    assert run.train()
    assert first_step(run)["matrices"]["fraction_changed"] > 0.9
    assert first_step(run)["matrices"]["dtype"] == "float32"
    assert first_step(run)["other_parameters"]["fraction_changed"] > 0.9
    assert not any(text in run.said.getvalue() for text in ("notice", "step 1"))


@pytest.mark.rest
@pytest.mark.parametrize("name", ["soren", "muon", "htmuon", "adamw"])
def test_every_optimizer_is_measured(paper, name):
    short = ("trainer.max_steps=2", "trainer.gradient_accumulation_steps=2",
             *(["optimizer.adjust_lr_fn=null"] if name != "adamw" else []))  # fmt: skip
    lost = paper(*LOST, *short, f"optimizer.name={name}", "optimizer.lr=1e-6", name="lost")
    with pytest.raises(UserError, match="rounding loses most updates of the matrices"):
        lost.train()
    kept = paper(*LOST, *short, f"optimizer.name={name}", "optimizer.lr=3e-2", "optimizer.aux_lr=3e-2", name="kept")
    assert kept.train()
    assert first_step(kept)["matrices"]["fraction_changed"] > 0.9


# 2% is issue 6's bound, for 200 steps; DPO's gradients differ by more, and by the same gradients both are equal
# (test_compensation.py). The map is that of the bound: the default map also lifts the rounding noise of bfloat16 gradients.
@pytest.mark.rest
def test_with_kahan_the_weights_go_the_way_of_float32(paper):
    """Each run by its own gradients: of bfloat16 forward passes, of float32 ones."""
    ends = {}
    for name, overrides in {"wide": (), "kahan": KAHAN}.items():
        run = paper("trainer.max_steps=60", *overrides, SHORT_REACH, name=name)
        trainer = run.trainer()
        trainer.train()
        ways = [(now, then) for number, now, then in trainer.starting_weights.pairs(trainer.attached.optimizer)
                if number == 0]  # fmt: skip
        ends[name], start = (torch.cat([tensors[i].flatten() for tensors in ways]) for i in (0, 1))
        parameters = torch.cat([p.detach().flatten() for p in trainer.attached.optimizer.param_groups[0]["params"]])
    way = (ends["wide"] - start).norm()
    apart = float((ends["kahan"] - ends["wide"]).norm() / way)
    assert apart < 0.02
    assert (parameters.float() - ends["wide"]).norm() > 0.9 * way, "nearly all of it is in the compensation"


def test_kahan_resumes_bit_for_bit_and_saves_the_sum(paper):
    saving = ("trainer.save_strategy=steps", "trainer.save_steps=3", "run.save_dtype=float32", *KAHAN)
    whole, halves = paper(*saving, name="whole"), paper(*saving, name="halves")
    assert whole.train()
    shutil.copytree(whole.folder.path, halves.folder.path)
    halves.forget_the_end()
    assert halves.train()
    assert halves.folder.read()["resumed_from_steps"] == [3]
    one = whole.weights()
    assert {tensor.dtype for tensor in one.values()} == {torch.float32}
    assert same(one, halves.weights())
    layers = [name for name, tensor in one.items() if "layers" in name and tensor.ndim == 2]
    assert any(not torch.equal(one[name], one[name].bfloat16().float()) for name in layers)
    assert halves.folder.read()["first_step"]["matrices"]["fraction_changed"] > 0.9


@pytest.mark.parametrize(("asked", "dtype"), [("null", "bfloat16"), ("float32", "float32"), ("float16", "float16")])
def test_the_model_folder_is_in_the_dtype_asked_for_or_the_starts(paper, qwen, asked, dtype):
    run = paper(f"run.save_dtype={asked}")
    assert run.train()
    assert json.loads((run.folder.model / "config.json").read_text())["dtype"] == dtype
    saved = run.weights()
    assert {tensor.dtype for tensor in saved.values()} == {getattr(torch, dtype)}
    assert saved.keys() == load_file(qwen / "model.safetensors").keys()
    assert next(AutoModelForCausalLM.from_pretrained(run.folder.model).parameters()).dtype == getattr(torch, dtype)


def test_the_run_says_how_much_of_the_change_survives_the_export(paper, qwen):
    run = paper()
    assert run.train()
    wide = paper("run.save_dtype=float32", name="wide")
    assert wide.train()
    start, saved, unrounded = load_file(qwen / "model.safetensors"), run.weights(), wide.weights()
    matrices = [name for name, tensor in start.items() if "layers" in name and tensor.ndim == 2]
    way, kept = (torch.cat([(end[n].double() - start[n].double()).flatten() for n in matrices])
                 for end in (unrounded, saved))  # fmt: skip
    survived, whole = (each.folder.read()["training"]["change_after_saving"] for each in (run, wide))
    assert survived["dtype"] == "bfloat16"
    share = float((kept != 0).sum() / (way != 0).sum())
    assert survived["matrices"]["fraction_changed"] == pytest.approx(share, rel=1e-6)
    assert survived["matrices"]["projection"] == pytest.approx(float(kept @ way / (way @ way)), rel=1e-3)
    assert survived["matrices"]["fraction_changed"] < 0.1
    assert "write run.save_dtype: float32 to keep it" in " ".join(run.said.getvalue().split())
    assert whole["matrices"] == pytest.approx({"fraction_changed": 1, "projection": 1})
    assert "float32 to keep it" not in wide.said.getvalue()


@pytest.mark.parametrize(("overrides", "message"), [
    ((NARROW,), "model.dtype: rounding to bfloat16 loses most small updates"),
    (("optimizer.compensation=kahan",), "optimizer.compensation: applies only to bfloat16 parameters"),
    ((*KAHAN, "run.parallel=zero2"), "optimizer.compensation: zero2 updates float32 master weights"),
    ((*KAHAN, "run.parallel=zero3-offload"), "zero3-offload updates float32 master weights"),
    ((NARROW, "run.parallel=zero2", "trainer.bf16=false"), "under zero2, bfloat16 weights get float32 master weights"),
])  # fmt: skip
def test_a_recipe_that_would_lose_updates_unasked_is_refused_before_torch(tiny_run, overrides, message):
    with pytest.raises(UserError) as refused:
        tiny_run("sft", *overrides)
    assert any(message in problem for problem in refused.value.problems), refused.value.problems


@pytest.mark.parametrize("mode", ["zero3", "fsdp2"])
def test_what_is_sharded_is_stepped_in_float32_whatever_was_loaded(two_ranks, mode):
    folder, seen = two_ranks
    assert [rank[mode]["stepped"] for rank in seen] == [["torch.float32"]] * 2
    run = RunFolder(folder / f"narrow-{mode}")
    for group in run.read()["first_step"].values():
        assert group["dtype"] == "float32"
        assert group["fraction_changed"] > 0.9
    assert run.read()["training"]["change_after_saving"]["matrices"]["fraction_changed"] < 0.2
    assert {tensor.dtype for tensor in load_file(run.model / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((run.model / "config.json").read_text())["dtype"] == "bfloat16"


def test_ranks_of_ddp_have_the_same_compensation_of_every_parameter(two_ranks):
    folder, (first, second) = two_ranks
    assert first["ddp"]["kept"] == second["ddp"]["kept"]
    assert first["ddp"]["kept"][0] == 20
    assert RunFolder(folder / "narrow-ddp").read()["first_step"]["matrices"]["fraction_changed"] > 0.9


def test_a_training_whose_gradients_were_all_zero_is_named():
    model, reports = torch.nn.Linear(4, 4), []
    optimizer = build_optimizer(model, name="soren", lr=0.1)
    policy = LostUpdatesPolicy("stop", lambda groups, warnings: reports.append(warnings))
    check, state = (
        FirstStepCheck(SimpleNamespace(optimizer=optimizer, ranks=Ranks()), policy),
        SimpleNamespace(global_step=0),
    )
    check.on_train_begin(None, state, None)
    for scale, first in ((0.0, ["all gradients were zero until the end (step 1)"]), (1.0, [])):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, scale)
        check.on_step_begin(None, state, None)
        optimizer.step()
        check.on_optimizer_step(None, state, None)
        state.global_step += 1
        check.on_train_end(SimpleNamespace(fp16=False), state, None)
        assert [text.partition(",")[0] for text in reports.pop()] == first
    assert reports == []


def test_ranks_stop_together_where_updates_are_lost(two_ranks):
    first, second = (rank["ddp"]["lost"] for rank in two_ranks[1])
    assert first == second
    assert first.startswith("step 1: rounding loses most updates of the matrices")
