"""Write functions and their docstrings from Python's own library, as data for SFT: python docstrings.py FOLDER.

train.jsonl and held_out.jsonl: functions of the standard library, with the first paragraph of their docstring as the
answer. The functions of a module are all in one of the files. retention.jsonl: pages of the language reference, which
the module pydoc_data has. These are the data of research/studies/smollm2-spectrum.yaml.

With --short, for the model of quickstart/stdlib: shorter functions, as plain texts. Held out are functions of the
modules of stdlib's validation split, and retention.jsonl is the code of these modules in passages. These are the data
of the recipe quickstart/docstrings.

Nothing is downloaded, and the same version of Python gives the same files.
"""

import argparse
import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

QUESTION = "Write the docstring of this Python function.\n\n```python\n{}\n```"
LONGEST_FUNCTION, LONGEST_ANSWER = 1200, 400  # characters: with the template, about 512 tokens
SHORT_FUNCTION, SHORT_ANSWER = (
    400,
    120,
)  # characters: about 200 tokens of quickstart/stdlib, which has 256 positions
PASSAGE = 1500  # characters: more than 256 tokens of quickstart/stdlib, so that no passage's end is scored
SHORTEST_ANSWER = 20
HELD_OUT = 6  # one module in so many

Example = dict[str, str]


def functions(
    library: Path, longest_function: int, longest_answer: int
) -> Iterator[tuple[str, str, str]]:
    """The module, the code and the docstring of each function that has one, without repeated functions."""
    known: set[str] = set()
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
            fits = (
                SHORTEST_ANSWER <= len(answer) <= longest_answer
                and len(function) <= longest_function
            )
            if fits and function not in known:
                known.add(function)
                yield module, function, answer


def examples(library: Path) -> Iterator[tuple[str, Example]]:
    """The module and the example of each function, for a chat model."""
    for module, function, answer in functions(library, LONGEST_FUNCTION, LONGEST_ANSWER):
        yield module, {"instruction": QUESTION.format(function), "output": answer}


def short_examples(library: Path) -> Iterator[tuple[str, Example]]:
    """The module and the example of each short function, for a model without a chat template: a comment after it."""
    for module, function, answer in functions(library, SHORT_FUNCTION, SHORT_ANSWER):
        # The space belongs to the answer's first token.
        yield module, {"prompt": f"{function}\n\n#", "completion": f" {answer}"}


def passages(text: str) -> Iterator[str]:
    """Consecutive lines of a text, with at least PASSAGE characters; the last ones are left out."""
    passage = ""
    for line in text.splitlines(keepends=True):
        passage += line
        if len(passage) >= PASSAGE:
            yield passage
            passage = ""


def split_by_module(examples: Iterable[tuple[str, Example]]) -> dict[str, list[Example]]:
    """train and held_out: one module in HELD_OUT is held out."""
    lines: dict[str, list[Example]] = {"train": [], "held_out": []}
    for module, example in examples:
        is_held_out = int(hashlib.sha256(module.encode()).hexdigest(), 16) % HELD_OUT == 0
        lines["held_out" if is_held_out else "train"].append(example)
    return lines


def split_as_stdlib(library: Path) -> dict[str, list[Example]]:
    """train, held_out and retention, by the splits of `python:stdlib`: the base was not trained on the latter two."""
    from soren_align.data.files import entries, is_validation

    lines: dict[str, list[Example]] = {"train": [], "held_out": [], "retention": []}
    for module, example in short_examples(library):
        lines["held_out" if is_validation(module) else "train"].append(example)
    for entry in entries(library)["validation"]:
        if (
            entry.name == entry.file.relative_to(library).as_posix()
        ):  # a module, not a topic of `help`
            lines["retention"] += (
                {"text": passage} for passage in passages(entry.file.read_text(encoding="utf-8"))
            )
    return lines


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--short", action="store_true", help="for the model of quickstart/stdlib")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    if arguments.short:
        lines = split_as_stdlib(library)
    else:
        lines = split_by_module(examples(library)) | {
            "retention": [{"text": topics[name]} for name in sorted(topics)]
        }
    for name, records in lines.items():
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (arguments.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(
            f"{name}.jsonl: {len(records):,} lines, sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"
        )


if __name__ == "__main__":
    main()
