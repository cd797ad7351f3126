"""Normalized scores: 0 for answers at random, the plain mean of subtasks, and differences that can be tested."""

import numpy as np
import pytest
from soren_align.core.errors import UserError
from soren_align.evaluate.stats.intervals import score_points
from soren_align.evaluate.stats.paired import ModelAnswers
from soren_align.evaluate.stats.points import above_random, metric_points, normalize
from soren_align.evaluate.stats.significance import compare_pairs
from soren_align.evaluate.suite import suites
from soren_align.evaluate.suite.suites import load_suite, refuse_missing_packages

MUSR = {"murder": 2, "objects": 5, "teams": 3}
RAW = {"murder": [1, 1, 0, 1], "objects": [0, 1], "teams": [0, 0, 1, 0, 0, 1]}


def score_of(raw, num_choices):
    """As on the leaderboard's page: each subtask's accuracy, above random, then the plain mean."""
    scores = []
    for name, points in raw.items():
        random = 1 / num_choices[name]
        scores.append((sum(points) / len(points) - random) / (1 - random))
    return sum(scores) / len(scores)


def test_the_mean_over_questions_is_the_plain_mean_of_normalized_subtasks():
    points = [p for own in normalize(RAW, MUSR).values() for p in own]
    assert np.mean(points) == pytest.approx(score_of(RAW, MUSR), abs=1e-12)
    assert score_of(RAW, MUSR) != pytest.approx(np.mean([p for own in RAW.values() for p in own]), abs=0.1)


def test_with_one_number_of_choices_questions_have_equal_weight():
    points = [p for own in normalize(RAW, 4).values() for p in own]
    assert np.mean(points) == pytest.approx((6 / 12 - 1 / 4) / (3 / 4))
    assert normalize(RAW, None) == RAW


@pytest.mark.parametrize("accuracy", [0.0, 0.25, 1.0])
def test_an_accuracy_of_all_subtasks_has_the_score_of_such_points(accuracy):
    raw = {name: [accuracy] * len(points) for name, points in RAW.items()}
    assert above_random(accuracy, MUSR) == pytest.approx(score_of(raw, MUSR))


def test_a_metric_of_several_outcomes_is_the_mean_of_all_outcomes_and_a_sum_the_mean_of_two():
    samples = [{"prompt": True, "inst": [True]}, {"prompt": False, "inst": [True, False, False]}]
    assert np.mean(metric_points(samples, "inst")) == 2 / 4
    with pytest.raises(UserError, match=r"pair is not a mean over questions.*: a question has \(-5.0, 3\); choose"):
        metric_points([{"pair": (-5.0, 3)}], "pair")
    assert np.mean(metric_points(samples, "prompt+inst")) == (1 / 2 + 2 / 4) / 2


def test_an_interval_of_a_normalized_score_may_lie_below_0():
    score = score_points([*normalize({"murder": [1, 0, 0] * 10, "objects": [0] * 29 + [1], "teams": [0, 1] * 20},
                                     MUSR).values()])  # fmt: skip
    assert score["low"] < score["value"] < 0


def table_of(rng, effect=0.0):
    """Two models on subtasks of 40 clusters each, of two questions that change together."""
    answers = [ModelAnswers({}), ModelAnswers({})]
    raw = [{name: [] for name in MUSR} for _ in answers]
    for name, choices in MUSR.items():
        right = np.repeat(rng.random(40) < 1 / choices + 0.1, 2)
        for model, own in zip(raw, answers, strict=True):
            changed = np.repeat(rng.random(40) < 0.3, 2)
            other = rng.random(80) < 1 / choices + 0.1 + (effect if own is answers[1] else 0)
            model[name] = np.where(changed, other, right).astype(float).tolist()
    for model, own in zip(raw, answers, strict=True):
        own.points["musr"] = [p for points in normalize(model, MUSR).values() for p in points]
        own.clusters["musr"] = [(name, i // 2) for name in MUSR for i in range(80)]
        own.prompt_hashes["musr"] = [(str(i), "") for i in range(240)]
    return answers


def test_equal_models_differ_in_about_5_percent_of_the_tables():
    rng = np.random.default_rng(0)
    pairs = [tuple(table_of(rng)) for _ in range(400)]
    p = [compare_pairs([pair], average=False)[0]["musr"]["p"] for pair in pairs]
    share = np.mean(np.array(p) < 0.05)
    assert 0.05 - 3 * 0.011 < share < 0.05 + 3 * 0.011  # the standard error of a share of 5% of 400 is 1.1%


def test_a_difference_may_exceed_100_percent_and_lies_in_its_interval():
    raw = ({"murder": [0.0] * 30}, {"murder": [1.0] * 29 + [0.0]})
    pair = [ModelAnswers({}, points={"m": normalize(own, {"murder": 2})["murder"]},
                         prompt_hashes={"m": [(str(i), "") for i in range(30)]}) for own in raw]  # fmt: skip
    ((difference,),) = (row.values() for row in compare_pairs([tuple(pair)], average=False))
    assert difference["value"] == pytest.approx(2 * 100 * 29 / 30)
    assert difference["low"] <= difference["value"] <= difference["high"]


def test_a_missing_package_is_one_sentence_with_its_remedy(monkeypatch):
    monkeypatch.setattr(suites.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        refuse_missing_packages(load_suite("open-llm-leaderboard-v2"))
    first, second = error.value.problems
    assert first.startswith("ifeval: lm-eval's task leaderboard_ifeval needs langdetect, immutabledict and nltk,")
    assert 'run `pip install "soren-align[leaderboard-v2]"`, or' in first
    assert "--omit ifeval" in first
    assert second.startswith("math_hard: ")
