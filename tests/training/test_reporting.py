"""A tracker gets the loss and our own measurements. transformers takes the stand-in here for trackio itself."""

import sys

import pytest

STAND_IN = """
import contextvars, json, types

__version__ = "0.43.0"
context_vars = types.SimpleNamespace(current_space_id=contextvars.ContextVar("space", default=None))
begun, logs, finished = [], [], []


class _Config(dict):
    def update(self, said, allow_val_change=False):
        super().update(said)


config = _Config()


def init(**how):
    begun.append(how)


def log(said):
    logs.append(json.loads(json.dumps(said)))


def finish():
    finished.append(True)
"""


@pytest.fixture
def trackio(tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "trackio.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    import trackio

    yield trackio
    del sys.modules["trackio"]  # not by monkeypatch, which would put the stand-in back


@pytest.mark.rest
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_a_tracker_gets_every_number_of_metrics_jsonl(tiny_run, trackio, task):
    run = tiny_run(task, "trainer.report_to=[trackio]", "trainer.save_strategy=no", name="my-run")
    assert run.train()
    lines = [line for line in run.metrics() if "loss" in line]
    logged = [said for said in trackio.logs if "train/loss" in said]
    assert len(logged) == len(lines) == 6
    for line, said in zip(lines, logged, strict=True):
        ours = {key: value for key, value in line.items() if key != "step"}
        assert {key: said[f"train/{key}"] for key in ours} == ours
        assert said["train/global_step"] == line["step"]
    assert {"train/relative_change", "train/update_rms", "train/aux_learning_rate"} <= logged[-1].keys()
    assert trackio.begun[0]["name"] == "my-run"
    assert trackio.finished == [True]


def test_without_a_word_nothing_is_reported(tiny_run, trackio):
    assert tiny_run("sft", "trainer.max_steps=1", "trainer.save_strategy=no").train()
    assert trackio.begun == []
