"""Weights are whole or refused: in training, in evaluation, in a merge and where an adapter is gone on with."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from soren_align import recipe
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.evaluate.run.backends import BackendSettings, load_lm
from soren_align.run import weights
from soren_align.training import adapters
from soren_align.training.model import generation_notices, load_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

from tests.support.edited_files import edit
from tests.support.run_folders import finished_run

pytestmark = pytest.mark.model

BASE = shipped.ROOT / "recipes" / "quickstart" / "base"
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    config = AutoConfig.from_pretrained(BASE)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE).save_pretrained(folder)
    return folder


@pytest.fixture
def model(base, tmp_path):
    return shutil.copytree(base, tmp_path / "base_model")


@pytest.fixture
def adapter(model, tmp_path):
    whole = AutoModelForCausalLM.from_pretrained(model)
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False)
    folder = tmp_path / "adapter"
    get_peft_model(whole, config).save_pretrained(folder)
    shutil.copy(model / "tokenizer.json", folder)
    shutil.copy(model / "tokenizer_config.json", folder)
    edit(folder / "adapter_config.json", base_model_name_or_path=str(model))
    return folder


def train(start):
    made = recipe.load("quickstart/sft", [f"model.name_or_path={start}", "model.init_seed=null"])
    return load_model(made, str(start))


def evaluate(start):
    tokenizer = AutoTokenizer.from_pretrained(start)
    return load_lm(start, tokenizer, BackendSettings("hf", "float32", "cpu", 8))


def change(folder, how, file="model.safetensors"):
    weights = load_file(folder / file)
    how(weights)
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / file, metadata={"format": "pt"})


DAMAGE = {
    "missing": (lambda w: w.pop(f"{Q}.weight"), rf"weights are missing: {Q}\.weight \(1 in total\)"),
    "unexpected": (lambda w: w.update({f"{Q}.bias": torch.zeros(3)}),
                   rf"the model does not have these weights: {Q}\.bias \(1 in total\)"),
    "another shape": (lambda w: w.update({f"{Q}.weight": torch.zeros(3, 3)}),
                         rf"these weights have another shape than in the model: {Q}\.weight \(1 in total\)"),
    "renamed": (lambda w: w.update({f"other.{k}": w.pop(k) for k in sorted(w)}), "weights are missing: .* in total"),
}  # fmt: skip


@pytest.mark.parametrize("use", [train, evaluate])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_model_whose_weights_do_not_fit_is_refused(model, use, damage):
    how, message = DAMAGE[damage]
    change(model, how)
    with pytest.raises(UserError, match=message):
        use(model)


@pytest.mark.parametrize("damage", DAMAGE)
def test_under_zero_3_too_before_anything_is_sharded(model, damage):
    how, message = DAMAGE[damage]
    change(model, how)
    alive = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    with pytest.raises(UserError, match=message):
        train(model)
    assert alive.is_zero3()


def with_generation(model, **settings):
    (model / "generation_config.json").write_text(json.dumps(settings))
    return recipe.load("quickstart/sft", [f"model.name_or_path={model}", "model.init_seed=null"])


@pytest.mark.parametrize(("settings", "change", "expected"), [
    ({}, "the model is saved with `do_sample: true`, which these settings need",
     {"do_sample": True, "temperature": 0.9, "top_p": 0.6}),
    ({"do_sample": False}, "the saved model does not have them, because do_sample is false", {"do_sample": False}),
])  # fmt: skip
def test_a_model_with_settings_of_sampling_alone_can_be_saved_after_training(
    model, tmp_path, settings, change, expected
):
    made = with_generation(model, temperature=0.9, top_p=0.6, **settings)
    notice = f"model {model}: generation_config.json has sampling settings; {change}"
    assert generation_notices(made, str(model)) == [notice]
    load_model(made, str(model)).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert {key: saved[key] for key in ("do_sample", "temperature", "top_p") if saved.get(key) is not None} == expected


@pytest.mark.parametrize("settings", [{"output_attentions": True}, {"temperature": 0.9, "max_new_tokens": -1}])
def test_a_generation_config_that_cannot_be_saved_is_refused_before_training(model, settings):
    made = with_generation(model, **settings)
    for use in (generation_notices, load_model):
        with pytest.raises(UserError, match=r"correct the file in a copy of the model|must be greater than 0"):
            use(made, str(model))


def test_a_tied_head_is_not_missing(model):
    edit(model / "config.json", tie_word_embeddings=True)
    change(model, lambda w: w.pop("lm_head.weight", None))
    for whole in (train(model), evaluate(model).model):
        assert whole.lm_head.weight is whole.model.embed_tokens.weight


FACTOR = f"base_model.model.{Q}.lora_A.weight"
ADAPTER_DAMAGE = {
    "renamed": (lambda w: w.update({k.replace("model.layers", "layers"): w.pop(k) for k in sorted(w)}), "are missing"),
    "missing": (lambda w: w.pop(FACTOR), r"weights are missing: .*lora_A.* \(1 in total\)"),
    "unexpected": (lambda w: w.update({FACTOR.replace("q_proj", "k_proj"): w[FACTOR].clone()}),
                   r"the model does not have these weights: .*k_proj\.lora_A.* \(1 in total\)"),
    "another shape": (lambda w: w.update({FACTOR: torch.zeros(5, 3)}), "the adapter cannot be loaded"),
    "empty": (lambda w: w.clear(), "are missing"),
}  # fmt: skip


def merge(start):
    run = finished_run(start.parent / "run", adapter_of="x")
    shutil.rmtree(run.model)
    shutil.copytree(start, run.model)
    return adapters.merge(run)


@pytest.mark.parametrize("use", [train, evaluate, merge])
@pytest.mark.parametrize("damage", ADAPTER_DAMAGE)
def test_an_adapter_whose_weights_do_not_fit_is_refused(adapter, use, damage):
    how, message = ADAPTER_DAMAGE[damage]
    change(adapter, how, "adapter_model.safetensors")
    with pytest.raises(UserError, match=message):
        use(adapter)


@pytest.mark.parametrize("use", [train, evaluate, merge])
def test_a_whole_adapter_is_used_and_its_base_must_be_whole_too(adapter, model, use):
    use(adapter)
    shutil.rmtree(adapter.parent / "run", ignore_errors=True)
    change(model, lambda w: w.pop(f"{Q}.weight"))
    with pytest.raises(UserError, match=f"weights are missing: {Q}"):
        use(adapter)


FILES = {
    "heads that divide nothing": ("config.json", {"num_attention_heads": 0}, "the model cannot be loaded: "),
    "an unknown quantization": (
        "config.json", {"quantization_config": {"quant_method": "zzz"}}, "quantization_config of an unknown method, 'zzz'",
    ),
    "an unknown activation": ("config.json", {"hidden_act": "x"}, "the model cannot be loaded: "),
    "no tokenizer model": ("tokenizer.json", {"model": {"type": "x"}}, "the tokenizer cannot be loaded: "),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_model_folder_whose_files_a_library_does_not_expect_is_refused(model, case):
    name, change_of, message = FILES[case]
    edit(model / name, **change_of)
    load = weights.load_model if name == "config.json" else weights.load_tokenizer
    with pytest.raises(UserError, match=message):
        load(str(model))
