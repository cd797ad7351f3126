"""recipes/smollm2-135m/docstrings.py, whose two forms of data the studies train on, on a library of a few modules."""

import runpy

from soren_align.core import shipped
from soren_align.data.files import is_validation

FUNCTION = '''
def function_{0}(x):
    """Return the {0}th power of a number in a sentence of its own."""
    return x ** {0}
'''


def test_functions_of_one_module_are_in_one_split_and_retention_is_code_of_held_out_modules(tmp_path):
    script = runpy.run_path(str(shipped.ROOT / "recipes/smollm2-135m/docstrings.py"))
    for i in range(60):
        code = "".join(FUNCTION.format(f"{i + 1}0{j}") for j in range(20))
        (tmp_path / f"module{i}.py").write_text(code)
    lines = script["split_as_stdlib"](tmp_path)
    held_out = [i for i in range(60) if is_validation(f"module{i}.py")]
    assert 0 < len(held_out) < 30
    assert (len(lines["train"]), len(lines["held_out"])) == (20 * (60 - len(held_out)), 20 * len(held_out))
    first = lines["train"][0]
    assert first["prompt"].startswith("def function_")
    assert first["prompt"].endswith("\n\n#")
    assert first["completion"].endswith("th power of a number in a sentence of its own.")
    assert all(f"function_{held_out[0] + 1}00(" not in str(each) for each in lines["train"])
    assert lines["retention"]
    assert all('"""Return' in each["text"] for each in lines["retention"])
    chats = script["split_by_module"](script["examples"](tmp_path))
    assert len(chats["train"]) + len(chats["held_out"]) == 60 * 20
