"""Under FSDP2 two ranks take the steps of one process, resume, and leave a plain model folder; on CPUs by a patch."""

import json
import re
import shutil
from unittest import mock

import pytest
import torch
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.launch import commands
from soren_align.recipe import checks, parallel
from soren_align.run.folder import RunFolder
from soren_align.sharding.ranks import Ranks
from soren_align.training import checkpoints
from soren_align.training.setup import trl_arguments
from tests.support.tiny_run import TinyRun
from tests.support.trainer_jobs import DPO, PACKED, RESHARDED, SOREN
from tests.support.trainer_parity import (
    assert_own_references,
    assert_resumed,
    assert_same_measurements,
    furthest,
    logged,
    one_process,
    one_process_logs,
    ranks_do,
    weights,
)
from transformers import AutoModelForCausalLM

JOB = "fsdp2"


@pytest.mark.parametrize(("name", "like"), [("soren", SOREN), ("dpo", DPO), ("recomputed", SOREN), ("packed", PACKED)])
def test_two_ranks_take_the_same_ten_steps_as_one_process(two_ranks, name, like):
    folder, seen = two_ranks
    run, task, overrides = like
    alone = one_process(run, task, *overrides)
    assert furthest(alone, weights(folder / f"{name}-fsdp2")) <= 2e-6
    for rank in seen:
        maps = rank["maps"][name]
        assert (maps["all"], maps["per_step"], maps["accumulation"]) == (140, 14, 2), "14 matrices once per step"
    shares = [rank["maps"][name]["momentum"] for rank in seen]
    assert sum(shares) == sum(w.numel() for w in alone.values())
    assert max(shares) <= 1.01 * min(shares)


@pytest.mark.parametrize(("name", "task"), [SOREN[:2], DPO[:2]])
def test_ranks_measure_together_what_one_process_measures(two_ranks, name, task):
    alone = one_process_logs(name, task)
    keys = ("update_rms", "aux_update_rms", "relative_change", "aux_relative_change", "grad_norm", "loss")
    for rank in two_ranks[1]:
        log = rank["maps"][name]["logged"]
        assert {k: log[k] for k in keys} == pytest.approx({k: alone[k] for k in keys}, rel=1e-5)
        assert log["update_rms"] == pytest.approx(0.2 * log["learning_rate"], rel=0.01)
        assert 0 < log["map_min_singular_value"] < log["map_max_singular_value"] < 0.51


def test_two_ranks_record_the_spectra_and_the_map_error_of_one_process(two_ranks):
    folder, seen = two_ranks
    logs = [rank["maps"]["soren"]["logged"] for rank in seen]
    assert_same_measurements(SOREN[:2], RunFolder(folder / "soren-fsdp2"), logs)


def test_in_bfloat16_the_losses_are_not_rounded_and_the_export_is_of_the_masters(two_ranks):
    folder, seen = two_ranks
    losses = torch.tensor(seen[0]["bfloat16"])
    assert len(losses) == 10
    assert not torch.equal(losses[:2], losses[:2].bfloat16().float())
    assert one_process_logs(*SOREN[:2])["loss"] == pytest.approx(float(losses[-1]), abs=0.02)
    # After an evaluation FSDP2 keeps some weights whole and in bfloat16 until the next backward pass.
    for name, tensor in weights(folder / "bfloat16-fsdp2").items():
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, tensor.bfloat16().float()), name


def test_a_run_goes_on_with_other_numbers_of_ranks(rank_pools, tmp_path):
    for num_ranks in (2, 3, 1):
        assert ranks_do(rank_pools(num_ranks), "resharded", tmp_path) == [True] * num_ranks
        if num_ranks > 1:
            with mock.patch.object(checks, "_check_parallel"):  # they refuse fsdp2 without GPUs
                commands.reshard(str(tmp_path / "resharded"))
    run = RunFolder(tmp_path / "resharded")
    assert (run.read()["processes"], run.read()["resumed_from_steps"]) == (1, [2, 6])
    alone = TinyRun(tmp_path / "alone", "sft", *RESHARDED[1:])
    alone.train()
    assert furthest(weights(alone.folder.path), weights(run.path)) <= 2e-6


def test_two_ranks_resume_bit_for_bit(two_ranks):
    record = assert_resumed(two_ranks[0], "fsdp2", [rank["resumed"] for rank in two_ranks[1]]).read()
    assert record["optimizer"]["chain"] == ["AcceleratedOptimizer", "Soren"]
    assert record["optimizer"]["parallel"] == "fsdp2"


def test_a_checkpoint_in_the_background_is_sealed_last_and_resumes_as_any_other(two_ranks):
    folder, seen = two_ranks
    for rank in seen:
        left, error = rank["background"]
        assert left == {"checkpoint-2": True, "checkpoint-4": False}  # step 5 was taken, and the older is kept
        assert re.search(r"No space left on device.*The last complete checkpoint is checkpoint-2; .*rerun", error)
    run, whole = RunFolder(folder / "killed-background"), RunFolder(folder / "whole-fsdp2")
    assert run.read()["resumed_from_steps"] == [2]
    assert run.read()["training"]["best_model"]["step"] == 6
    assert logged(run) == logged(whole)
    assert furthest(weights(run.path), weights(whole.path)) == 0


def test_a_checkpoint_is_sealed_with_every_ranks_parts(two_ranks, tmp_path):
    whole = RunFolder(two_ranks[0] / "whole-fsdp2").complete_checkpoints()[0]
    seal = json.loads((whole / "soren_align.json").read_text())
    parts, files = ("optimizer_0", "pytorch_model_fsdp_0"), ("__0_0.distcp", ".metadata")
    assert {
        *(f"{part}/{file}" for part in parts for file in files),
        "optimizer_0/__1_0.distcp",
        "rng_state_1.pth",
        "scheduler.pt",
    } <= seal["files"].keys()
    copy = shutil.copytree(whole, tmp_path / whole.name)
    checkpoints.check(copy, seal["origin"])
    (copy / "optimizer_0" / "__1_0.distcp").unlink()
    with pytest.raises(UserError, match=r"optimizer_0/__1_0\.distcp missing or truncated"):
        checkpoints.check(copy, seal["origin"])


def test_the_exported_folder_is_a_plain_model(two_ranks):
    run = RunFolder(two_ranks[0] / "whole-fsdp2")
    last = weights(run.path)
    exported = AutoModelForCausalLM.from_pretrained(run.model)
    assert type(exported).__name__ == "LlamaForCausalLM"
    assert exported.config.architectures == ["LlamaForCausalLM"]
    started = AutoModelForCausalLM.from_pretrained(run.start)
    tokens = torch.arange(2, 40).view(2, -1)
    begun = started(tokens).logits
    started.load_state_dict(last, strict=False)  # the head is the embedding, and is written once
    assert last.keys() == dict(started.named_parameters()).keys()
    assert torch.equal(exported(tokens).logits, started(tokens).logits)
    assert not torch.equal(exported(tokens).logits, begun)


def test_a_nan_on_one_rank_is_the_verdict_of_all(two_ranks):
    first, second = (rank["poisoned"] for rank in two_ranks[1])
    assert first == second
    assert re.match("step 1: NaN or infinity in the gradient of .*the optimizer did not apply this step", first)
    for rank in two_ranks[1]:
        assert re.match("step 2: the norm of the gradients overflowed in the step before", rank["overflows"])


def test_no_rank_keeps_the_whole_model_or_whole_gradients(two_ranks):
    assert [rank["kept_whole"] for rank in two_ranks[1]] == [[0, 0]] * 2


def test_one_layer_at_a_time_of_dpos_reference_is_whole(two_ranks):
    for rank in two_ranks[1]:
        num_layers, numbers, whole = rank["whole_layers"]
        assert num_layers > 1
        assert (numbers, whole) == ({1}, [])


def test_where_accelerate_trains_by_ddp_instead_the_run_is_refused(two_ranks):
    for rank in two_ranks[1]:
        message = "run.parallel: is fsdp2, but accelerate set up ddp; write run.parallel: ddp, or change the launcher"
        assert rank["unsharded"] == message


def test_a_config_says_nothing_that_nobody_reads(tmp_path):
    config = tmp_path / "mine.yaml"
    ours = (shipped.ROOT / "configs/accelerate/fsdp2.yaml").read_text()
    config.write_text(ours.replace("'no' ", "bf16 ") + "  fsdp_forward_prefetch: true\n")
    with pytest.raises(UserError) as refused:
        parallel(str(config))
    assert refused.value.problems == (
        "mine.yaml: fsdp_forward_prefetch: has no effect under FSDP2; remove this key",
        "mine.yaml: mixed_precision: found 'bf16', but trainer.bf16 sets the precision; write 'no'",
    )


def test_accelerates_offload_reaches_transformers_by_its_other_name(tmp_path, tiny_run):
    config = tmp_path / "mine.yaml"
    config.write_text((shipped.ROOT / "configs/accelerate/fsdp2.yaml").read_text() + "  fsdp_offload_params: true\n")
    with mock.patch.object(checks, "_check_parallel"):
        run = tiny_run("sft", f"run.parallel={config}")
    arguments = trl_arguments(run.recipe, tmp_path, Ranks(launched=True))
    assert arguments.fsdp_plugin_args["cpu_offload"] is True


def test_a_dpo_trains_towards_its_own_start_and_no_cached_one(two_ranks):
    assert_own_references([rank["references"] for rank in two_ranks[1]])
