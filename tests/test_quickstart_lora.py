"""SFT, DPO and merging of adapters, by the shipped recipes, with the bars of full training less 0.1."""

import json
import os
import subprocess
import sys

import pytest


def soren_align(*arguments, cwd):
    command = [sys.executable, "-m", "soren_align.cli", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    for task in ("sft", "dpo"):
        soren_align(task, f"quickstart/{task}-lora", "--set", "trainer.eval_strategy=no", cwd=folder)
    return folder


def test_adapters_learn_the_facts_and_then_the_tone_as_full_training_does(folder):
    results = json.loads((folder / "runs/quickstart/dpo-lora/eval/quickstart/results.json").read_text())
    rows = {row["name"]: {k: v["value"] for k, v in row["scores"].items()} for row in results["rows"]}
    assert list(rows) == ["base", "SFT", "DPO"]
    full = {"SFT": (100.0, 100.0), "DPO": (98.3, 92.5)}
    for name, (zoo_mc, zoo_gen) in full.items():
        assert rows[name]["zoo_mc"] >= zoo_mc - 10
        assert rows[name]["zoo_gen"] >= zoo_gen - 10
    assert rows["SFT"]["preference"] <= 70
    assert rows["DPO"]["preference"] >= 99.2 - 10


def test_a_merged_run_is_a_checkpoint_like_another(folder):
    said = soren_align("merge", "runs/quickstart/dpo-lora", cwd=folder)
    assert said.split() == ["written", "runs/quickstart/dpo-lora/merged"]
    assert "library_name: transformers" in (folder / "runs/quickstart/dpo-lora/merged/README.md").read_text()
    assert "library_name: peft" in (folder / "runs/quickstart/dpo-lora/model/README.md").read_text()
    soren_align("eval", "runs/quickstart/dpo-lora/merged", "--suite", "quickstart", "--output", "of-merged", cwd=folder)
    rows = json.loads((folder / "of-merged/results.json").read_text())["rows"]
    trained = json.loads((folder / "runs/quickstart/dpo-lora/eval/quickstart/results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["base", "SFT", "DPO"]
    assert [row["scores"] for row in rows] == [row["scores"] for row in trained]
