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

_SOREN = """\
These keys are as in the source. To use Soren, write `name: soren` and keep lr: after a few
hundred steps Soren's updates are as large as AdamW's. For about 30 steps multiply lr by 2 to 4.
Then try rates near lr."""
_BATCH = """\
As in the source, a step has per_device_train_batch_size x gradient_accumulation_steps x processes
examples. For N examples, write `global_batch_size: N`. To shard the model, write
`parallel: zero3` or `fsdp2`."""
_EVAL = (
    "# eval: {suite: open-llm-leaderboard-v1}     # evaluates the model and its starting"
    " checkpoint\n"
)


def import_file(
    path: Path, task: TaskName | None = None, template_file: Path | None = None
) -> tuple[str, str]:
    """The recipe as YAML, which `load` accepts, and the table of the outcome of each key.

    task: sft, dpo or kto, instead of the file's own. template_file: where an inline chat template
    is written, if there is one; None: it is left out. Models, data and suites that are not here are
    listed under the table. Raises UserError, with every mistake, for a file that is not YAML, is
    for another task, or gives an invalid recipe; then nothing is written.
    """
    # LLaMA-Factory's file names its data by a second one, which stands beside it.
    source, folder = parse(read_text(path), path.name).content, path.resolve().parent
    try:
        source = with_datasets(source, folder)
        conversion = convert(
            source, path.stem, folder.name, task, template_file and str(template_file)
        )
    except UserError as error:
        raise UserError(*(f"{path.name}: {problem}" for problem in error.problems)) from None
    text = to_text(conversion, path.name)
    # The recipe is loaded as a run would load it, so that the template has to be there already.
    if template_file is not None and conversion.template is not None:
        with template_file.open("x", encoding="utf-8") as stream:
            stream.write(conversion.template)
    missing: list[str] = []
    try:
        load_text(text, f"{path.name} as a recipe", missing.append)
    except UserError as error:
        if template_file is not None and conversion.template is not None:
            template_file.unlink()
        remedy = f"{path.name}: nothing was written; correct this file, and rerun this command"
        raise UserError(*error.problems, *missing, remedy) from None
    table = to_table(conversion, path.name)
    if missing:
        table = "\n".join([table, "", "not on this machine:", *map(_wrapped, missing)])
    return text, table


def _parts(conversion: Conversion) -> dict[str, list[Note]]:
    """The notes under the title that each is printed under, those that need attention first."""
    notes = conversion.notes
    parts = {
        "changes to the training": [n for n in notes if n.changes_training and n.outcome != "yours"]
    }
    titles = {
        "yours": "set these yourself",
        "unknown": "unknown keys, which are left out",
        "renamed": "renamed",
        "dropped": "dropped",
    }
    for outcome, title in titles.items():
        is_change = outcome == "yours"
        parts[title] = [
            n for n in notes if n.outcome == outcome and n.changes_training == is_change
        ]
    return {title: notes for title, notes in parts.items() if notes}


def _lines(notes: list[Note]) -> list[str]:
    """One line for the keys of each explanation."""
    # Keys with one explanation share a line: a file of Axolotl has 60 keys.
    labels: dict[str, list[str]] = {}
    for note in notes:
        labels.setdefault(note.explanation, []).append(printable(note.label, 200))
    return [
        " ".join(f"{', '.join(keys)}{f': {explanation}' if explanation else ''}".split())
        for explanation, keys in labels.items()
    ]


def _wrapped(line: str, width: int = 80, first: str = "  ", others: str = "    ") -> str:
    return textwrap.fill(
        line, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )


def to_table(conversion: Conversion, name: str) -> str:
    """The outcome of each key, 80 columns wide: first the keys that change the training."""
    lines = [f"{name} as a recipe for soren-align {conversion.task}"]
    for title, notes in _parts(conversion).items():
        lines += ["", title, *map(_wrapped, _lines(notes))]
    if unchanged := [n.key for n in conversion.notes if n.outcome == "unchanged"]:
        lines += ["", "unchanged, in trainer", _wrapped(", ".join(unchanged), others="  ")]
    return "\n".join(lines)


def to_text(conversion: Conversion, name: str) -> str:
    """The recipe as YAML; values that are not from the source are marked `# ours`."""
    recipe = CommentedMap({"task": conversion.task})
    # Keys in the order of the schema, as in the shipped recipes.
    optimizer = OPTIMIZER_SECTIONS[conversion.recipe["optimizer"]["name"]]
    forms = {"model": Model, "optimizer": optimizer, "run": Run}
    for section, values in conversion.recipe.items():
        order = list(forms[section].model_fields) if section in forms else list(values)
        ordered = {key: values[key] for key in [*order, *values] if key in values}
        recipe[section] = _commented(ordered, section, conversion.ours)
        recipe.yaml_set_comment_before_after_key(section, before="\n")
    recipe["optimizer"].yaml_set_comment_before_after_key("name", before=_SOREN, indent=2)
    recipe["run"].yaml_set_comment_before_after_key("output_dir", before=_BATCH, indent=2)
    # What differs from the source stands at the file's head: the table is gone when the terminal
    # is.
    head = [f"{conversion.task.upper()}, imported from {' '.join(name.split())}"]
    for title in (
        "changes to the training",
        "set these yourself",
        "unknown keys, which are left out",
    ):
        if notes := _parts(conversion).get(title):
            lines = (_wrapped(line, 100, "- ", "  ") for line in _lines(notes))
            head += [f"{title.capitalize()}:", *"\n".join(lines).split("\n")]
    return "".join(f"# {line}\n" for line in head) + dump(recipe) + "\n" + _EVAL


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
            comment = printable(" ".join(f"ours: {ours[dotted]}".split()))
            section.yaml_add_eol_comment(comment, key, column=34)
    return section
