"""The verdict on simulated studies, whose true differences are known: errors, coverage, power, and planted faults.

tests/study/simulations.py has many more of them, for the tables of research/studies/statistics.md.
"""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from soren_align.evaluate.stats.paired import Paired
from soren_align.evaluate.stats.power import detectable, part_of
from soren_align.study import stats as module
from soren_align.study.config import Equivalence, Retention, VerdictSection
from soren_align.study.estimates import (
    Assumed,
    Design,
    Estimate,
    Part,
    Spread,
    detectable_loss,
    detectable_score,
    estimate,
)
from soren_align.study.stats import Answers, num_declared_tests, verdict
from soren_align.study.study import HELD_OUT
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
    sizes = world.columns.get(column)
    num_tests = num_declared_tests(RULES, len(world.names), [*world.columns, HELD_OUT])
    design = Design(seeds=world.seeds, num_tests=num_tests, power=0.8)
    if sizes is None:
        assumed = Assumed(loss_sd=world.loss_sd, example_sd=world.example_sd)
        gain = detectable_loss(design, assumed, world.examples, to_base=to_base) / world.loss_sd
    else:
        assumed = measured(world, column, np.random.default_rng(1))
        clusters = [] if sizes.max() == 1 else sizes.tolist()
        gain = detectable_score(design, assumed, int(sizes.sum()), clusters, to_base=to_base) / 100
    return replace(world, gains={("soren", column): factor * gain})


def share_better(verdicts, column, reference, candidate="soren"):
    wanted = (candidate, reference, column)
    answers = [d.answer for each in verdicts for d in each if (d.candidate, d.reference, d.measure) == wanted]
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
    world = replace(ONE_COLUMN, seeds=5, skill=0.8, start=-0.8)
    verdicts = studies(world, 200)
    answers = [d.answer for each in verdicts for d in each if (d.reference, d.measure) == ("base", "zoo_mc")]
    assert np.mean([answer == "better" for answer in answers]) > 0.95
    assert share_with_false_answers(world, verdicts) <= 0.05


@pytest.mark.rest
def test_intervals_cover_the_truth(equals):
    """95% or somewhat more, because each of the variance's parts has its own quantile."""
    assert 0.95 <= coverage(EQUAL, equals, ["held-out"]) <= 0.99
    assert 0.95 <= coverage(EQUAL, equals, EQUAL.columns) <= 0.99


@pytest.mark.rest
def test_clustered_questions_are_no_more_evidence_than_their_clusters(large):
    assert share_with_false_answers(LARGE, large) <= 0.14  # 5% and 2.3 standard errors of 30 studies
    assert coverage(LARGE, large, ["mmlu"]) >= 0.94
    assert coverage(LARGE, large, LARGE.columns) >= 0.94


@pytest.mark.parametrize("to_base", [True, False])
@pytest.mark.parametrize(
    ("world", "column", "count"), [(EQUAL, "zoo_mc", 60), (LOSS_ONLY, "held-out", 300), (LARGE, "mmlu", 10)]
)
def test_one_and_a_half_times_the_minimum_detectable_effect_is_found(world, column, count, to_base):
    world = replace(world, seeds=5)  # with three, no difference of the quickstart's columns would be large enough
    verdicts = studies(with_gain(world, column, to_base, 1.5), count)
    assert share_better(verdicts, column, "base" if to_base else "adamw") >= 0.8


@pytest.mark.parametrize("to_base", [True, False])
def test_the_minimum_detectable_effect_itself_is_found_with_the_declared_power(to_base):
    world = replace(LOSS_ONLY, seeds=5)
    verdicts = studies(with_gain(world, "held-out", to_base, 1.0), 300)
    share = share_better(verdicts, "held-out", "base" if to_base else "adamw")
    assert share == pytest.approx(0.8, abs=0.07)  # 3 standard errors


@pytest.mark.rest
def test_the_study_states_about_the_same_effect_as_was_planned():
    """Five seeds: the quantiles of three are so long that the mean over studies says little."""
    world = replace(EQUAL, seeds=5)
    stated = [d.detectable for differences in studies(world, 100) for d in differences if d.measure == "zoo_mc"]
    planned = [with_gain(world, "zoo_mc", to_base, 1.0).gains["soren", "zoo_mc"] for to_base in (True, False)]
    assert np.mean(stated) == pytest.approx(100 * np.mean(planned), rel=0.2)


@pytest.mark.parametrize("noise", [1, 3, 30])
def test_one_noisy_candidate_hides_no_difference_of_two_quiet_ones(noise):
    """Ten standard errors between two of four candidates, five seeds, 28 tests."""
    world = replace(EQUAL, seeds=5, spreads=(1, 1, 1, noise))
    error = np.sqrt(2 * world.loss_sd**2 / world.seeds + world.example_sd**2 / world.examples)
    world = replace(world, gains={("muon", HELD_OUT): 10 * error / world.loss_sd})
    assert share_better(studies(world, 60), HELD_OUT, "adamw", "muon") >= 0.9


@pytest.mark.rest
@pytest.mark.parametrize("spreads", [(1, 1, 1, 3), (1, 3, 10, 30)])
def test_unequal_spreads_make_no_wrong_answers(spreads):
    world = replace(LOSS_ONLY, spreads=spreads)
    assert share_with_false_answers(world, studies(world, 300)) <= 0.05


@pytest.mark.rest
@pytest.mark.parametrize(("examples", "example_sd"), [(100, 0.2), (240, 0.3)])
def test_differences_on_these_examples_are_no_answers_about_new_ones(examples, example_sd):
    """Of equal optimizers whose held-out losses differ by example: seeds alone would make 60% and 80% wrong."""
    world = replace(LOSS_ONLY, seeds=5, examples=examples, example_sd=example_sd, start_loss=3.0)
    assert share_with_false_answers(world, studies(world, 200)) <= 0.05


def declaring(held_out):
    return RULES.model_copy(update={"equivalence": Equivalence(held_out=held_out)})


@pytest.mark.rest
def test_a_difference_of_the_margin_is_called_equivalent_in_at_most_five_percent_of_studies():
    margin = 0.1
    world = replace(LOSS_ONLY, seeds=5, start_loss=3.0, gains={("soren", HELD_OUT): margin / LOSS_ONLY.loss_sd})
    found = [d for each in studies(world, 200, declaring(margin)) for d in each if d.is_equivalent is not None]
    assert len(found) == 3 * 200
    assert np.mean([d.is_equivalent for d in found if d.candidate == "soren"]) <= 0.05


@pytest.mark.rest
def test_equal_optimizers_are_equivalent_within_the_margin_that_was_planned():
    world = replace(LOSS_ONLY, seeds=5, start_loss=3.0)
    design = Design(seeds=5, num_tests=10, power=0.8)
    assumed = Assumed(loss_sd=world.loss_sd, example_sd=world.example_sd)
    margin = detectable_loss(design, assumed, world.examples, to_base=False, equivalence=True)
    answers = [d.answer for each in studies(world, 200, declaring(margin)) for d in each if d.reference == "adamw"]
    assert np.mean([answer == "equivalent" for answer in answers]) >= 0.75


def test_two_one_sided_tests_are_those_of_student():
    rng = np.random.default_rng(0)
    d = rng.normal(0.02, 0.05, size=8)
    found = Estimate(float(d.mean()), Spread(Part(float(d.var(ddof=1)) / 8, 7)))
    below = stats.ttest_1samp(d, 0.1, alternative="less").pvalue
    above = stats.ttest_1samp(d, -0.1, alternative="greater").pvalue
    assert found.p_within(-0.1, 0.1) == pytest.approx(max(below, above), rel=1e-2)
    assert found.p_within(-0.001, 0.001) > 0.5  # the estimate itself is outside


def test_the_number_of_looks_multiplies_p():
    candidates, answers = draw(replace(LOSS_ONLY, seeds=5), np.random.default_rng(0))
    first, third = (verdict(RULES, candidates, answers, look=look) for look in (1, 3))
    for a, b in zip(first, third, strict=True):
        assert (a.value, a.low, a.high, a.p) == (b.value, b.low, b.high, b.p)
        assert b.p_holm == pytest.approx(min(1.0, 3 * a.p_holm))
        assert b.detectable > a.detectable


@pytest.mark.rest
def test_whoever_stops_at_any_of_four_looks_is_wrong_in_at_most_the_sum_of_their_shares():
    """Each look has seeds of its own, as after an extension that selects other settings: the worst case."""
    rng = np.random.default_rng(0)
    world, looks = replace(LOSS_ONLY, example_sd=0.001), (1, 2, 3, 4)
    wrong = [
        [any(is_false(world, d) for d in verdict(RULES, *draw(world, rng), look=look)) for look in looks]
        for _ in range(250)
    ]
    assert np.mean(wrong, axis=0)[-1] <= 0.05
    assert np.mean(np.any(wrong, axis=1)) <= sum(0.05 / look for look in looks)  # 10%


@pytest.mark.parametrize("loss", [20.0, 0.0])
def test_retention_is_shown_below_the_margin_only(loss):
    world = replace(ONE_COLUMN, seeds=5, gains={(name, "zoo_mc"): -loss / 100 for name in EQUAL.names})
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

    def faulty(measures):
        whole = estimate(measures)
        return replace(whole, spread=fault(whole.spread))

    monkeypatch.setattr(module, "estimate", faulty)
    world = replace(EQUAL, seeds=5, taste=0.6, seed_sd=0.2, example_sd=0.3)
    assert share_with_false_answers(world, studies(world, 60)) >= at_least


def test_the_part_of_the_seeds_is_that_of_a_paired_t_test():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5))
    part = estimate([Paired(np.repeat((a - b)[:, None], 50, axis=1))]).spread.seeds
    expected = stats.ttest_rel(a, b)
    found = Estimate(float((a - b).mean()), Spread(part))
    assert found.p() == pytest.approx(expected.pvalue, rel=1e-3)
    low, high = expected.confidence_interval(0.95)
    assert found.spread.margin(0.05) == pytest.approx((high - low) / 2)


def test_parts_of_the_variance_are_those_of_an_analysis_of_variance():
    """By explicit sums over seeds and questions."""
    d = np.random.default_rng(0).normal(size=(3, 40))
    found = estimate([Paired(d)]).spread
    mean, of_seeds, of_questions = d.mean(), d.mean(axis=1), d.mean(axis=0)
    residual = sum((d[s, q] - of_seeds[s] - of_questions[q] + mean) ** 2 for s in range(3) for q in range(40)) / 78
    assert found.seeds.variance == pytest.approx(((of_seeds - mean) ** 2).sum() / 2 / 3)
    assert found.questions.variance == pytest.approx(((of_questions - mean) ** 2).sum() / 39 / 40)
    assert found.residual.variance == pytest.approx(residual / 120)


def test_seeds_that_change_nothing_leave_the_interval_of_one_run():
    base, later = np.random.default_rng(0).random((2, 400)) < 0.5
    each = np.repeat((later * 1.0 - base)[None], 3, axis=0)
    found = estimate([Paired(each)])
    won, lost, n = (each[0] == 1).sum(), (each[0] == -1).sum(), 402
    expected = 1.96 * np.sqrt(((won + lost + 2) / n - ((won - lost) / n) ** 2) / n)  # Bonett and Price
    assert found.spread.margin(0.05) == pytest.approx(expected, rel=0.01)
    assert found.spread.seed_share == 0


def drawn(**changes):
    world = replace(EQUAL, **changes)
    return draw(world, np.random.default_rng(0))


def test_a_candidate_with_a_diverged_run_has_no_differences_and_lowers_no_bar():
    candidates, answers = drawn()
    diverged = replace(candidates[2].verdict[1], status="diverged", metric=None)
    runs = [candidates[2].verdict[0], diverged, candidates[2].verdict[2]]
    found = verdict(RULES, [*candidates[:2], replace(candidates[2], verdict=runs), candidates[3]], answers)
    assert {d.candidate for d in found} == {"adamw", "muon", "soren"}
    least = min(found, key=lambda d: d.p)
    assert least.p_holm == pytest.approx(min(1.0, 28 * least.p))  # four candidates' tests


def test_without_the_reference_or_the_start_the_other_comparisons_remain():
    candidates, answers = drawn()
    assert {d.reference for d in verdict(RULES, candidates[1:], answers)} == {"base"}
    no_starts = Answers(answers.runs, {name: [{}] * 3 for name in answers.runs})
    assert {d.reference for d in verdict(RULES, candidates, no_starts)} == {"adamw"}


def test_columns_with_unlike_prompts_are_not_compared():
    candidates, answers = drawn()
    for start in {id(each): each for each in answers.starts["soren"]}.values():
        start["zoo_mc"] = replace(start["zoo_mc"], prompts="1" * 64)
    answers.runs["muon"][2]["zoo_gen"] = replace(answers.runs["muon"][2]["zoo_gen"], prompts="1" * 64)
    found = {(d.reference, d.measure) for d in verdict(RULES, candidates, answers)}
    assert {measure for reference, measure in found if reference == "adamw"} == {"zoo_mc", "preference", "held-out"}
    assert {measure for reference, measure in found if reference == "base"} == {"preference", "held-out"}


def test_the_correction_counts_all_answers_and_tests_of_retention():
    candidates, answers = drawn()
    found = verdict(retaining(2.0), candidates, answers, average=True)
    assert len(found) == 7 * 5
    measures = {d.measure for d in found}
    assert num_declared_tests(retaining(2.0), 4, measures) == 7 * 5 + 4
    margins = {"equivalence": Equivalence(held_out=0.1, benchmarks=1.0)}
    assert num_declared_tests(retaining(2.0, **margins), 4, measures) == 7 * 5 + 4 + 3 * 5
    margins = {"equivalence": Equivalence(held_out=0.1)}
    assert num_declared_tests(retaining(2.0, **margins), 4, measures) == 7 * 5 + 4 + 3 * 1
    least = min(found, key=lambda d: d.p)
    assert least.p_holm >= min(1.0, 35 * least.p)
    assert all(d.p <= d.p_holm for d in found)


def test_all_pairs_are_compared_once_each_in_one_larger_family():
    candidates, answers = drawn()
    found = verdict(retaining(2.0, reference="all"), candidates, answers, average=True)
    held_out = [(d.candidate, d.reference) for d in found if d.measure == "held-out" and d.reference != "base"]
    assert [set(pair) for pair in held_out] == [set(pair) for pair in itertools.combinations(EQUAL.names, 2)]
    assert len(found) == 10 * 5
    measures = {d.measure for d in found}
    assert num_declared_tests(retaining(2.0, reference="all"), 4, measures) == 10 * 5 + 4
    of_one = {(d.candidate, d.reference, d.measure): d for d in verdict(RULES, candidates, answers)}
    for d in found:
        if one := of_one.get((d.candidate, d.reference, d.measure)):
            assert (d.value, d.low, d.high, d.p) == (one.value, one.low, one.high, one.p)
            assert d.p_holm >= one.p_holm
            assert d.detectable > one.detectable


@pytest.mark.rest
def test_of_all_pairs_any_is_said_to_differ_in_at_most_five_percent_of_studies_of_equals():
    verdicts = studies(ONE_COLUMN, 200, RULES.model_copy(update={"reference": "all"}))
    assert share_with_false_answers(ONE_COLUMN, verdicts) <= 0.05


def test_no_spread_at_all_is_no_evidence():
    candidates, answers = drawn()
    for k, runs in enumerate(answers.runs.values()):
        for run in runs:
            run[HELD_OUT] = replace(run[HELD_OUT], each=np.full(240, 0.5 + 0.3 * k))
    for start in {id(each): each for each in answers.starts["soren"]}.values():
        start[HELD_OUT] = replace(start[HELD_OUT], each=np.full(240, 9.5))
    held_out = [d for d in verdict(RULES, candidates, answers) if d.measure == HELD_OUT]
    assert {d.answer for d in held_out} == {"not distinguishable"}
    assert {d.detectable for d in held_out} == {None}


def test_answers_of_unlike_lengths_are_worth_fewer_examples():
    """Lengths of 12 answers with sigma 1.5: Student's t with 11 degrees of freedom covers 82% of true means."""
    rng, covered, before = np.random.default_rng(0), [], []
    for _ in range(1500):
        weights, x = rng.lognormal(sigma=1.5, size=12), rng.normal(size=12)
        mean = np.average(x, weights=weights)
        scaled = mean + (x - mean) * weights / weights.mean()  # as `read_held_out` does
        for known, into in ((weights, covered), (None, before)):
            part = part_of(Paired(scaled, weights=known))
            into.append(mean**2 <= part.at(0.05))
    assert np.mean(covered) >= 0.93
    assert np.mean(before) <= 0.85
    # Equal weights are none, and an example that is its own cluster is no cluster.
    x = rng.normal(size=30)
    plain, equal = part_of(Paired(x)), part_of(Paired(x, weights=np.full(30, 7.0)))
    clustered = part_of(Paired(x, np.arange(30), np.full(30, 2.0)))
    for part in (equal, clustered):
        assert (part.variance, part.degrees) == pytest.approx((plain.variance, plain.degrees))


def test_one_answer_with_nearly_all_tokens_decides_nothing():
    world = replace(LOSS_ONLY, seeds=5, examples=12, start_loss=3.0)
    candidates, answers = draw(world, np.random.default_rng(0))
    weights = np.array([1e5, *[1.0] * 11])
    for points in [*itertools.chain(*answers.runs.values()), *answers.starts["soren"][:1]]:
        points[HELD_OUT] = replace(points[HELD_OUT], weights=weights)
    found = [d for d in verdict(RULES, candidates, answers) if d.measure == HELD_OUT]
    assert {d.answer for d in found} == {"not distinguishable"}


def test_a_difference_that_a_finer_search_may_explain_is_none():
    """Ten standard errors between two optimizers, which the reference might gain between its learning rates."""
    world = replace(LOSS_ONLY, seeds=5, example_sd=0.001, start_loss=3.0, gains={("soren", HELD_OUT): 10.0})
    candidates, answers = draw(world, np.random.default_rng(0))

    def soren(adamw, own=0.0):
        gains = {"adamw": adamw, "soren": own}
        known = [replace(c, finer=gains.get(c.name, 0.0)) for c in candidates]
        found = verdict(declaring(0.2), known, answers)
        return next(d for d in found if (d.candidate, d.reference) == ("soren", "adamw"))

    plain = soren(0.0)
    assert (plain.answer, plain.is_equivalent) == ("better", True)
    for gain in (0.01, 0.05):
        widened = soren(gain)
        assert (widened.low, widened.high) == pytest.approx((plain.low - gain, plain.high))
        assert widened.finer == gain
        assert widened.detectable == pytest.approx(plain.detectable + gain)
    assert soren(0.05).p_holm > soren(0.01).p_holm > plain.p_holm
    assert soren(0.12).answer != "better"
    assert soren(0.0, own=0.12).answer == "better"  # its own better rate can only widen the lead
    assert soren(0.0, own=0.12).is_equivalent is False  # but then out of the margin


def test_a_margin_of_a_million_errors_has_its_detectable_difference_at_once():
    """scipy's search for it takes hours; both forms agree where they meet."""
    for degrees in (1.0, 1.5, 4.0):
        below, above = (detectable(1.0, degrees, margin, 0.8) / margin for margin in (999.0, 1001.0))
        assert below == pytest.approx(above, rel=1e-3)
    start = time.perf_counter()
    assert detectable(1.0, 4.0, 1e8, 0.8) > 1e8
    assert detectable(1.0, 0.002, 1e30, 0.8) >= 1e30
    assert time.perf_counter() - start < 1
