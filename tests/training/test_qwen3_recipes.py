"""Both readings of qwen3-0.6b on a small C4 and a small Qwen3: from random weights, and from published ones."""

import pytest
import torch
from safetensors.torch import load_file
from tests.support.c4_replica import replica
from tests.support.tiny_run import TinyRun

pytestmark = pytest.mark.model


@pytest.mark.parametrize("reading", ["scratch", "pretrained"])
def test_a_reading_starts_from_its_weights_and_trains_them(reading, tmp_path):
    name = f"qwen3-0.6b/{reading}-soren"
    run = TinyRun(tmp_path / "run", name, *replica(name, tmp_path / "replica"))
    run.train()
    published = load_file(tmp_path / "replica/qwen3/model.safetensors")
    is_random = reading == "scratch"
    assert run.folder.start.is_dir() == is_random
    before = load_file(run.folder.start / "model.safetensors") if is_random else published
    embedding = "model.embed_tokens.weight"
    assert torch.equal(before[embedding], published[embedding]) != is_random
    trained = load_file(run.folder.model / "model.safetensors")
    assert sum(not torch.equal(before[key], trained[key]) for key in before) > len(before) / 2
