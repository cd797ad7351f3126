"""Adapters on two ranks of DDP and of ZeRO 2 take the steps of one process; DPO goes on with what they saved."""

import subprocess
import sys

import pytest
from safetensors.torch import load_file

STEPS = ("trainer.max_steps=4", "trainer.warmup_steps=0", "trainer.per_device_train_batch_size=4", "eval=null")
STEPS += ("trainer.eval_strategy=no", "run.global_batch_size=8", "data.train.limit=64", "trainer.logging_steps=1")


def train(folder, recipe, *overrides, processes=1):
    sets = [part for each in (*STEPS, f"run.output_dir={folder}", *overrides) for part in ("--set", each)]
    command = [sys.executable, "-m", "soren_align.cli", recipe[:3], f"quickstart/{recipe}", *sets]
    command += ["--processes", str(processes)] if processes > 1 else []
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return load_file(folder / "model/adapter_model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    sft = train(folder / "sft", "sft-lora")
    return folder, sft, train(folder / "dpo", "dpo-lora", f"model.name_or_path={folder / 'sft/model'}")


@pytest.mark.parametrize("parallel", ["ddp", "zero2"])
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_two_ranks_take_the_steps_of_one_process(tmp_path, alone, parallel, task):
    folder, *expected = alone
    start = [f"model.name_or_path={folder / 'sft/model'}"] if task == "dpo" else []
    found = train(tmp_path, f"{task}-lora", *start, f"run.parallel={parallel}", processes=2)
    wanted = expected[task == "dpo"]
    assert found.keys() == wanted.keys()
    furthest = max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
    assert furthest <= 1e-5  # float32 sums in another order, and A's first gradients are rounding itself: B is small
