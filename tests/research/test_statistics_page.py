"""The figures of research/studies/statistics.md that are computed, and not measured."""

import re

import pytest
from scipy.stats import t
from soren_align.study.config import VerdictSection
from soren_align.study.estimates import Assumed, Design, detectable_loss, detectable_score
from soren_align.study.stats import num_declared_tests
from tests.support.pages import ROOT

pytestmark = pytest.mark.rest


def test_the_quantiles_of_the_statistics_page_are_students():
    """At Holm's first threshold for 28 comparisons, two-sided; three and five seeds have 2 and 4 degrees of freedom."""
    page = " ".join((ROOT / "research/studies/statistics.md").read_text(encoding="utf-8").split())
    three, five = (t.ppf(1 - 0.05 / 28 / 2, degrees) for degrees in (2, 4))
    assert "with 28 tests the first threshold of Holm's correction is 0.05 / 28" in page
    assert f"is {three:.1f} with three seeds, and {five:.1f} with five seeds" in page


def test_the_detectable_effects_of_the_statistics_page_are_those_of_its_assumptions():
    """Four optimizers, the leaderboard's columns with their average, and 1,000 held-out examples.

    The tolerance is half of the last digit. MMLU's subjects have unequal sizes, which are not on this machine: its
    effect is larger than that of 57 equal ones.
    """
    page = (ROOT / "research/studies/statistics.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| against .* seeds", line)]
    num_declared = num_declared_tests(VerdictSection(seeds=[1, 2, 3]), 4, [f"measure {i}" for i in range(8)])
    assert (len(rows), num_declared) == (4, 80)
    for name, arc, hellaswag, mmlu, *others, loss in rows:
        design = Design(seeds=int(name.split(", ")[1][0]), num_tests=num_declared)
        to_base = "the start" in name
        effects = [
            detectable_score(design, Assumed(), questions, to_base=to_base)
            for questions in (1172, 10042, 817, 1267, 1319)
        ]
        assert [*map(float, (arc, hellaswag, *others))] == pytest.approx(effects, abs=0.06), name
        equal = detectable_score(design, Assumed(), 14042, [246] * 57, to_base=to_base)
        assert equal - 0.05 < float(mmlu) < 1.3 * equal
        assert float(loss) == pytest.approx(detectable_loss(design, Assumed(), 1000, to_base=to_base), abs=0.0006)
