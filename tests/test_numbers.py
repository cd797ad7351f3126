"""Every section of README, of the studies and of the recipes' pages names a source of its numbers."""

import re

import pytest
from scipy.stats import t
from soren_align.study.config import VerdictSection
from soren_align.study.estimates import Assumed, Design, detectable_loss, detectable_score
from soren_align.study.stats import num_declared_tests

from tests.support.pages import ROOT, script

numbers = script("docs/list_numbers.py")

WITHOUT_SOURCE = {("docs/studies/optimizers.md", ""), ("docs/studies/statistics.md", "What a verdict does not cover")}
"""Sections whose numbers are no figures: 8 bits, 100%. Add none with a figure."""


def test_no_further_section_has_numbers_without_a_source():
    """If this fails for a section: name the test, the command or the work that its numbers are from."""
    missing = set()
    for page in numbers.PAGES:
        name, sections = str(page.relative_to(ROOT)), numbers.with_sources(page)
        missing |= {(name, section.title) for section, sources in sections if not sources}
    assert missing - WITHOUT_SOURCE == set()


@pytest.mark.parametrize("page", numbers.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tests_and_scripts_that_a_page_names_exist(page):
    for _, sources in numbers.with_sources(page):
        scripts = [word for command in sources.get("command", ()) for word in re.findall(r"[\w/.-]+\.py", command)]
        assert [
            file
            for file in (*sources.get("test", ()), *scripts)
            if not any((folder / file).is_file() for folder in (ROOT, page.parent))
        ] == []


def test_a_new_number_needs_a_source(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\nNo figures.\n\n## One\n\nIt takes 12 ms.\n\n## Two\n\n"
        "It takes 3.5 ms, `python docs/list_numbers.py`.\n\n"
        "    4 lines of code\n\n```\n5\n```\n\n## Three\n\nWords alone, `map: {steps: 6}`, version1.\n"
    )
    found = {section.title: ([*section.numbers()], sources) for section, sources in numbers.with_sources(page)}
    assert found == {"One": ([(7, "12")], {}), "Two": ([(11, "3.5")], {"command": ["python docs/list_numbers.py"]})}


def test_what_stands_before_the_first_section_of_a_study_holds_for_the_page(tmp_path):
    page = tmp_path / "studies" / "page.md"
    page.parent.mkdir()
    page.write_text("# Page\n\n`tests/test_numbers.py` checks them.\n\n## One\n\n12 ms\n")
    ((_, sources),) = numbers.with_sources(page)
    assert sources == {"test": ["tests/test_numbers.py"]}


def test_the_quantiles_of_the_statistics_page_are_students():
    """At Holm's first threshold for 28 comparisons, two-sided; three and five seeds have 2 and 4 degrees of freedom."""
    page = " ".join((ROOT / "docs/studies/statistics.md").read_text(encoding="utf-8").split())
    three, five = (t.ppf(1 - 0.05 / 28 / 2, degrees) for degrees in (2, 4))
    assert "with 28 tests the first threshold of Holm's correction is 0.05 / 28" in page
    assert f"is {three:.1f} with three seeds, and {five:.1f} with five seeds" in page


def test_the_detectable_effects_of_the_statistics_page_are_those_of_its_assumptions():
    """Four optimizers, the leaderboard's columns with their average, and 1,000 held-out examples.

    The tolerance is half of the last digit. MMLU's subjects have unequal sizes, which are not on this machine: its
    effect is larger than that of 57 equal ones.
    """
    page = (ROOT / "docs/studies/statistics.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| against .* seeds", line)]
    num_declared = num_declared_tests(VerdictSection(seeds=[1, 2, 3]), 4, [f"measure {i}" for i in range(8)])
    assert (len(rows), num_declared) == (4, 56)
    for name, arc, hellaswag, mmlu, *others, loss in rows:
        design = Design(seeds=int(name.split(", ")[1][0]), num_tests=num_declared)
        to_base = "the start" in name
        effects = [
            detectable_score(design, Assumed(), questions, to_base=to_base)
            for questions in (1172, 10042, 817, 1267, 1319)
        ]
        assert [*map(float, (arc, hellaswag, *others))] == pytest.approx(effects, abs=0.06), name
        equal = detectable_score(design, Assumed(), 14042, [246] * 57, to_base=to_base)
        assert equal < float(mmlu) < 1.3 * equal
        assert float(loss) == pytest.approx(detectable_loss(design, Assumed(), 1000, to_base=to_base), abs=0.0006)
