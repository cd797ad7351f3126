"""The words of docs/style.md: the phrases in backticks in the right column of its table occur nowhere in the tree."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STYLE = ROOT / "docs/style.md"
SUFFIXES = {".py", ".md", ".yaml", ".toml"}
OLD = {ROOT / "CHANGELOG.md"}


def phrases():
    table = STYLE.read_text(encoding="utf-8").split("| write | not |")[1].split("\n\n")[0]
    cells = [line.split("|")[2] for line in table.splitlines() if line.count("|") >= 3]
    return [phrase for cell in cells for phrase in re.findall(r"`([^`]+)`", cell)]


def files():
    folders = [ROOT / name for name in ("soren_align", "docs", "recipes", "configs", "eval")]
    inside = [f for folder in folders for f in folder.rglob("*") if f.suffix in SUFFIXES]
    return [f for f in [*inside, ROOT / "README.md", ROOT / "CONTRIBUTING.md"] if f != STYLE]


def uses(phrase, text):
    """Lines of the text with the phrase as words of their own, across line breaks too."""
    pattern = r"\b" + r"\s+(?:#\s+)?".join(map(re.escape, phrase.split())) + r"\b"
    return [text[: match.start()].count("\n") + 1 for match in re.finditer(pattern, text, re.IGNORECASE)]


@pytest.mark.parametrize("phrase", phrases())
def test_a_phrase_that_the_style_replaces_occurs_nowhere(phrase):
    places = {
        f"{file.relative_to(ROOT)}:{line}": phrase
        for file in files()
        for line in uses(phrase, file.read_text(encoding="utf-8"))
    }
    assert not places


def test_the_search_finds_a_planted_phrase():
    assert len(phrases()) > 15
    assert uses("goes on", "It\n# goes\n# on here, and\ngoes on there; goesons") == [2, 4]
