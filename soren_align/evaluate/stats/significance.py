"""The differences between models on the same questions, with confidence intervals and p-values.

Questions differ in difficulty more than models do, so all comparisons are paired by question.
Questions of one cluster, such as a subject or a source text, tend to change together, so that they
count for less than as many independent ones. Scores from different prompts are never compared.
"""

import statistics
from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
from scipy.special import stdtr

from ...core.errors import UserError
from .paired import MODELS_OWN, Z95, ModelAnswers, Paired, cluster_numbers, holm, least_p, t95

RESAMPLES = 10_000
LARGE = 100_000
"""Questions from which a mean of resampled scores has Student's t: drawing 10^9 questions
takes a minute."""
SEED = 1234
"""Equal for all rows, so that an additional row changes no interval."""


def compare(
    rows: Sequence[tuple[str, ModelAnswers]], average: bool
) -> list[dict[str, dict[str, Any]] | None]:
    """Return for each row its differences to the first row, by column, without `unpaired` ones;
    None for the first.

    average: add "average", the difference of the plain means of the columns. A difference is
    {"value", "low", "high"} in percent with a 95% interval, "p" of no difference, two-sided, and
    "p_holm", the same after Holm's correction (1979) for all comparisons: if no row differs from
    the first, the smallest p_holm of the table is below 0.05 with a probability of 5% only.
    "num_clusters": of a column with clusters. Raises UserError if two rows were evaluated with
    another dtype, batch size or software.
    """
    first_name, first = rows[0]
    # Refused before anything is compared: another dtype or batch size moves the last digits, and
    # the difference would be attributed to the models.
    for name, later in rows[1:]:
        refuse_unlike((first_name, first), (name, later))
    return [None, *compare_pairs([(first, later) for _, later in rows[1:]], average)]


def compare_pairs(
    pairs: Sequence[tuple[ModelAnswers, ModelAnswers]], average: bool
) -> list[dict[str, dict[str, Any]]]:
    """Return for each pair the differences of the second to the first; "p_holm" is for all pairs.
    See `compare`.
    """
    differences = [_differences(first, later, average) for first, later in pairs]
    columns = [difference for row in differences for difference in row.values()]
    for difference, corrected in zip(columns, holm([d["p"] for d in columns]), strict=True):
        difference["p_holm"] = corrected
    return differences


def _differences(
    first: ModelAnswers, later: ModelAnswers, average: bool
) -> dict[str, dict[str, Any]]:
    """Return the differences of a row, before any correction."""
    reasons = unpaired(first, later)
    row, columns = {}, []
    # Columns with other prompts are left out, not compared as independent: questions differ in
    # difficulty more than models do, so that such a test would detect little.
    for column in first.points:
        if column in reasons:
            continue
        columns.append(pair_column(first, later, column))
        row[column] = _difference(columns[-1:])
    # A mean over the columns that happened to be comparable would be another benchmark.
    if average and not reasons:
        row["average"] = _resampled(columns)
    return row


def pair_column(first: ModelAnswers, later: ModelAnswers, column: str) -> Paired:
    """Return the differences of two models' points on a column."""
    labels = first.clusters.get(column)
    clusters = None if labels is None else cluster_numbers(labels)
    return Paired(np.subtract(later.points[column], first.points[column], dtype=float), clusters)


def unpaired(first: ModelAnswers, later: ModelAnswers) -> dict[str, str]:
    """Return the columns whose scores cannot be compared, with the reason: what differs in
    `later`.
    """
    # The model's own settings come first: they affect all columns, so that one reason is enough.
    for key, reason in MODELS_OWN.items():
        a, b = first.settings.get(key), later.settings.get(key)
        if a != b:
            return dict.fromkeys(first.points, reason.format(a, b))
    reasons: dict[str, str] = {}
    for column in first.points:
        a, b = first.prompt_hashes.get(column, []), later.prompt_hashes.get(column, [])
        num_a, num_b = first.truncated.get(column, 0), later.truncated.get(column, 0)
        # Questions before prompts: where the questions differ, the prompts do too.
        if [question for question, _ in a] != [question for question, _ in b]:
            reasons[column] = (
                f"it was evaluated on {len(b)} questions, but the first model on {len(a)}"
                if len(a) != len(b)
                else "its questions differ"
            )
        elif a != b:
            reasons[column] = "its prompts differ, for example by the chat template"
        elif num_a != num_b:
            reasons[column] = (
                f"{num_b} of its prompts were truncated, but {num_a} of the first model's, because"
                " the context lengths differ"
            )
    return reasons


def refuse_unlike(first: tuple[str, ModelAnswers], later: tuple[str, ModelAnswers]) -> None:
    """Raises UserError if two models were evaluated with settings that must be equal for all rows
    of a table.
    """
    (first_name, a), (later_name, b) = first, later
    for key in a.settings | b.settings:
        if key not in MODELS_OWN and a.settings.get(key) != b.settings.get(key):
            raise UserError(
                f"{later_name} was evaluated with {key} = {b.settings.get(key)}, but {first_name}"
                f" with {a.settings.get(key)}, so their scores cannot be compared; evaluate the two"
                " models separately"
            )


def _difference(columns: list[Paired]) -> dict[str, Any]:
    """Return the mean of the columns' mean differences, by the test that fits their points."""
    if len(columns) > 1:
        return _resampled(columns)
    column = columns[0].without_equal_clusters()
    each, value = column.each, column.each.mean()
    if error_and_degrees := _clustered_error(column):  # Student's t over clusters
        assert column.clusters is not None
        error, degrees = error_and_degrees
        p, margin = 2 * float(stdtr(degrees, -abs(value) / error)), t95(degrees) * error
        result = _percent(
            value, value - margin, value + margin, max(p, least_p(column.num_changed))
        )
        return result | {"num_clusters": int(column.clusters.max()) + 1}
    if not column.is_discrete:
        return _resampled(columns)
    # A sign test, which for right and wrong answers is McNemar's exact one: a binomial test on the
    # questions that only one model got right. The interval is Bonett and Price's (2012): the normal
    # one with one more pair for each model, so that its width stays positive if all questions
    # changed in the same way. 64 MB, which reading large files of results shall not have beside
    # them
    from scipy.stats import binomtest

    won, lost = int((each > 0).sum()), int((each < 0).sum())
    p = float(binomtest(won, won + lost).pvalue) if won + lost else 1.0
    n = len(each) + 2
    middle, total = float(each.sum()) / n, (float(each @ each) + 2) / n
    margin = Z95 * sqrt((total - middle**2) / n)
    result = _percent(value, middle - margin, middle + margin, p)
    is_clustered = columns[0].clusters is not None and column.clusters is None
    return result | ({"num_clusters": len(each)} if is_clustered else {})


def _clustered_error(column: Paired) -> tuple[float, float] | None:
    """Return `clustered_error` of a column from `without_equal_clusters`; None if no cluster
    changed.
    """
    result = column.clustered_error()
    return result if result and result[0] > 0 else None


def _resampled(columns: list[Paired]) -> dict[str, Any]:
    """Return the mean of the columns' mean differences, with interval and p by a bootstrap within
    each column.

    The interval is the percentile one. BCa corrects for skewness, of which a mean over hundreds of
    questions has almost
    none: on 817 questions its ends differ by 0.006 standard errors, less than the Monte Carlo error
    of 0.03. p counts the resamples that deviate from their mean by as much as the observed mean
    from 0; (1 + count) / (1 + RESAMPLES) keeps it above 0 (Davison and Hinkley 1997, section 4.4).
    """
    rng = np.random.default_rng(SEED)
    value = statistics.fmean(column.each.mean() for column in columns)
    columns = [column.without_equal_clusters() for column in columns]
    # Columns are resampled independently and then averaged, as their questions are different ones.
    drawn = np.mean([_deviations(column, rng) for column in columns], axis=0)
    low, high = np.quantile(drawn, (0.025, 0.975))
    p = (1 + int((np.abs(drawn) >= abs(value) - 1e-12).sum())) / (1 + RESAMPLES)
    # With three questions that changed by nearly the same amount, a bootstrap's p would be far too
    # small.
    return _percent(
        value,
        value + low,
        value + high,
        max(p, least_p(sum(column.num_changed for column in columns))),
    )


def _deviations(column: Paired, rng: np.random.Generator) -> np.ndarray:
    """Return the deviations of resampled means from the sample's mean: [RESAMPLES].
    Of clusters, by Student's t.
    """
    if error := _clustered_error(column):
        return error[0] * rng.standard_t(error[1], RESAMPLES)
    each = column.each
    n = len(each)
    if column.is_discrete:
        # Only three values occur: drawing their counts is equivalent, and 600 times faster on MMLU.
        # With the two additional pairs of a sign test's interval, for the same reason.
        values, counts = np.unique(np.concatenate(([-1.0], each, [1.0])), return_counts=True)
        return (rng.multinomial(n + 2, counts / (n + 2), size=RESAMPLES) @ values - each.sum()) / (
            n + 2
        )
    if n > LARGE:
        return each.std(ddof=1) / sqrt(n) * rng.standard_t(n - 1, RESAMPLES)
    means = [each[rng.integers(n, size=(100, n))].mean(axis=1) for _ in range(RESAMPLES // 100)]
    # The variance of resampled means is the sample's over n, that of the mean over n - 1. The
    # variance is an estimate, hence Student's t: without it the interval covers 59% at n = 2, 88%
    # at 5, 91% at 10. With mc2's 817 questions it makes the interval 0.15% wider.
    return (np.concatenate(means) - each.mean()) * sqrt(n / (n - 1)) * t95(n - 1) / Z95


def _percent(value: float, low: float, high: float, p: float) -> dict[str, float]:
    return {
        "value": 100 * float(value),
        # normalized scores may differ by more than 100%
        "low": 100 * max(float(low), min(-1.0, float(value))),
        "high": 100 * min(float(high), max(1.0, float(value))),
        "p": p,
    }
