"""Import another tool's file: the recipe as commented YAML, and a table of the outcome of every
key.
"""

import textwrap
from pathlib import Path
from typing import Any

from ruamel.yaml.comments import CommentedMap

from ..core.document import dump
from ..core.errors import UserError, printable
from ..core.files import read_text
from ..recipe.loader import load_text, parse
from ..recipe.optimizer import OPTIMIZER_SECTIONS
from ..recipe.schema import Model, Run
from ..tasks import TaskName
from .datasets import with_datasets
from .engine import convert
from .keys import Conversion, Note

_WIDTH = 80
_KEYS = 24
_SOREN = """\
These keys are as in the source. To use Soren, write `name: soren` and keep lr: after a few hundred steps
Soren's updates are as large as AdamW's. For about 30 steps multiply lr by 2 to 4. Then try rates near lr."""
_BATCH = """\
As in the source, a step has per_device_train_batch_size x gradient_accumulation_steps x processes
examples. For N examples, write `global_batch_size: N`. To shard the model, write `parallel: zero3` or `fsdp2`."""
_EVAL = "# eval: {suite: open-llm-leaderboard-v1}     # evaluates the model and its starting checkpoint\n"


def import_file(
    path: Path, task: TaskName | None = None, template_file: Path | None = None
) -> tuple[str, str]:
    """The recipe as YAML, which `load` accepts, and the table of the outcome of each key.

    task: sft or dpo, instead of the file's own. template_file: where an inline chat template is
    written, if there is one; None: it is left out. Models, data and suites that are not here are
    listed under the table. Raises UserError, with every mistake, for a file that is not YAML, is
    for another task, or gives an invalid recipe; then nothing is written.
    """
    source = parse(read_text(path), path.name).content
    try:
        source = with_datasets(source, path.resolve().parent)
        conversion = convert(
            source,
            path.stem,
            path.resolve().parent.name,
            task,
            template_file and str(template_file),
        )
    except UserError as error:
        raise UserError(*(f"{path.name}: {problem}" for problem in error.problems)) from None
    text = to_text(conversion, path.name)
    if template_file is not None and conversion.template is not None:
        with template_file.open("x", encoding="utf-8") as stream:
            stream.write(conversion.template)
    missing: list[str] = []
    try:
        load_text(text, f"{path.name} as a recipe", missing.append)
    except UserError as error:
        if template_file is not None and conversion.template is not None:
            template_file.unlink()
        remedy = (
            f"{path.name}: nothing was written; correct this file, and run the same command again"
        )
        raise UserError(*error.problems, *missing, remedy) from None
    table = to_table(conversion, path.name)
    if missing:
        lines = [line for problem in missing for line in _wrapped(problem, 2)]
        table = "\n".join([table, "", "not on this machine:", *lines])
    return text, table


def to_text(conversion: Conversion, name: str) -> str:
    """The recipe as YAML; values that are not from the source are marked `# ours`."""
    recipe = CommentedMap({"task": conversion.task})
    forms = {
        "model": Model,
        "optimizer": OPTIMIZER_SECTIONS[conversion.recipe["optimizer"]["name"]],
    }
    for section, values in conversion.recipe.items():
        order = list(forms.get(section, Run).model_fields)
        rank = {key: order.index(key) for key in values if key in order}
        ordered = dict(sorted(values.items(), key=lambda item: rank.get(item[0], 0)))
        recipe[section] = _commented(ordered, section, conversion.ours)
        recipe.yaml_set_comment_before_after_key(section, before="\n")
    recipe["optimizer"].yaml_set_comment_before_after_key("name", before=_SOREN, indent=2)
    recipe["run"].yaml_set_comment_before_after_key("output_dir", before=_BATCH, indent=2)
    lines = [f"{conversion.task.upper()}, imported from {_one_line(name)}"]
    changes = [
        _one_line(f"{', '.join(keys)}: {explanation}")
        for keys, explanation in _grouped([n for n in conversion.notes if n.changes_training])
    ]
    if changes:
        lines.append("Changes to the training:")
        lines += [
            line
            for c in changes
            for line in textwrap.wrap(c, 100, initial_indent="- ", subsequent_indent="  ")
        ]
    if unknown := [note.key for note in conversion.notes if note.outcome == "unknown"]:
        lines += textwrap.wrap(
            _one_line(f"Unknown keys, which are left out: {', '.join(unknown)}"), 100
        )
    return "".join(f"# {line}\n" for line in lines) + dump(recipe) + "\n" + _EVAL


def _commented(values: dict[str, Any], at: str, ours: dict[str, str]) -> CommentedMap:
    section = CommentedMap()
    for key, value in values.items():
        dotted = f"{at}.{key}"
        section[key] = value
        if isinstance(value, dict) and at in ("data", "model"):
            section[key] = _commented(value, dotted, ours)
        elif isinstance(value, list) and at == "data":
            section[key] = [_commented(one, f"{dotted}[{i}]", ours) for i, one in enumerate(value)]
        if dotted in ours:
            section.yaml_add_eol_comment(_one_line(f"ours: {ours[dotted]}"), key, column=34)
    return section


def _one_line(text: str) -> str:
    """The text on one line, as a YAML comment needs it."""
    return printable(" ".join(text.split()))


def to_table(conversion: Conversion, name: str) -> str:
    """The outcome of each key, 80 columns wide: first the keys that change the training."""
    parts = {
        "changes to the training": [note for note in conversion.notes if note.changes_training]
    }
    others = [note for note in conversion.notes if not note.changes_training]
    titles = {
        "unknown": "unknown keys, which are left out",
        "renamed": "renamed",
        "dropped": "dropped",
    }
    parts |= {
        title: [note for note in others if note.outcome == outcome]
        for outcome, title in titles.items()
    }
    lines = [f"{name} as a recipe for soren-align {conversion.task}"]
    for title, notes in parts.items():
        if notes:
            lines += ["", title]
        for keys, explanation in _grouped(notes):
            left, right = _wrapped(", ".join(keys), 2), _wrapped(explanation, _KEYS + 2)
            if len(left) == 1 and right and len(left[0]) < _KEYS + 1:  # side by side
                left, right = [left[0] + right[0][len(left[0]) :]], right[1:]
            lines += left + right
    if unchanged := [n.key for n in conversion.notes if n.outcome == "unchanged"]:
        lines += ["", "unchanged, in trainer", *_wrapped(", ".join(unchanged), 2)]
    return "\n".join(lines)


def _grouped(notes: list[Note]) -> list[tuple[list[str], str]]:
    """(keys, explanation) of the notes with one explanation."""
    keys_of: dict[str, list[str]] = {}
    for note in notes:
        keys_of.setdefault(note.explanation, []).append(note.key)
    return [(keys, explanation) for explanation, keys in keys_of.items()]


def _wrapped(text: str, indent: int) -> list[str]:
    pad = " " * indent
    return textwrap.wrap(
        text, _WIDTH, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False
    )
