"""Each host of docs/hosts.md ends with the bits of our own trainer, after ten steps on one process."""

import importlib
import json
import sys
from types import ModuleType

import datasets
import pytest
import torch
import trl
from accelerate import Accelerator
from soren_align import OptimizerFactory, SorenDPOTrainer, SorenSFTTrainer, build_optimizer
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.sharding import set_strategy
from soren_align.training.trainer import SorenTrainerMixin
from tests.support.tiny_models import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

pytestmark = pytest.mark.model
DATA = shipped.ROOT / "recipes" / "quickstart" / "data"
NUM_STEPS, BATCH = 10, 2
SETTINGS = {"name": "soren", "aux_lr": 1e-3}
SHARED = {"learning_rate": 5e-3, "weight_decay": 0.1, "max_steps": NUM_STEPS, "lr_scheduler_type": "constant",
          "per_device_train_batch_size": BATCH, "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no",
          "train_sampling_strategy": "sequential", "disable_tqdm": True}  # fmt: skip
BUILD = {**SETTINGS, "lr": 5e-3, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_measured"}


def examples(name, column):
    lines = (DATA / name).read_text().splitlines()[: NUM_STEPS * BATCH]
    return datasets.Dataset.from_list([json.loads(line) for line in lines]).select_columns(column)


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal_bits(model, expected):
    assert expected.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("tiny") / "model", 0))


@pytest.fixture
def config(tmp_path):
    return {"output_dir": str(tmp_path), **SHARED, "max_length": 64, "gradient_checkpointing": False}


def fresh(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


class SorenTrainer(SorenTrainerMixin, Trainer):
    """Our trainer with the model's own loss: TRL's SFTTrainer computes the logits in chunks, which rounds otherwise."""


@pytest.fixture(scope="module")
def ours(path, tmp_path_factory):
    """Our trainer's weights after ten steps, and the examples and the collator, which are TRL's."""
    folder, conversations = str(tmp_path_factory.mktemp("ours")), examples("chat_train.jsonl", ["messages"])
    tokenizer = AutoTokenizer.from_pretrained(path)
    theirs = trl.SFTTrainer(fresh(path), trl.SFTConfig(folder, **SHARED, max_length=64), train_dataset=conversations,
                            processing_class=tokenizer)  # fmt: skip
    data = {"train_dataset": theirs.train_dataset, "data_collator": theirs.data_collator}
    trainer = SorenTrainer(fresh(path), arguments(folder), **data, optimizer_settings=SETTINGS)
    start = weights(trainer.model)
    trainer.train()
    assert all(not torch.equal(weight, start[name]) for name, weight in weights(trainer.model).items())
    return weights(trainer.model), data


def arguments(folder, **more):
    return TrainingArguments(str(folder), **SHARED, remove_unused_columns=False, **more)


def test_transformers_trainer(path, ours, tmp_path):
    expected, data = ours
    factory = (OptimizerFactory, {"args": (args := arguments(tmp_path)), **SETTINGS})
    trainer = Trainer(fresh(path), args, **data, optimizer_cls_and_kwargs=factory)
    trainer.train()
    assert_equal_bits(trainer.model, expected)


def test_trl_sft_trainer(path, config):
    args = trl.SFTConfig(**config)
    data = {"train_dataset": examples("chat_train.jsonl", ["messages"])}
    data["processing_class"] = AutoTokenizer.from_pretrained(path)
    reference = SorenSFTTrainer(fresh(path), args, **data, optimizer_settings=SETTINGS)
    reference.train()
    factory = (OptimizerFactory, {"args": args, **SETTINGS})
    trainer = trl.SFTTrainer(fresh(path), args, **data, optimizer_cls_and_kwargs=factory)
    trainer.train()
    assert_equal_bits(trainer.model, weights(reference.model))


def test_trl_dpo_trainer(path, config):
    """TRL's DPOTrainer has no such argument; the attribute is transformers'."""
    data = {"args": trl.DPOConfig(**config), "train_dataset": examples("pairs_train.jsonl", ["chosen", "rejected"])}
    data["processing_class"] = AutoTokenizer.from_pretrained(path)
    reference = SorenDPOTrainer(fresh(path), **data, optimizer_settings=SETTINGS)
    reference.train()
    trainer = trl.DPOTrainer(fresh(path), **data)
    trainer.optimizer_cls_and_kwargs = (OptimizerFactory, {"args": data["args"], **SETTINGS})
    trainer.train()
    assert_equal_bits(trainer.model, weights(reference.model))


def batches(data):
    rows = list(data["train_dataset"])
    for start in range(0, NUM_STEPS * BATCH, BATCH):
        batch = data["data_collator"](rows[start : start + BATCH])
        # As transformers' Trainer: the sum of the losses over their number, which rounds otherwise than their mean.
        yield {**batch, "num_items_in_batch": (batch["labels"][:, 1:] != -100).sum()}


def test_a_plain_loop(path, ours):
    expected, data = ours
    model = fresh(path).train()
    optimizer = build_optimizer(model, **BUILD)
    for batch in batches(data):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_bits(model, expected)


def test_accelerate(path, ours):
    expected, data = ours
    accelerator = Accelerator(cpu=True)
    model = fresh(path).train()
    model, optimizer = accelerator.prepare(model, build_optimizer(model, **BUILD))
    set_strategy(optimizer)
    for batch in batches(data):
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert_equal_bits(model, expected)


# Axolotl and ms-swift cannot be installed beside this transformers: these stand-ins have the signatures that were read.


class AxolotlMixin(Trainer):
    """axolotl.core.trainers.mixins.optimizer.OptimizerMixin at 067b021, as far as a factory is concerned."""

    def create_optimizer(self, model=None):
        opt_model = self.model if model is None else model
        if not self.optimizer and self.optimizer_cls_and_kwargs is not None:
            factory, kwargs = self.optimizer_cls_and_kwargs
            self.optimizer = factory()(opt_model, self.args, **kwargs)
        return super().create_optimizer(model=model)


class AxolotlConfig(dict):
    """axolotl.utils.dict.DictDefault: a missing key is None."""

    __getattr__ = dict.get


@pytest.fixture
def axolotl(monkeypatch):
    """Our plug-in beside a stand-in for axolotl.integrations.base."""
    names = ("axolotl", "axolotl.integrations", "axolotl.integrations.base")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].BasePlugin = type("BasePlugin", (), {})
    yield importlib.import_module("soren_align.plugins.axolotl")
    del sys.modules["soren_align.plugins.axolotl"]


def axolotl_trainer(path, ours, folder, **settings):
    return AxolotlMixin(fresh(path), arguments(folder), **ours[1], **settings)


def test_axolotls_plugin(path, ours, tmp_path, axolotl):
    plugin = axolotl.SorenPlugin()
    module, _, name = plugin.get_input_args().rpartition(".")
    assert getattr(sys.modules[module], name)(soren_align=SETTINGS).soren_align == SETTINGS
    trainer = axolotl_trainer(path, ours, tmp_path)
    plugin.post_trainer_create(AxolotlConfig(soren_align=SETTINGS), trainer)
    trainer.train()
    assert_equal_bits(trainer.model, ours[0])


@pytest.mark.parametrize(("keys", "settings", "problem"), [
    ({"embedding_lr": 1e-5}, {}, "embedding_lr: has no effect with SorenPlugin; remove this key"),
    ({"optimizer": "muon"}, {"optimizer_cls_and_kwargs": (torch.optim.Muon, {})}, "optimizer: is muon, which has no"),
])  # fmt: skip
def test_axolotls_keys_that_would_have_no_effect_are_refused(path, ours, tmp_path, axolotl, keys, settings, problem):
    trainer = axolotl_trainer(path, ours, tmp_path, **settings)
    with pytest.raises(UserError, match=problem):
        axolotl.SorenPlugin().post_trainer_create(AxolotlConfig(**keys), trainer)


class SwiftCallback:
    """swift.optimizers.base.OptimizerCallback at 3602360."""

    def __init__(self, args, trainer):
        self.args, self.trainer = args, trainer


class SwiftTrainer(Trainer):
    """swift.trainers.mixin.SwiftMixin at 3602360, as far as the optimizer is concerned."""

    def __init__(self, model, args, callback, **kwargs):
        self.optimizer_callback = callback(args, self)
        super().__init__(model, args, **kwargs)

    def create_optimizer(self, model=None):
        self.optimizer = self.optimizer_callback.create_optimizer(model=model)
        self.optimizer.param_groups = [group for group in self.optimizer.param_groups if len(group["params"]) > 0]
        return self.optimizer


@pytest.fixture
def swift(monkeypatch):
    """Our plug-in beside a stand-in for swift.optimizers, whose map it registers in."""
    module = ModuleType("swift.optimizers")
    module.OptimizerCallback, module.optimizers_map = SwiftCallback, {"muon": object()}
    monkeypatch.setitem(sys.modules, "swift", ModuleType("swift"))
    monkeypatch.setitem(sys.modules, "swift.optimizers", module)
    importlib.import_module("soren_align.plugins.ms_swift")
    yield module
    del sys.modules["soren_align.plugins.ms_swift"]


def test_ms_swifts_plugin(path, ours, tmp_path, swift):
    expected, data = ours
    assert swift.optimizers_map.keys() == {"muon", "soren"}
    args = arguments(tmp_path, optim_args="name=soren, aux_lr=1e-3")
    trainer = SwiftTrainer(fresh(path), args, swift.optimizers_map["soren"], **data)
    trainer.train()
    assert_equal_bits(trainer.model, expected)


def test_ms_swifts_arguments_are_read_as_yaml(swift):
    read = sys.modules["soren_align.plugins.ms_swift"].settings_of
    settings = {"name": "muon", "lr": 1e-5, "nesterov": False, "ns_steps": 6}
    assert read("name=muon, lr=1e-5,nesterov=false,ns_steps=6") == settings
    assert read(None) == {}
    with pytest.raises(UserError, match="optim_args: found 'muon'; write key=value,key=value"):
        read("muon")
