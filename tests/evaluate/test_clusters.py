"""Questions of one cluster change together: intervals and p-values that count clusters instead of questions."""

from dataclasses import replace
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import statsmodels.api as sm
from scipy.stats import binomtest
from soren_align.core.errors import UserError
from soren_align.evaluate.run.harness import ModelResults
from soren_align.evaluate.stats.intervals import score_points
from soren_align.evaluate.stats.scores import cluster_labels
from soren_align.evaluate.stats.significance import Paired, _difference, compare
from soren_align.evaluate.suite.suites import SuiteTask

# The numbers of questions of MMLU's 57 subjects.
# fmt: off
MMLU = np.array([
    100, 135, 152, 100, 265, 144, 100, 100, 100, 173, 102, 100, 235, 114, 145, 378, 126, 100, 310, 203, 100,
    165, 198, 193, 390, 270, 238, 151, 545, 216, 204, 237, 223, 131, 121, 108, 163, 112, 103, 234, 100, 783,
    346, 895, 306, 311, 324, 282, 1534, 272, 612, 110, 245, 201, 100, 166, 171,
])
# fmt: on
SIZES = {"mmlu": MMLU, "20 of 30": np.full(20, 30), "300 of 1 to 8": np.random.default_rng(1).integers(1, 9, 300)}


def results(points, labels=None):
    prompts = {"x": [(str(i), "same") for i in range(len(points))]}
    clusters = {} if labels is None else {"x": [str(label) for label in labels]}
    return ModelResults(settings={}, points={"x": list(points)}, prompt_hashes=prompts, clusters=clusters)


def difference(each, labels=None, average=False):
    """Of two models whose points differ by `each`."""
    rows = [("base", results([0.0] * len(each), labels)), ("SFT", results(each, labels))]
    return compare(rows, average)[1]["average" if average else "x"]


def changes(rng, sizes, correlation, mean=0.0):
    """Right and wrong answers of two models, and their clusters; `correlation`: of two questions of one cluster."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    shared = rng.normal(size=len(sizes))[labels] * np.sqrt(correlation)
    z = mean + shared + rng.normal(size=len(labels)) * np.sqrt(1 - correlation)
    return np.where(z > 1, 1.0, np.where(z < -1, -1.0, 0.0)), labels


def coverage(sizes, correlation, num_tables, seed=0):
    """Shares of the intervals, with and without clusters, that cover the true difference, 0; and of p < 0.05."""
    rng = np.random.default_rng(seed)
    pairs = [changes(rng, sizes, correlation) for _ in range(num_tables)]
    found = [(_difference([Paired(each, labels)]), _difference([Paired(each)])) for each, labels in pairs]
    covers = [[d["low"] <= 0 <= d["high"] for d in pair] for pair in found]
    return *np.mean(covers, axis=0), np.mean([pair[0]["p"] < 0.05 for pair in found])


def score_coverage(sizes, correlation, share, num_tables, seed=0):
    """Shares of the scores' intervals, with and without clusters, that cover the true score."""
    rng, labels = np.random.default_rng(seed), np.repeat(np.arange(len(sizes)), sizes)
    limit, covers = NormalDist().inv_cdf(share), []
    for _ in range(num_tables):
        shared = rng.normal(size=len(sizes))[labels] * np.sqrt(correlation)
        z = shared + rng.normal(size=len(labels)) * np.sqrt(1 - correlation)
        points = (z < limit).astype(float).tolist()
        scores = [score_points([points], labels), score_points([points])]
        covers.append([score["low"] <= 100 * share <= score["high"] for score in scores])
    return np.mean(covers, axis=0)


@pytest.mark.rest
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("share", "least"), [(0.5, 0.92), (0.9, 0.90)])
def test_intervals_of_scores_cover_the_truth_at_a_correlation_of_one_half(name, share, least):
    """See docs/evaluation.md (`python -m tests.evaluate.test_clusters`): at 90% the clusters' sums are skewed."""
    clustered, independent = score_coverage(SIZES[name], 0.5, share, 400)
    assert least <= clustered <= 0.98
    assert independent < 0.85


@pytest.mark.parametrize("name", SIZES)
def test_intervals_of_scores_know_clusters_as_intervals_of_differences_do(name):
    """Half the width of the interval is Student's quantile times the standard error, up to Wilson's correction."""
    labels = np.repeat(np.arange(len(SIZES[name])), SIZES[name])
    points, _ = changes(np.random.default_rng(3), SIZES[name], 0.5, mean=0.5)
    points = (points > 0).astype(float)
    score, d = score_points([points.tolist()], labels), difference(points, labels)
    sums = np.bincount(labels, points - points.mean())
    error = np.sqrt((sums**2 / (1 - SIZES[name] / len(labels))).sum()) / len(labels)  # CR2, written anew
    assert score["stderr"] == pytest.approx(100 * error, rel=1e-9)
    assert score["high"] - score["low"] == pytest.approx(d["high"] - d["low"], rel=0.12)


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_a_score_of_none_or_all_counts_each_cluster_once(right):
    score = score_points([[right] * 40], np.repeat(np.arange(10), 4))
    low, high = binomtest(int(10 * right), 10).proportion_ci(method="wilson")
    width = 100 * (high - low)
    z, t = 1.959963984540054, 2.2621571627409915  # of 9 degrees of freedom
    assert score["high"] - score["low"] == pytest.approx(100 * t**2 / (10 + t**2))
    assert width == pytest.approx(100 * z**2 / (10 + z**2))
    assert score["stderr"] == 0


def test_clusters_that_are_all_half_right_count_once_each():
    score = score_points([[0.0, 1.0] * 8], np.repeat(np.arange(8), 2))
    assert score["stderr"] == pytest.approx(100 * np.sqrt(0.25 / 8))
    assert score["high"] - score["low"] > 2 * score["stderr"]


def test_repeated_questions_do_not_narrow_a_score():
    points = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    once, repeated = score_points([points], range(10)), score_points([points * 6], [*range(10)] * 6)
    for key in ("value", "stderr", "low", "high"):
        assert repeated[key] == pytest.approx(once[key], rel=0.03)
    assert score_points([points * 6])["stderr"] < once["stderr"] / 2


def test_without_clusters_the_interval_is_scipy_s():
    for right in (0, 1, 7, 30):
        score = score_points([[1.0] * right + [0.0] * (30 - right)])
        low, high = binomtest(right, 30).proportion_ci(method="wilson")
        assert (score["low"], score["high"]) == pytest.approx((100 * low, 100 * high), abs=1e-10)


@pytest.mark.parametrize("name", SIZES)
def test_intervals_cover_the_truth_at_a_correlation_of_one_half(name):
    """94% to 96% of 2,000 tables in docs/evaluation.md (`python -m tests.evaluate.test_clusters`); here 400."""
    clustered, independent, small_p = coverage(SIZES[name], 0.5, 400)
    assert 0.92 <= clustered <= 0.975  # 3 standard errors of 400 tables: 0.033
    assert independent < 0.85
    assert small_p == pytest.approx(1 - clustered, abs=0.005)


def test_error_is_that_of_statsmodels_on_equal_clusters():
    """For clusters of equal size CR2 is CR1, with G / (G - 1) and without (n - 1) / (n - k)."""
    each, labels = changes(np.random.default_rng(0), np.full(25, 12), 0.3, mean=0.4)
    fit = sm.OLS(each, np.ones(len(each))).fit(cov_type="cluster", cov_kwds={"groups": labels, "df_correction": True})
    factor = (len(each) - 1) / len(each)  # of n / (n - 1) in fit
    low, high = fit.conf_int()[0]
    d = difference(each, labels)
    half = (high - low) / 2 * 100
    assert d["value"] == pytest.approx(100 * each.mean())
    assert (d["high"] - d["low"]) / 2 == pytest.approx(half, rel=0.06)  # statsmodels' quantile is the normal one
    t_over_z = 2.0639 / 1.95996  # 24 degrees of freedom
    assert (d["high"] - d["low"]) / 2 == pytest.approx(half * np.sqrt(factor) * t_over_z, rel=0.003)
    assert d["num_clusters"] == 25


def test_clusters_of_one_question_give_nearly_the_interval_of_independent_ones():
    each, _ = changes(np.random.default_rng(0), np.full(2000, 1), 0.0, mean=0.1)
    alone, independent = difference(each, np.arange(2000)), difference(each)
    assert alone["high"] - alone["low"] == pytest.approx(independent["high"] - independent["low"], rel=0.01)
    assert alone["p"] == pytest.approx(independent["p"], rel=0.15)


def test_the_average_counts_clusters_too():
    each, labels = changes(np.random.default_rng(0), np.full(20, 50), 0.5, mean=0.3)
    clustered, alone = difference(each, labels, average=True), difference(each, labels)
    assert clustered["high"] - clustered["low"] == pytest.approx(alone["high"] - alone["low"], rel=0.05)


@pytest.mark.parametrize("each", [[0.0] * 6, [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
def test_few_changed_clusters_give_no_small_p(each):
    d = difference(each, [0, 0, 1, 1, 2, 2])
    assert d["p"] == 1
    assert d["low"] < d["high"]


@pytest.mark.parametrize(("size", "mean"), [(4, 1.0), (4, -1.0), (2, 0.5), (3, 0.3)])
@pytest.mark.parametrize("num_clusters", [2, 5, 30])
def test_clusters_that_all_changed_alike_count_once_each(num_clusters, size, mean):
    """0% to 100% in 5 clusters of 4 questions is p 1/16, not the 2e-6 of 20 questions."""
    each = [1.0, 0.0] * num_clusters if mean == 0.5 else [mean] * (size * num_clusters)
    d = difference(each, np.repeat(np.arange(num_clusters), size))
    assert d["p"] == pytest.approx(2.0 ** (1 - num_clusters), rel=1e-12)  # of all signs of the clusters, these or none
    pairs = [mean] * num_clusters + [1.0, -1.0]  # Bonett and Price: one more pair for each model
    middle = sum(pairs) / len(pairs)
    margin = 1.959963984540054 * (sum((x - middle) ** 2 for x in pairs) / len(pairs)) ** 0.5 / len(pairs) ** 0.5
    assert d["value"] == pytest.approx(100 * mean)
    assert d["low"] == pytest.approx(100 * max(middle - margin, -1.0))
    assert d["high"] == pytest.approx(100 * min(middle + margin, 1.0))
    assert d["num_clusters"] == num_clusters
    average = difference(each, np.repeat(np.arange(num_clusters), size), average=True)
    assert average["p"] >= 2.0 ** (1 - num_clusters)
    width = min(100 * (mean + margin), 100) - max(100 * (mean - margin), -100)
    assert average["high"] - average["low"] == pytest.approx(width, rel=0.2)


def test_one_cluster_is_no_cluster():
    each = [1.0, 0.0, 0.0, -1.0, 1.0]
    assert difference(each, ["a"] * 5) == difference(each)


def test_labels_differ_from_another_models_only_by_the_questions():
    base, later = results([0.0] * 4, "aabb"), results([1.0, 0.0, 1.0, 1.0], "aabb")
    without = replace(later, clusters={})
    assert compare([("base", base), ("SFT", later)], False) == compare([("base", base), ("SFT", without)], False)


def test_a_cluster_is_a_field_of_the_question_or_its_task():
    def labels(cluster):
        question = SimpleNamespace(task_name="mmlu_law"), {"source_id": 7, "ctx": "..."}
        return cluster_labels(SuiteTask(task="mmlu", metric="acc", cluster=cluster), [question])

    assert (labels("task"), labels("source_id")) == (["mmlu_law"], ["7"])
    message = "cluster: source, but the questions have no field source; write one of source_id, ctx"
    with pytest.raises(UserError, match=message):
        labels("source")


if __name__ == "__main__":
    for name, sizes in SIZES.items():
        for share in (0.5, 0.9, 0.98):
            clustered, independent = score_coverage(sizes, 0.5, share, 500)
            print(
                f"{name}, scores of {share:.0%}: {clustered:.1%} with clusters, {independent:.1%} without", flush=True
            )
    for name, sizes in SIZES.items():
        for correlation in (0.0, 0.5):
            clustered, independent, _ = coverage(sizes, correlation, 2000)
            print(f"{name}, correlation {correlation}: {clustered:.1%} with clusters, {independent:.1%} without")
