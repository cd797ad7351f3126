"""The progress of training is a bar in a terminal, and lines at intervals elsewhere."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from soren_align.trainers import progress


@pytest.fixture
def steps(monkeypatch):
    """steps(is_terminal, seconds) returns the bar's positions and the text of three steps, `seconds` apart."""

    def run(is_terminal, seconds):
        clock = iter(range(0, 100 * seconds, seconds))
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal, color_system=None)
        display, positions = progress.ProgressBar(console, "sft"), []
        display.on_train_begin(None, SimpleNamespace(global_step=4, max_steps=8), None)
        for step in (5, 6, 7):
            state = SimpleNamespace(global_step=step, max_steps=8)
            display.on_step_end(None, state, None)
            for logs in (None, {"eval_loss": 1.0}, {"loss": step / 4}):
                display.on_log(None, state, None, logs=logs)
            if display.bar:
                (task,) = display.bar.tasks
                positions.append((task.completed, task.total, task.fields["loss"]))
        display.on_train_end(None, None, None)
        assert display.bar is None
        return positions, console.file.getvalue()

    return run


def test_a_terminal_has_a_bar_with_the_loss_that_begins_at_the_checkpoint(steps):
    positions, text = steps(is_terminal=True, seconds=60)
    assert positions == [(5, 8, "loss 1.250"), (6, 8, "loss 1.500"), (7, 8, "loss 1.750")]
    assert "step 5/8" not in text


@pytest.mark.parametrize(("seconds", "expected"), [(11, [5, 6, 7]), (6, [6]), (1, [])])
def test_elsewhere_a_line_is_printed_when_ten_seconds_have_passed(steps, seconds, expected):
    positions, text = steps(is_terminal=False, seconds=seconds)
    assert positions == []
    assert [line.split()[2] for line in text.splitlines()] == [f"{step}/8," for step in expected]
