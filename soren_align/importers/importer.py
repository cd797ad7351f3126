"""Another tool's file, read; the recipe that it becomes, as commented YAML; the table of what became of its keys."""

import io
import textwrap
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from ..errors import UserError, printable
from ..files import read_text
from ..recipe.loader import load_text, parse
from ..recipe.sections import Model, Optimizer, Run, Task
from .convert import Translation, translate
from .key_tables import Note

_WIDTH = 80
_KEYS = 24
_SOREN = """\
As in the source. For Soren write `name: soren` and `adjust_lr_fn: match_rms_adamw`: its updates are
then as large as AdamW's, so that lr may stay, and a search for a better one begins there."""
_BATCH = """\
Rows per step: per_device_train_batch_size x gradient_accumulation_steps x processes, as there;
global_batch_size: N fixes them. parallel: zero3, fsdp2, ... share the model."""
_EVAL = "# eval: {suite: open-llm-leaderboard-v1}     # measures the model beside the one that it started from\n"


def import_file(path: Path, task: Task | None = None) -> tuple[str, str]:
    """(the recipe as YAML, which `load` accepts; the table of what became of each key).

    task: sft or dpo, where the file does not say it or says it wrongly.
    UserError, with every mistake, for a file that is not YAML, trains by neither, or becomes no good recipe.
    """
    source, _ = parse(read_text(path), path.name)
    try:
        made = translate(source, path.stem, path.resolve().parent.name, task)
    except UserError as error:
        raise UserError(*(f"{path.name}: {problem}" for problem in error.problems)) from None
    text = to_text(made, path.name)
    try:
        load_text(text, f"{path.name} as a recipe")
    except UserError as error:
        raise UserError(
            *error.problems, f"{path.name}: mend it there, then import it again; nothing was written"
        ) from None
    return text, to_table(made, path.name)


def to_text(made: Translation, name: str) -> str:
    """The recipe as YAML; what the source does not say is marked `# ours`."""
    recipe = CommentedMap({"task": made.task})
    for section, values in made.recipe.items():
        order = list({"model": Model, "optimizer": Optimizer}.get(section, Run).model_fields)
        rank = {key: order.index(key) for key in values if key in order}
        ordered = dict(sorted(values.items(), key=lambda item: rank.get(item[0], 0)))
        recipe[section] = _commented(ordered, section, made.ours)
        recipe.yaml_set_comment_before_after_key(section, before="\n")
    recipe["optimizer"].yaml_set_comment_before_after_key("name", before=_SOREN, indent=2)
    recipe["run"].yaml_set_comment_before_after_key("output_dir", before=_BATCH, indent=2)
    stream = io.StringIO()
    yaml = YAML()
    yaml.width = 100
    yaml.dump(recipe, stream)
    lines = [f"{made.task.upper()}, imported from {_one_line(name)}"]
    changes = [
        _one_line(f"{', '.join(keys)}: {words}") for keys, words in _grouped([n for n in made.notes if n.changes])
    ]
    if changes:
        lines.append("What changes the training:")
        lines += [line for c in changes for line in textwrap.wrap(c, 100, initial_indent="- ", subsequent_indent="  ")]
    if unknown := [note.key for note in made.notes if note.fate == "unknown"]:
        lines += textwrap.wrap(_one_line(f"Unknown, and left out: {', '.join(unknown)}"), 100)
    return "".join(f"# {line}\n" for line in lines) + stream.getvalue() + "\n" + _EVAL


def _commented(values: dict[str, Any], at: str, ours: dict[str, str]) -> CommentedMap:
    found = CommentedMap()
    for key, value in values.items():
        dotted = f"{at}.{key}"
        found[key] = value
        if isinstance(value, dict) and at in ("data", "model"):
            found[key] = _commented(value, dotted, ours)
        elif isinstance(value, list) and at == "data":
            found[key] = [_commented(one, f"{dotted}[{i}]", ours) for i, one in enumerate(value)]
        if dotted in ours:
            found.yaml_add_eol_comment(_one_line(f"ours: {ours[dotted]}"), key, column=34)
    return found


def _one_line(text: str) -> str:
    """The text as a comment of YAML: whatever stands in it, it begins no line of its own."""
    return printable(" ".join(text.split()))


def to_table(made: Translation, name: str) -> str:
    """What became of each key, in 80 columns: first what changes the training."""
    parts = {
        "changes the training": [n for n in made.notes if n.changes],
        "unknown, left out": [n for n in made.notes if n.fate == "unknown" and not n.changes],
        "renamed": [n for n in made.notes if n.fate == "renamed" and not n.changes],
        "dropped": [n for n in made.notes if n.fate == "dropped" and not n.changes],
    }
    lines = [f"{name} as a recipe for soren-align {made.task}"]
    for title, notes in parts.items():
        if notes:
            lines += ["", title]
            lines += [line for keys, words in _grouped(notes) for line in _row(keys, words)]
    if kept := [n.key for n in made.notes if n.fate == "kept"]:
        lines += ["", "kept in trainer", *_wrapped(", ".join(kept), 2)]
    return "\n".join(lines)


def _grouped(notes: list[Note]) -> list[tuple[list[str], str]]:
    """Keys by what is said of them."""
    found: dict[str, list[str]] = {}
    for note in notes:
        found.setdefault(note.words, []).append(note.key)
    return [(keys, words) for words, keys in found.items()]


def _row(keys: list[str], words: str) -> list[str]:
    left = _wrapped(", ".join(keys), 2)
    right = _wrapped(words, _KEYS + 2)
    if len(left) == 1 and right and len(left[0]) < _KEYS + 1:
        return [left[0] + right[0][len(left[0]) :], *right[1:]]
    return left + right


def _wrapped(text: str, indent: int) -> list[str]:
    pad = " " * indent
    return textwrap.wrap(
        text, _WIDTH, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False, break_long_words=True
    )
