"""SFT, DPO and merging of adapters by the shipped recipes, in half of SFT's steps.

By all of them the accuracies are full training's less at most 0.1: recipes/quickstart/README.md has them.
"""

import io
import os

import pytest
import torch
from rich.console import Console
from soren_align import recipe
from soren_align.evaluate.run.lineage import lineage
from soren_align.evaluate.run.stage import evaluate
from soren_align.launch.preparation import prepare
from soren_align.recipe import Eval
from soren_align.run.folder import RunFolder
from soren_align.training import adapters, setup
from soren_align.training import run as training

pytestmark = [pytest.mark.model, pytest.mark.slow]

QUIET = Console(file=io.StringIO())


def trained(folder, task, *overrides):
    """The folder of a run in this process: loading torch and lm-eval for each command would take longer than it."""
    always = ("trainer.eval_strategy=no", "trainer.save_strategy=no", f"run.output_dir={folder / task}")
    asked = recipe.load(f"quickstart/{task}-lora", [*always, *overrides])
    run = RunFolder(folder / task)
    prepare(run, asked)
    assert training.train(setup.set_up_training(asked, run), run, QUIET)
    return run


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    """{"base", "SFT", "DPO": {column: %}}: of what the merged run came from, and of the merged run."""
    folder, threads = tmp_path_factory.mktemp("lora"), torch.get_num_threads()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sft = trained(folder, "sft", "trainer.max_steps=300")
    dpo = trained(folder, "dpo", f"model.name_or_path={sft.model}")
    merged = adapters.merge(dpo)
    results = evaluate(lineage(merged), Eval(suite="quickstart"), folder / "of-merged", console=QUIET)
    torch.set_num_threads(threads)
    assert results["rows"][-1]["model"] == str(merged)
    return {row["name"]: {k: v["value"] for k, v in row["scores"].items()} for row in results["rows"]}


def test_adapters_learn_the_facts(scores):
    """In 300 steps 79% and 55%, where random weights guess 20% and nothing."""
    assert list(scores) == ["base", "SFT", "DPO"]
    assert scores["base"]["zoo_mc"] <= 45
    assert scores["SFT"]["zoo_mc"] >= 65
    assert scores["SFT"]["zoo_gen"] >= 35
    assert scores["SFT"]["preference"] <= 70


def test_going_on_they_learn_the_tone_and_keep_it_when_merged(scores):
    """In 100 steps of DPO, from 50% to 84%; of the facts, 73% are left of 79%."""
    assert scores["DPO"]["preference"] >= 70
    assert scores["DPO"]["zoo_mc"] >= scores["SFT"]["zoo_mc"] - 15
