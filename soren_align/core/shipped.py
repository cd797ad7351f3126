"""The shipped folders: `recipes/`, `configs/`, `eval/`, and the pages of `docs/`.

They are listed by name here; a path that starts with `shipped:` is resolved by
`files.resolve_path`.
"""

from pathlib import Path

from .errors import did_you_mean
from .files import ROOT

MODELINE = "# yaml-language-server: $schema="
"""The first words of a recipe, by which editors find its JSON Schema."""

NAVIGATION = {
    "Start": [
        *(
            "README.md",
            "docs/index.md",
            "recipes/quickstart/README.md",
            "docs/own-data.md",
            "docs/gpu.md",
        ),
        "docs/faq.md",
    ],
    "Guides": [
        *("docs/data.md", "docs/evaluation.md", "docs/stats.md", "docs/comparison.md"),
        *("docs/distributed.md", "docs/runs.md"),
        *(
            "recipes/boolq/README.md",
            "recipes/qwen2.5-3b/README.md",
            "recipes/mistral-7b/README.md",
            "recipes/llama-c4/README.md",
        ),
        *("recipes/qwen3-0.6b/README.md", "recipes/studies/README.md"),
    ],
    "Reference": [
        *("docs/plan.md", "docs/metrics.md", "docs/models.md"),
        *("docs/library.md", "docs/hosts.md"),
        *("docs/doctor.md", "docs/environment.md", "docs/support.md", "docs/reliability.md"),
    ],
    "Science": ["docs/optimizers.md", "docs/learning-rates.md"],
    "Contributing": [
        *("CONTRIBUTING.md", "docs/architecture.md", "docs/style.md"),
        *("SECURITY.md", "CHANGELOG.md"),
    ],
}
"""Every page by group, in the order of `soren-align docs`, the site and llms.txt."""


def recipes_and_studies() -> dict[str, Path]:
    """Return every shipped recipe and study by name, sorted; no file is read."""
    return _files("recipes")


def recipes() -> dict[str, Path]:
    """Return every shipped recipe by name, e.g.
    {'quickstart/sft': .../recipes/quickstart/sft.yaml}, sorted.
    """
    return {name: file for name, file in _files("recipes").items() if not is_study(file)}


def studies() -> dict[str, Path]:
    """Return every shipped study by name, e.g.
    {'quickstart/compare': .../recipes/quickstart/compare.yaml}, sorted.
    """
    return {name: file for name, file in _files("recipes").items() if is_study(file)}


def _files(folder: str) -> dict[str, Path]:
    """The YAML files in the subfolders of a shipped folder by name, sorted; without those beside a
    suite.
    """
    # By the files that are there: a new recipe needs no list, and a wheel has what the checkout
    # has.
    files = sorted((ROOT / folder).glob("*/*.yaml"))
    return {f"{f.parent.name}/{f.stem}": f for f in files if not (f.parent / "suite.yaml").exists()}


def is_study(file: Path) -> bool:
    """Whether a YAML file is a study, and not a recipe: it has `candidates`."""
    # Without parsing YAML, since `recipes` and the shell's completion list dozens of files in a
    # fraction of a second.
    return any(
        line.startswith("candidates:")
        for line in file.read_text("utf-8", errors="replace").splitlines()
    )


def templates() -> dict[str, Path]:
    """Return every shipped chat template by name: {'qwen2.5': .../configs/templates/qwen2.5.jinja,
    ...}, sorted.
    """
    return {f.stem: f for f in sorted((ROOT / "configs" / "templates").glob("*.jinja"))}


def pages() -> dict[str, Path]:
    """Return every page of the documentation by name, e.g.
    {'readme': .../README.md, 'data': .../docs/data.md}.

    A README.md has the name of its folder: `recipes/studies`.
    """
    return {page_name(file): ROOT / file for files in NAVIGATION.values() for file in files}


def page_name(file: str) -> str:
    """The name of a page of NAVIGATION: 'own-data' for 'docs/own-data.md'."""
    name = file.removeprefix("docs/").removesuffix(".md").removesuffix("/README")
    return name if "/" in name else name.lower()


def title(page: Path) -> str:
    """The heading of a page, without Markdown."""
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").replace("`", "")


def suites() -> dict[str, Path]:
    """Return every shipped evaluation suite by name, e.g.
    {'quickstart': .../eval/quickstart/suite.yaml}, sorted.
    """
    return {f.parent.name: f for f in sorted((ROOT / "eval").glob("*/suite.yaml"))}


def suite_hint(name: str, path: Path) -> str:
    """The remedy for a name that is no suite's: a similar one, of a folder with a suite.yaml beside
    its path too.
    """
    beside = [str(file.parent) for file in path.parent.glob("*/suite.yaml")]
    return did_you_mean(name, [*beside, *suites()], f"shipped suites: {', '.join(suites())}")


def published() -> dict[str, Path]:
    """Return every shipped table of published scores by name, e.g.
    {'paper/sft': .../eval/paper/sft.yaml}, sorted.
    """
    return _files("eval")
