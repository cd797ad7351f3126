"""The table of a pre-training study, against plain computations."""

from math import exp, sqrt

import pytest

from studies import pretraining


def run(losses, seconds, moved=0.5):
    """One finished run of study.json: losses at equally spaced times, the first at 0 s."""
    times = [seconds * i / (len(losses) - 1) for i in range(len(losses))]
    points = zip(times, losses, strict=True)
    curve = [{"seconds": time or None, "metric": loss, "relative_change": moved} for time, loss in points]
    return {"status": "finished", "folder": "verdict/a/1", "metric": losses[-1], "curve": curve,
            "parameters": {"optimizer.lr": 0.01}}  # fmt: skip


def test_the_interval_is_student_s_over_seeds():
    losses = [1.0, 1.2, 1.7]
    half = 4.302652729911275 * sqrt(0.13 / 3)  # t at 97.5% with 2 degrees of freedom; the variance is 0.13
    assert pretraining.interval(losses) == pytest.approx((exp(1.3), exp(1.3 - half), exp(1.3 + half)))


def test_losses_at_equal_seconds_are_interpolated():
    assert pretraining.at_seconds(run([6.0, 4.0, 3.0], 20.0), 15.0) == pytest.approx(3.5)
    with pytest.raises(ValueError, match="verdict/a/1: no evaluation after 21 s"):
        pretraining.at_seconds(run([6.0, 4.0, 3.0], 20.0), 21.0)


def test_candidates_are_listed_best_first_at_the_seconds_of_the_fastest():
    fast = {"name": "fast", "verdict": [run([6.0, 4.0, 3.0], 10.0), run([6.0, 4.0, 3.2], 10.0)]}
    slow = {"name": "slow", "verdict": [run([6.0, 3.0, 2.0], 20.0), run([6.0, 3.0, 2.0], 20.0)]}
    *_, first, second = pretraining.table({"candidates": [fast, slow]}).splitlines()
    assert first == f"| slow | 0.01 | {exp(2):.2f} ({exp(2):.2f} to {exp(2):.2f}) | 20 | {exp(3):.2f} | 50% |"
    assert second.startswith(f"| fast | 0.01 | {exp(3.1):.2f} (")
    assert second.endswith(f" | 10 | {exp(3.1):.2f} | 50% |")
