"""The wheel's metadata names all that the package imports, and its source is Python of every version that it names."""

import ast
import re
import sys
import tomllib
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from soren_align.core.extras import EXTRAS

from tests.test_layers import imports
from tests.versions import OLDEST, constraints

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "soren_align").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The files that need lm-eval when they are imported. Of the training's, none needs a package of an extra.
BEHIND = {"evaluate/stats/scores.py", "evaluate/suite/sandbox.py", "evaluate/suite/tasks.py"}
BEHIND |= {f"evaluate/run/{name}.py" for name in ("backends", "harness", "preflight", "requests", "stage", "workers")}
HOSTS = {"axolotl", "swift"}
"""Modules of the tools that a plug-in is for: the user has them, with versions of their own."""


ABSENT = {"quack": "quack-kernels"}
"""Distributions of modules that need a GPU."""


def distribution(requirement):
    """The normalized name in a requirement: 'lm-eval>=0.4' -> 'lm-eval'."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def declared():
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return {distribution(requirement) for requirements in lists for requirement in requirements}


def imported_modules(files):
    """Top-level module of every absolute import -> a file that has it."""
    modules = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            modules |= {name.split(".")[0]: file.name for name in names}
    return modules


def undeclared(files):
    """'module (file)' for each import whose distribution pyproject.toml does not name."""
    distributions = packages_distributions()
    for module, file in sorted(imported_modules(files).items()):
        names = {distribution(name) for name in distributions.get(module, [ABSENT.get(module, module)])}
        is_ours = module in {"soren_align", *HOSTS, *sys.stdlib_module_names}
        if not is_ours and not names & declared():
            yield f"{module} ({file})"


def test_every_import_is_a_declared_dependency():
    assert list(undeclared(FILES)) == []


def test_an_undeclared_import_is_found(tmp_path):
    (tmp_path / "planted.py").write_text("def f():\n    from dill.source import getname\n    import numpy.linalg\n")
    assert list(undeclared([tmp_path / "planted.py"])) == ["dill (planted.py)"]


def extra_modules():
    """Modules of packages that extras alone install."""
    extras = declared() - {"soren-align", *map(distribution, PROJECT["dependencies"])}
    return {module for module, names in packages_distributions().items() if {*map(distribution, names)} & extras}


def needing_extras(package):
    """The files whose import fails without a package of an extra: outside functions, `if` and `with`, they import it, a
    file that does, or one whose room does."""
    graph = {file: imports(file, package, lambda tree: tree.body) for file in package.rglob("*.py")}
    needing, names = set(), extra_modules()

    def needs(file):
        return any(f"{x}.".startswith(f"{y}.") for x in graph[file] for y in names)

    while more := {*filter(needs, graph.keys() - needing)}:
        needing |= more
        modules = (file.relative_to(package).with_suffix("").parts for file in more)
        names |= {".".join(["soren_align", *parts]).removesuffix(".__init__") for parts in modules}
    return {file.relative_to(package).as_posix() for file in needing}


def test_only_files_behind_the_door_need_an_extra_when_they_are_imported():
    assert needing_extras(ROOT / "soren_align") == BEHIND


def test_a_file_that_needs_an_extra_is_found_through_others(tmp_path):
    files = ["__init__", "first", "second", "third", "fourth"]
    sources = ["", "def f():\n    import gguf", "from gguf import x", "from . import second", "from . import first"]
    for name, source in zip(files, sources, strict=True):
        (tmp_path / f"{name}.py").write_text(source)
    assert needing_extras(tmp_path) == {"second.py", "third.py"}


def requirements_of(extras):
    """The requirements of these extras, of which one may name others."""
    for requirement in (r for extra in extras for r in PROJECT["optional-dependencies"][extra]):
        is_ours = distribution(requirement) == "soren-align"
        yield from requirements_of(sorted(Requirement(requirement).extras)) if is_ours else [requirement]


def needed_packages(requirements, environment):
    """The packages that an installation of these requirements has, by the metadata of those installed here."""
    metadata = {distribution(each.metadata["Name"]): each.requires or [] for each in distributions()}
    todo = [("", text) for text in requirements]
    names, seen = set(), set()
    while todo:
        extra, text = todo.pop()
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate(environment | {"extra": extra}):
            continue
        name = distribution(requirement.name)
        names.add(name)
        for own in {"", *requirement.extras}:
            if (name, own) not in seen:
                seen.add((name, own))
                todo += [(own, each) for each in metadata.get(name, [])]
    return names


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_the_constraints_are_the_packages_of_an_installation(version):
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    extras = re.search(r"'\.\[(.+)\]'", text)[1].split(",")
    pinned = {distribution(line) for line in text.splitlines() if "==" in line}
    requirements = [*PROJECT["dependencies"], *requirements_of(extras)]
    environment = default_environment() | {"python_version": version, "python_full_version": f"{version}.0"}
    environment |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    names = needed_packages(requirements, environment)
    # Torch takes any setuptools, and its builds for GPUs bring their own libraries.
    assert {each for each in names if not each.startswith(("setuptools", "nvidia-", "cuda-", "triton"))} == pinned


def test_the_oldest_end_has_the_lower_bound_of_each_package():
    assert sorted(line.split("==")[0] for line in constraints("oldest")) == sorted([*OLDEST, "torch"])
    assert [line.split("==")[0] for line in constraints("newest")] == ["torch"]


def declared_extras(text):
    return set(re.findall(r"soren-align\[([\w-]+)\]", text))


def test_every_extra_that_a_message_or_a_page_names_exists():
    pages = [*FILES, ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {extra for page in pages for extra in declared_extras(page.read_text(encoding="utf-8"))}
    named |= {extra for _, extra in EXTRAS.values()}
    assert {"eval", "deepspeed", "leaderboard-v2"} <= named
    assert named <= PROJECT["optional-dependencies"].keys()


"""Modules of Python 3.11 that 3.12, 3.13 or 3.14 no longer has."""


@pytest.mark.filterwarnings("error")
def test_the_source_is_python_of_the_oldest_version():
    version = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
    for file in FILES:
        ast.parse(file.read_text(encoding="utf-8"), str(file), feature_version=version)
