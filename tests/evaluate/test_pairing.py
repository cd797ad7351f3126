"""Differences question by question: against scipy and statsmodels, and on models that do not differ at all."""

import numpy as np
import pytest
from scipy import stats
from soren_align.core.errors import UserError
from soren_align.evaluate.run.harness import ModelResults
from soren_align.evaluate.stats import significance
from soren_align.evaluate.stats.intervals import score_points
from soren_align.evaluate.stats.significance import compare, unpaired
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

SIZES = {"arc_challenge": 1172, "hellaswag": 10042, "mmlu": 14042, "mc2": 817, "winogrande": 1267, "gsm8k": 1319}


def answers(points, prompts=None, **settings):
    points = {column: list(map(float, p)) for column, p in points.items()}
    prompts = prompts or {column: [(str(i), "same") for i in range(len(p))] for column, p in points.items()}
    return ModelResults(points=points, prompt_hashes=prompts, settings={"batch_size": 8} | settings)


def difference(a, b, column="x"):
    """Of one column between two models."""
    row = compare([("base", answers({column: a})), ("SFT", answers({column: b}))], average=False)[1]
    return row[column]


def right_or_wrong(rng, n, discordant=0.2):
    """Two models of equal skill; `discordant`: the share of questions that only one of them gets right."""
    alike, first = rng.random(n) >= discordant, rng.random(n) < 0.5
    a = first.astype(float)
    return a, np.where(alike, a, 1 - a)


def shares(rng, n):
    """Two models of equal skill on points like those of mc2: any number in [0, 1], each question with its own level."""
    level = rng.normal(0, 2, n)
    return tuple(1 / (1 + np.exp(-level - rng.normal(0, 0.5, n))) for _ in range(2))


def null_pair(rng, sizes):
    drawn = {c: (shares if c == "mc2" else right_or_wrong)(rng, n) for c, n in sizes.items()}
    return [(name, answers({c: pair[i] for c, pair in drawn.items()})) for i, name in enumerate(("base", "SFT"))]


def table(seed, num_rows, sizes):
    """Answers of several models that do differ."""
    rng = np.random.default_rng(seed)
    level = {c: rng.normal(size=n) for c, n in sizes.items()}
    rows = []
    for row in range(num_rows):
        logits = {c: level[c] + 0.02 * row + rng.normal(0, 0.7, n) for c, n in sizes.items()}
        rows.append(
            (f"row{row}", answers({c: 1 / (1 + np.exp(-x)) if c == "mc2" else x > 0 for c, x in logits.items()}))
        )
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_p_of_right_or_wrong_answers_is_mcnemars_of_statsmodels_and_scipy(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 400))
    a, b = rng.random(n) < 0.6, rng.random(n) < rng.uniform(0.5, 0.8)
    p = difference(a, b)["p"]
    both = [[int((x & y).sum()) for y in (b, ~b)] for x in (a, ~a)]
    assert p == pytest.approx(mcnemar(both, exact=True).pvalue, abs=1e-12)
    assert p == pytest.approx(stats.binomtest(both[0][1], both[0][1] + both[1][0]).pvalue if (a != b).any() else 1)


@pytest.mark.parametrize("num_rows", [2, 3, 6])
def test_the_correction_is_holms_of_statsmodels_over_the_whole_table(num_rows):
    rows = compare(table(num_rows, num_rows, {"arc_challenge": 300, "mc2": 100, "gsm8k": 200}), average=True)
    tested = [d for row in rows[1:] for d in row.values()]
    assert len(tested) == (num_rows - 1) * 4
    expected = multipletests([d["p"] for d in tested], method="holm")[1]
    assert [d["p_holm"] for d in tested] == pytest.approx(list(expected))


@pytest.mark.parametrize("method", ["percentile", "BCa"])
@pytest.mark.parametrize("columns", [["mc2"], list(SIZES)], ids=["mc2", "average"])
def test_the_interval_is_that_of_scipys_bootstrap(columns, method):
    """Either of scipy's, within Monte-Carlo error: an end's own is 0.027 standard errors at 10,000 resamples."""
    base, later = table(0, 2, {c: SIZES[c] if c == "mc2" else 1500 for c in columns})
    found = compare([base, later], average=True)[1]["average"]
    each = [np.subtract(later[1].points[c], base[1].points[c]) for c in columns]

    def mean_of_means(*samples, axis):
        return np.mean([s.mean(axis=axis) for s in samples], axis=0)

    expected = stats.bootstrap(each, mean_of_means, n_resamples=9999, method=method, batch=500, rng=1)
    ends = [100 * end for end in expected.confidence_interval]
    assert [found["low"], found["high"]] == pytest.approx(ends, abs=0.12 * 100 * expected.standard_error)
    assert found["value"] == pytest.approx(100 * mean_of_means(*each, axis=0))


@pytest.mark.parametrize("shift", [0.0, 0.01])
def test_the_bootstraps_p_is_about_that_of_a_sign_flip_test(shift):
    a, b = shares(np.random.default_rng(0), 817)
    b = np.clip(b + shift, 0, 1)
    flips = np.random.default_rng(1).choice([-1.0, 1.0], size=(20_000, 817))
    expected = float((np.abs(flips @ (b - a)) >= abs((b - a).sum())).mean())
    assert difference(a, b)["p"] == pytest.approx(expected, abs=0.02)


@pytest.fixture(scope="module")
def tables_of_equals():
    """200 pairs of equally good models on the leaderboard's six sizes; 1000 resamples, for the time it takes."""
    rng = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(significance, "RESAMPLES", 1000)
        return [compare(null_pair(rng, SIZES), average=True)[1] for _ in range(200)]


@pytest.mark.rest
@pytest.mark.parametrize("column", [*SIZES, "average"])
def test_of_pairs_of_equals_five_in_a_hundred_seem_to_differ(tables_of_equals, column):
    # McNemar's exact test is a little conservative: at 234 discordant questions of 1172 its size is 4.2%.
    found = [row[column] for row in tables_of_equals]
    assert 0.02 <= np.mean([d["p"] < 0.05 for d in found]) <= 0.08
    # The interval tells the same, but for pairs at the edge.
    assert all((d["p"] < 0.05) == (d["low"] > 0 or d["high"] < 0) for d in found if not 0.03 < d["p"] < 0.07)


@pytest.mark.rest
def test_a_whole_table_of_equals_seldom_holds_a_corrected_p_below_five_percent(tables_of_equals):
    """The family-wise error of the six columns and their average: at most 7% of 200 tables; uncorrected, a fifth."""
    assert np.mean([any(d["p_holm"] < 0.05 for d in row.values()) for row in tables_of_equals]) <= 0.07
    assert np.mean([any(d["p"] < 0.05 for d in row.values()) for row in tables_of_equals]) >= 0.15


def test_the_paired_interval_covers_the_truth_and_is_narrower_than_the_unpaired_one():
    """Questions of very different difficulty; the second model gains 10 points on each. Slow and obvious reference."""
    rng = np.random.default_rng(0)
    covered, narrower = 0, 0
    for _ in range(300):
        easy = rng.random(200)
        luck = rng.random(200)
        a, b = (luck < easy * 0.9).astype(float), (luck < easy * 0.9 + 0.1).astype(float)
        found = difference(a, b)
        covered += found["low"] <= 10 <= found["high"]
        unpaired = 1.96 * 100 * np.sqrt(a.var(ddof=1) / 200 + b.var(ddof=1) / 200)
        narrower += found["high"] - found["value"] < unpaired
    assert 0.91 <= covered / 300 <= 0.99  # 95%, and three standard errors of 300 tries
    assert narrower == 300


def test_the_average_is_the_plain_mean_of_the_columns_however_many_questions_they_have():
    base, later = table(1, 2, SIZES)
    row = compare([base, later], average=True)[1]
    assert list(row) == [*SIZES, "average"]
    assert row["average"]["value"] == pytest.approx(np.mean([row[c]["value"] for c in SIZES]))
    # Independent columns: the Average's interval is the quadratic mean of theirs over the root of six.
    width = {c: d["high"] - d["low"] for c, d in row.items()}
    expected = np.sqrt(sum(width[c] ** 2 for c in SIZES)) / 6
    assert width["average"] == pytest.approx(expected, rel=0.03)


def test_another_row_changes_no_interval_and_no_p_but_the_corrected_one():
    rows = table(2, 3, {"arc_challenge": 200, "mc2": 100})
    two, three = compare(rows[:2], average=True)[1], compare(rows, average=True)[1]
    for column, d in two.items():
        assert {**d, "p_holm": 0} == {**three[column], "p_holm": 0}
    assert all(three[column]["p_holm"] >= d["p_holm"] for column, d in two.items())
    assert compare(rows, average=True)[0] is None


@pytest.mark.parametrize("points", [[0.0] * 120, [0.25] * 120])
def test_certainty_is_not_claimed_where_every_question_changed_alike(points):
    rows = [("base", answers({"x": points, "y": points})), ("SFT", answers({"x": [1.0] * 120, "y": [1.0] * 120}))]
    row = compare(rows, average=True)[1]
    if points[0] == 0:
        assert all(90 < row[c]["low"] < 98 for c in row)
        assert all(row[c]["value"] == row[c]["high"] == 100 for c in row)
    same = compare([rows[1], rows[1]], average=True)[1]
    for d in same.values():
        assert (d["value"], d["p"], -5 < d["low"] < -0.5, 0.5 < d["high"] < 5) == (0, 1, True, True)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_handful_of_questions_proves_nothing(n):
    """As in a run of a few questions: differences that are nearly alike would make a plain bootstrap very sure."""
    a = np.linspace(0.1, 0.2, n)
    for b in (a + 0.3 + np.linspace(0, 0.01, n), np.ones(n)):
        assert difference(a, b)["p"] >= min(1, 2.0 ** (1 - n))
    assert difference([0.0], [1.0])["p"] == 1
    assert difference([0.2], [0.5])["high"] - difference([0.2], [0.5])["low"] > 50


def test_models_evaluated_with_different_prompts_are_not_compared():
    prompts = {"x": [("0", "same")], "y": [("0", "other")], "z": []}
    points = {column: [0] for column in "xyz"}
    first, other = answers(points), answers(points, prompts=prompts)
    assert list(compare([("base", first), ("SFT", other)], average=True)[1]) == ["x"]
    assert unpaired(first, other) == {
        "y": "its prompts differ, for example by the chat template",
        "z": "it was evaluated on 0 questions, but the first model on 1",
    }


@pytest.mark.parametrize(("key", "reason"), [
    ("generation_config", "its generation config is 2, but the first model's is 1"),
    ("chat_template", "only one of the two models was prompted with a chat template"),
    ("bos", "only one of the two models got prompts with a BOS token"),
])  # fmt: skip
def test_settings_that_come_with_a_model_leave_its_row_unpaired(key, reason):
    first, other = answers({"x": [0]}, **{key: 1}), answers({"x": [0]}, **{key: 2})
    assert compare([("base", first), ("SFT", other)], average=True) == [None, {}]
    assert unpaired(first, other) == {"x": reason}


@pytest.mark.parametrize("settings", [{"batch_size": 4}, {"dtype": "bfloat16"}])
def test_models_evaluated_with_different_settings_are_not_compared(settings):
    key, value = next(iter(settings.items()))
    with pytest.raises(UserError, match=f"SFT was evaluated with {key} = {value}, but base with (8|None)"):
        compare([("base", answers({"x": [0]})), ("SFT", answers({"x": [0]}, **settings))], average=False)


def test_every_row_is_compared_with_the_first():
    rows = [(name, answers({"x": [0]})) for name in ("base", "SFT", "DPO")]
    rows[2][1].settings["batch_size"] = 1
    with pytest.raises(UserError, match="DPO was evaluated with batch_size = 1, but base with 8"):
        compare(rows, average=True)


@pytest.mark.parametrize("n", [2, 5, 10, 50])
def test_intervals_of_a_few_questions_cover_the_truth(n, monkeypatch):
    """As mc2's with --limit. By the normal quantile, 59% at n = 2, 88% at 5, 91% at 10. 600 tries have an error of 0.9
    points."""
    monkeypatch.setattr(significance, "RESAMPLES", 500)
    rng = np.random.default_rng(n)
    covered = {"score": 0, "difference": 0}
    for _ in range(600):
        level = rng.normal(0.5, 0.1, n)
        a, b = (level + rng.normal(0, 0.03, n) for _ in range(2))
        score, d = score_points([list(a)]), difference(a, b)
        covered["score"] += score["low"] <= 50 <= score["high"]
        covered["difference"] += d["low"] <= 0 <= d["high"]
    assert min(covered.values()) >= 0.925 * 600
    assert max(covered.values()) <= 0.99 * 600


def test_with_hundreds_of_questions_the_interval_is_the_normal_one():
    a, _ = shares(np.random.default_rng(0), 817)
    score = score_points([list(a)])
    assert score["high"] - score["value"] == pytest.approx(1.96 * score["stderr"], rel=2e-3)
