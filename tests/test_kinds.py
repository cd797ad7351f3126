"""No control flow by the words of a message or by the names in a traceback: errors have classes, problems a `kind`."""

import ast
from pathlib import Path

import pytest
import soren_align

SOURCE = Path(soren_align.__file__).parent
ALLOWED = {"core/errors.py"}
"""core/errors.py: `machine_failure` classifies errors of other libraries that have no type of their own. The others go."""
MESSAGES = {"message", "problem", "reason", "obstacle", "last_error", "finding"}
"""Names of variables and attributes that hold messages."""
TESTS = {"startswith", "endswith", "find", "index", "count", "partition", "rpartition", "search", "match", "fullmatch"}
"""Methods that look for words: of texts, and of compiled patterns."""
TRACEBACK = {"walk_tb", "extract_tb", "f_code", "co_name", "tb_frame"}


def words(node: ast.AST) -> bool:
    """Whether a node is a text with a letter."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and any(map(str.isalpha, node.value))


def found_in(source: str) -> list[int]:
    """The lines of a module where control flow depends on a message or on a traceback."""
    tree = ast.parse(source)
    errors = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)}

    def is_message(node: ast.AST) -> bool:
        match node:
            case ast.Call(func=ast.Name(id="str" | "in_one_line" | "first_sentence"), args=[ast.Name(id=name), *_]):
                return name in errors | {"error"}
            case ast.Call(func=ast.Attribute(value=inner)):  # such as str(error).lower()
                return is_message(inner)
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=name)):
                return name in MESSAGES
        return False

    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[right]) if is_message(right):
                lines += [node.lineno] if words(left) else []
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=args) if name in TESTS:
                of_text = is_message(value) and any(map(words, args))
                of_pattern = any(isinstance(arg, ast.Call) and is_message(arg) for arg in args)
                lines += [node.lineno] if of_text or of_pattern else []
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in TRACEBACK:
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("source", [
    'if "out of memory" in self.obstacle: pass',
    'if message.startswith("no file"): pass',
    'try: f()\nexcept ValueError as error: x = str(error).partition(" Please request")',
    'try: f()\nexcept ValueError as e: x = PATTERN.search(str(e))',
    "names = {frame.f_code.co_name for frame in frames}",
])  # fmt: skip
def test_such_control_flow_would_be_found(source):
    assert found_in(source)


def test_no_control_flow_depends_on_the_words_of_a_message():
    files = {str(path.relative_to(SOURCE)): path for path in sorted(SOURCE.rglob("*.py"))}
    found = [f"{name}:{line}" for name, path in files.items() if name not in ALLOWED
             for line in found_in(path.read_text(encoding="utf-8"))]  # fmt: skip
    assert not found
