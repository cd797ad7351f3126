"""The studies of LLaMA-1B and Qwen3-0.6B on a small model and a small C4: from the first run to the verdict."""

import json

import pytest
from soren_align.study import runner
from tests.support import command
from tests.support.c4_replica import replica

from .test_runner import train_here

pytestmark = [pytest.mark.model, pytest.mark.rest]
OF_C4 = ("optimizer.", "trainer.max_steps", "trainer.save_steps", "trainer.eval_steps")


@pytest.mark.parametrize(("name", "recipe"), [("llama-c4-1b", "1b-soren"), ("qwen3-0.6b", "scratch-soren")])
def test_a_small_replica_of_a_study_runs_to_its_verdict(name, recipe, tmp_path, monkeypatch):
    """One trial and three seeds of each candidate, two steps a run."""
    monkeypatch.setattr(runner, "start_run", train_here)
    family = name.removesuffix("-1b")
    overrides = [each for each in replica(f"{family}/{recipe}", tmp_path / "replica") if not each.startswith(OF_C4)]
    overrides += ["trainer.max_steps=2", "trainer.save_steps=2", "trainer.eval_steps=2", "optimizer.compensation=null"]
    if family == "qwen3-0.6b":
        overrides += ["eval=null"]
    options = [f"set.{each}" for each in overrides]
    spaces = ("search.space", "candidates.adamw.space", "candidates.released-soren.space")
    options += [f"{space}={{optimizer.lr: [0.01]}}" for space in spaces]
    options += ["search.trials=1", "verdict.seeds=[101, 102, 103]", f"output_dir={tmp_path / 'study'}"]
    done = command.run("compare", f"studies/{name}", *(part for each in options for part in ("--set", each)))
    assert done.returncode == 0, done.stderr
    candidates = json.loads((tmp_path / "study/study.json").read_text())["candidates"]
    assert [candidate["name"] for candidate in candidates] == [
        *("adamw", "muon", "htmuon", "soren", "released-soren", "released-exact")
    ]
    for candidate in candidates:
        assert [run["status"] for run in candidate["trials"]] == ["finished"]
        assert [run["status"] for run in candidate["verdict"]] == ["finished"] * 3
    assert "On held-out loss" in done.stdout
