"""The words of docs/style.md: its right-hand column occurs nowhere, nor do its participles as names."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Pattern -> what to write instead. Patterns are matched without regard to case, over line breaks too.
AVOID = {
    r"(training|dataset|data|bad|eval|of|per|held-out|more|kept|dropped) rows": "examples",
    r"rows (per|kept|dropped|of data)": "examples",
    r"\bbad_rows": "bad_examples",
    r"\bwho steps|\bthe rest\b": "optimizer, other parameters (AdamW)",
    r"how far (a|the) step|in float32's": "update RMS, relative update, ulp",
    r"\b(go|goes|going|went|gone) on\b": "resume, continue",
    r"(?<!\.)\b(tells?|told|telling|says?|said|saying|speaks?|spoken|speaking)\b": "report, print, warn, log, state",
    r"answered before": "cached",
    r"in other words|in (its|our|their|your) (own )?words\b": "with different prompts",
    r"rows of others|others' rows|quoted (rows?|tables?)": "published scores",
    r"\bnobody\b|says nothing": "has no effect, ignored",
    r"half-hearted|\bmend(s|ed|ing)?\b": "user-fixable, invalid, fix",
    r"\btravel(s|led|ling)?\b|\bcom(e|es|ing) back\b|\bcame back\b": "gather, scatter, all-to-all",
    r"\b(brings?|bringing|brought) (\w+ )?together\b|\bdea(l|ls|lt|ling) (out|among)\b": "gather, shard, distribute",
    r"\bof a pass\b": "per micro-batch",
    r"(?<!Raises\s)(?<!raise\s)(?<!Raise\s)(?<!and\s)(?<!or\s)\b[A-Z]\w*Error (for|where) ": "Raises ...Error if ...",
    r"\blest\b|\bwhereupon\b|\bforthwith\b": "so that ... not",
}
PARTICIPLES = {"found", "said", "asked", "given", "held", "told", "kept", "spoken", "brought"}
HERE = ["soren_align", "docs", "notes", "recipes", "configs", "eval"]
HERE += ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
FILES = sorted(
    file
    for name in HERE
    for file in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    if file != ROOT / "recipes/quickstart/make.py"  # its sentences are training data
    and file.name != "messages.py"  # which names the old keys
    and file.suffix in {".py", ".md", ".yaml", ".json", ".sbatch"}
    and file.name not in {"style.md", "tokenizer.json", "recipe.schema.json"}  # the last has TRL's own help
)


def avoided(text):
    """(line number, words, what to write instead) of every use of the patterns."""
    # A comment's or a string's line break is no break in the sentence.
    flat = re.sub(r"[ \t]*\n[ \t]*(# ?)?", lambda match: "\n" + " " * (len(match.group()) - 1), text)
    for pattern, instead in AVOID.items():
        for match in re.finditer(pattern.replace(" ", r"\s+"), flat, re.IGNORECASE):
            yield flat.count("\n", 0, match.start()) + 1, " ".join(match.group().split()), instead


def participles(source):
    """(line number, name) of every variable, parameter and function that is a participle."""
    for node in ast.walk(ast.parse(source)):
        names = {ast.Name: "id", ast.arg: "arg", ast.FunctionDef: "name", ast.ClassDef: "name", ast.Attribute: "attr"}
        if (field := names.get(type(node))) and (name := getattr(node, field)).strip("_") in PARTICIPLES:
            yield node.lineno, name


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_only_words_of_the_field(file):
    text = file.read_text(encoding="utf-8")
    problems = [f"{file}:{line} {words!r}: write {instead}" for line, words, instead in avoided(text)]
    if file.suffix == ".py":
        problems += [f"{file}:{line} {name}: name the thing by a noun" for line, name in participles(text)]
    assert not problems, "\n".join(problems)


def test_the_patterns_can_match():
    text = "A rank that\n    # goes on, and tells the user; ValueError for a typo."
    assert [words for _, words, _ in avoided(text)] == ["goes on", "tells", "ValueError for"]
    assert list(participles("def f(given):\n    found = self.said")) == [(1, "given"), (2, "found"), (2, "said")]
