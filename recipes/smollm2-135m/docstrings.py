"""Write the data of the study smollm2-spectrum from Python's own library: python docstrings.py FOLDER.

train.jsonl and held_out.jsonl: functions of the standard library, with the first paragraph of their docstring as the
answer. The functions of a module are all in one of the files. retention.jsonl: pages of the language reference, which
the module pydoc_data has. Nothing is downloaded, and the same version of Python gives the same files.
"""

import argparse
import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

QUESTION = "Write the docstring of this Python function.\n\n```python\n{}\n```"
LONGEST_FUNCTION, LONGEST_ANSWER = 1200, 400  # characters: with the template, about 512 tokens
SHORTEST_ANSWER = 20
HELD_OUT = 6  # one module in so many


def examples(library: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The module and the example of each function that has a docstring, without repeated functions."""
    functions: set[str] = set()
    for path in sorted(library.rglob("*.py")):
        module = path.relative_to(library).as_posix()
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(module.split("/")):
            continue
        try:
            nodes = list(ast.walk(ast.parse(path.read_bytes())))
        except SyntaxError:  # files that test the parser
            continue
        for node in nodes:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
                continue
            answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            node.body = node.body[1:]
            function = ast.unparse(node)
            fits = SHORTEST_ANSWER <= len(answer) <= LONGEST_ANSWER and len(function) <= LONGEST_FUNCTION
            if fits and function not in functions:
                functions.add(function)
                yield module, {"instruction": QUESTION.format(function), "output": answer}


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[dict[str, str]]] = {"train": [], "held_out": []}
    for module, example in examples(Path(sysconfig.get_paths()["stdlib"])):
        is_held_out = int(hashlib.sha256(module.encode()).hexdigest(), 16) % HELD_OUT == 0
        lines["held_out" if is_held_out else "train"].append(example)
    lines["retention"] = [{"text": topics[name]} for name in sorted(topics)]
    for name, records in lines.items():
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{name}.jsonl: {len(records):,} lines, sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}")


if __name__ == "__main__":
    main()
