"""docs/studies/pretrained_by.py against plain computations."""

from math import sqrt

import pytest

from studies import pretrained_by


def run(points, seed=1, lr=0.01):
    """A finished run of study.json with these (held-out loss, retention loss)."""
    curve = [{"metric": metric, "retention_loss": retention} for metric, retention in points]
    return {"status": "finished", "seed": seed, "curve": curve, "parameters": {"optimizer.lr": lr}}


def candidate(name, rises, trials=()):
    """A candidate whose final runs gain 1.0 and then 2.0, and forget these amounts at the end, half of them before."""
    points = [[(5.0, 2.0), (4.0, 2.0 + rise / 2), (3.0, 2.0 + rise)] for rise in rises]
    return {"name": name, "verdict": [run(each, seed) for seed, each in enumerate(points)], "trials": list(trials)}


@pytest.fixture
def studies():
    ends = [run([(5.0, 2.0), (4.0, 2.1)], lr=0.001), run([(5.0, 2.0), (3.0, 2.5)], lr=0.01)]
    diverged = {"status": "diverged", "seed": 0, "curve": [], "parameters": {"optimizer.lr": 0.1}}
    after_adamw = [candidate("adamw", [0.1, 0.2, 0.3], [*ends, diverged]), candidate("muon", [0.4, 0.6, 0.5], ends)]
    short = candidate("muon", [0.2, 0.2, 0.4], ends)
    short["verdict"][1]["curve"][-1]["metric"] = 3.5  # its largest gain is 1.5
    return {
        "adamw": {"candidates": after_adamw},
        "muon": {"candidates": [candidate("adamw", [0.8, 1.0, 0.9], ends), short]},
    }


def test_a_rise_is_interpolated_where_the_gain_is_first_reached():
    points = pretrained_by.path(run([(5.0, 2.0), (4.0, 2.2), (3.0, 2.6), (4.5, 9.0)]))
    expected = [(0.0, 0.0), (1.0, 0.2), (2.0, 0.6), (0.5, 7.0)]
    assert all(point == pytest.approx(each) for point, each in zip(points, expected, strict=True))
    assert pretrained_by.rise_at(points, 1.5) == pytest.approx(0.4)
    assert pretrained_by.rise_at(points, 0.5) == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"a gain of 2.100 is not reached: the largest is 2.000"):
        pretrained_by.rise_at(points, 2.1)


def test_the_common_gain_is_that_of_the_run_that_gains_least(studies):
    assert pretrained_by.common_gain(studies) == pytest.approx(1.5)


def test_differences_are_of_equal_seeds_with_student_s_interval(studies):
    rows = [line.strip("| ").split(" | ") for line in pretrained_by.equal_gain_table(studies).splitlines()[2:]]
    assert [row[:2] for row in rows] == [["adamw", "adamw"], ["adamw", "muon"], ["muon", "adamw"], ["muon", "muon"]]
    differences = [0.75 * 0.3, 0.75 * 0.4, 0.75 * 0.2]  # at 1.5, three quarters of the rise
    mean = sum(differences) / 3
    half = 4.302652729911275 * sqrt(sum((each - mean) ** 2 for each in differences) / 2 / 3)  # t, 2 degrees of freedom
    assert rows[1][3] == f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"
    assert float(rows[1][4]) > half  # two tests, and a power of 80%
    assert len(rows[0]) == len(rows[3]) == 3  # the base's own optimizer


def test_the_search_is_interpolated_over_learning_rates(studies):
    table = pretrained_by.whole_schedules_table(studies)
    assert table.splitlines()[0] == "| rise at a gain of 2.000 | base of adamw | base of muon |"
    assert "+0.500" in table.splitlines()[2]
    search = pretrained_by.search_table(studies["adamw"]).splitlines()
    assert search[0] == "| fine-tuned by | 0.001 | 0.01 | 0.1 |"
    assert search[2] == "| adamw | 1.000 (+0.100) | best: 2.000 (+0.500) | - |"


def test_the_ends_and_the_bases_have_a_row_each(studies):
    assert len(pretrained_by.ends_table(studies).splitlines()) == 2 + 4
    assert pretrained_by.bases_table(studies).splitlines()[2] == "| adamw | 5.000 | 2.000 |"
