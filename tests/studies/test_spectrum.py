"""docs/studies/spectrum.py computes the tables of its page from the runs, and docstrings.py writes the study's data."""

import ast
import json
from pathlib import Path

from tests.support.pages import script

from studies import spectrum

FOLDER = Path(spectrum.__file__).parent
RUNS = [json.loads(line) for line in (FOLDER / "smollm2-spectrum.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_tables_of_the_runs_are_those_of_the_page():
    page = (FOLDER / "spectrum.md").read_text(encoding="utf-8")
    assert spectrum.search_table(RUNS).count("\n") == len(spectrum.NAMES) + 1
    assert spectrum.search_table(RUNS) in page
    assert spectrum.seeds_table(RUNS) in page


def test_the_runs_show_what_the_page_concludes():
    loss = {(r["candidate"], r["stage"], r["seed"], spectrum.rate(r)): r["held_out"][-1] for r in RUNS}
    pairs = [(loss[key], loss["soren", *key[1:]]) for key in loss if key[0] == "muon"]
    assert max(abs(a - b) for a, b in pairs) <= 0.005
    best = {name: min(v for key, v in loss.items() if key[:2] == (name, "search")) for name in spectrum.NAMES}
    assert max(best.values()) - min(best.values()) < 0.03
    assert min(best, key=best.__getitem__) == "adamw"


def test_the_data_have_functions_without_docstring_and_modules_of_their_own(tmp_path):
    module = script("recipes/smollm2-135m/docstrings.py")
    (tmp_path / "test").mkdir()
    text = 'def f(x):\n    """Return the number x,\n    doubled.\n\n    More."""\n    return 2 * x\n'
    text += "\ndef without_docstring(x):\n    return x\n"
    for name in ("a.py", "b.py", "test/c.py"):
        (tmp_path / name).write_text(text if name != "b.py" else text.replace("2 *", "3 *"), encoding="utf-8")
    (tmp_path / "broken.py").write_text("def f(:", encoding="utf-8")
    examples = dict(module.examples(tmp_path))
    assert list(examples) == ["a.py", "b.py"]
    assert examples["a.py"]["output"] == "Return the number x, doubled."
    function = examples["a.py"]["instruction"].split("```python\n")[1].removesuffix("\n```")
    assert ast.get_docstring(ast.parse(function).body[0]) is None
    assert "return 2 * x" in function
