"""The schemas, and the site's page of a recipe's keys, are generated from the recipe's models."""

from soren_align.core import shipped
from soren_align.core.document import schema_text
from soren_align.core.files import read_text
from soren_align.core.yaml import parse_yaml
from soren_align.recipe import OPTIMIZER_SECTIONS, Recipe
from soren_align.study.config import study_schema

from tests.support.pages import script

reference = script("docs/make_reference.py")


def test_the_shipped_schemas_are_the_generated_ones():
    for file, schema in reference.SCHEMAS.items():
        assert file.read_text(encoding="utf-8") == schema_text(schema()), "run: python docs/make_reference.py"


def test_every_shipped_recipe_and_study_names_its_schema_for_editors():
    of_recipes, of_studies = (file.resolve() for file in reference.SCHEMAS)
    for files, schema in ((shipped.recipes(), of_recipes), (shipped.studies(), of_studies)):
        for path in files.values():
            first = path.read_text(encoding="utf-8").splitlines()[0]
            assert first.startswith(shipped.MODELINE), path
            assert (path.parent / first.removeprefix(shipped.MODELINE)).resolve() == schema


def unknown_keys(value, part, schema):
    """Keys of a study that its JSON Schema does not have."""
    if "$ref" in part:
        part = schema["$defs"][part["$ref"].removeprefix("#/$defs/")]
    part = next((each for each in part.get("anyOf", ()) if "$ref" in each and isinstance(value, dict)), part)
    if "$ref" in part:
        return unknown_keys(value, part, schema)
    if not isinstance(value, dict) or part.get("additionalProperties") is True:
        return []
    known = part.get("properties", {})
    others = part.get("additionalProperties") or next(iter(part.get("patternProperties", {}).values()), None)
    found = []
    for key, each in value.items():
        inner = known.get(key, others)
        found += [key] if not inner else [f"{key}.{name}" for name in unknown_keys(each, inner, schema)]
    return found


def test_the_schema_knows_every_key_of_a_shipped_study():
    schema = study_schema()
    for path in shipped.studies().values():
        study, _ = parse_yaml(read_text(path), str(path))
        assert unknown_keys(study, schema, schema) == []
        assert set(schema["required"]) <= study.keys()
    wrong = {"search": {"trails": 1, "space": {"optimizer.lr": {"lo": 1}}}, "candidates": {"soren": {"sets": {}}}}
    assert unknown_keys(wrong, schema, schema) == [
        "search.trails", "search.space.optimizer.lr.lo", "candidates.soren.sets",
    ]  # fmt: skip
    assert "eval_rewards/margins" in schema["$defs"]["Search"]["properties"]["metric"]["enum"]
    assert schema["$defs"]["VerdictSection"]["properties"]["seeds"]["minItems"] == 3


def test_the_page_has_every_key_with_its_meaning():
    text = reference.page()
    keys = set(Recipe.model_fields) - {"model", "data", "optimizer", "trainer", "run", "eval"}
    keys |= {key for member in OPTIMIZER_SECTIONS.values() for key in member.model_fields}
    for key in keys:
        assert f"**`{key}`**" in text
    assert not [line for line in text.splitlines() if line.startswith("- **`") and line.endswith("): ")]
