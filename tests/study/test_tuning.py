"""What a search shows of its own uncertainty, against explicit sums, all resamples, and simulated searches."""

from dataclasses import replace
from itertools import product
from math import log2, sqrt
from statistics import fmean, pstdev

import numpy as np
import pytest
from soren_align.study.runs import select
from soren_align.study.study import Candidate, Run
from soren_align.study.tuning import RESAMPLES, metric_at, parabola, profile, resampled_selection, tuning

LOST = None


def search(metrics, *, higher=False, name="soren", **keys):
    """A candidate whose trial i has these metrics, one per seed, LOST of a diverged run.

    metrics: by learning rate. keys: of other parameters, a value per trial.
    """
    runs = []
    for number, (rate, each) in enumerate(metrics.items()):
        parameters = {"optimizer.lr": rate, "optimizer.aux_lr": rate}
        parameters |= {f"optimizer.{key}": values[number] for key, values in keys.items()}
        for seed, metric in enumerate(each if isinstance(each, list) else [each]):
            run = Run(name, "search", number, seed, f"search/{name}/{number:02}", parameters, "finished", metric=metric)
            runs.append(replace(run, status="diverged") if metric is LOST else run)
    return Candidate(name, {}, {}, runs, select(runs, higher_is_better=higher), {})


def test_a_metric_is_linear_between_trials_on_log_rate():
    along = {0.01: 3.0, 0.04: 1.0, 0.08: 2.0}
    assert metric_at(along, 0.02).metric == pytest.approx(2.0)
    assert metric_at(along, 0.0283).metric == pytest.approx(1.0 + 2.0 * log2(0.04 / 0.0283) / 2)
    assert metric_at(along, 0.08).metric == 2.0
    assert metric_at(along, 0.01).metric == 3.0
    for rate in (0.0099, 0.081):
        assert (metric_at(along, rate).metric, metric_at(along, rate).reason) == (None, "not tried")


def test_beside_a_lost_trial_there_is_no_metric():
    along = {0.01: 3.0, 0.04: 1.0, 0.16: LOST}
    assert [metric_at(along, rate).reason for rate in (0.04, 0.08, 0.16, 0.32)] == [
        "", "no result", "no result", "not tried",
    ]  # fmt: skip


def test_half_and_twice_of_the_best_rate_of_a_grid_are_its_neighbours():
    each = tuning(search({0.01: 1.3, 0.02: 1.0, 0.04: 1.5}), higher_is_better=False)
    assert (each.rate, each.metric, each.half.metric, each.twice.metric) == (0.02, 1.0, 1.3, 1.5)
    edge = tuning(search({0.01: 1.0, 0.02: 1.1, 0.04: 1.5}), higher_is_better=False)
    assert (edge.half.reason, edge.twice.metric, edge.optimum) == ("not tried", 1.1, None)


@pytest.mark.parametrize(
    ("metrics", "higher", "near"),
    [
        ({0.01: 1.0, 0.02: 1.0099, 0.04: 1.011, 0.08: LOST}, False, 2),
        ({0.01: 1.0, 0.02: 0.991, 0.04: 0.98, 0.08: LOST}, True, 2),
        ({0.01: -1.0, 0.02: -1.009, 0.04: -1.02}, True, 2),  # margins are negative where the rejected answer wins
        ({0.01: 2.0, 0.02: 2.0, 0.04: 2.0}, False, 3),
        ({0.01: LOST, 0.02: 2.0}, False, 1),
    ],
)
def test_trials_within_a_percent_of_the_best_are_counted(metrics, higher, near):
    each = tuning(search(metrics, higher=higher), higher_is_better=higher)
    assert (each.num_near, each.num_trials) == (near, len(metrics))


def test_one_trial_and_lost_trials_have_no_tuning():
    assert tuning(search({0.01: 1.0}), higher_is_better=False) is None
    assert tuning(search({0.01: LOST, 0.02: LOST}), higher_is_better=False) is None
    candidate = search({0.01: 1.0, 0.02: 2.0})
    waiting = [replace(run, status="waiting", metric=None) if run.number else run for run in candidate.trials]
    assert tuning(replace(candidate, trials=waiting), higher_is_better=False) is None


def test_a_profile_has_only_trials_with_the_selected_ones_other_settings():
    candidate = search({0.01: 1.3, 0.02: 1.0, 0.04: 1.5, 0.08: 0.9}, momentum=[0.95, 0.95, 0.95, 0.9])
    assert profile(candidate) == {0.08: 0.9}  # aux_lr is always lr, and is not another setting
    each = tuning(candidate, higher_is_better=False)
    assert (each.half, each.twice, each.optimum, each.num_near, each.num_trials) == (None, None, None, 1, 4)
    candidate = search({0.01: 1.3, 0.02: 1.0, 0.04: 1.5, 0.08: 1.1}, momentum=[0.95, 0.95, 0.95, 0.9])
    assert profile(candidate) == {0.01: 1.3, 0.02: 1.0, 0.04: 1.5}


def test_a_search_without_a_learning_rate_has_a_share_of_trials():
    runs = [
        Run("soren", "search", i, 0, "x", {"optimizer.map": word}, "finished", metric=metric)
        for i, (word, metric) in enumerate({"exact": 1.0, "sns": 1.005}.items())
    ]
    each = tuning(Candidate("soren", {}, {}, runs, 0, {}), higher_is_better=False)
    assert (each.rate, each.half, each.optimum, each.num_near) == (None, None, None, 2)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_interpolated_optimum_is_the_vertex_of_the_parabola(sign):
    # The map exact on this repository's source, docs/studies/maps.jsonl: rates 2^-7, 2^-6, 2^-5.
    metrics = [2.0722544342279434, 2.0562, 2.21545073390007]
    along = dict(zip((2**-7, 2**-6, 2**-5), (sign * metric for metric in metrics), strict=True))
    a, b, c = np.polyfit([-7, -6, -5], metrics, 2)
    optimum = parabola(along, 2**-6, higher_is_better=sign < 0)
    assert optimum.rate == pytest.approx(2 ** (-b / (2 * a)))
    assert optimum.gain == pytest.approx(metrics[1] - (c - b * b / (4 * a)))
    assert optimum.rate == pytest.approx(0.0118, abs=5e-5)


def test_no_parabola_ends_at_an_edge_or_crosses_a_lost_trial():
    def vertex(along, rate):
        return parabola(along, rate, higher_is_better=False)

    assert vertex({0.01: 1.0, 0.02: 2.0, 0.04: 3.0}, 0.01) is None
    assert vertex({0.01: 2.0, 0.02: 1.0, 0.04: LOST}, 0.02) is None
    assert vertex({0.01: 1.0, 0.02: 1.0, 0.04: 1.0}, 0.02) is None
    assert vertex({0.01: 1.1, 0.02: 1.0, 0.021: LOST, 0.04: 1.1}, 0.02) is None
    # A trial at nearly the same rate differs by noise, and would make the parabola steep.
    close = vertex({0.01: 1.1, 0.0199: 1.05, 0.02: 1.0, 0.0201: 1.05, 0.04: 1.1}, 0.02)
    assert close.rate == pytest.approx(0.02)
    assert close.gain == pytest.approx(0.0, abs=1e-12)


def all_resamples(metrics, best):
    """The share of all resamples of the seeds that select a trial, by its number. metrics: [trials][seeds]."""
    selected = []
    for seeds in product(range(len(metrics[0])), repeat=len(metrics[0])):
        means = {
            number: fmean(each[seed] for seed in seeds)
            for number, each in enumerate(metrics)
            if all(each[seed] is not LOST for seed in seeds)
        }
        if means:
            selected.append(best(means, key=means.get))
    return {number: selected.count(number) / len(selected) for number in set(selected)}


@pytest.mark.parametrize(("sign", "best"), [(1, min), (-1, max)])
def test_resampled_selections_are_those_of_all_resamples(sign, best):
    metrics = [[1.5, 1.1, 1.6], [1.2, 1.3, 1.1], [1.0, LOST, 1.0], [LOST, LOST, LOST]]
    metrics = [[metric and sign * metric for metric in each] for each in metrics]
    candidate = search({0.01 * (i + 1): each for i, each in enumerate(metrics)}, higher=sign < 0)
    selection = resampled_selection(candidate, higher_is_better=sign < 0)
    exact = all_resamples(metrics, best)
    assert exact == pytest.approx({0: 4 / 27, 1: 15 / 27, 2: 8 / 27})  # 2: of those without the second seed
    for number, share in exact.items():
        assert selection.shares[number] == pytest.approx(share, abs=4 * sqrt(share * (1 - share) / RESAMPLES))
    assert [*selection.shares] == sorted(selection.shares, key=selection.shares.get, reverse=True)
    means = {0: sign * 1.4, 1: sign * 1.2, 2: sign * 1.0}
    mean = sum(share * means[number] for number, share in selection.shares.items())
    variance = sum(share * (means[number] - mean) ** 2 for number, share in selection.shares.items())
    assert selection.variance == pytest.approx(variance)


def test_of_equal_trials_the_first_is_selected_again():
    candidate = search({0.01 * (i + 1): [1.1, 1.2, 1.3] for i in range(9)})
    assert resampled_selection(candidate, higher_is_better=False).shares == {0: 1.0}


def test_a_selection_is_not_resampled_with_two_seeds_or_without_results():
    two, three = search({0.01: [1.0, 1.1], 0.02: [1.1, 1.0]}), search({0.01: [1.0, 1.1, 1.2], 0.02: [1.1, 1.0, 1.2]})
    lost = search({0.01: [LOST] * 3, 0.02: [LOST] * 3}, name="lost")
    assert resampled_selection(two, higher_is_better=False) is None
    assert resampled_selection(lost, higher_is_better=False) is None
    assert resampled_selection(three, higher_is_better=False) is not None
    alone = search({0.01: [1.0, 1.1, 1.2]})
    assert resampled_selection(alone, higher_is_better=False).variance == 0.0


def simulated(curvature, num_seeds, *, repetitions=150, num_trials=6, noise=0.02, seed_sd=0.05):
    """(true sd of the selected setting's true metric, root mean square of its estimates) over simulated searches.

    The true metric is quadratic in the log rate, whose distance between trials is 1. A run adds the effect of its
    seed, which all trials share, and noise.
    """
    rng = np.random.default_rng(0)
    rates = 2.0 ** np.arange(-num_trials, 0)
    truth = noise * curvature * (np.arange(num_trials) - num_trials / 2 + 0.7) ** 2
    selected, variances = [], []
    for _ in range(repetitions):
        runs = 2 + truth[:, None] + seed_sd * rng.standard_normal(num_seeds)
        runs += noise * rng.standard_normal((num_trials, num_seeds))
        candidate = search(dict(zip(rates.tolist(), runs.tolist(), strict=True)))
        selected.append(float(truth[candidate.selected]))
        variances.append(resampled_selection(candidate, higher_is_better=False).variance)
    return pstdev(selected), sqrt(fmean(variances))


@pytest.mark.parametrize("num_seeds", [3, 5])
@pytest.mark.parametrize("curvature", [0.1, 0.3, 1.0])
def test_the_estimated_spread_of_the_selection_is_within_a_factor_of_two(curvature, num_seeds):
    """curvature: the rise of the true metric one trial beside the optimum, in units of the noise of a run."""
    truth, estimate = simulated(curvature, num_seeds)
    assert truth / 2 < estimate < 2 * truth


@pytest.mark.parametrize("num_seeds", [3, 5])
def test_with_equal_trials_the_estimate_is_below_the_noise_of_a_trial(num_seeds):
    truth, estimate = simulated(0.0, num_seeds)
    assert truth == 0
    assert 0 < estimate < 0.02 / sqrt(num_seeds)
