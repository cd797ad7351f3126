"""The pages agree with the code: generated parts are current, and what a page names exists."""

import ast
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from soren_align import optim, recipe
from soren_align.core import shipped
from soren_align.core.files import digest
from soren_align.evaluate.suite.suites import load_suite
from soren_align.optim import build as build_module
from soren_align.optim import optimizer as optimizer_module
from soren_align.optim import optimizers as optimizers_module
from soren_align.recipe import optimizer as optimizer_sections
from soren_align.run.metrics import METRICS
from soren_align.testing import check_map

from tests.support import command
from tests.support.pages import ROOT, blocks, script

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md")])
EVERY_PAGE = pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "notes/log.md", ROOT / ".github/RELEASING.md"], ids=lambda page: str(page.relative_to(ROOT))
)


def prose_of(page):
    """The page without fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_the_picture_of_the_rooms_is_current():
    """If not: python docs/make_architecture.py."""
    architecture = script("docs/make_architecture.py")
    assert architecture.PICTURE.read_text(encoding="utf-8") == architecture.picture()


def test_every_file_of_the_package_stands_in_the_tree_once():
    tree = script("docs/make_architecture.py").tree().split("```")[1]
    names = re.findall(r"^ *(\S+\.py) +\S", tree, re.MULTILINE)
    there = [f for f in (ROOT / "soren_align").rglob("*.py") if f.name != "__init__.py"]
    assert sorted(Path(name).name for name in names) == sorted(f.name for f in there)
    rooms = re.findall(r"^ *(\S+)/ +\S", tree, re.MULTILINE)
    assert sorted(rooms) == sorted(f.parent.name for f in (ROOT / "soren_align").glob("*/**/__init__.py"))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the pages show what is printed without a GPU")
@pytest.mark.model
@pytest.mark.parametrize("page", script("docs/make_outputs.py").pages(), ids=lambda page: page.name)
def test_the_commands_print_what_the_pages_show(page):
    """If not: python docs/make_outputs.py."""

    def in_this_process(arguments, folder, environment):
        return command.run(*arguments, cwd=folder, env=environment)

    text = page.read_text(encoding="utf-8")
    assert script("docs/make_outputs.py").page(text, in_this_process) == text


@EVERY_PAGE
def test_every_path_and_symbol_that_a_page_names_exists(page):
    for name, symbol in re.findall(r"`([\w./-]+\.(?:py|md|json|yaml|sbatch|jinja))(?:: ([\w.]+))?`", prose_of(page)):
        if "/" not in name and not symbol:  # a file of a run folder or of a user, such as recipe.yaml
            continue
        folders = (ROOT, ROOT / "soren_align", ROOT / "docs", page.parent)
        found = [folder / name for folder in folders if (folder / name).is_file()]
        assert found, f"{page.name}: {name} does not exist"
        if symbol:
            assert symbol in symbols(found[0]), f"{page.name}: {name} has no {symbol}"


def symbols(file):
    """Names of a module's functions, classes and constants, and of classes' members as Class.member."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        names |= names_in(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for member in node.body for name in names_in(member)}
    return names


def names_in(node):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


@EVERY_PAGE
def test_every_link_to_a_heading_finds_it(page):
    for target, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", prose_of(page)):
        linked = page.parent / target if target else page
        titles = re.findall(r"^#+ (.*)$", prose_of(linked), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert heading in slugs, f"{page.name}: {target}#{heading}"


@EVERY_PAGE
def test_every_link_leads_somewhere(page):
    pictures = re.findall(r'src(?:set)?="([^"]+)"', prose_of(page))
    for target in (*re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose_of(page)), *pictures):
        assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation_once():
    files = [file for group in shipped.NAVIGATION.values() for file in group]
    assert sorted(files) == sorted(str(page.relative_to(ROOT)) for page in PAGES)


def test_the_optimizer_of_the_contributing_page_takes_its_step(monkeypatch):
    (code,) = [block for block in blocks("CONTRIBUTING.md", "python") if "HILL" in block]
    exec(code, names := {})
    record = names["HILL"]
    check_map(record)
    for module in (optimizer_module, build_module):
        monkeypatch.setattr(module, "OPTIMIZERS", {**optim.OPTIMIZERS})
    hill = optimizers_module.optimizer_of(record)
    weight = torch.nn.Parameter(torch.eye(3, 2))
    weight.grad = torch.tensor([[0.3, 0.0], [0.0, 0.2], [0.0, 0.0]])
    hill([weight], 1.0, momentum=0.0, weight_decay=0.0, adjust_lr_fn="none").step()
    expected = torch.eye(3, 2) - torch.tensor([[0.9, 0.0], [0.0, 0.8], [0.0, 0.0]])
    torch.testing.assert_close(weight.detach(), expected)
    assert hill.keywords()["tau"] == 0.1
    assert type(pickle.loads(pickle.dumps(hill([weight], 1.0)))) is vars(optimizers_module).pop("Hill")
    section = optimizer_sections.section_of(record)
    settings = section(name="hill", lr=1.0)
    assert (settings.map_settings, settings.title) == ({"tau": 0.1}, "Hill")
    keys = hill.keywords().keys() - {"workspace_mb"}
    assert keys <= {*type(settings).model_fields}
    with pytest.raises(ValueError, match="greater than 0"):
        section(name="hill", lr=1.0, tau=-1.0)


def test_the_suite_of_the_contributing_page_is_valid(tmp_path):
    (block,) = [block for block in blocks("CONTRIBUTING.md", "yaml") if block.startswith("title: ")]
    (tmp_path / "suite.yaml").write_text(block, encoding="utf-8")
    suite = load_suite(tmp_path / "suite.yaml")
    assert [suite.file_of(task).is_file() for task in suite.tasks] == [True]


@pytest.mark.parametrize("page", ["data.md", "optimizers.md"])
def test_sections_of_recipes_in_the_pages_are_valid(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sections = blocks(f"docs/{page}", "yaml")
    for block in sections:
        for name in re.findall(r"path: ([\w-]+\.\w+)", block):
            (tmp_path / name).write_text("question,answer,best_answer\n" if name.endswith(".csv") else "{}\n")
        (tmp_path / "my.yaml").write_text(f"extends: quickstart/sft\n{block}", encoding="utf-8")
        assert recipe.load("my.yaml", task="sft").task == "sft"
    assert sections


def test_the_study_of_the_readme_is_the_shipped_one():
    """Its table and figures from verdict.json; the declaration's hash from its content."""
    folder = ROOT / "research/studies/quickstart-compare"
    verdict = json.loads((folder / "verdict.json").read_text())
    declared = json.loads((folder / "declaration.json").read_text())
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    answers = {(d["candidate"], d["reference"], d["measure"]): d for d in verdict["differences"]}
    for name in ("adamw", "muon", "htmuon", "soren"):
        cells = []
        for measure in verdict["measures"]:
            own, decimals = measure["candidates"][name], 3 if measure["name"] == "held-out" else 1
            answer = answers.get((name, "adamw", measure["name"]), {}).get("answer")
            sign = {"better": " ▲", "worse": " ▼"}.get(answer, "")
            cells.append(f"{own['mean']:.{decimals}f} ± {own['standard_deviation']:.{decimals}f}{sign}")
        (line,) = re.findall(rf"^    {name} +(.*)$", page, re.MULTILINE)
        assert re.split(r"  +", line.strip()) == cells
    assert f"declared as {verdict['digits']}" in page
    assert declared["sha256"] == verdict["declaration"] == digest({k: v for k, v in declared.items() if k != "sha256"})
    d = answers["soren", "muon", "held-out"]
    assert d["answer"] == "not distinguishable"
    assert f"{d['detectable']:.2f}" in page


def test_soren_alone_learns_in_the_lines_of_the_readme():
    (code,) = blocks("README.md", "python")
    names = {}
    exec(code, names)
    assert names["loss"].item() < 0.05  # from about 0.15; of 300 seeds the largest is 0.014
    assert names["optimizer"].num_maps == 100


def test_the_recipe_of_the_readme_is_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").write_text("{}\n")
    (tmp_path / "my.yaml").write_text(blocks("docs/index.md", "yaml")[0])
    assert recipe.load("my.yaml", task="sft").optimizer.name == "soren"


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_every_measurement_is_explained_and_taken(metric):
    """If not: python docs/make_metrics.py."""
    metrics = script("docs/make_metrics.py")
    text = metrics.PAGE.read_text(encoding="utf-8")
    assert metrics.page(text) == text
    sources = "".join(file.read_text() for file in (ROOT / "soren_align/training").rglob("*.py"))
    for key in filter(None, (metric.key, metric.further_key)):
        assert f"`{key}`" in text
        assert f'"{key}"' in sources or key == "learning_rate"  # which TRL logs


def test_the_learning_rates_of_other_tools_are_those_of_the_command():
    """If not: python docs/make_rates.py."""
    rates = script("docs/make_rates.py")
    text = rates.PAGE.read_text(encoding="utf-8")
    assert rates.page(text) == text


@pytest.mark.rest
@pytest.mark.process
@pytest.mark.sample
def test_the_site_is_built_and_needs_nothing_from_elsewhere(monkeypatch, tmp_path, capfd):
    site = script("docs/make_site.py")
    monkeypatch.setattr(site, "BUILD", tmp_path / "build")
    monkeypatch.setattr(site, "SITE", tmp_path / "site")
    site.main()
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.search(r"<(script|link|img|iframe)[^>]*\b(src|href)=\"?https?:", page.read_text(encoding="utf-8"))
    assert (tmp_path / "site/llms.txt").is_file()
    monkeypatch.setattr(site, "site_page", lambda file, text: (text + "\n[a](nowhere.md)\n", []))
    with pytest.raises(SystemExit):
        site.main()


def test_the_readme_is_short_and_its_first_screen_has_a_picture_commands_for_own_data_and_the_status():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    first_screen = "\n".join(lines[:46])
    for part in ("\nsoren-align sft quickstart/sft", "docs/sft.svg", "soren-align new mine --data", "> [!NOTE]"):
        assert part in first_screen
    assert "Which optimizer?" in first_screen
    assert "Tested on" in first_screen
    assert re.findall(r"\nsoren-align sft (\S+)", first_screen)[0] in shipped.recipes()
    assert any("soren_align/optim/step.py" in line for line in lines)


def test_a_page_of_the_site_links_to_pages_of_the_site():
    site = script("docs/make_site.py")
    text = (
        "[a](own-data.md#x), [b](../recipes/quickstart/README.md), [c](../research/README.md), [d](../README.md), "
        "[`e`](../soren_align/optim/step.py), [f](https://example.org/a.md), [g](../CONTRIBUTING.md) ![h](house.svg)\n"
        "```\n[a](../README.md)\n```\n"
    )
    page, pictures = site.site_page("docs/data.md", text)
    assert page == (
        "[a](own-data.md#x), [b](recipes/quickstart/index.md), c, [d](index.md), "
        "`e`, [f](https://example.org/a.md), [g](contributing.md) ![h](house.svg)\n"
        "```\n[a](../README.md)\n```\n"
    )
    assert pictures == ["docs/house.svg"]
    assert site.site_page("recipes/quickstart/README.md", "[a](../../docs/data.md)")[0] == "[a](../../data.md)"
    home, pictures = site.site_page(site.HOME, (ROOT / site.HOME).read_text(encoding="utf-8"))
    assert pictures == ["docs/sft.svg"]
    home, pictures = site.site_page("README.md", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert pictures[0] == "docs/sft.svg"
    assert {*pictures} >= {"docs/idea.svg", "docs/idea-dark.svg"}
    assert "idea-dark.svg#only-dark" in home
