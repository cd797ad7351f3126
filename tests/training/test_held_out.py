"""A study's two halves of the held-out examples, and the metrics of each example in held_out.json."""

import json
from dataclasses import replace

import numpy as np
import pytest
from soren_align.core.errors import UserError
from soren_align.core.files import file_sha256
from soren_align.run.held_out import read_held_out
from soren_align.run.provenance import fingerprint
from soren_align.tasks import TASKS
from soren_align.training.setup import tokenize_splits
from tests.support.tiny_run import TinyRun, stop_after

# With one example per batch, transformers' mean over batches is the mean over examples.
EVALUATED = ("trainer.eval_strategy=steps", "trainer.eval_steps=2", "trainer.max_steps=4", "trainer.eval_on_start=true",
             "trainer.per_device_eval_batch_size=1", "data.eval.limit=21", "optimizer.lr=1e-2")  # fmt: skip


def values(run):
    return json.loads(run.folder.held_out.read_text())


@pytest.mark.model
def test_both_halves_are_disjoint_and_together_all_examples(tiny_run):
    def texts(*overrides):
        setup = tiny_run("sft", "data.eval.limit=21", *overrides).prepare()
        return [example["input_ids"] for example in setup.tokens.eval]

    everything, search, verdict = texts(), texts("data.eval_part=search"), texts("data.eval_part=verdict")
    assert (len(search), len(verdict)) == (11, 10)
    assert search == everything[::2]
    assert verdict == everything[1::2]
    run = tiny_run("sft", "data.eval_part=search")
    setup = run.prepare()
    one = replace(setup.splits, eval=None)
    assert tokenize_splits(run.recipe, one, setup.tokenizer)[1].eval is None
    with pytest.raises(UserError, match=r"data.eval: has 1 example"):
        tiny_run("sft", "data.eval_part=search", "data.eval.limit=1").prepare()


@pytest.mark.rest
@pytest.mark.model
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_the_metrics_of_the_examples_have_the_logged_means(tiny_run, task):
    run = tiny_run(task, *EVALUATED, "data.eval_part=verdict")
    assert run.train()
    logs = {log["step"]: log for log in run.metrics() if "eval_loss" in log}
    content = values(run)
    for at, step in (("start", 0), ("end", 4)):
        assert content[at].keys() == TASKS[task].higher_is_better.keys()
        for metric, of_examples in content[at].items():
            assert len(of_examples) == 10
            assert np.mean(of_examples) == pytest.approx(logs[step][metric], rel=1e-4, abs=1e-6)
    tokens = [sum(label != -100 for label in example["labels"]) for example in run.prepare().tokens.eval] \
        if task == "sft" else [1] * 10  # fmt: skip
    assert content["weights"] == tokens
    loss = read_held_out(run.folder.held_out, "eval_loss")
    assert loss.end.mean() == pytest.approx(np.average(content["end"]["eval_loss"], weights=tokens))
    assert run.folder.read()["written"]["held_out_sha256"] == file_sha256(run.folder.held_out)


@pytest.mark.rest
@pytest.mark.model
def test_measuring_the_examples_changes_no_weight_and_a_resumed_run_measures_the_same(tmp_path):
    dropout = (*EVALUATED, "model.lora={r: 4, dropout: 0.3}", "optimizer.aux_lr=null")

    def make(name, *overrides):
        return TinyRun(tmp_path / name, "sft", *dropout, *overrides)

    without, whole, killed = make("a"), make("b", "data.eval_part=verdict"), make("c", "data.eval_part=verdict")
    assert without.train()
    assert whole.train()
    assert fingerprint(str(whole.folder.model)) == fingerprint(str(without.folder.model))
    assert not without.folder.held_out.exists()
    stop_after(lambda: killed, 3)
    assert "end" not in values(killed)
    killed = make("c", "data.eval_part=verdict")
    assert killed.train()
    assert values(killed) == values(whole)
