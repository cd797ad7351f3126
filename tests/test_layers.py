"""The house's two rules: arrows point down only, and each big dependency has one door."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "soren_align"
LAYERS = [
    {"cli"},
    {"launch", "push", "recipe_commands"},
    {"planning", "card"},
    {"trainers", "evaluate", "bench"},
    {"sharding", "data", "run_folder", "weights"},
    {"importers"},
    {"optim", "recipe", "manifest"},
    {"spectral", "shipped"},
    {"files", "lock", "provenance", "silence", "terminal"},
    {"yaml_reader"},
    {"errors", "optimizer_settings"},
]
DOORS = {
    "deepspeed": {"sharding", "launch", "bench"},
    "torch.distributed": {"sharding", "launch"},
    "trl": {"trainers"},
    "datasets": {"data", "evaluate"},
    "lm_eval": {"evaluate"},
}
WITHOUT_TORCH = {
    "cli",
    "importers",
    "recipe",
    "shipped",
    "recipe_commands",
    "run_folder",
    "lock",
    "provenance",
    "silence",
    "yaml_reader",
    "card",
    "push",
    "manifest",
    "files",
    "errors",
    "optimizer_settings",
    "terminal",
}
HEAVY = {"torch", "transformers", "trl", "datasets", "accelerate", "peft", "lm_eval", "deepspeed"}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(file: Path) -> str:
    part = file.relative_to(PACKAGE).parts[0]
    return part.removesuffix(".py")


def imports(file: Path) -> set[str]:
    """Absolute names of all that a file imports, inside functions too; not what is for type checkers only."""
    package = ["soren_align", *file.relative_to(PACKAGE).parts[:-1]]
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names |= {prefix, *(f"{prefix}.{alias.name}" for alias in node.names)}
    return names


def layer(name: str) -> int:
    return next((i for i, names in enumerate(LAYERS) if name in names), -1)


def test_every_room_has_a_layer():
    rooms = {room(f) for f in FILES} - {"__init__", "_shipped"}
    assert {r for r in rooms if layer(r) < 0} == set()


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_arrows_point_down_only(file):
    here = room(file)
    if here == "__init__":
        return
    for name in imports(file):
        parts = name.split(".")
        there = parts[1] if parts[0] == "soren_align" and len(parts) > 1 else here
        if there != here and layer(there) >= 0:
            assert layer(there) > layer(here), f"{here} must not import {there}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_each_dependency_has_one_door(file):
    here = room(file)
    for name in imports(file):
        for dependency, doors in DOORS.items():
            if name == dependency or name.startswith(dependency + "."):
                assert here in doors, f"{here} imports {name}; its door is {sorted(doors)}"
        if here in WITHOUT_TORCH:
            assert name.split(".")[0] not in HEAVY, f"{here} must not import {name}"


def test_the_rules_can_fail(tmp_path):
    """The reader of imports sees relative, absolute, nested and aliased ones."""
    file = PACKAGE / "spectral" / "imaginary.py"
    source = "def f():\n    from ..trainers import training\n    import lm_eval.tasks as t\n"
    tree = tmp_path / "imaginary.py"
    tree.write_text(source)

    class Elsewhere(type(file)):
        def read_text(self, *a, **k):
            return source

    names = imports(Elsewhere(file))
    assert {"soren_align.trainers", "soren_align.trainers.training", "lm_eval.tasks"} <= names
