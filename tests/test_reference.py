"""docs/recipe.md is generated from the recipe's models."""

import importlib.util
from pathlib import Path

from soren_align import shipped
from soren_align.recipe import OPTIMIZERS, Recipe, schema_text

DOCS = Path(__file__).resolve().parents[1] / "docs"


def make_reference():
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_the_generated_one():
    text = make_reference().recipe_page()
    assert (DOCS / "recipe.md").read_text() == text, "run: python docs/make_reference.py"


def test_the_shipped_schema_is_the_generated_one():
    reference = make_reference()
    assert reference.SCHEMA.read_text(encoding="utf-8") == schema_text(), "run: python docs/make_reference.py"


def test_every_shipped_recipe_names_the_schema_for_editors():
    for path in shipped.recipes().values():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith(shipped.MODELINE)
        assert (path.parent / first.removeprefix(shipped.MODELINE)).resolve() == make_reference().SCHEMA.resolve()


def test_the_page_has_every_key_with_its_meaning():
    text = make_reference().recipe_page()
    keys = set(Recipe.model_fields) - {"model", "data", "optimizer", "trainer", "run", "eval"}
    keys |= {key for member in OPTIMIZERS.values() for key in member.model_fields}
    for key in keys:
        assert f"**`{key}`**" in text
    assert not [line for line in text.splitlines() if line.startswith("- **`") and line.endswith("): ")]
