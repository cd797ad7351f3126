"""The picture holds every score of the results where it belongs; how it looks was looked at."""

import pytest
from matplotlib.figure import Figure
from soren_align.core.figures import LIGHT
from soren_align.evaluate.report import tables
from tests.support.result_tables import make_results


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws results and returns the figure, as matplotlib holds it."""
    figures = []

    class Kept(Figure):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            figures.append(self)

    def draw(results):
        figures.clear()
        monkeypatch.setattr("matplotlib.figure.Figure", Kept)
        tables.draw(results, tmp_path / "scores.png")
        return figures[0]  # for a light page

    return draw


def dots(panel):
    """(x, y, filled) of every dot."""
    lines = [line for line in panel.lines if line.get_marker() == "o"]
    return [(line.get_xdata()[0], line.get_ydata()[0], line.get_markerfacecolor() != LIGHT.paper) for line in lines]


@pytest.mark.parametrize(
    ("num_columns", "num_rows", "num_published", "average"), [(3, 3, 0, False), (6, 5, 4, True), (1, 1, 0, False)]
)
def test_there_is_a_panel_a_column_and_a_dot_a_row_in_the_tables_order(
    drawn, num_columns, num_rows, num_published, average
):
    results = make_results(num_columns, num_rows, num_published, average)
    drawing = drawn(results)
    rows = results["rows"] + results["published"]
    panels = {panel.get_title(loc="left"): panel for panel in drawing.axes if panel.get_visible()}
    assert list(panels) == list(results["rows"][0]["scores"])
    for column, panel in panels.items():
        expected = [(row["scores"][column]["value"], y, y < num_rows) for y, row in enumerate(rows)]
        assert dots(panel) == expected
        arrows = [(text.xyann[0], text.xy) for text in panel.texts if text.arrow_patch]  # from the first row's score
        assert arrows == [(expected[0][0], (x, y)) for x, y, _ in expected[1:] if x != expected[0][0]]
        assert panel.get_xlim() == (0, 100)
        assert [text.get_text() for text in panel.texts if not text.arrow_patch] == [
            f"{value:.1f}" for value, *_ in expected
        ]
    names = [label.get_text() for label in drawing.axes[0].get_yticklabels()]
    published = [f"{row['name']} (published)" for row in results["published"]]
    assert names == [row["name"] for row in results["rows"]] + published
    low, high = drawing.axes[0].get_ylim()
    assert low > high  # the first row on top
    assert drawing.get_suptitle() == results["title"]


def test_an_interval_is_196_standard_errors_and_stays_within_a_hundred(drawn):
    results = make_results(2, 2, average=False)
    results["rows"][0]["scores"]["arc_challenge"] |= {"value": 50.0, "stderr": 1.0}
    results["rows"][1]["scores"]["arc_challenge"] |= {"value": 99.0, "stderr": 1.0}
    intervals = [list(line.get_xdata()) for line in drawn(results).axes[0].lines if line.get_marker() != "o"][:2]
    assert intervals == [pytest.approx([48.04, 51.96]), pytest.approx([97.04, 100])]
