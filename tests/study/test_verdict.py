"""The verdict on simulated studies, whose true differences are known: errors, coverage, power, and planted faults.

`python -m tests.study.test_verdict` prints the table of docs/studies/statistics.md.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from soren_align.evaluate.stats.paired import Paired
from soren_align.study import stats as module
from soren_align.study.config import Retention, VerdictSection
from soren_align.study.stats import (
    Assumed,
    Design,
    Spread,
    estimate,
    minimum_detectable,
    minimum_detectable_loss,
    num_comparisons,
    seeds_part,
    verdict,
)
from tests.support.simulated_studies import LEADERBOARD, World, draw, measured

RULES = VerdictSection(seeds=[1, 2, 3], reference="adamw")
EQUAL = World()
ONE_COLUMN = replace(EQUAL, columns={"zoo_mc": EQUAL.columns["zoo_mc"]})
LOSS_ONLY = replace(EQUAL, columns={})
LARGE = World(columns=LEADERBOARD, seed_sd=0.02, cluster_correlation=0.1)


def retaining(margin, **changes):
    """RULES with a margin for zoo_mc."""
    return RULES.model_copy(update={"retention": Retention(columns=["zoo_mc"], margin=margin), **changes})


def studies(world, count, rules=RULES, seed=0):
    rng = np.random.default_rng(seed)
    return [verdict(rules, *draw(world, rng)) for _ in range(count)]


def is_false(world, d):
    true = world.true_difference(d.candidate, d.reference, d.measure)
    return (d.answer == "better" and true <= 1e-9) or (d.answer == "worse" and true >= -1e-9)


def share_with_false_answers(world, verdicts):
    return np.mean([any(is_false(world, d) for d in differences) for differences in verdicts])


def coverage(world, verdicts, measures):
    within = [d.low <= world.true_difference(d.candidate, d.reference, d.measure) <= d.high for differences in verdicts
              for d in differences if d.measure in measures]  # fmt: skip
    return np.mean(within)


def with_gain(world, column, to_base, factor):
    """The world in which soren gains `factor` times the minimum detectable effect on a column."""
    count, sizes = len(world.names), world.columns.get(column)
    design = Design(
        candidates=count, seeds=world.seeds, comparisons=num_comparisons(count, len(world.columns) + 1), power=0.8
    )
    if sizes is None:
        gain = minimum_detectable_loss(design, Assumed(loss_sd=world.loss_sd), to_base=to_base) / world.loss_sd
    else:
        assumed = measured(world, column, np.random.default_rng(1))
        clusters = [] if sizes.max() == 1 else sizes.tolist()
        gain = minimum_detectable(design, assumed, int(sizes.sum()), clusters, to_base=to_base) / 100
    return replace(world, gains={("soren", column): factor * gain})


def share_better(verdicts, column, to_base):
    reference = "base" if to_base else "adamw"
    answers = [d.answer for differences in verdicts for d in differences
               if (d.candidate, d.reference, d.measure) == ("soren", reference, column)]  # fmt: skip
    return np.mean([answer == "better" for answer in answers])


@pytest.fixture(scope="module")
def equals():
    """500 studies of four equal optimizers that learn nothing, at the quickstart's sizes and three seeds."""
    return studies(EQUAL, 500)


@pytest.fixture(scope="module")
def large():
    """30 studies at the leaderboard's sizes and clusters."""
    return studies(LARGE, 30)


@pytest.mark.rest
def test_better_is_said_anywhere_in_at_most_five_percent_of_studies_of_equals(equals):
    assert np.mean([any(d.answer == "better" for d in differences) for differences in equals]) <= 0.05
    assert share_with_false_answers(EQUAL, equals) <= 0.05


def test_optimizers_that_learn_equally_are_better_than_the_start_and_not_than_one_another():
    world = replace(ONE_COLUMN, skill=0.8, start=-0.8)
    verdicts = studies(world, 200)
    answers = [d.answer for each in verdicts for d in each if (d.reference, d.measure) == ("base", "zoo_mc")]
    assert np.mean([answer == "better" for answer in answers]) > 0.95
    assert share_with_false_answers(world, verdicts) <= 0.05


def test_intervals_cover_the_truth(equals):
    """93% to 97% where seeds matter; of columns, whose variance has three parts, up to 98%."""
    assert 0.93 <= coverage(EQUAL, equals, ["held-out"]) <= 0.97
    assert 0.95 <= coverage(EQUAL, equals, EQUAL.columns) <= 0.985


def test_clustered_questions_are_no_more_evidence_than_their_clusters(large):
    assert share_with_false_answers(LARGE, large) <= 0.14  # 5% and 2.3 standard errors of 30 studies
    assert coverage(LARGE, large, ["mmlu"]) >= 0.94
    assert coverage(LARGE, large, LARGE.columns) >= 0.94


@pytest.mark.parametrize("to_base", [True, False])
@pytest.mark.parametrize(
    ("world", "column", "count"), [(EQUAL, "zoo_mc", 60), (LOSS_ONLY, "held-out", 300), (LARGE, "mmlu", 10)]
)
def test_one_and_a_half_times_the_minimum_detectable_effect_is_found(world, column, count, to_base):
    verdicts = studies(with_gain(world, column, to_base, 1.5), count)
    assert share_better(verdicts, column, to_base) >= 0.8


@pytest.mark.parametrize("to_base", [True, False])
def test_the_minimum_detectable_effect_itself_is_found_with_the_declared_power(to_base):
    verdicts = studies(with_gain(LOSS_ONLY, "held-out", to_base, 1.0), 300)
    assert share_better(verdicts, "held-out", to_base) == pytest.approx(0.8, abs=0.07)  # 3 standard errors


def test_the_study_states_about_the_same_effect_as_was_planned(equals):
    stated = [d.detectable for differences in equals for d in differences if d.measure == "zoo_mc"]
    planned = [with_gain(EQUAL, "zoo_mc", to_base, 1.0).gains["soren", "zoo_mc"] for to_base in (True, False)]
    assert np.mean(stated) == pytest.approx(100 * np.mean(planned), rel=0.15)


@pytest.mark.parametrize("loss", [20.0, 0.0])
def test_retention_is_shown_below_the_margin_only(loss):
    world = replace(ONE_COLUMN, gains={(name, "zoo_mc"): -loss / 100 for name in EQUAL.names})
    verdicts = studies(world, 150, retaining(20.0))
    shown = [[d.retained for d in each if d.retained is not None] for each in verdicts]
    assert all(len(each) == 4 for each in shown)
    if loss:
        assert np.mean([any(each) for each in shown]) <= 0.05
    else:
        assert np.mean(shown) >= 0.5


def ignore_seeds(spread):
    return Spread(replace(spread.seeds, variance=0.0), spread.questions, spread.residual)


def ignore_questions(spread):
    return Spread(spread.seeds, replace(spread.questions, variance=0.0), spread.residual)


@pytest.mark.parametrize(("fault", "at_least"), [(ignore_seeds, 0.25), (ignore_questions, 0.1)])
def test_a_verdict_that_ignores_seeds_or_questions_is_caught(monkeypatch, fault, at_least):
    """The simulation can fail: without either part of the variance, equals differ far too often."""

    def faulty(columns, seeds):
        whole = estimate(columns, seeds)
        return replace(whole, spread=fault(whole.spread))

    monkeypatch.setattr(module, "estimate", faulty)
    world = replace(EQUAL, taste=0.6, seed_sd=0.2)
    assert share_with_false_answers(world, studies(world, 60)) >= at_least


def test_two_candidates_on_the_held_out_loss_are_a_paired_t_test():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(2, 5))
    part = seeds_part(scores, 0, 1)
    expected = stats.ttest_rel(scores[0], scores[1])
    found = module.Estimate(float(scores[0].mean() - scores[1].mean()), Spread(part))
    assert found.p() == pytest.approx(expected.pvalue, rel=1e-3)
    low, high = expected.confidence_interval(0.95)
    assert found.spread.margin(0.05) == pytest.approx((high - low) / 2)


def test_parts_of_the_variance_are_those_of_an_analysis_of_variance():
    """By explicit sums over seeds and questions."""
    d = np.random.default_rng(0).normal(size=(3, 40))
    found = estimate([Paired(d)], module.seeds_part(d.mean(axis=1)[None], 0, None)).spread
    mean, of_seeds, of_questions = d.mean(), d.mean(axis=1), d.mean(axis=0)
    residual = sum((d[s, q] - of_seeds[s] - of_questions[q] + mean) ** 2 for s in range(3) for q in range(40)) / 78
    assert found.seeds.variance == pytest.approx(((of_seeds - mean) ** 2).sum() / 2 / 3)
    assert found.questions.variance == pytest.approx(((of_questions - mean) ** 2).sum() / 39 / 40)
    assert found.residual.variance == pytest.approx(residual / 120)


def test_seeds_that_change_nothing_leave_the_interval_of_one_run():
    base, later = np.random.default_rng(0).random((2, 400)) < 0.5
    each = np.repeat((later * 1.0 - base)[None], 3, axis=0)
    found = estimate([Paired(each)], seeds_part(np.zeros((4, 3)), 0, None))
    won, lost, n = (each[0] == 1).sum(), (each[0] == -1).sum(), 402
    expected = 1.96 * np.sqrt(((won + lost + 2) / n - ((won - lost) / n) ** 2) / n)  # Bonett and Price
    assert found.spread.margin(0.05) == pytest.approx(expected, rel=0.01)


def drawn(**changes):
    world = replace(EQUAL, **changes)
    return draw(world, np.random.default_rng(0))


def test_a_candidate_with_a_diverged_run_has_no_differences():
    candidates, points, base = drawn()
    diverged = replace(candidates[2].verdict[1], status="diverged", metric=None)
    runs = [candidates[2].verdict[0], diverged, candidates[2].verdict[2]]
    found = verdict(RULES, [*candidates[:2], replace(candidates[2], verdict=runs), candidates[3]], points, base)
    assert {d.candidate for d in found} == {"adamw", "muon", "soren"}


def test_without_the_reference_or_the_start_the_other_comparisons_remain():
    candidates, points, base = drawn()
    assert {d.reference for d in verdict(RULES, candidates[1:], points, base)} == {"base"}
    assert {d.reference for d in verdict(RULES, candidates, points, None) if d.measure != "held-out"} == {"adamw"}


def test_columns_with_unlike_prompts_are_not_compared():
    candidates, points, base = drawn()
    base["zoo_mc"] = replace(base["zoo_mc"], prompts="1" * 64)
    points["muon"][2]["zoo_gen"] = replace(points["muon"][2]["zoo_gen"], prompts="1" * 64)
    found = {(d.reference, d.measure) for d in verdict(RULES, candidates, points, base)}
    assert {measure for reference, measure in found if reference == "adamw"} == {"zoo_mc", "preference", "held-out"}
    assert {measure for reference, measure in found if reference == "base"} == {"preference", "held-out"}


def test_the_correction_counts_all_answers_and_tests_of_retention():
    candidates, points, base = drawn()
    found = verdict(retaining(2.0), candidates, points, base, average=True)
    assert len(found) == 7 * 5
    assert num_comparisons(4, 5, 1) == 7 * 5 + 4
    least = min(found, key=lambda d: d.p)
    assert least.p_holm >= min(1.0, 35 * least.p)
    assert all(d.p <= d.p_holm for d in found)


def test_all_pairs_are_compared_once_each_in_one_larger_family():
    candidates, points, base = drawn()
    found = verdict(retaining(2.0, reference="all"), candidates, points, base, average=True)
    held_out = [(d.candidate, d.reference) for d in found if d.measure == "held-out" and d.reference != "base"]
    assert [set(pair) for pair in held_out] == [set(pair) for pair in itertools.combinations(EQUAL.names, 2)]
    assert len(found) == 10 * 5
    assert num_comparisons(4, 5, 1, all_pairs=True) == 10 * 5 + 4
    of_one = {(d.candidate, d.reference, d.measure): d for d in verdict(RULES, candidates, points, base)}
    for d in found:
        if one := of_one.get((d.candidate, d.reference, d.measure)):
            assert (d.value, d.low, d.high, d.p) == (one.value, one.low, one.high, one.p)
            assert d.p_holm >= one.p_holm
            assert d.detectable > one.detectable


def test_of_all_pairs_any_is_said_to_differ_in_at_most_five_percent_of_studies_of_equals():
    verdicts = studies(ONE_COLUMN, 200, RULES.model_copy(update={"reference": "all"}))
    assert share_with_false_answers(ONE_COLUMN, verdicts) <= 0.05


def test_no_spread_at_all_is_no_evidence():
    candidates, _, _ = drawn()
    same = [replace(c, verdict=[replace(run, metric=0.5 + k) for run in c.verdict]) for k, c in enumerate(candidates)]
    held_out = [d for d in verdict(RULES, same, {}, None) if d.measure == "held-out"]
    assert {d.answer for d in held_out} == {"not distinguishable"}


def report(title, world, count):
    verdicts = studies(world, count)
    shares = [share_with_false_answers(world, verdicts), coverage(world, verdicts, world.columns)]
    cells = [f"{100 * share:.1f}%" for share in (*shares, coverage(world, verdicts, ["held-out"]))]
    print("|", " | ".join([title, str(count), *cells]), "|", flush=True)


def report_power(title, world, column, count):
    for to_base in (True, False):
        shares = [
            f"{100 * share_better(studies(with_gain(world, column, to_base, factor), count), column, to_base):.0f}%"
            for factor in (1.0, 1.5)
        ]
        effect = with_gain(world, column, to_base, 1.0).gains["soren", column]
        effect = f"{effect:.1f} standard deviations" if column == "held-out" else f"{100 * effect:.1f} points"
        print(
            "|", " | ".join([f"{title}, {column}", "start" if to_base else "AdamW", effect, *shares]), "|", flush=True
        )


if __name__ == "__main__":
    for seed_sd, shared in itertools.product((0.03, 0.1, 0.3), (0.0, 0.5)):
        scores = f"{measured(replace(EQUAL, seed_sd=seed_sd), 'zoo_mc', np.random.default_rng(0), 200).seed_sd:.1f}"
        world = replace(EQUAL, seed_sd=seed_sd, seeds_shared=shared)
        report(f"quickstart, {scores} points over seeds, {shared:.0%} shared", world, 2000)
        report("the same, all much better than the start", replace(world, skill=0.8, start=-0.8), 1000)
    for spreads in ((2, 1, 1, 1), (3, 1, 1, 1), (1, 1, 1, 3)):
        report(f"spreads over seeds of {spreads}", replace(EQUAL, spreads=spreads), 2000)
    report("five seeds", replace(EQUAL, seeds=5), 1000)
    for seed_sd, correlation in itertools.product((0.01, 0.02, 0.05), (0.1, 0.3)):
        world = replace(LARGE, seed_sd=seed_sd, cluster_correlation=correlation)
        report(f"leaderboard, {seed_sd} over seeds, correlation {correlation}", world, 500)
        report("the same, all much better than the start", replace(world, skill=0.8, start=-0.8), 500)
    report_power("quickstart", EQUAL, "zoo_mc", 1000)
    report_power("quickstart", LOSS_ONLY, "held-out", 2000)
    for seed_sd, column in itertools.product((0.02, 0.05), ("mmlu", "arc_challenge")):
        report_power("leaderboard", replace(LARGE, seed_sd=seed_sd), column, 500)
