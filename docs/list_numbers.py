"""List the numbers of README, the studies and the recipes' pages, each with the source that its
section names.

    python docs/list_numbers.py            # a line for each section
    python docs/list_numbers.py --all      # a line for each number, with the commit that wrote its line

A source is a test that recomputes numbers from shipped data, a command that measures or counts
them, a cited work or, in pages that sum up others, a link to the page with the figures. In a page
of a study, what stands before the first section or in the sections Protocol and Command holds for
the whole page. Whether a source gives a number is not decided
here: the tests do that for shipped data. Machines and versions are those of docs/figures.md.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUMMARIES = [ROOT / "README.md", ROOT / "docs/studies/README.md"]
PAGES = [
    *SUMMARIES,
    *sorted({*ROOT.glob("docs/studies/*.md"), *ROOT.glob("recipes/*/README.md")} - {*SUMMARIES}),
]
FOR_THE_PAGE = ("", "Protocol", "Command", "Commands")
"""Titles of sections of a study whose sources are the whole page's; "" is before the first heading
of level 2."""
NUMBER = re.compile(r"(?<![\w.,/#-])[-+±]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?(?![\w/])")
SOURCES = {
    "test": re.compile(r"tests/[\w/]+\.py"),
    "command": re.compile(
        r"(?:^ {4}|`)((?:python|make|soren-align plan|soren-align \w+ [\w.]+/)[^`#\n]*)",
        re.MULTILINE,
    ),
    "cited": re.compile(
        r"arXiv \d+\.\d+|github\.com/[\w/-]+|[Tt]he paper's appendix|GaLore's\s+paper"
    ),
}
LINK = re.compile(r"\]\(((?:[\w.-]+/)*[\w.-]+\.md)")


@dataclass
class Section:
    """The lines below a heading, without those of its subsections: (line number, text)."""

    title: str
    lines: list[tuple[int, str]] = field(default_factory=list)

    def numbers(self) -> Iterator[tuple[int, str]]:
        """Yield (line number, number) outside of code and links."""
        is_code = False
        for line_number, line in self.lines:
            is_code ^= line.lstrip().startswith("```")
            if not is_code and not line.startswith("    "):
                text = re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>", "", line)
                yield from ((line_number, match.group()) for match in NUMBER.finditer(text))

    def sources(self, *, is_summary: bool) -> dict[str, list[str]]:
        """Return the sources that the section names, by kind."""
        text = "\n".join(line for _, line in self.lines)
        kinds = SOURCES | ({"page": LINK} if is_summary else {})
        names = {
            kind: list(dict.fromkeys(pattern.findall(text))) for kind, pattern in kinds.items()
        }
        return {kind: some for kind, some in names.items() if some}


def sections(page: Path) -> list[Section]:
    """Return the sections of a page in order."""
    result, is_code = [Section("")], False
    for line_number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if not is_code and (heading := re.match(r"##+ (.*)", line)):
            result.append(Section(heading[1]))
        elif not line.startswith("# "):
            result[-1].lines.append((line_number, line))
    return result


def with_sources(page: Path) -> Iterator[tuple[Section, dict[str, list[str]]]]:
    """Yield each section that has numbers, with its own sources, or those of the page if it names
    none.
    """
    is_summary = page in SUMMARIES
    every = sections(page)
    of_the_page: dict[str, list[str]] = {}
    for section in every:
        if section.title in FOR_THE_PAGE and page.parent.name == "studies" and not is_summary:
            of_the_page |= section.sources(is_summary=False)
    for section in every:
        if any(section.numbers()):
            yield section, section.sources(is_summary=is_summary) or of_the_page


def main() -> None:
    """Print the list."""
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        blame = ["git", "-C", str(ROOT), "blame", "-s", "--abbrev=8", name]
        commits = (
            subprocess.check_output(blame, text=True).splitlines() if "--all" in sys.argv else []
        )
        for section, sources in with_sources(page):
            source = "; ".join(some for names in sources.values() for some in names) or "NO SOURCE"
            numbers = [*section.numbers()]
            if not commits:
                print(
                    f"{name} | {section.title or 'beginning'} | {len(numbers)} numbers | {source}"
                )
            for line, number in numbers if commits else ():
                print(f"{name}:{line} {number} | {commits[line - 1].split()[0]} | {source}")


if __name__ == "__main__":
    main()
