"""research/studies/maps.py prints its page's tables."""

from pathlib import Path

import pytest
from research.studies import maps

pytestmark = pytest.mark.rest
FOLDER = Path(maps.__file__).parent


@pytest.mark.parametrize("task", maps.SHARED_RATES)
def test_the_table_of_the_runs_is_that_of_the_page(task, capsys):
    maps.table(maps.Study(maps.RUNS), task, list(maps.COLUMNS))
    table = capsys.readouterr().out.strip()
    assert table.count("\n") == 9
    assert table in (FOLDER / "maps.md").read_text(encoding="utf-8")


def test_the_table_of_half_powers_is_that_of_the_page(capsys):
    maps.half_table(maps.Study(maps.RUNS), "source", list(maps.COLUMNS))
    table = capsys.readouterr().out.strip()
    assert table.count("\n") > 2
    assert table in (FOLDER / "maps.md").read_text(encoding="utf-8")
