"""Trainings on GPUs: `pytest -m gpu tests/gpu` on a machine that has one; elsewhere they are skipped, saying so.

With several GPUs, the strategies run on all of them; with one, in one process.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from soren_align.core.files import resolve_path
from soren_align.doctor.maps import mapped, momenta, precisions
from soren_align.doctor.ranks import TOLERANCE
from soren_align.run.folder import RunFolder, read_metrics
from soren_align.spectral import MAPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"),
]
NUM_GPUS = torch.cuda.device_count()
SAVED = ("run.parallel=zero2", "trainer.save_strategy=steps", "trainer.save_steps=2")
MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 1024,
    "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 16,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 2,
    "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
"""158 million parameters, so that the constants of CUDA's libraries are a small share of the peak."""


def furthest(a, b):
    """The largest difference of any weight between the models of two runs."""
    weights, others = (load_file(run / "model" / "model.safetensors") for run in (a, b))
    return max(float((weights[name].float() - others[name].float()).abs().max()) for name in weights)


def words(*arguments):
    return [sys.executable, "-m", "soren_align", *map(str, arguments)]


def settings(*texts):
    return [word for text in texts for word in ("--set", text)]


def ten_steps(run, *texts, processes=NUM_GPUS):
    """The command of ten steps of the quickstart in float32, of the same examples on any number of processes."""
    # At least 32 examples: fewer leave matrices of low rank, of which the map magnifies the rounding.
    divisor = 4 * max(1, NUM_GPUS)
    common = [f"run.output_dir={run}", f"run.global_batch_size={-(-32 // divisor) * divisor}", "data.eval=null"]
    common += ["trainer.per_device_train_batch_size=4", "trainer.max_steps=10", "optimizer.precision=float32"]
    common += ["trainer.eval_strategy=no", "trainer.save_strategy=no", "trainer.warmup_steps=0"]
    common += ["trainer.lr_scheduler_type=constant", "trainer.use_cpu=false", "run.num_threads=null"]
    return words("sft", "quickstart/sft", "--no-eval", *settings(*common, *texts), "--processes", processes)


def train(run, *texts, **processes):
    """The run's folder after ten steps."""
    subprocess.run(ten_steps(run, *texts, **processes), check=True)
    return run


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_ten_steps_under_each_strategy_are_those_of_one_process(tmp_path, strategy):
    if strategy == "ddp" and NUM_GPUS == 1:
        pytest.skip("one GPU")
    run = train(tmp_path / strategy, f"run.parallel={strategy}")
    assert furthest(run, train(tmp_path / "alone", processes=1)) <= TOLERANCE


def test_the_first_loss_of_dpo_is_ln_2(tmp_path):
    start = ("model.name_or_path=shipped:recipes/quickstart/base", "model.init_seed=1", "trainer.max_steps=1")
    more = (
        "trainer.use_cpu=false",
        "run.num_threads=null",
        "trainer.logging_steps=1",
        f"run.output_dir={tmp_path}/run",
    )
    subprocess.run(words("dpo", "quickstart/dpo", "--no-eval", *settings(*start, *more)), check=True)
    first = next(log for log in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in log)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-3)  # the policy is its reference before any update
    assert [first["rewards/chosen"], first["rewards/rejected"]] == pytest.approx([0, 0], abs=1e-3)


@pytest.fixture(scope="module")
def planned_and_trained(tmp_path_factory):
    """The plan of a training of MODEL_CONFIG on one GPU, in full sequences, and its run's folder."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "model").mkdir()
    for file in resolve_path("shipped:recipes/quickstart/base").iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            (folder / "model" / file.name).write_bytes(file.read_bytes())
    (folder / "model" / "config.json").write_text(json.dumps(MODEL_CONFIG))
    texts = [f"model.name_or_path={folder}/model", f"run.output_dir={folder}/run", "run.global_batch_size=32"]
    texts += ["trainer.per_device_train_batch_size=32", "trainer.bf16=true", "trainer.max_steps=8", "data.eval=null"]
    texts += ["trainer.eval_strategy=no", "trainer.save_strategy=no", "trainer.logging_steps=1"]
    texts += ["trainer.use_cpu=false", "run.num_threads=null", "trainer.packing=true", "trainer.max_length=512"]
    texts += ["trainer.packing_strategy=wrapped", "trainer.dataloader_drop_last=true"]
    printed = subprocess.run(
        words("plan", "quickstart/sft", "--json", *settings(*texts)), check=True, stdout=subprocess.PIPE, text=True
    )
    subprocess.run(words("sft", "quickstart/sft", "--no-eval", *settings(*texts)), check=True)
    return json.loads(printed.stdout), folder / "run"


def test_the_peak_of_memory_is_that_of_plan(planned_and_trained):
    plan, run = planned_and_trained
    planned = max(plan["processes"]["memory_total"]["device"].values())
    peak = json.loads((run / "run.json").read_text())["training"]["peak_memory_bytes"]
    assert abs(peak - planned) <= 0.1 * planned + 0.3e9  # and the workspaces of CUDA's libraries


def test_a_training_has_a_quarter_of_the_speed_of_plan(planned_and_trained):
    """plan's is that of a model of billions of parameters; here kernels are small, and their launches take long."""
    plan, run = planned_and_trained
    device = torch.cuda.get_device_name()
    chip = next((chip for chip in plan["compute"]["hours"] if re.sub("H200", "H100", device).find(chip) >= 0), None)
    if chip is None:
        pytest.skip(f"plan has no data sheet of {device}")
    planned = plan["compute"]["training_tokens"] / plan["compute"]["hours"][chip] / 3600
    *_, last = [log["tokens_per_second"] for log in read_metrics(run / "metrics.jsonl") if "tokens_per_second" in log]
    assert last >= 0.25 * planned


def newest_step(run):
    steps = [int(folder.name.rpartition("-")[2]) for folder in RunFolder(str(run)).complete_checkpoints()]
    return max(steps, default=0)


def interrupted(run, number):
    """Train until a new checkpoint is complete, send a signal to a rank or to the launcher; return the exit code."""
    before, process = newest_step(run), subprocess.Popen(ten_steps(run, *SAVED))
    begin = time.monotonic()
    while newest_step(run) <= before:
        assert process.poll() is None
        assert time.monotonic() - begin < 180
        time.sleep(0.01)
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [n for n in pids if b"soren_align.launch.worker" in Path(f"/proc/{n}/cmdline").read_bytes()]
    os.kill(max(map(int, workers), default=process.pid) if number == signal.SIGKILL else process.pid, number)
    begin = time.monotonic()
    process.wait(60)
    return process.returncode


def test_a_run_that_was_killed_and_stopped_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    undisturbed = train(tmp_path / "undisturbed", "run.parallel=zero2")
    for number in (signal.SIGKILL, signal.SIGTERM):
        assert interrupted(tmp_path / "interrupted", number) != 0
    resumed = train(tmp_path / "interrupted", *SAVED)
    assert furthest(resumed, undisturbed) <= TOLERANCE


@pytest.mark.parametrize(
    "name", ["fp32_precision", "allow_fp16_accumulation", "allow_fp16_reduced_precision_reduction", "autocast"]
)
def test_settings_of_torch_do_not_change_a_map(name):
    matmul, x = torch.backends.cuda.matmul, momenta()[1].x.float().cuda()
    if name != "autocast" and not hasattr(matmul, name):
        pytest.skip(f"torch {torch.__version__} has no such setting")
    subjects = [(each, precision) for each in MAPS.values() for precision in precisions(each)]
    usual = [mapped(*subject[:1], x, subject[1]) for subject in subjects]
    with ExitStack() as stack:
        if name == "autocast":
            stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        else:
            stack.callback(setattr, matmul, name, getattr(matmul, name))
            setattr(matmul, name, "tf32" if name == "fp32_precision" else not getattr(matmul, name))
        outputs = [mapped(*subject[:1], x, subject[1]) for subject in subjects]
    for (each, precision), before, after in zip(subjects, usual, outputs, strict=True):
        # libraries may choose another kernel
        assert float((after - before).norm() / before.norm()) <= 1e-6, (each.name, precision)
