"""The progress of training is a line that changes in a terminal, and lines at intervals elsewhere."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console
from soren_align.training.measure import progress

LOGS = {"sft": {"loss": 1.25, "mean_token_accuracy": 0.625, "tokens_per_second": 12345.6},
        "dpo": {"loss": 0.5, "rewards/margins": 1.5, "rewards/accuracies": 0.75, "tokens_per_second": 99}}  # fmt: skip


def evaluation(task):
    return {f"eval_{key}": value / 2 for key, value in LOGS[task].items()}


@pytest.fixture
def steps(monkeypatch):
    """steps(task, is_terminal, seconds) returns the shown lines and the text of steps 5 to 7, `seconds` apart.

    Step 6 is followed by an evaluation in two batches.
    """
    monkeypatch.setattr(progress, "peak_memory", lambda: 7.5e9)

    def run(task, is_terminal, seconds, width=80):
        now, shown = [0], []
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
        console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)
        display = progress.TrainingProgress(console, task)
        state = SimpleNamespace(global_step=4, max_steps=8)
        display.on_train_begin(None, state, None)
        for step in (5, 6, 7):
            display.on_step_begin(None, state, None)
            shown += [str(display.status.status)] if display.status else []
            now[0] += seconds
            state.global_step = step
            display.on_log(None, state, None, logs=None)
            display.on_log(None, state, None, logs=LOGS[task])
            if step == 6:
                for _ in range(2):
                    display.on_prediction_step(None, state, None, eval_dataloader=[1, 2])
                shown += [str(display.status.status)] if display.status else []
                display.on_log(None, state, None, logs=evaluation(task))
                display.on_evaluate(None, state, None)
        display.close()
        assert display.status is None
        return shown, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()).replace("\r", "\n")

    return run


def test_a_terminal_has_a_line_with_step_loss_speed_and_time_left(steps):
    shown, text = steps("sft", is_terminal=True, seconds=60)
    facts = "loss 1.2500, token accuracy 62.5%, 12,346 tokens/s, peak 7.50 GB"
    last, *curve = shown.pop().splitlines()  # of two logs; of one there is none
    assert [*shown, last] == ["sft", f"sft step 5/8, {facts}, 0:03:00 left", "eval step 6, batch 2 of 2",
                              f"sft step 6/8, {facts}, 0:02:00 left"]  # fmt: skip
    assert (len(curve), curve[-1].split()) == (6, ["5", "6"])
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.rest
@pytest.mark.model
@pytest.mark.parametrize(("settings", "steps"), [
    (("trainer.logging_steps=4",), [1, 4, 5]), (("trainer.logging_strategy=epoch",), [1, 5]),
    (("trainer.logging_strategy=no",), []),
])  # fmt: skip
def test_a_run_of_any_length_reports_its_losses(tiny_run, settings, steps):
    run = tiny_run("sft", "trainer.max_steps=5", "trainer.warmup_steps=0", "trainer.save_strategy=no", *settings)
    assert run.train()
    logs = run.metrics()
    assert [log["step"] for log in logs if "loss" in log] == steps
    assert all(log["update_rms"] > 0 and log["aux_learning_rate"] > 0 for log in logs if "loss" in log)
    training, said = run.folder.read()["training"], " ".join(run.said.getvalue().split())
    if steps:
        first, last = (next(log["loss"] for log in logs if log["step"] == step) for step in (steps[0], steps[-1]))
        assert (training["first_loss"], training["last_loss"]) == (first, last)
        num_steps = [b - a for a, b in zip([0, *steps], steps, strict=False)]
        assert training["examples_per_log"] == [8 * num_steps[0], 8 * num_steps[-1]]
        assert f"loss {first:.3f} -> {last:.3f} (first and last log, of up to {8 * num_steps[0]}" in said
    else:
        assert re.search(r"trained 5 steps in \d+ s, loss 4\.\d+ on average", said)


@pytest.mark.model
def test_the_last_lines_quote_the_held_out_loss_first_and_its_number_of_examples(tiny_run):
    held_out = (
        "data.eval.limit=5", "trainer.eval_strategy=steps", "trainer.eval_steps=2", "trainer.eval_on_start=true",
    )  # fmt: skip
    run = tiny_run("sft", "trainer.max_steps=5", "trainer.save_strategy=no", *held_out)
    assert run.train()
    losses = {log["step"]: log["eval_loss"] for log in run.metrics() if "eval_loss" in log}
    assert [*losses] == [0, 2, 4, 5]
    record = run.folder.read()["training"]["held_out"]
    evaluations = [{"step": 0, "loss": losses[0]}, {"step": 5, "loss": losses[5]}]
    assert record == {"num_examples": 5, "evaluations": evaluations}
    said = " ".join(run.said.getvalue().split())
    assert f"held-out loss {losses[0]:.3f} -> {losses[5]:.3f} (5 examples) training loss" in said


@pytest.mark.rest
@pytest.mark.model
@pytest.mark.parametrize("evaluates", [True, False])
def test_preferences_are_those_of_held_out_pairs_or_of_the_pairs_of_the_last_log(tiny_run, evaluates):
    held_out = ("data.eval.limit=5", "trainer.eval_strategy=steps", "trainer.eval_steps=2") if evaluates else ()
    run = tiny_run("dpo", "trainer.max_steps=4", "trainer.logging_steps=3", "trainer.save_strategy=no", *held_out)
    assert run.train()
    share, margin = (f"{'eval_' if evaluates else ''}rewards/{name}" for name in ("accuracies", "margins"))
    last = next(log for log in reversed(run.metrics()) if share in log)
    record = run.folder.read()["training"]["preferences"]
    assert (record["share"], record["margin"]) == (last[share], last[margin])
    assert (record["num_pairs"], record["held_out"]) == ((5, True) if evaluates else (8, False))
    pairs = "5 held-out pairs" if evaluates else "8 pairs (last log)"
    words = f"prefers the chosen answer in {record['share']:.0%} of {pairs}, margin {record['margin']:.3g}"
    assert words in run.said.getvalue()
