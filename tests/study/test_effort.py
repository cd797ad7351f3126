"""The report's tables of tuning and of time to the reference's final metric: numbers by hand, and no empty tables."""

from dataclasses import replace

import pytest
from soren_align.core.text import Table
from soren_align.study.report.blocks import Items, Paragraph
from soren_align.study.report.curves import first_reach
from soren_align.study.report.effort import Time, target_blocks, target_times, tuning_blocks
from soren_align.study.study import Candidate, Point, Run, Study
from tests.support.report_study import make_study


def run(name, seed, metrics, *, status="finished", every=10, load=None):
    """A run of the verdict with these metrics at steps 0, 10, ...; 0.5 s a step."""
    curve = [Point(i * every, seconds=i * every / 2, metric=metric) for i, metric in enumerate(metrics)]
    return Run(name, "verdict", seed - 1, seed, f"verdict/{name}/{seed}", {}, status, metric=metrics[-1], curve=curve,
               load=load)  # fmt: skip


def candidate(name, *runs):
    return Candidate(name, {}, {}, [], None, {}, [*runs])


def study(*candidates, reference="adamw", higher=False):
    return Study("s", {"verdict": {"reference": reference}}, higher, [*candidates], None)


@pytest.mark.parametrize(("sign", "higher"), [(1, False), (-1, True)])
def test_a_target_is_reached_on_the_line_between_two_evaluations(sign, higher):
    falling = run("soren", 1, [sign * metric for metric in (4.0, 3.0, 1.0, 2.0, 0.0)])
    assert first_reach(falling, sign * 2.5, higher) == (pytest.approx(12.5), pytest.approx(6.25))
    assert first_reach(falling, sign * 1.0, higher) == (20, 10)
    assert first_reach(falling, sign * 0.5, higher) == (pytest.approx(37.5), pytest.approx(18.75))  # not at step 20
    assert first_reach(falling, sign * 4.0, higher) == (0, 0)
    assert first_reach(falling, sign * -0.1, higher) is None


def test_evaluations_without_a_metric_are_left_out():
    gap = run("soren", 1, [4.0, None, 2.0])
    assert first_reach(gap, 3.0, False) == (10, 5)
    untimed = replace(gap, curve=[replace(point, seconds=None) for point in gap.curve])
    assert first_reach(untimed, 3.0, False) == (10, None)


def test_times_are_paired_by_seed_with_the_references_own():
    adamw = candidate("adamw", run("adamw", 1, [4.0, 3.0, 2.0]), run("adamw", 2, [4.0, 1.0, 0.9, 1.0]))
    soren = candidate("soren", run("soren", 2, [4.0, 2.0, 0.0]), run("soren", 1, [4.0, 2.5, 2.5, 2.1, 2.2]),
                      run("soren", 3, [4.0, 0.0]))  # fmt: skip
    times = target_times(soren, adamw, higher_is_better=False)
    # Seed 2: adamw first had its final 1.0 at step 10. Seed 1 ends above 2.0. Seed 3 has no run of adamw.
    assert times.steps == [Time(False, 15.0), Time(True, 40.0)]
    assert times.step_shares == [Time(False, 1.5), Time(True, 2.0)]
    assert times.seconds == [Time(False, 7.5), Time(True, 20.0)]
    assert times.second_shares == [Time(False, 1.5), Time(True, 2.0)]


def test_the_target_is_the_end_of_the_references_curve():
    """A final run's metric is a mean with other weights, which its curve need not reach."""
    adamw = run("adamw", 1, [4.0, 3.0, 2.0])
    soren = candidate("soren", run("soren", 1, [4.0, 2.0, 0.0]))
    for metric in (1.9, 2.1):
        times = target_times(soren, candidate("adamw", replace(adamw, metric=metric)), higher_is_better=False)
        assert times.steps == [Time(False, 10)]
        assert times.step_shares == [Time(False, 0.5)]


def test_a_reference_that_started_with_its_final_metric_is_no_target():
    worse = candidate("adamw", run("adamw", 1, [2.0, 3.0]))
    assert target_times(candidate("soren", run("soren", 1, [2.0, 1.0])), worse, higher_is_better=False).steps == []
    assert target_blocks(study(worse, candidate("soren", run("soren", 1, [2.0, 1.0])))) == []


def test_a_diverged_run_counts_as_one_that_never_reaches_it():
    adamw = candidate("adamw", run("adamw", 1, [4.0, 3.0, 2.0]))
    diverged = candidate("soren", run("soren", 1, [4.0, float("nan")], status="diverged"))
    assert target_times(diverged, adamw, higher_is_better=False).steps == [Time(True, 20)]
    failed = candidate("soren", run("soren", 1, [4.0, 1.0], status="failed"))
    assert target_times(failed, adamw, higher_is_better=False).steps == []


def blocks_of(*curves, **changes):
    """The blocks of a study of adamw, which ends with 2.0 after 40 steps, and soren with these metrics by seed."""
    adamw = candidate("adamw", *(run("adamw", seed, [4.0, 3.5, 3.0, 2.5, 2.0]) for seed in range(len(curves))))
    soren = candidate("soren", *(run("soren", seed, metrics) for seed, metrics in enumerate(curves)))
    return target_blocks(replace(study(adamw, soren), **changes))


def test_the_statement_has_the_median_share_and_its_range():
    items, caveat, table, _ = blocks_of([4, 3, 2, 1, 0], [4, 2, 1, 1, 1], [4, 3, 3, 2, 1])
    (item,) = items.items
    assert item.lead + item.text == (
        "soren first reached adamw's final held-out loss at step 20 of 40; adamw's own runs first reached their final "
        "value at step 40 (medians over 3 seeds). With equal seeds, soren needed 50% of the steps that adamw needed "
        "for this value (median; smallest 25%, largest 75%)."
    )
    assert "curves of longer runs" in caveat.text
    assert table.rows == [
        ["adamw", "3 of 3 seeds", "40", "100%", "20.0", "100%"],
        ["soren", "3 of 3 seeds", "20 (10 to 30)", "50% (25% to 75%)", "10.0 (5.0 to 15.0)", "50% (25% to 75%)"],
    ]


def test_seeds_that_do_not_reach_the_target_are_censored():
    items, _, table, _ = blocks_of([4, 3, 2, 1, 0], [4, 3, 3, 3, 3], [4, 3, 3, 2, 1])
    assert items.items[0].text == (
        "; adamw's own runs first reached their final value at step 40 (medians over 3 seeds). With equal seeds, soren "
        "needed 75% of the steps that adamw needed for this value (median; smallest 50%, largest > 100%)."
    )
    assert table.rows[1][1:4] == ["2 of 3 seeds", "30 (20 to > 40)", "75% (50% to > 100%)"]
    items, _, table, _ = blocks_of([4, 3, 2, 1, 0], [4, 3, 3, 3, 3])
    assert items.items[0].lead + items.items[0].text == "soren reached adamw's final held-out loss with 1 of 2 seeds."
    assert table.rows[1][1:3] == ["1 of 2 seeds", "> 30 (20 to > 40)"]  # the median of 20 and more than 40
    _, _, table, _ = blocks_of([4, 3, 3, 3, 3])
    assert table.rows[1][1:4] == ["0 of 1 seed", "> 40", "> 100%"]


def test_seconds_of_unequally_loaded_cpus_are_not_shown():
    for loads, shown in (((2.0, 2.4), True), ((2.0, 2.6), False)):
        pair = [candidate(f"{load}", run(f"{load}", 1, [4.0, 2.0], load=load)) for load in loads]
        _, _, table, note = target_blocks(study(*pair))
        assert ("seconds" in table.head) is shown
        assert ("CPU's load differed" in note.text) is not shown


def test_there_is_no_table_where_nothing_can_be_compared():
    adamw = candidate("adamw", run("adamw", 1, [4.0, 2.0]))
    soren = candidate("soren", run("soren", 1, [4.0, 1.0]))
    assert len(target_blocks(study(adamw, soren))) == 4
    assert len(target_blocks(study(adamw, soren, reference="all"))) == 4  # to the first candidate's
    assert target_blocks(replace(study(adamw, soren), problems=["other batches"])) == []
    assert (
        target_blocks(study(adamw)) == target_blocks(study(adamw, candidate("soren"))) == target_blocks(study()) == []
    )
    assert tuning_blocks(study(adamw, soren)) == tuning_blocks(study()) == []


def search(name, metrics, selected, *, keys=("optimizer.lr",), num_seeds=1):
    runs = [
        Run(name, "search", i, seed, "x", dict.fromkeys(keys, rate), "finished" if metric else "diverged",
            metric=metric + (0.2 * seed * (i == selected) if metric else 0) if metric else None)
        for i, (rate, metric) in enumerate(metrics.items()) for seed in range(num_seeds)
    ]  # fmt: skip
    return Candidate(name, {}, {}, runs, selected, {})


def test_a_table_of_tuning_has_a_row_for_each_candidate_and_no_empty_columns():
    adamw = search("adamw", {0.01: 1.2, 0.02: 1.0, 0.04: 1.2, 0.08: None}, 1)
    soren = replace(search("soren", {0.01: 1.2, 0.02: 1.1, 0.04: 1.0, 0.08: None}, 2), at_edge={"optimizer.lr": "high"})
    table, note = tuning_blocks(study(adamw, soren))
    assert table.head == ["", "selected optimizer.lr", "at an edge", "held-out loss", "at half", "at twice",
                          "interpolated optimum", "trials within 1%"]  # fmt: skip
    assert table.rows == [
        ["adamw", "0.02", "no", "1.000", "1.200", "1.200", "0.02, gain 0.000", "1 of 4"],
        ["soren", "0.04", "high", "1.000", "1.100", "no result", "-", "1 of 4"],
    ]
    assert "The search has 1 seed; 3 or more seeds would show how the selection varies." in note.text
    words = [search(name, {"exact": 1.0, "sns": 1.005}, 0, keys=("optimizer.map",)) for name in ("a", "b")]
    table, note = tuning_blocks(study(*words))
    assert table.head == ["", "held-out loss", "trials within 1%"]
    assert "interpolated" not in note.text


def test_selections_with_resampled_seeds_are_shown_with_their_rates():
    # The second trial has 1.0, 1.2 and 1.4 at its seeds: in 10 of 27 resamples its mean is above 1.25.
    soren = search("soren", {0.01: 1.25, 0.02: 1.0}, 1, num_seeds=3)
    table, note = tuning_blocks(study(soren))
    first, second = table.rows[0][table.head.index("selected again")].split("\n")
    assert first.startswith("0.02 in 6")
    assert second.startswith("0.01 in 3")
    assert float(table.rows[0][-1]) == pytest.approx(0.05 * (10 * 17) ** 0.5 / 27, abs=1e-3)
    assert "show how the selection varies" not in note.text


def test_the_report_has_both_tables():
    made = make_study(num_trials=8)
    (tuned, _), (statements, caveat, times, _) = tuning_blocks(made), target_blocks(made)
    assert [row[0] for row in tuned.rows] == [row[0] for row in times.rows] == ["adamw", "muon", "htmuon", "soren"]
    assert isinstance(statements, Items)
    assert isinstance(caveat, Paragraph)
    assert isinstance(tuned, Table)
