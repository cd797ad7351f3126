"""docs/studies/maps.py prints its page's tables, chooses rates inside of the grid, and trains."""

import math
from pathlib import Path

import pytest

from studies import maps

FOLDER = Path(maps.__file__).parent


@pytest.mark.parametrize("task", maps.TASKS)
def test_the_table_of_the_runs_is_that_of_the_page(task, capsys):
    maps.table(maps.Study(FOLDER / "maps.jsonl"), task, list(maps.COLUMNS))
    table = capsys.readouterr().out.strip()
    assert table.count("\n") == 9
    assert table in (FOLDER / "maps.md").read_text(encoding="utf-8")


def test_the_table_of_half_powers_is_that_of_the_page(capsys):
    maps.half_table(maps.Study(FOLDER / "maps.jsonl"), "source", list(maps.COLUMNS))
    table = capsys.readouterr().out.strip()
    assert table.count("\n") > 2
    assert table in (FOLDER / "maps.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("best", [2**-9, 2**-6, 2**-3])
def test_the_grid_is_extended_until_the_best_rate_is_inside(best, tmp_path, monkeypatch):
    def task(settings, lr, seed):
        return abs(math.log2(lr / best)) + seed / 1e6, 0.0

    monkeypatch.setattr(maps, "TASKS", {"source": task})
    study = maps.Study(tmp_path / "runs.jsonl")
    assert study.best_rate("source", "exact", half=False) == best
    assert maps.Study(tmp_path / "runs.jsonl").best_measured("source", "exact", half=False) == best
    assert study.best_measured("source", "exact", half=True) is None


@pytest.mark.parametrize("best", [2**-8.5, 2**-6, 2**-3.5])
def test_half_powers_around_the_best_power_of_two_are_tried(best, tmp_path, monkeypatch):
    def task(settings, lr, seed):
        return abs(math.log2(lr / best) + 0.1) + seed / 1e6, 0.0

    monkeypatch.setattr(maps, "TASKS", {"source": task})
    study = maps.Study(tmp_path / "runs.jsonl")
    powers = study.best_rate("source", "exact", half=False)
    assert math.log2(powers).is_integer()
    assert study.best_rate("source", "exact", half=True) == pytest.approx(best, rel=1e-12)
    study = maps.Study(tmp_path / "runs.jsonl")
    assert study.best_measured("source", "exact", half=False) == powers
    assert study.best_measured("source", "exact", half=True) == pytest.approx(best, rel=1e-12)


@pytest.mark.rest
@pytest.mark.model
@pytest.mark.parametrize(("name", "vocabulary"), [("source", 256), ("quickstart", 121)])
def test_a_few_steps_of_each_task_are_better_than_guessing(name, vocabulary, monkeypatch):
    monkeypatch.setitem(maps.NUM_STEPS, name, 8)
    for loss in maps.TASKS[name](maps.COLUMNS["minimax 0.01"], 2**-6, 0):
        assert 0 < loss < math.log(vocabulary)
