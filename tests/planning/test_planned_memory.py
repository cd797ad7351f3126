"""The plan's memory, component by component, against what a training run of the same recipe allocates."""

import pytest
import torch
from soren_align import recipe
from soren_align.launch.preparation import prepare
from soren_align.planning import plan as planning
from soren_align.planning.flops import Meter
from soren_align.run.folder import RunFolder
from tests.support.published_data import ultrachat_200k, ultrafeedback_binarized
from tests.support.published_tokenizers import mistral, qwen
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config

pytestmark = pytest.mark.model

SHAPE = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 5, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
LENGTH = 64
SHRUNK = [f"trainer.max_length={LENGTH}", "trainer.max_steps=2", "trainer.per_device_train_batch_size=4"]
SHRUNK += ["trainer.use_cpu=true", "run.global_batch_size=8", "run.num_threads=1", "eval=null"]
SHRUNK += ["trainer.warmup_steps=0", "trainer.logging_strategy=no"]  # measurements of a logged step take memory too


def small(name, root):
    """Overrides that shrink a model and its data; examples are longer than LENGTH, so that all batches are full."""
    if name.startswith("qwen"):
        tokenizer, config, data = qwen(), Qwen2Config, ultrachat_200k(root)["train_sft"]
    else:
        tokenizer, config, data = mistral(), MistralConfig, ultrafeedback_binarized(root)["train_prefs"]
    tokenizer.save_pretrained(root / "model")
    made = config(**SHAPE, vocab_size=len(tokenizer), tie_word_embeddings=name.startswith("qwen"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(made).save_pretrained(root / "model")
    return [
        f"model.name_or_path={root / 'model'}", f"data.train.path={data}", f"run.output_dir={root / 'run'}", *SHRUNK,
    ]  # fmt: skip


def measured(loaded):
    """Bytes by the plan's names of components, of one process that trains two steps of two batches."""
    from soren_align.training import build
    from soren_align.training import setup as training_setup

    folder = RunFolder(loaded.run.output_dir)
    prepare(folder, loaded, 1)
    setup = training_setup.set_up_training(loaded, folder)
    trainer = build.build_trainer(setup, folder)
    found, batches = {}, []
    one_pass = trainer.training_step

    def metered_pass(model, inputs, *args, **kwargs):
        batches.append(inputs["input_ids"].shape)
        if len(batches) != 2:  # the second of a step: gradients are there already
            return one_pass(model, inputs, *args, **kwargs)
        with Meter() as meter:
            loss = one_pass(model, inputs, *args, **kwargs)
        found["activations"] = meter.peak
        return loss

    trainer.training_step = metered_pass
    trainer.create_optimizer()
    step = trainer.optimizer.step

    def metered_step(*args, **kwargs):
        grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        found["gradients"] = sum(g.untyped_storage().nbytes() for g in grads)
        with Meter() as meter:
            out = step(*args, **kwargs)
        found["map workspace"] = meter.peak  # of the last step: momentum is there already
        return out

    trainer.optimizer.step = metered_step
    trainer.train()
    assert all(shape[1] == LENGTH for shape in batches)
    parameters = list(trainer.model.parameters())
    found["weights"] = sum(p.untyped_storage().nbytes() for p in parameters)
    states = [t for state in trainer.optimizer.state.values() for t in state.values() if t.ndim]
    found["optimizer states"] = sum(t.untyped_storage().nbytes() for t in states)
    return found


@pytest.mark.rest
@pytest.mark.parametrize(("name", "bf16", "more"), [
    pytest.param("qwen2.5-3b/soren", False, ("optimizer.momentum_dtype=bfloat16",), marks=pytest.mark.slow),
    ("qwen2.5-3b/soren", False, ("optimizer.name=adamw",)),
    ("mistral-7b/paper-soren", True, ()),
])  # fmt: skip
def test_each_component_is_what_a_run_allocates(name, bf16, more, tmp_path):
    loaded = recipe.load(name, [*small(name, tmp_path), f"trainer.bf16={bf16}", "run.parallel=ddp",
                                "trainer.train_sampling_strategy=random", *more])  # fmt: skip
    plan, _ = planning.plan_training(loaded)
    planned = {part["name"]: part["num_bytes"] for part in plan["processes"]["memory"]}
    real = measured(loaded)
    if "map workspace" not in planned:  # AdamW's fused step of float32 weights allocates nothing
        assert real.pop("map workspace") < 1e-3 * real["weights"]
    assert planned.keys() == real.keys()
    for part in real:
        assert planned[part] == pytest.approx(real[part], rel=0.05), part
