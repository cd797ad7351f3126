"""Benchmarks beside the training: the scores are those of `eval`, and nothing waits for them."""

import json
import sys
import time
from types import SimpleNamespace

import pytest
from soren_align import recipe
from soren_align.cli.app import app
from soren_align.core.errors import UserError
from soren_align.core.files import file_sha256
from soren_align.evaluate.report.results import read_results
from soren_align.recipe import Benchmark, Eval
from soren_align.training.measure.sidecar import Sidecar
from tests.support import command
from tests.support.tiny_run import assert_trained_alike
from typer.main import get_command

pytestmark = pytest.mark.model

SCORED = ("eval={suite: quickstart, batch_size: 120}", "run.benchmark={every: 2, limit: 5}")


def finish(run):
    """As the command does when the training has ended and no rank waits any more."""
    Sidecar(run.recipe.run.benchmark, run.recipe.eval, run.folder, run.console).finish()


def lines_with_scores(run):
    return [line for line in run.metrics() if "benchmark_step" in line]


@pytest.mark.rest
@pytest.mark.process
def test_the_scores_of_a_checkpoint_are_those_of_eval_and_change_no_weight(tiny_run, tmp_path):
    silent = tiny_run("sft", name="silent")
    scored = tiny_run("sft", *SCORED, "trainer.save_total_limit=1", name="scored")
    assert_trained_alike(silent, scored)  # six steps, saved after 2, 4 and 6
    finish(scored)
    (line,) = lines_with_scores(scored)
    assert scored.folder.read()["written"]["metrics_sha256"] == file_sha256(scored.folder.metrics)
    assert line["benchmark_step"] == 4
    place = scored.folder.path / "benchmarks/checkpoint-4"
    assert {entry.name for entry in place.iterdir()} == {"eval", "log.txt"}  # the links are gone
    checkpoint = next(c for c in silent.folder.complete_checkpoints() if c.name == "checkpoint-4")
    command.run(
        "eval", checkpoint, "--suite", "quickstart", "--limit", "5", "--output", tmp_path / "own", "--batch-size", "120"
    )
    row = read_results(tmp_path / "own")["rows"][-1]["scores"]
    assert {key.partition("/")[2]: value for key, value in line.items() if "/" in key} == {
        column: score["value"] for column, score in row.items()
    }


@pytest.mark.process
def test_a_dead_sidecar_is_named_and_loses_nothing(tiny_run):
    run = tiny_run("sft", *SCORED, "run.benchmark.command=[sh, -c, exit 3]")
    assert run.train()
    finish(run)
    place = run.folder.path / "benchmarks/checkpoint-4"
    said = " ".join(run.said.getvalue().split())
    assert "no scores of step 4: the evaluation ended with exit code 3" in said
    assert "the run continues" in said
    assert (place / "model/model.safetensors").is_file()
    assert run.folder.read()["status"] == "trained"
    assert not lines_with_scores(run)


def sidecar(folder, program, **section):
    """One whose evaluations are a program of Python, which gets the place as its last word but some."""
    benchmark = Benchmark(command=[sys.executable, "-c", program], **section)
    made = Sidecar(
        benchmark,
        Eval(suite="eval/quickstart", omit=["zoo_gen"]),
        SimpleNamespace(path=folder, checkpoints=folder / "checkpoints", metrics=folder / "metrics.jsonl"),
        CONSOLE,
    )
    return made


CONSOLE = SimpleNamespace(print=lambda *args, **kwargs: None, width=80, is_terminal=False)
WRITES = (
    "import sys, json, pathlib; out = pathlib.Path(sys.argv[sys.argv.index('--output') + 1]); out.mkdir();"
    "(out / 'argv.json').write_text(json.dumps(sys.argv))"
)


def save(made, folder, step):
    checkpoint = folder / f"checkpoints/checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    for name in ("model.safetensors", "config.json", "optimizer.pt", "trainer_state.json", "chat_template.jinja"):
        (checkpoint / name).write_text(f"{name} {step}")
    made.on_save(SimpleNamespace(output_dir=folder / "checkpoints"), SimpleNamespace(global_step=step), None)
    return folder / f"benchmarks/checkpoint-{step}"


@pytest.mark.process
def test_checkpoints_wait_for_their_turn_and_survive_their_deletion(tmp_path):
    made = sidecar(tmp_path, "import time; time.sleep(60)", every=2)
    first, second, third, fourth = (save(made, tmp_path, step) for step in (2, 4, 6, 8))
    assert not first.exists()
    assert not third.exists()
    assert made.running[0] == second
    assert made.waiting == [fourth]
    assert sorted(file.name for file in (fourth / "model").iterdir()) == [
        "chat_template.jinja", "config.json", "model.safetensors",
    ]  # fmt: skip
    (tmp_path / "checkpoints/checkpoint-8/model.safetensors").unlink()
    assert (fourth / "model/model.safetensors").read_text() == "model.safetensors 8"
    process = made.running[1]
    started = time.perf_counter()
    for _ in range(1000):
        made.on_step_end(None, None, None)
    assert time.perf_counter() - started < 1  # a system call a step
    made.close()
    assert process.returncode is not None
    # The next command finds what had no scores; steps that it repeats are saved anew.
    again = sidecar(tmp_path, "import time; time.sleep(60)", every=2)
    again.on_train_begin(IN_STEPS, SimpleNamespace(global_step=4, save_steps=2), None)
    assert again.waiting == [second]
    assert not fourth.exists()


IN_STEPS = SimpleNamespace(save_strategy="steps")


def test_a_resumed_run_logs_scores_that_no_log_has_and_scores_the_same_checkpoints(tmp_path):
    """The lines after the checkpoint were dropped, and with them the scores of an earlier one."""
    for step in (2, 4):
        results = tmp_path / f"benchmarks/checkpoint-{step}/eval/results.json"
        results.parent.mkdir(parents=True)
        results.write_text(json.dumps({"rows": [{"scores": {"zoo_mc": {"value": 10.0 * step}}}]}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "benchmark_step": 2, "benchmark/zoo_mc": 20.0}\n')
    made = sidecar(tmp_path, "pass", every=2)
    made.on_train_begin(IN_STEPS, SimpleNamespace(global_step=6, save_steps=2), None)
    assert made.waiting == []
    assert made.values() == {"benchmark_step": 4, "benchmark/zoo_mc": 40.0}
    assert made.values() == {}
    assert made._num_saved == 3  # so that every second one is the 4th, at step 8


@pytest.mark.process
def test_the_command_is_that_of_a_single_process_without_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "somewhere")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")  # in a job's step, `eval` would take itself for one of two ranks
    names = ("RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "SLURM_STEP_NUM_TASKS")
    made = sidecar(tmp_path, f"{WRITES}; import os; sys.exit(any(k in os.environ for k in {names}))", limit=3)
    place = save(made, tmp_path, 10)
    assert made.running[1].wait() == 0
    words = json.loads((place / "eval/argv.json").read_text())
    words = words[words.index("eval") + 1 :]
    assert words[:5] == [str(place / "model"), "--output", str(place / "eval"), "--processes", "1"]
    options = dict(zip(words[5::2], words[6::2], strict=True))
    assert options == {"--suite": "eval/quickstart", "--backend": "hf", "--limit": "3", "--omit": "zoo_gen"}
    # Every key of the section that is passed on is an option of `eval`.
    known = {option for each in get_command(app).commands["eval"].params for option in each.opts}
    section = Eval.model_fields.keys() - {"processes", "published", "base_template"}
    assert {f"--{key.replace('_', '-')}" for key in section} <= known


@pytest.mark.parametrize(("overrides", "message"), [
    (["eval=null", "run.benchmark=1"], "run.benchmark: has no suite; add eval.suite, or remove this key"),
    (["run.benchmark=1", "run.parallel=zero3"], "run.benchmark: run.parallel zero3 shards the weights"),
    (["run.benchmark={every: 0}"], "run.benchmark.every: found 0; write a number of at least 1"),
])  # fmt: skip
def test_benchmarks_that_no_process_could_run_are_refused(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        recipe.load("quickstart/sft", [f"run.output_dir={tmp_path / 'run'}", *overrides])
