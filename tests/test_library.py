"""The trainers as a library: the blocks of docs/library.md run on tiny local models, and settings have their source."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import trl
from soren_align import SorenSFTTrainer, recipe
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.optim import completed_settings
from transformers import AutoModelForCausalLM, TrainingArguments

from tests.support.pages import blocks
from tests.support.tiny_models import make_model

pytestmark = pytest.mark.model
DATA = shipped.ROOT / "recipes" / "quickstart" / "data"
FILES = {"trl-lib/Capybara": "chat_train.jsonl", "trl-lib/ultrafeedback_binarized": "pairs_train.jsonl"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny") / "model", 0)


@pytest.fixture(autouse=True)
def two_steps_on_the_cpu(monkeypatch, tmp_path):
    """In place of the hub and of a GPU: the quickstart's data, and two steps in float32."""
    monkeypatch.chdir(tmp_path)
    for cls in (trl.SFTConfig, trl.DPOConfig, TrainingArguments):
        monkeypatch.setattr(cls, "__init__", _with_defaults(cls.__init__, cls is not TrainingArguments))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: _examples(FILES[name]))


def _with_defaults(init, has_length):
    defaults = {"use_cpu": True, "bf16": False, "max_steps": 2, "per_device_train_batch_size": 2, "report_to": []}
    defaults |= {"max_length": 64} if has_length else {}

    def wrapped(self, *args, **kwargs):
        init(self, *args, **{**defaults, **kwargs})

    return wrapped


def _examples(name):
    lines = (DATA / name).read_text().splitlines()[:8]
    columns = ["chosen", "rejected"] if "pairs" in name else ["messages"]
    return datasets.Dataset.from_list([json.loads(line) for line in lines]).select_columns(columns)


def trainer(model, **settings):
    args = trl.SFTConfig("out", learning_rate=3e-4, weight_decay=0.05, adam_beta2=0.9, adam_epsilon=1e-7)
    return SorenSFTTrainer(str(model), args, train_dataset=_examples("chat_train.jsonl"), **settings)


def groups(trained):
    """The optimizer's class and its two parameter groups, before the schedule moves their rates."""
    optimizer = trained.create_optimizer()
    return type(optimizer).__name__, *optimizer.param_groups


@pytest.mark.rest
def test_every_block_of_the_page_runs(model):
    code = blocks("docs/library.md", "python")
    assert len(code) == 7
    names, steps = {}, []
    for block in code:
        exec(re.sub(r'"Qwen/[\w.-]+"', repr(str(model)), block), names)
        steps.append(getattr(names["trainer"].state, "global_step", None))
        assert type(names["trainer"].create_optimizer()).__name__ in ("Soren", "AcceleratedOptimizer")
    assert steps == [2, 2, 2, 0, 2, 2, 2]  # the fourth reads a recipe, the last two have no trainer
    assert names["optimizer"].num_maps == 3 * 14
    assert (Path("out/model") / "model.safetensors").is_file()


@pytest.mark.rest
def test_every_block_of_the_page_on_other_trainers_runs(model):
    code = blocks("docs/hosts.md", "python")
    assert len(code) == 4
    names = {"model": AutoModelForCausalLM.from_pretrained(model), "dataset": _examples("chat_train.jsonl"),
             "pairs": _examples("pairs_train.jsonl")}  # fmt: skip
    for block, trainer in zip(code[:2], ("SFTTrainer", "DPOTrainer"), strict=True):
        names["model"].name_or_path = str(model)  # of its tokenizer
        exec(block, names)
        assert type(names["trainer"]).__name__ == trainer
        assert names["trainer"].state.global_step == 2
        assert type(names["trainer"].optimizer.optimizer).__name__ == "Soren"
    exec(code[2], names)
    assert type(names["optimizer"].optimizer).__name__ == "Soren"
    exec(code[3], names)
    module = SimpleNamespace(model=names["accelerator"].unwrap_model(names["model"]))
    assert type(names["configure_optimizers"](module)).__name__ == "Soren"


def test_by_default_it_is_soren_as_in_our_recipes_with_the_values_of_args(model):
    name, matrices, others = groups(trainer(model))
    ours = recipe.load("qwen2.5-3b/soren").optimizer
    assert name == "Soren"
    assert matrices["adjust_lr_fn"] == ours.adjust_lr_fn == "match_rms_measured"
    assert matrices["map"] == ours.map.model_dump()
    assert matrices["momentum"] == ours.momentum
    assert (matrices["lr"], matrices["weight_decay"]) == (3e-4, 0.05)
    assert (others["lr"], others["weight_decay"], others["betas"], others["eps"]) == (3e-4, 0.0, (0.9, 0.9), 1e-7)


def test_a_name_or_keys_replace_them(model):
    name, matrices, others = groups(trainer(model, optimizer_settings="muon"))
    assert (name, matrices["lr"], others["lr"], matrices["adjust_lr_fn"]) == ("Muon", 3e-4, 3e-4, "match_rms_measured")
    keys = {"map": "sns", "lr": 1e-2, "weight_decay": 0.0}
    name, matrices, others = groups(trainer(model, optimizer_settings=keys))
    assert (name, matrices["lr"], others["lr"], matrices["weight_decay"]) == ("Soren", 1e-2, 1e-2, 0.0)
    assert matrices["map"]["name"] == "sns"
    name, matrices, others = groups(trainer(model, optimizer_settings={"name": "adamw", "lr": 1e-3}))
    assert (name, matrices["lr"], others["lr"]) == ("AdamW", 1e-3, 1e-3)


def test_a_wrong_setting_is_refused_before_training(model):
    with pytest.raises(ValueError, match=r"momentun: is no setting of the optimizer soren; write one of .*momentum"):
        trainer(model, optimizer_settings={"momentun": 0.9})
    with pytest.raises(ValueError, match="name: no optimizer 'sorn'; write one of 'adamw', 'htmuon', 'muon', 'soren'"):
        trainer(model, optimizer_settings="sorn")
    for key, value in {
        "optim": "adafactor",
        "optim_args": "momentum=0.5",
        "optim_target_modules": "all-linear",
    }.items():
        with pytest.raises(UserError, match=rf"args.{key}: is {value}, which has no effect here; remove it, and write"):
            completed_settings("soren", trl.SFTConfig("out", **{key: value}))


def test_updates_lost_to_rounding_are_a_warning(model):
    args = trl.SFTConfig("out", learning_rate=1e-9, model_init_kwargs={"dtype": "bfloat16"})
    quiet = SorenSFTTrainer(str(model), args, train_dataset=_examples("chat_train.jsonl"))
    with pytest.warns(UserWarning, match="rounding loses most updates of the matrices"):
        quiet.train()


@pytest.mark.rest
def test_it_trains_as_trls_own_trainer_with_the_same_optimizer(model):
    """The reference: TRL's trainer, with AdamW built by hand. A trainer changes nothing but the optimizer."""
    ours = trainer(model, optimizer_settings={"name": "adamw", "aux_weight_decay": 0.05})
    args = trl.SFTConfig("out", learning_rate=3e-4, weight_decay=0.05, adam_beta2=0.9, adam_epsilon=1e-7)
    theirs = trl.SFTTrainer(str(model), args, train_dataset=_examples("chat_train.jsonl"), optimizer_cls_and_kwargs=(
        torch.optim.AdamW, {"lr": 3e-4, "betas": (0.9, 0.9), "eps": 1e-7, "weight_decay": 0.05},
    ))  # fmt: skip
    theirs.get_decay_parameter_names = lambda model: [name for name, _ in model.named_parameters()]
    ours.train()
    theirs.train()
    other = dict(theirs.model.named_parameters())
    for name, parameter in ours.model.named_parameters():
        torch.testing.assert_close(parameter, other[name], rtol=1e-6, atol=1e-8)


@pytest.mark.process
def test_the_import_prints_nothing_and_leaves_other_warnings():
    code = "import logging\nfrom soren_align import SorenSFTTrainer\n"
    code += "logging.getLogger('bitsandbytes.backends.cpu.ops').warning('another one')\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "another one\n")
