"""N ranks take the steps of one."""

from dataclasses import replace

import pytest
import torch
from tests.support.parity_configurations import (
    COMMON,
    CONFIGURATIONS,
    CONTROL,
    DEFAULT,
    LARGEST_BYTES,
    TOLERANCE,
    WAYS,
    WITHOUT_CLIP,
    compare,
)
from tests.support.toy import NUM_STEPS, Run, one_process

WAYS_OF_MAPS = {
    "sns": ("FSDP2",), "measured RMS": ("DDP", "ZeRO 3"), "released": ("ZeRO 1",),
    "Muon, map in float64": ("DDP", "ZeRO 2"), "NorMuon, map in float64": ("FSDP2",), "rows, Soren": ("ZeRO 3",),
    "HTMuon, full rank": ("ZeRO 2",), "exact, full rank": ("DDP",), "identity": ("FSDP2",), "high_pass": ("ZeRO 1",),
    "soft_sign": ("ZeRO 3",), "random, full rank": ("DDP", "ZeRO 2"), "all 2-D": ("FSDP2", "ZeRO 2"),
    "LoRA": ("DDP", "ZeRO 2"), "CPU offload": ("ZeRO 2", "ZeRO 3"),
}  # fmt: skip
"""A map sees whole matrices under every way: one or two of them show it. `make parity` takes all."""
CASES = [pytest.param(way, configuration, marks=[pytest.mark.sample] if configuration in (COMMON, DEFAULT) else [])
         for configuration in CONFIGURATIONS for way in WAYS_OF_MAPS.get(configuration.name, configuration.ways)]  # fmt: skip


def same_steps(ranks, way, configuration):
    """The comparison, after holding all weights to the tolerance, and counting a map per matrix and step."""
    found, run = compare(ranks, way, configuration), configuration.run
    assert min(found.norms) > 1.2 * run.clip, "the clip must bind in every step"
    assert found.difference <= TOLERANCE
    assert sum(result.num_maps for result in found.results) == found.num_maps
    # a matrix that alone exceeds the bucket's bytes has a bucket to itself
    bound = 3 * max(run.bucket_mb * 2**20, LARGEST_BYTES)
    assert all(result.peak_bytes <= bound for result in found.results)
    assert all(result.state_numel == result.weights_numel for result in found.results)
    return found


@pytest.mark.parametrize(("way", "configuration"), CASES, ids=str)
def test_n_ranks_take_the_steps_of_one(ranks, way, configuration):
    same_steps(ranks, way, configuration)


@pytest.mark.parametrize("way", ["DDP", "ZeRO 2"])
def test_the_comparison_would_notice_a_missing_clip(ranks, way):
    assert compare(ranks, way, CONTROL).difference > WITHOUT_CLIP


def test_matrices_straddle_in_unequal_pieces(ranks):
    """Else the comparison would not have tried it."""
    pieces = {way: compare(ranks, way, COMMON).pieces for way in WAYS}
    assert pieces["DDP"] == []
    assert pieces["ZeRO 1"] == pieces["ZeRO 2"]
    straddling = [p for p in pieces["ZeRO 2"] if len(p) > 1]
    assert len(straddling) == {2: 0, 3: 2}[ranks.num_ranks]
    frozen = compare(ranks, "ZeRO 2", next(c for c in CONFIGURATIONS if c.run.frozen)).pieces
    assert any(len(p) > 1 for p in [*straddling, *frozen])
    for way in ("FSDP2", "ZeRO 3"):
        assert all(len(p) == ranks.num_ranks for p in pieces[way])
    assert sum(len(set(p)) > 1 for p in pieces["FSDP2"]) == {2: 4, 3: 10}[ranks.num_ranks]


def test_several_sub_groups_are_several(ranks):
    (configuration,) = (c for c in CONFIGURATIONS if "sub_group_size" in c.zero)
    assert len(compare(ranks, "ZeRO 3", configuration).results[0].plans) > 1


def test_full_rank_is_full_rank():
    _, _, optimizer = one_process(Run({"map": "exact"}, full_rank=True))
    for parameter in optimizer.param_groups[0]["params"]:
        sigma = torch.linalg.svdvals(optimizer.state[parameter]["exp_avg"].double())
        assert sigma[-1] > 1e-4 * sigma[0]


@pytest.mark.parametrize("bucket_mb", [0.001, 512])
def test_the_size_of_a_bucket_changes_nothing(ranks, bucket_mb):
    found = same_steps(ranks, "FSDP2", replace(COMMON, run=replace(COMMON.run, bucket_mb=bucket_mb)))
    (plan,) = found.results[0].plans
    assert len(plan.buckets) == 1 if bucket_mb == 512 else len(plan.buckets) > len(plan.layout.weights) // 3


@pytest.mark.parametrize("way", WAYS[1:])
def test_no_rank_has_more_than_its_share_of_the_momentum(ranks, way):
    # FSDP2 deals out rows, the others numbers with a little padding
    assert compare(ranks, way, COMMON).momentum_share <= (1.03 if way == "FSDP2" else 1.01)


def test_zero_2_sends_only_what_straddles(ranks):
    found = compare(ranks, "ZeRO 2", COMMON)
    straddling = [pieces for pieces in found.pieces if len(pieces) > 1]
    sent = sum(result.bytes_sent for result in found.results)
    assert sent <= NUM_STEPS * 2 * 4 * sum(map(sum, straddling))
    assert sent >= NUM_STEPS * 2 * 4 * sum(sum(pieces) - max(pieces) for pieces in straddling)
