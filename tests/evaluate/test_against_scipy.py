"""`stats`, `compare` and `plan` on 500 random tables against scipy's own tests and distributions."""

import numpy as np
import pytest
from scipy import stats
from soren_align.evaluate.stats.intervals import score_points
from soren_align.evaluate.stats.paired import ModelAnswers, Paired, holm
from soren_align.evaluate.stats.power import detectable, detectable_by, part_of
from soren_align.evaluate.stats.significance import compare
from soren_align.study.estimates import Assumed, Design, detectable_loss, estimate

pytestmark = pytest.mark.rest


def test_stats_on_200_tables_of_right_and_wrong_answers():
    """McNemar's exact test, Wilson's interval, Holm's correction (its definition, in Bonferroni steps)."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        n, columns = int(rng.integers(1, 400)), [f"t{i}" for i in range(rng.integers(1, 6))]
        a, b = ({c: (rng.random(n) < rng.uniform(0.02, 0.98)).astype(float) for c in columns} for _ in range(2))
        found = compare([("a", ModelAnswers({}, a)), ("b", ModelAnswers({}, b))], False)[1]
        p = []
        for c in columns:
            won, lost = int(((b[c] - a[c]) > 0).sum()), int(((b[c] - a[c]) < 0).sum())
            p.append(stats.binomtest(won, won + lost).pvalue if won + lost else 1.0)
            assert found[c]["p"] == pytest.approx(p[-1], rel=1e-12)
            assert found[c]["value"] == pytest.approx(100 * (b[c].mean() - a[c].mean()), abs=1e-10)
            score = score_points([b[c]])
            wilson = stats.binomtest(int(b[c].sum()), n).proportion_ci(method="wilson")
            assert (score["low"], score["high"]) == pytest.approx((100 * wilson.low, 100 * wilson.high), abs=1e-6)
        order = np.argsort(p)
        steps = np.maximum.accumulate([min(1.0, (len(p) - rank) * p[i]) for rank, i in enumerate(order)])
        assert [found[columns[i]]["p_holm"] for i in order] == pytest.approx([*steps])
        assert holm(p) == pytest.approx([found[c]["p_holm"] for c in columns])


def test_stats_on_100_tables_of_graded_answers():
    """The bootstrap of a mean is Student's t, within its Monte Carlo error and skewness."""
    rng = np.random.default_rng(1)
    for _ in range(100):
        n = int(rng.integers(40, 300))
        a, b = rng.beta(2, 2, n), rng.beta(2, rng.uniform(1.5, 2.5), n)
        found = compare([("a", ModelAnswers({}, {"t": a})), ("b", ModelAnswers({}, {"t": b}))], False)[1]["t"]
        student = stats.ttest_rel(b, a)
        interval = student.confidence_interval()
        width = 100 * (interval.high - interval.low)
        assert found["low"] == pytest.approx(100 * interval.low, abs=0.05 * width)
        assert found["high"] == pytest.approx(100 * interval.high, abs=0.05 * width)
        assert found["p"] == pytest.approx(student.pvalue, abs=0.03)


def test_compare_on_100_tables_of_seeds_that_decide_alone():
    """Student's paired t over seeds, and its two one-sided tests, where all examples change alike."""
    rng = np.random.default_rng(2)
    for _ in range(100):
        seeds = int(rng.integers(3, 12))
        d = rng.normal(rng.normal(0, 0.03), 0.02, seeds)
        found = estimate([Paired(np.repeat(d[:, None], 500, axis=1))])
        student = stats.ttest_1samp(d, 0.0)
        assert found.p() == pytest.approx(max(student.pvalue, 1e-12), rel=5e-3)
        assert found.spread.margin(0.05) == pytest.approx(student.confidence_interval().high - d.mean(), rel=1e-9)
        above = stats.ttest_1samp(d, -0.05, alternative="greater").pvalue
        below = stats.ttest_1samp(d, 0.05, alternative="less").pvalue
        assert found.p_within(-0.05, 0.05) == pytest.approx(max(above, below), rel=5e-3, abs=1e-11)


def test_compare_and_stats_on_50_tables_of_clusters():
    """With equal clusters, CR2's error is that of the clusters' means, with one degree less than their number."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        clusters, size = int(rng.integers(2, 40)), int(rng.integers(1, 9))
        each = rng.normal(size=(clusters, 1)) + rng.normal(size=(clusters, size))
        part = part_of(Paired(each.ravel(), np.repeat(np.arange(clusters), size)))
        student = stats.sem(each.mean(axis=1))
        assert (part.variance, part.degrees) == pytest.approx((student**2, clusters - 1))


def test_plan_on_50_designs_and_the_noncentral_t():
    """The planned effect is found with the promised power by Student's test over seeds."""
    rng = np.random.default_rng(4)
    for _ in range(50):
        seeds, num_tests = int(rng.integers(3, 12)), int(rng.integers(1, 60))
        power = float(rng.uniform(0.6, 0.95))
        sd = float(rng.uniform(0.001, 0.1))
        design = Design(seeds=seeds, num_tests=num_tests, power=power)
        error, quantile = sd * np.sqrt(2 / seeds), stats.t.isf(0.025 / num_tests, seeds - 1)
        effect = detectable_loss(design, Assumed(loss_sd=sd), None, to_base=False)
        # Two-sided tests whose wrong side has no power: the noncentral t's upper tail.
        assert stats.nct.sf(quantile, seeds - 1, effect / error) == pytest.approx(power, abs=0.015)
        exact = detectable(error, seeds - 1, quantile * error, power)
        assert stats.nct.sf(quantile, seeds - 1, exact / error) == pytest.approx(power, abs=1e-4)
        assert detectable_by(part_of(Paired(rng.normal(size=50))), num_tests) > 0
