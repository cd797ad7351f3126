"""Two ranks of DDP take the steps of one process, stop together, and go on where they were."""

import json
import re
from collections import Counter
from contextlib import nullcontext

import pytest
from safetensors.torch import load_file
from soren_align.core.errors import UserError
from soren_align.run.folder import RunFolder
from soren_align.sharding.ranks import Ranks
from tests.support.trainer_jobs import PACKED, PRETRAINED, RUNS, SOREN, STREAMED, UNEVEN
from tests.support.trainer_parity import (
    assert_own_references,
    assert_resumed,
    assert_same_measurements,
    assert_same_perplexity,
    furthest,
    one_process,
)

JOB = "ddp"


@pytest.mark.parametrize(("name", "task", "overrides"), [*RUNS, PACKED, UNEVEN, STREAMED, PRETRAINED])
def test_two_ranks_take_the_same_ten_steps_as_one_process(two_ranks, name, task, overrides):
    folder, seen = two_ranks
    alone = one_process(name, task, *overrides)
    first, second = (load_file(folder / f"{name}-ddp" / f"weights{rank}.safetensors") for rank in (0, 1))
    assert furthest(first, second) == 0
    # float32 sums in another order; the bound is that of issue 4
    assert furthest(alone, first) <= 2e-6
    for rank in seen:
        maps = rank["maps"][name]
        assert (maps["all"], maps["per_step"], maps["accumulation"]) == (140, 14, 2), "14 matrices once per step"
    if name == "soren":  # the comparison can fail
        assert furthest(alone, load_file(folder / "unclipped-ddp" / "weights0.safetensors")) > 1e-4


def test_the_last_pairs_of_an_epoch_are_left_out_and_none_is_repeated(two_ranks):
    (first, everything), (second, _) = (rank["pairs"] for rank in two_ranks[1])
    assert (len(first), len(second)) == (32, 32)  # of 77, in batches of 16 on each
    assert Counter([*first, *second]) <= Counter(everything)


def test_two_ranks_have_the_perplexity_of_one_process(two_ranks):
    assert_same_perplexity([rank["maps"]["pretrained"]["validation"] for rank in two_ranks[1]])


def test_two_ranks_record_the_spectra_and_the_map_error_of_one_process(two_ranks):
    folder, seen = two_ranks
    logs = [rank["maps"]["soren"]["logged"] for rank in seen]
    assert_same_measurements(SOREN[:2], RunFolder(folder / "soren-ddp"), logs)


def test_two_ranks_resume_bit_for_bit(two_ranks):
    killed = assert_resumed(two_ranks[0], "ddp", [rank["resumed"] for rank in two_ranks[1]])
    sealed = json.loads((killed.complete_checkpoints()[0] / "soren_align.json").read_text())
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= sealed["files"].keys()
    assert sealed["origin"]["processes"] == 2


def test_a_nan_on_one_rank_is_the_verdict_of_all(two_ranks):
    first, second = (rank["poisoned"] for rank in two_ranks[1])
    assert first == second
    assert re.match(r"step 1: NaN or infinity in the gradient of .*the optimizer did not apply this step", first)


def test_a_dpo_trains_towards_its_own_start_and_no_cached_one(two_ranks):
    assert_own_references([rank["references"] for rank in two_ranks[1]])


def test_gradients_that_were_not_averaged_are_noticed_at_the_next_log(two_ranks):
    for rank in two_ranks[1]:
        assert re.match("step 1: the processes did not average their gradients", rank["drifted"]), rank["drifted"]


def test_a_signal_to_one_rank_stops_all_after_the_same_step(two_ranks):
    # The signal comes within step 3, of which save_steps=2 would leave no checkpoint.
    assert [rank["stopped"] for rank in two_ranks[1]] == [[False, ["checkpoint-2", "checkpoint-3"]]] * 2


def test_ranks_tell_each_other(two_ranks):
    assert [rank["of_first"] for rank in two_ranks[1]] == ["told by rank 0"] * 2
    assert [rank["any"] for rank in two_ranks[1]] == [[True, False]] * 2


def test_a_trainer_that_sees_fewer_processes_than_were_started_is_refused(tiny_run):
    run = tiny_run()
    run.ranks = Ranks(0, 2)
    run.ranks.__dict__["main_process_first"] = nullcontext  # the other rank does not exist
    with pytest.raises(UserError, match="started 2 processes, but the trainer found 1"):
        run.prepare()
