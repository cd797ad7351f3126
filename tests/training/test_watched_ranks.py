"""Two ranks sample once, and end early together."""

import json

import pytest
from soren_align.run.folder import RunFolder
from tests.support.trainer_parity import furthest, weights

JOB = "watched"


@pytest.mark.parametrize("mode", ["ddp", "zero2"])
def test_two_ranks_sample_once_and_train_as_without_samples(two_ranks, mode):
    folder, _ = two_ranks
    run = RunFolder(folder / f"sampled-{mode}")
    records = [json.loads(line) for line in run.samples.read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 0, 1, 1, 2, 2]
    alone = (folder / "sampled-ddp" / "samples.jsonl").read_text().splitlines()
    assert records[:2] == [json.loads(line) for line in alone[:2]]
    assert furthest(weights(run.path), weights(folder / f"silent-{mode}")) == 0


@pytest.mark.parametrize("mode", ["ddp", "zero2", "zero3"])
def test_two_ranks_end_early_together(two_ranks, mode):
    training = RunFolder(two_ranks[0] / f"silent-{mode}").read()["training"]
    assert (training["steps"], training["stopped_early"]["best"]["step"]) == (2, 2)
