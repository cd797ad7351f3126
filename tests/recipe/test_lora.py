"""What a recipe says of LoRA, and what it is told before torch is loaded."""

import importlib.util
import json
import shutil

import pytest
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.launch import commands
from tests.support import command

LORA = ("model.lora={r: 4}", "optimizer.aux_lr=null", "optimizer.adjust_lr_fn=null")


def load(*overrides):
    return recipe.load("quickstart/sft", list(overrides))


def problems(*overrides):
    with pytest.raises(UserError) as told:
        load(*overrides)
    return "\n".join(told.value.problems)


@pytest.fixture
def adapter(tmp_path):
    """An adapter's folder as PEFT lays it out, on a base beside it."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    for each in (base, folder):
        each.mkdir()
        (each / "tokenizer_config.json").write_text("{}")
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_text("")
    (folder / "adapter_model.safetensors").write_text("")

    def write(**said):
        said = {"peft_type": "LORA", "base_model_name_or_path": str(base), **said}
        (folder / "adapter_config.json").write_text(json.dumps(said))
        return folder

    write()
    return write


def start(folder):
    return (f"model.name_or_path={folder}", "model.init_seed=null")


def test_a_new_adapter_has_its_defaults_written_out():
    found = load(*LORA)
    assert found.model.lora.model_dump() == {
        "r": 4, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear", "modules_to_save": [],
    }  # fmt: skip
    assert recipe.load_text(recipe.to_yaml(found)) == found


@pytest.mark.parametrize("name", ["soren", "muon", "htmuon"])
def test_adapters_have_the_scale_of_whole_models(name, adapter):
    for form in ((), LORA, start(adapter())):
        settings = (*form, "optimizer.adjust_lr_fn=null", f"optimizer.name={name}")
        assert load(*settings).optimizer.adjust_lr_fn == "match_rms_measured"
    assert load(*LORA, f"optimizer.name={name}", "optimizer.adjust_lr_fn=none").optimizer.adjust_lr_fn == "none"


def test_aux_lr_is_null_where_there_are_no_other_parameters(adapter):
    """So that runs of adapters whose recorded recipe has null resume."""
    assert load(*LORA).optimizer.aux_lr is None
    assert load(*start(adapter()), "optimizer.aux_lr=null").optimizer.aux_lr is None
    for whole in ((*LORA, "model.lora.modules_to_save=[embed_tokens]"),
                  (*start(adapter(modules_to_save=["embed_tokens"])), "optimizer.aux_lr=null")):  # fmt: skip
        optimizer = load(*whole).optimizer
        assert optimizer.aux_lr == optimizer.lr


def test_an_adapter_beneath_a_new_one_is_told_the_two_ways(adapter):
    folder = adapter()
    told = problems(*start(folder), *LORA)
    assert f"model.lora: {folder} is already a LoRA adapter. To continue its training, remove model.lora" in told
    assert "`soren-align merge RUN`" in told
    assert "start from RUN/merged" in told


def test_an_adapter_needs_its_base_and_its_weights(adapter, tmp_path):
    load(*start(adapter()))
    load(*start(adapter(base_model_name_or_path="someone/on-the-hub")))
    gone = f"is an adapter of {tmp_path}/gone, which does not exist"
    assert gone in problems(*start(adapter(base_model_name_or_path=str(tmp_path / "gone"))))
    assert "is an adapter of type IA3; name a LoRA" in problems(*start(adapter(peft_type="IA3")))
    assert "has no base model" in problems(*start(adapter(base_model_name_or_path=None)))
    assert "remove model.init_seed" in problems(f"model.name_or_path={adapter()}")
    (adapter() / "adapter_model.safetensors").unlink()
    assert "save its weights as safetensors" in problems(*start(adapter()))


def test_frozen_weights_may_be_bfloat16_and_factors_need_no_compensation(adapter):
    narrow = "model.dtype=bfloat16"
    inert = "optimizer.compensation: an adapter's factors are float32 and need no compensation; remove this key"
    for asked in (LORA, start(adapter())):
        assert load(*asked, narrow).model.dtype == "bfloat16"
        assert inert in problems(*asked, narrow, "optimizer.compensation=kahan")
    assert "rounding to bfloat16 loses most small updates" in problems(narrow)
    whole = ("model.lora={modules_to_save: [embed_tokens]}", narrow)
    assert load(*whole, "trainer.bf16=true").model.lora.modules_to_save == ["embed_tokens"]
    assert "model.dtype: modules_to_save are float32 beside bfloat16 weights" in problems(*whole)


@pytest.mark.parametrize("word", ["zero3", "zero3-offload"])
def test_adapters_are_not_trained_where_it_was_never_seen_to_work(word, adapter):
    told = f"an adapter needs ddp, zero1 or zero2, but run.parallel is {word}"
    assert f"model.lora: {told}" in problems(*LORA, f"run.parallel={word}")
    assert f"model.name_or_path: {told}" in problems(*start(adapter()), f"run.parallel={word}")


def test_a_quantized_base_lies_whole_on_every_process():
    quantized = (*LORA, "model.quantize=4bit")
    assert load(*quantized).model.quantize == "4bit"
    assert load(*LORA, "model.quantize=8bit").model.quantize == "8bit"
    for word in ("zero2", "zero3"):
        told = f"model.quantize: quantized weights need ddp, but run.parallel is {word}"
        assert told in problems(*quantized, f"run.parallel={word}")


def test_quantized_weights_are_trained_with_an_adapter_only():
    told = "model.quantize: quantized weights cannot be trained; add `lora: {r: 16}` to train an adapter"
    assert told in problems("model.quantize=4bit")


def test_an_adapter_brings_the_quantization_that_it_was_trained_on(adapter):
    record = '{"quantize": "4bit", "dtype": "float32", "compute_dtype": "bfloat16", "num_layers": 14}'
    folder = adapter()
    assert load(*start(folder)).model.quantize is None
    assert load(*start(folder), "model.quantize=8bit").model.quantize == "8bit"
    (folder / "base_quantization.json").write_text(record)
    assert load(*start(folder)).model.quantize == "4bit"
    assert load(*start(folder), "model.quantize=4bit").model.quantize == "4bit"
    told = "model.quantize: found '8bit', but {} was trained on 4bit weights; remove this key"
    assert told.format(folder) in problems(*start(folder), "model.quantize=8bit")
    told = "model.name_or_path: quantized weights need ddp, but run.parallel is zero2"
    assert told in problems(*start(folder), "run.parallel=zero2")
    for text, told in (
        ("[]", "it: found []; write a mapping"),
        ('{"quantize": "3bit"}', "quantize: found '3bit'; write 4bit or"),
    ):
        (folder / "base_quantization.json").write_text(text)
        assert f"base_quantization.json: {told}" in problems(*start(folder))


def test_without_bitsandbytes_a_quantized_base_is_refused_before_anything_is_touched(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "bitsandbytes" else find(name, *a)
    )
    quantized = load(*LORA, "model.quantize=4bit", f"run.output_dir={tmp_path / 'run'}")
    message = r"model.quantize: needs bitsandbytes, .*; run `pip install .soren-align\[quantize\].`"
    with pytest.raises(UserError, match=message):
        commands.train(quantized)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("override", "told"), [
    ("model.lora.target_modules=3", "model.lora.target_modules: found 3; write all-linear, or a list of the names"),
    ("model.lora.target_modules=q_proj", "found 'q_proj'; write all-linear, or a list of the names of layers"),
    ("model.lora.target_modules=[]", "found []; write all-linear, or a list of the names of layers"),
    ("model.quantize=3bit", "model.quantize: found '3bit'; write 4bit or 8bit"),
    ("model.lora.rank=4", "model.lora.rank: unknown key; did you mean 'r'?"),
    ("model.lora.lora_alpha=4", "model.lora.lora_alpha: unknown key; did you mean 'alpha'?"),
    ("model.lora.r=0", "model.lora.r: found 0; write a number of at least 1"),
    ("model.lora=16", "model.lora: found 16; write lora: {r: 16}"),
])  # fmt: skip
def test_mistakes_are_told_in_one_line(override, told):
    assert told in problems(*LORA, override)


def test_what_cannot_be_merged_is_told_without_torch(tmp_path):
    for number, (record, told) in enumerate((
        (None, "has no run.json"),
        ({"status": "training"}, "has no model yet (status: training); finish the run first"),
        ({"status": "finished"}, "trained no adapter,"),
    )):  # fmt: skip
        run = tmp_path / str(number)
        (run / "model").mkdir(parents=True)
        if record:
            ours = {"format_version": 2, "task": "sft", "versions": {"soren-align": "0.1.0"}}
            (run / "run.json").write_text(json.dumps(record | ours))
        assert told in command.run("merge", run, code=2).stderr


@pytest.mark.parametrize(("said", "told"), [
    ({"base_model_name_or_path": ["a", "b"]}, "write a folder's path or a hub name"),
    ({"base_model_name_or_path": "/" + "x" * 300}, "cannot be used as a path"),
    ({"peft_type": None}, "is an adapter of type None; name a LoRA"),
    ({"task_type": "SEQ_CLS"}, "adapter_config.json: task_type: found 'SEQ_CLS'"),
    ({"r": "8"}, "adapter_config.json: r: found '8'"),
    ({"target_modules": 3}, "adapter_config.json: target_modules"),
])  # fmt: skip
def test_a_field_of_an_adapters_config_that_is_none_is_one_sentence(adapter, said, told):
    assert told in problems(*start(adapter(**said)))


def test_an_adapter_stands_on_a_model_and_not_on_an_adapter(adapter, tmp_path):
    folder = adapter()
    adapter(base_model_name_or_path=str(folder))
    assert f"the base model {folder} is an adapter too; merge {folder}" in problems(*start(folder))
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    adapter(base_model_name_or_path=str(other))
    assert f"the base model {other} is an adapter too" in problems(*start(folder))


def test_the_product_of_factors_is_no_longer_a_setting():
    assert "optimizer.lora_update: unknown key; remove it: the two factors" in problems("optimizer.lora_update=product")
