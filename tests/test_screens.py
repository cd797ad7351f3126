"""What a person sees, kept as text in tests/snapshots: a change of words, order or colour shows in a commit's diff.

SNAPSHOTS=write python -m pytest tests/test_screens.py writes the files anew; read their diff before you commit it.
"""

import json
import os
import re
from pathlib import Path

import pytest

from tests.support import command
from tests.support.run_folders import add_results, finished_run

SNAPSHOTS = Path(__file__).parent / "snapshots"
STYLE = re.compile("\x1b\\[[0-9;]*m")
COLOR = re.compile("\x1b\\[[0-9;]*(3[0-7]|38|9[0-7])[;m]")
PLAIN = {"TERM": "dumb", **dict.fromkeys(("NO_COLOR", "COLORTERM", "FORCE_COLOR", "TTY_COMPATIBLE"))}
STARTED = re.compile(r"20\d\d-\d\d-\d\d(?:T\S+|(?= ))")
RECIPE = """\
task: sft
model: {name_or_path: "shipped:configs/models/tiny", init_seed: 1, load_in_4bit: true}
data: {train: {path: chats.jsonl}}
optimizer: {name: sorn, lr: 0}
trainer: {max_step: 3, use_cpu: true, bf16: false}
run: {output_dir: runs/a}
"""
SCREENS = {
    "help": [["--help"]],
    "recipes": [["recipes"]],
    "mistakes": [
        ["sft", "quickstart/sfx"], ["sft", "mistakes.yaml"], ["sft", "indented.yaml"], ["sft", "trl.yaml"],
        ["plan", "quickstart/sft", "lr=1e-3", "max_steps=3", "eval.suite=question"], ["eval", "runs/none"],
    ],
    "show": [["show", "runs/a"], ["runs", "runs"]],
}  # fmt: skip
"""The commands of each snapshot, which all read files alone."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder: a run, recipes with mistakes, and the suite `questions`."""
    monkeypatch.chdir(tmp_path)
    run = finished_run(Path("runs/a"))
    losses = [{"step": step, "loss": 4 / step} for step in range(1, 101)]
    held_out = [{"step": step, "eval_loss": loss} for step, loss in ((40, 0.2), (60, 0.1), (100, 0.3))]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in (*losses, *held_out)))
    add_results(run)
    (tmp_path / "mistakes.yaml").write_text(RECIPE)
    (tmp_path / "indented.yaml").write_text("task: sft\nmodel:\n  name_or_path: a\n   init_seed: 1\n")
    (tmp_path / "trl.yaml").write_text("model_name_or_path: a\ndataset_name: b\nlearning_rate: 1.0e-5\n")
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions/suite.yaml").touch()
    return tmp_path


def screen(folder, commands, columns=80, *, is_terminal=True, **env):
    """Everything that the commands print, each after its prompt; the working folder's path is FOLDER, a time or date TIME.

    A terminal without styles, unless `env` has another one.
    """
    texts = []
    for words in commands:
        settings = {**PLAIN, "COLUMNS": str(columns), "LINES": "24" if columns == 80 else "40", **env}
        result = command.run(*words, cwd=folder, env=settings, is_terminal=is_terminal)
        texts.append(f"$ soren-align {' '.join(words)}\n{result.stdout}{result.stderr}")
    return STARTED.sub("TIME", "\n".join(texts).replace(str(folder), "FOLDER"))


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", SCREENS)
def test_a_person_sees_what_the_snapshot_shows(folder, name, columns):
    text, file = screen(folder, SCREENS[name], columns), SNAPSHOTS / f"{name}-{columns}.txt"
    if os.environ.get("SNAPSHOTS") == "write":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"if this is better: SNAPSHOTS=write pytest {Path(__file__).name}"


@pytest.mark.parametrize("name", SCREENS)
def test_colour_adds_nothing_but_colour(folder, name):
    plain, xterm = screen(folder, SCREENS[name]), {"TERM": "xterm-256color"}
    assert "\x1b" not in plain
    for env in (xterm, {**xterm, "COLORTERM": "truecolor"}, {**xterm, "NO_COLOR": "1"}):
        text = screen(folder, SCREENS[name], **env)
        assert [line.rstrip() for line in STYLE.sub("", text).splitlines()] == plain.splitlines()
        assert not ("NO_COLOR" in env and COLOR.search(text))  # bold remains
    if name == "mistakes":
        assert screen(folder, SCREENS[name], **xterm).count("\x1b[1;31merror: \x1b[0m") == len(SCREENS[name])
