"""Two ranks sample once, end early together, and know the size of their checkpoints."""

import json

import pytest
from soren_align.run.folder import RunFolder
from tests.support.trainer_parity import furthest, weights

JOB = "watched"
"""It returns the expected bytes of checkpoints."""


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2"])
def test_two_ranks_sample_once_and_train_as_without_samples(two_ranks, mode):
    folder, _ = two_ranks
    run = RunFolder(folder / f"sampled-{mode}")
    records = [json.loads(line) for line in run.samples.read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 0, 1, 1, 2, 2]
    alone = (folder / "sampled-ddp" / "samples.jsonl").read_text().splitlines()
    assert records[:2] == [json.loads(line) for line in alone[:2]]
    assert furthest(weights(run.path), weights(folder / f"silent-{mode}")) == 0


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3"])
def test_two_ranks_end_early_together(two_ranks, mode):
    training = RunFolder(two_ranks[0] / f"silent-{mode}").read()["training"]
    assert (training["steps"], training["stopped_early"]["best"]["step"]) == (2, 2)


@pytest.mark.parametrize("mode", ["ddp", "zero1", "zero2", "zero3"])
def test_the_expected_size_is_that_of_the_checkpoint(two_ranks, mode):
    folder, expected = two_ranks
    (checkpoint,) = RunFolder(folder / f"silent-{mode}").complete_checkpoints()
    files = [file for file in checkpoint.rglob("*") if file.suffix in (".pt", ".pth", ".safetensors")]
    size = sum(file.stat().st_size for file in files)
    for rank in expected:
        assert rank[mode] == expected[0][mode]
        (num_bytes,) = rank[mode]
        # random states and the records of pickles: at most 100 kB; DeepSpeed's padding
        assert 0.97 * size - 100_000 <= num_bytes <= 1.03 * size, (num_bytes, {f.name: f.stat().st_size for f in files})
