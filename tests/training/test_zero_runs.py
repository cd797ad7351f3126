"""Under ZeRO 1, 2 and 3 two ranks take the steps of one process, resume, and leave a plain model folder."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from soren_align.run.folder import RunFolder
from tests.support import command
from tests.support.tiny_run import TinyRun
from tests.support.trainer_jobs import DPO, FREED, PACKED, PRETRAINED, RUNS, SOREN, STREAMED, UNEVEN
from tests.support.trainer_parity import (
    assert_own_references,
    assert_resumed,
    assert_same_measurements,
    assert_same_perplexity,
    furthest,
    one_process,
    ranks_do,
    weights,
)
from transformers import AutoModelForCausalLM

JOB = "zero"
STAGES = ("zero1", "zero2", "zero3")


CASES = [("zero1", SOREN), *((mode, run) for mode in ("zero2", "zero3") for run in RUNS)]


@pytest.mark.parametrize(("mode", "run"), CASES)
def test_two_ranks_take_the_same_ten_steps_as_one_process(two_ranks, mode, run):
    folder, seen = two_ranks
    name, task, overrides = run
    alone = one_process(name, task, *overrides)
    assert furthest(alone, weights(folder / f"{name}-{mode}")) <= 2e-6
    for rank in seen:
        maps = rank["maps"][mode][name]
        assert (maps["all"], maps["per_step"], maps["accumulation"]) == (140, 14, 2), "14 matrices once per step"
        total = sum(w.numel() for w in alone.values())
        assert maps["momentum"] <= total / 2 + 20 * 4  # 20 tensors, each padded a little


@pytest.mark.parametrize(("name", "mode", "like"), [
    ("soren", "zero3-offload", SOREN), ("recomputed", "zero3", SOREN), ("precomputed", "zero3", DPO),
    ("packed", "zero3", PACKED), ("streamed", "zero2", STREAMED), ("pretrained", "zero2", PRETRAINED),
    ("uneven", "zero2", UNEVEN),
])  # fmt: skip
def test_so_they_do_with_offload_and_with_what_saves_memory(two_ranks, name, mode, like):
    same, task, overrides = like
    assert furthest(one_process(same, task, *overrides), weights(two_ranks[0] / f"{name}-{mode}")) <= 2e-6


def test_two_ranks_have_the_perplexity_of_one_process(two_ranks):
    assert_same_perplexity([rank["maps"]["zero2"]["pretrained"]["validation"] for rank in two_ranks[1]])


def test_the_comparison_would_notice_a_missing_clip(two_ranks):
    assert furthest(one_process(*SOREN[:2]), weights(two_ranks[0] / "unclipped-zero2")) > 1e-4


def test_ranks_measure_together_what_one_process_measures(two_ranks):
    keys = ("update_rms", "aux_update_rms", "relative_change", "aux_relative_change", "grad_norm")
    logged = [rank["maps"][mode]["soren"]["logged"] for mode in STAGES for rank in two_ranks[1]]
    for key in keys:
        values = {f"{log[key]:.5g}" for log in logged}
        assert len(values) == 1, (key, values)
    firsts = [two_ranks[1][0]["maps"][mode]["soren"]["first_step"] for mode in STAGES]
    for group in ("matrices", "other_parameters"):
        for key in ("update_rms", "ulp", "lr"):
            assert len({f"{first[group][key]:.5g}" for first in firsts}) == 1, (group, key, firsts)
    assert all(0 < log["map_min_singular_value"] < log["map_max_singular_value"] < 0.51 for log in logged)


@pytest.mark.parametrize("mode", STAGES)
def test_two_ranks_record_the_spectra_and_the_map_error_of_one_process(two_ranks, mode):
    folder, seen = two_ranks
    logs = [rank["maps"][mode]["soren"]["logged"] for rank in seen]
    assert_same_measurements(SOREN[:2], RunFolder(folder / f"soren-{mode}"), logs)


def test_in_bfloat16_the_losses_of_stages_2_and_3_agree_and_the_export_is_of_the_masters(two_ranks):
    folder, seen = two_ranks
    second, third = (torch.tensor(seen[0]["bfloat16"][mode]) for mode in ("zero2", "zero3"))
    assert len(second) == 10
    assert torch.allclose(second, third, atol=1e-3, rtol=0)
    for mode in ("zero2", "zero3"):
        exported = weights(folder / f"bfloat16-{mode}")
        assert {w.dtype for w in exported.values()} == {torch.float32}
        assert any(not torch.equal(w, w.bfloat16().float()) for w in exported.values())


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_two_ranks_resume_bit_for_bit(two_ranks, mode):
    killed = assert_resumed(two_ranks[0], mode, [rank["resumed"][mode] for rank in two_ranks[1]])
    sealed = json.loads((killed.complete_checkpoints()[0] / "soren_align.json").read_text())
    assert sum("optim_states" in name for name in sealed["files"]) == 2
    # No whole model beside the shards, unless run.benchmark scores it.
    assert "model.safetensors" not in sealed["files"]
    assert {"model.safetensors", "config.json"} <= set(two_ranks[1][0]["scored"])
    assert killed.read()["optimizer"]["chain"][0] == "DeepSpeedOptimizerWrapper"


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_the_exported_folder_and_deepspeeds_own_export_are_the_same_plain_model(two_ranks, tmp_path, mode):
    run = RunFolder(two_ranks[0] / f"whole-{mode}")
    checkpoint = max(run.complete_checkpoints(), key=lambda path: int(path.name.split("-")[1]))
    subprocess.run([sys.executable, "zero_to_fp32.py", ".", tmp_path], cwd=checkpoint, check=True, capture_output=True)
    theirs = AutoModelForCausalLM.from_pretrained(run.start)
    tensors = torch.load(tmp_path / "pytorch_model.bin")
    assert not theirs.load_state_dict(tensors, strict=False).unexpected_keys
    ours = AutoModelForCausalLM.from_pretrained(run.model)
    tokens = torch.arange(2, 40).view(2, -1)
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
    assert not torch.equal(ours(tokens).logits, AutoModelForCausalLM.from_pretrained(run.start)(tokens).logits)


def test_a_nan_on_one_rank_is_the_verdict_of_all(two_ranks):
    first, second = (rank["poisoned"] for rank in two_ranks[1])
    assert first == second
    assert re.match("step 1: the gradient has a NaN or an infinity", first)


def test_a_dpo_trains_towards_its_own_start_and_no_cached_one(two_ranks):
    assert_own_references([rank["references"] for rank in two_ranks[1]])


def test_three_ranks_go_on_where_two_have_left(rank_pools, two_ranks, tmp_path):
    folder, seen = two_ranks
    assert [rank["freed"] for rank in seen] == [[True, True]] * 2
    for mode in FREED:
        done = command.run_process("reshard", folder / f"freed-{mode}")
        assert done.returncode == 0, done.stderr
        assert "any number of processes can resume from" in done.stderr
    ranks_do(rank_pools(3), "freed", folder)
    # Elements near zero are divided by their own size, and so is the rounding of their gradients, summed in another order.
    for (mode, overrides), tolerance in zip(FREED.items(), (2e-5, 2e-6), strict=True):
        alone = TinyRun(tmp_path / mode, "sft", *overrides)
        alone.train()
        run = RunFolder(folder / f"freed-{mode}")
        assert (run.read()["processes"], run.read()["resumed_from_steps"]) == (3, [2])
        assert run.read()["identity"]["batches"] is None  # two ranks have no order that three continue
        assert furthest(weights(alone.folder.path), weights(run.path)) <= tolerance


def start(folder):
    """40 steps of 32 rows on two processes, a checkpoint every 5."""
    sets = [f"run.output_dir={folder.path}", "run.parallel=zero2", "trainer.max_steps=40", "trainer.save_steps=5",
            "trainer.logging_steps=1"]  # fmt: skip
    sets += ["trainer.per_device_train_batch_size=16", "trainer.eval_strategy=no"]
    return command.start("sft", "quickstart/sft", "--no-eval", "--processes", "2", *command.overrides(*sets))


def rank_process(rank, folder):
    """The process id of one rank of the run in `folder`."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() not in (entry / "cmdline").read_bytes():
                continue
            if f"\0RANK={rank}\0".encode() in (entry / "environ").read_bytes():
                return int(entry.name)
        except OSError:  # it ended meanwhile
            continue
    raise AssertionError(f"no rank {rank}")


@pytest.mark.process
def test_a_killed_rank_ends_the_job_and_the_same_command_goes_on(tmp_path):
    folder = RunFolder(tmp_path / "run")
    process = start(folder)
    command.wait_for(folder.complete_checkpoints, process)
    os.kill(rank_process(1, folder), signal.SIGKILL)
    began = time.monotonic()
    said = process.stderr.read()
    assert process.wait() == 1
    assert time.monotonic() - began < 600  # a rank that waits for a dead one gives up after 1800
    assert "rank 1 was killed by SIGKILL" in said
    assert "Traceback" not in said

    process = start(folder)
    said = process.stderr.read()
    assert process.wait() == 0, said
    assert "batch     32 examples per step: 2 processes x 16 examples x accumulation 1" in said
    run = folder.read()
    assert (run["status"], run["training"]["steps"], len(run["resumed_from_steps"])) == ("finished", 40, 1)
    steps = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines() if '"loss"' in line]
    assert steps == list(range(1, 41))
    assert (folder.model / "model.safetensors").is_file()
