"""Times are medians of interleaved rounds, each call with an argument of its own."""

import itertools
import statistics

import pytest
import torch
from soren_align.bench import timing

CPU = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch):
    """Every measured call in order; the n-th of A takes 1 + n / 100 s, of B four times that."""
    made = []

    def measure(function, argument, device):
        function(argument)
        return made[-1][0]

    monkeypatch.setattr(timing, "measure", measure)
    return made


def subject(calls, name, factor):
    count = itertools.count()
    return lambda argument: calls.append((factor * (1 + next(count) / 100), name, argument))


def test_rounds_are_interleaved_and_warm_ups_are_not_counted(calls):
    subjects = {"A": subject(calls, "A", 1.0), "B": subject(calls, "B", 4.0)}
    found = timing.interleaved(subjects, iter(range(1000)).__next__, CPU, seconds=50.0)
    num_rounds = 10  # 50 s at 5 s a round
    assert [name for _, name, _ in calls] == ["A", "B"] * (timing.WARM_UPS["cpu"] + num_rounds)
    assert [argument for *_, argument in calls] == list(range(len(calls)))
    counted = [seconds for seconds, name, _ in calls if name == "A"][timing.WARM_UPS["cpu"] :]
    assert found["A"].median == statistics.median(counted)
    assert found["A"].low < found["A"].median < found["A"].high
    # Both drift alike, so that the ratio of medians does not see it.
    assert found["B"].median / found["A"].median == pytest.approx(4.0, rel=1e-12)
    assert found["A"].num_rounds == num_rounds


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, timing.MIN_ROUNDS), (1e9, timing.MAX_ROUNDS)])
def test_the_number_of_rounds_has_bounds(calls, seconds, rounds):
    found = timing.interleaved({"A": subject(calls, "A", 1.0)}, object, CPU, seconds=seconds)
    assert found["A"].num_rounds == rounds


def test_a_short_call_is_made_once_more_before_the_timed_one(calls):
    subjects = {"A": subject(calls, "A", 1e-3), "B": subject(calls, "B", 1.0)}
    timing.interleaved(subjects, object, CPU, seconds=0.0)
    assert [name for _, name, _ in calls] == ["A", "B"] + ["A", "A", "B"] * timing.MIN_ROUNDS


def test_rates_are_of_both_dtypes_and_of_this_world():
    found = timing.matmul_rates(CPU)
    assert set(found) == {"float32", "bfloat16"}
    assert all(1e8 < rate < 1e14 for rate in found.values())


def test_the_machine_is_named_with_threads_versions_and_commit():
    found = timing.machine(CPU)
    assert found["num_threads"] == torch.get_num_threads()
    assert torch.__version__.startswith(found["versions"]["torch"].partition("+")[0])
    assert found["device"]
    assert "commit" in found
