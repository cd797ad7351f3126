"""The expected best of k trials, against all subsets."""

from itertools import combinations
from statistics import fmean

import pytest
from soren_align.study.report.curves import expected_best


@pytest.mark.parametrize(("higher", "best"), [(True, max), (False, min)])
@pytest.mark.parametrize("metrics", [[0.4, 0.1, 0.9, 0.1, 0.5], [2.0, None, 1.0, None]])
def test_it_is_the_mean_over_all_subsets(metrics, higher, best):
    worst = min if higher else max
    filled = [worst(m for m in metrics if m is not None) if m is None else m for m in metrics]
    expected = [fmean(map(best, combinations(filled, k))) for k in range(1, len(filled) + 1)]
    assert expected_best(metrics, higher) == pytest.approx(expected)


def test_nothing_is_expected_of_trials_that_all_diverged():
    assert expected_best([None, None], higher_is_better=False) == []
