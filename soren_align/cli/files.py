"""Commands for files: `new`, `recipes`, `suites`, `import`, `schema` and `docs`."""

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..core import shipped
from ..core.errors import UserError, did_you_mean, printable
from ..core.files import local_path
from ..core.shipped import MODELINE
from .grammar import refuse_options
from .questions import Kind, OwnData, keep_columns, kind_of, read_data, write_questions

recipes_app = typer.Typer(
    help="List or copy the recipes and studies that come with soren-align.",
    invoke_without_command=True,
    rich_markup_mode=None,
)
suites_app = typer.Typer(
    help="List or copy the benchmark suites that come with soren-align.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

NEW_FILES = """\
written   {folder}
          {recipes} ({schema}: for editors)
          {files}
next      in {folder}: soren-align plan sft.yaml, then {commands}
          soren-align docs own-data"""


def named(
    metavar: str, help_text: str, *tables: Callable[[], dict[str, Path]], of: Any = typer.Argument
) -> Any:
    """Return an argument, or an option, that is completed by the names in these tables; the shell
    adds files itself.
    """

    def complete(incomplete: str) -> list[str]:
        return [name for table in tables for name in table() if name.startswith(incomplete)]

    return of(metavar=metavar, help=help_text, autocompletion=complete)


def new(
    context: typer.Context,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A new folder, or an empty one.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model to fine-tune: a folder, or a hub name. Default: a tiny model.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Your questions and answers, chats, pairs or thumbs (.csv, .xlsx, .json, .jsonl).",
        ),
    ] = None,
    question: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The column of the questions.")
    ] = None,
    answer: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The column of the answers.")
    ] = None,
    kind: Annotated[
        Kind | None,
        typer.Option(
            metavar="KIND",
            help="facts: train all; behaviour: hold some out. Default: by the file's content.",
        ),
    ] = None,
) -> None:
    """Write a starting folder for your own data and questions.

    The folder has recipes (SFT; then DPO, or KTO for thumbs), their examples, and a suite of
    questions that judges them. You can run the recipes without a change. With --data, examples and
    questions come from your file: trained questions, rephrased ones, or examples that are held out.
    """
    if data is None:
        options = ["question", "answer", "kind"]
        refuse_options(context, options, "without --data", "add --data FILE")
    from ..core.text import print_labelled, stderr_console

    # Read before the folder is made: a file that cannot be used leaves nothing behind.
    own = read_data(data, question, answer) if data else None
    if model and Path(model).is_dir():
        model = str(Path(model).resolve())  # the recipes are used in the new folder
    target = _new_folder(folder)
    _copy_folder(shipped.ROOT / "configs/new", target)
    schema = _write_schema(target, "recipe")
    from ..launch.environment import has_gpu

    lines = [
        "chat.jsonl, pairs.jsonl: examples; replace them by your own",
        "questions/*/test.jsonl: questions; replace them by your own",
    ]
    notices, are_facts = [], False
    if own:
        looks, reason = kind_of(own.pairs)
        are_facts = (kind or looks) == "facts" and not (own.rejected or own.chats or own.thumbs)
        lines, notices = write_questions(
            target, own, kind or looks, is_pretrained=model is not None
        )
        notices = [*own.notices, *notices]
        print_labelled(stderr_console(), "read", f"{own.name}: {own.read_as}")
        if not (own.chats or own.rejected or own.thumbs):
            print_labelled(stderr_console(), "kind", KINDS[kind or looks].format(reason=reason))
    else:
        columns = ["trained", "rephrased", "preference", *["general"] * bool(model)]
        (target / "kto.yaml").unlink()
        keep_columns(target / "questions", columns)
    for file in target.glob("*.yaml"):
        _write_recipe(file, schema, model, own, are_facts=are_facts)
    if model and not has_gpu():
        notices.append(
            "this machine has no GPU, so the recipes train on the CPU; comments in the recipes name"
            " the keys for a GPU"
        )
    if data and not model:
        notices.append(
            "the tiny model starts from random weights: it can learn your answers by heart, and"
            " nothing else. For a pretrained model add --model MODEL; `soren-align docs own-data`"
            " names one for a CPU"
        )
    for notice in notices:
        print_labelled(stderr_console(), "notice", notice)
    names = [name for name in ("sft.yaml", "dpo.yaml", "kto.yaml") if (target / name).exists()]
    commands = ", ".join(f"soren-align {Path(name).stem} {name}" for name in names)
    texts = {"folder": target, "schema": schema, "recipes": ", ".join(names), "commands": commands}
    typer.echo(printable(NEW_FILES.format(**texts, files="\n          ".join(lines))))


KINDS = {
    "facts": "facts ({reason}): all are trained, and asked again. For examples of one skill, of"
    " which some should be held out, add --kind behaviour",
    "behaviour": "behaviour ({reason}): some are held out and asked. For separate facts, of which"
    " all should be trained, add --kind facts",
}


def _write_recipe(
    file: Path, schema: str, model: str | None, own: OwnData | None, *, are_facts: bool
) -> None:
    """Write a copied recipe with the user's model, and with room for the longest example."""
    from ..core.document import parse, with_modeline
    from ..launch.environment import has_gpu

    # Line by line and not as YAML: the comments of these recipes are what they are for.
    lines = file.read_text(encoding="utf-8").splitlines()
    values: dict[str, str] = {}
    if model:  # at the rates of a run without a recipe
        task = next(task for task in ("sft", "dpo", "kto") if f"task: {task}" in lines)
        start = parse(
            (shipped.ROOT / f"configs/start/{task}.yaml").read_text(encoding="utf-8"), task, ""
        ).content
        rate = f"{start['optimizer']['lr']:.1e}".replace("e-0", "e-")
        values = {"lr": rate, "num_train_epochs": str(start["trainer"]["num_train_epochs"])}
        values |= {"bf16": "true"} if has_gpu() else {}
        values |= {"name_or_path": json.dumps(model)} if task == "sft" else {}
        values |= {"max_length": str(start["trainer"]["max_length"])}
        if are_facts:  # a model learns single facts by heart in many small steps, or not at all
            values |= FACTS
    elif own:  # a token is a byte; the template has about forty more
        texts = [*own.pairs, *((q, a) for q, each in own.thumbs.items() for a, _ in each)]
        longest = max(len((prompt + reply).encode()) for prompt, reply in texts) + 64
        values = {"max_length": str(min(max(512, -(-longest // 128) * 128), TINY_LENGTH))}
    if own and own.thumbs:  # good answers together count as much as bad ones
        good = [good for each in own.thumbs.values() for _, good in each]
        ratio = good.count(False) / good.count(True)
        key = "desirable_weight" if ratio > 1 else "undesirable_weight"
        values[key] = f"{max(ratio, 1 / ratio):.3g}"
    keys = [line.partition(":")[0].strip() for line in lines]
    lines = [
        f"  {key}: {values[key]}" if key in values else line
        for key, line in zip(keys, lines, strict=True)
        if not (model and (key == "init_seed" or (key == "use_cpu" and has_gpu())))
    ]
    if model and are_facts:
        lines.insert(next(i for i, line in enumerate(lines) if "name_or_path:" in line) + 1, LORA)
    file.write_text(with_modeline("\n".join(lines) + "\n", schema), encoding="utf-8")


FACTS = {
    "lr": "1.0e-3                                  # for LoRA of SmolLM2-135M; less if it forgets",
    "num_train_epochs": "20                        # to learn them by heart",
}
"""Of 24 facts SmolLM2-135M-Instruct is right on 24 after this, and on 29 of 40 general questions
(24 before); after 15 epochs at 5e-4 on 1 of 24 (30 November 2026, CPU)."""
LORA = "  lora: {r: 16}                               # adapters; without this line all weights"
TINY_LENGTH = 1024
"""The positions of configs/models/tiny."""

FOLDERS = {
    "quickstart": "on a CPU, offline, in minutes",
    "smollm2-135m": "a small chat model with your data, on a CPU",
    "boolq": "a public benchmark without a hub, on a CPU",
    "qwen2.5-0.5b": "LoRA of Qwen2.5-0.5B on UltraChat, on one GPU of 24 GB",
    "qwen2.5-3b": "SFT of Qwen2.5-3B on UltraChat, on GPUs",
    "mistral-7b": "DPO of a Mistral-7B SFT on UltraFeedback, on GPUs",
    "llama-c4": "pre-training of LLaMA on C4, on GPUs",
    "qwen3-0.6b": "pre-training of Qwen3-0.6B on C4, on GPUs",
    "paper-figures": "the paper's figures of spectra, on GPUs",
}
"""The purpose of the recipes of a folder, in the order of the list."""
FIRST = ("sft", "dpo", "soren")
"""The recipes that a folder's list begins with."""
MAX_LISTED = 10
"""Recipes of a folder with a line each; of more, the parts of their names."""


@recipes_app.callback()
def recipes(context: typer.Context) -> None:
    """List the shipped recipes, and the studies for `compare`."""
    if context.invoked_subcommand is not None:
        return
    folders: dict[str, dict[str, Path]] = {folder: {} for folder in FOLDERS}
    for name, path in shipped.recipes().items():
        folder, _, rest = name.partition("/")
        folders.setdefault(folder, {})[rest] = path
    for folder, files in folders.items():
        typer.echo(f"{folder + '/':22} {FOLDERS.get(folder, '')}".rstrip())
        if len(files) <= MAX_LISTED:
            for name, path in sorted(
                files.items(), key=lambda item: (*FIRST, item[0]).index(item[0])
            ):
                typer.echo(f"  {name:20} {_first_comment(path)}")
            continue
        first, last = (
            list(dict.fromkeys(parts))
            for parts in zip(*(n.split("-", 1) for n in files), strict=True)
        )
        first.sort(key=lambda size: (size[-1:] != "m", len(size), size))  # 60m, 135m, 1b
        typer.echo(f"  {{{','.join(first)}}}-{{{','.join(last)}}}")
    typer.echo("\nstudies, for soren-align compare")
    for name, path in shipped.studies().items():
        typer.echo(f"{name:34} {_first_comment(path)}")
    typer.echo(
        "\nnext      soren-align sft quickstart/sft\n          soren-align recipes copy NAME"
        " my.yaml"
    )


@recipes_app.command()
def copy(
    name: Annotated[
        str,
        named(
            "NAME",
            "The name of a recipe or study that `soren-align recipes` lists, such as"
            " quickstart/sft.",
            shipped.recipes,
            shipped.studies,
        ),
    ],
    dest: Annotated[
        str | None,
        typer.Argument(
            metavar="DEST",
            help="The file or folder to write. Default: NAME.yaml in the working directory.",
        ),
    ] = None,
) -> None:
    """Copy a shipped recipe or study to edit it; the copy works in any folder.

    If the recipe extends another recipe, the copy has the keys of both. The command also writes a
    JSON schema (recipe.schema.json or study.schema.json), by which an editor completes and checks
    the keys of the copy.
    """
    from ..core.document import with_modeline
    from ..recipe.loader import merged_text, parse

    known, studies = shipped.recipes(), shipped.studies()
    if (source := (known | studies).get(name)) is None:
        hint = did_you_mean(name, known | studies, "run `soren-align recipes` for a list")
        raise UserError(f"{name}: is no shipped recipe or study{hint}")
    target = _new_file(dest or ".", f"{name.replace('/', '-')}.yaml")
    schema_file = _write_schema(target.parent, "study" if name in studies else "recipe")
    text = source.read_text(encoding="utf-8") if name in studies else merged_text(source)
    target.write_text(with_modeline(text, schema_file), encoding="utf-8")
    next_command = "compare" if name in studies else parse(text, name).content["task"]
    typer.echo(printable(f"{target}: edit this file, then run soren-align {next_command} {target}"))


@suites_app.callback()
def suites(context: typer.Context) -> None:
    """List the shipped suites."""
    if context.invoked_subcommand is None:
        from ..evaluate.suite.suites import load_suite

        # 80 if there is no terminal and COLUMNS is not set
        width = shutil.get_terminal_size().columns
        for name, path in shipped.suites().items():
            suite = load_suite(path)
            columns = ", ".join(task.column for task in suite.tasks)
            typer.echo(
                f"{name:24} "
                + textwrap.shorten(f"{suite.title}: {columns}", width - 25, placeholder=" ...")
            )


@suites_app.command("copy")
def copy_suite(
    name: Annotated[
        str,
        named(
            "NAME",
            "The name of a suite that `soren-align suites` lists, such as quickstart.",
            shipped.suites,
        ),
    ],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A new folder, or an empty one.")],
) -> None:
    """Copy a shipped suite and its task files to edit them; the copy works in any folder."""
    known = shipped.suites()
    if (source := known.get(name)) is None:
        hint = did_you_mean(name, known, f"write one of {', '.join(known)}")
        raise UserError(f"{name}: is no shipped suite{hint}")
    if folder in known:
        raise UserError(f"{folder}: is the name of a shipped suite; name another folder")
    target = _new_folder(folder)
    _copy_folder(source.parent, target)
    typer.echo(
        printable(
            f"{target / 'suite.yaml'}: edit it, then run soren-align eval RUN --suite {target}"
        )
    )


def import_(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="YAML of TRL, the alignment handbook, Axolotl or LLaMA-Factory."
        ),
    ],
    dest: Annotated[
        str | None,
        typer.Argument(
            metavar="DEST", help="The file or folder to write. Default: print the recipe."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK", help="sft, dpo or kto. Default: from the file's keys or name."
        ),
    ] = None,
) -> None:
    """Convert another tool's file to a recipe, and report every key."""
    from ..core.document import with_modeline
    from ..importers import import_file

    if task not in (None, "sft", "dpo", "kto"):
        raise UserError(f"--task: found {task!r}; write sft, dpo or kto")
    source = local_path(file)
    if not source.is_file():
        raise UserError(f"{file}: there is no such file; correct the path")
    # Without a file the recipe goes to standard output, and the table to standard error: both can
    # be redirected.
    if dest is None:
        text, table = import_file(source, task)
        typer.echo(printable(text) if sys.stdout.isatty() else text, nl=False)
    else:
        # The chat template of the source becomes a file beside the recipe, which names it.
        target = _new_file(dest, source.name)
        text, table = import_file(source, task, _new_file(str(target.with_suffix(".jinja")), ""))
        target.write_text(
            with_modeline(text, _write_schema(target.parent, "recipe")), encoding="utf-8"
        )
        table += f"\n\n{target}: check this file, then run soren-align plan {target}"
    typer.echo(printable(table), err=True)


def schema(
    kind: Annotated[
        Literal["recipe", "study"], typer.Argument(metavar="KIND", help="recipe or study.")
    ] = "recipe",
    output: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write to this file, or into this folder. Default: print the schema.",
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of recipes or studies, or write it to a file."""
    from ..core.document import write_schema

    file_name, text = _schema(kind)
    if output is None:
        typer.echo(text, nl=False)
        return
    target = local_path(output)
    target = target / file_name if target.is_dir() else target
    if not target.parent.is_dir():
        raise UserError(
            f"--output: there is no folder {target.parent}; create this folder, or name another one"
        )
    if not write_schema(target, text):
        raise UserError(
            f"--output: {target} exists already and was not written by this command; name another"
            " file"
        )
    use = f": to use it in an editor, write this first line into a {kind}: {MODELINE}{target.name}"
    typer.echo(printable(f"{target}{use}"))


def _schema(kind: str) -> tuple[str, str]:
    """Return the schema's file name and its text."""
    from ..core.document import schema_text

    if kind == "study":
        from ..study.config import STUDY_SCHEMA_FILE, study_schema

        return STUDY_SCHEMA_FILE, schema_text(study_schema())
    from ..recipe.loader import SCHEMA_FILE, json_schema

    return SCHEMA_FILE, schema_text(json_schema())


def _write_schema(folder: Path, kind: str) -> str:
    """Write a schema beside a recipe or a study, unless a file of another origin is there; return
    the file's name.
    """
    from ..core.document import write_schema

    file_name, text = _schema(kind)
    write_schema(folder / file_name, text)
    return file_name


def _new_file(dest: str, name: str) -> Path:
    """Return `dest`, or the file `name` in the folder `dest`.
    Raises UserError if it exists or cannot be written.
    """
    target = local_path(dest)
    target = target / name if target.is_dir() else target
    if target.exists() or target.is_symlink():
        raise UserError(f"{target}: exists already; name another file")
    _refuse_unwritable(target.parent)
    return target


def _new_folder(dest: str) -> Path:
    """Return the folder `dest`, which is new or empty. Raises UserError if it cannot be written."""
    target = local_path(dest)
    # is_symlink: a link whose target is missing does not exist, and would be written through.
    if (target.exists() or target.is_symlink()) and not (
        target.is_dir() and not any(target.iterdir())
    ):
        raise UserError(f"{target}: exists already; name a new folder, or an empty one")
    _refuse_unwritable(target if target.is_dir() else target.parent)
    return target


def _refuse_unwritable(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(
            f"{folder}: there is no such folder; create this folder, or name another one"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(
            f"{folder}: you have no permission to write into this folder; name another folder"
        )


def _copy_folder(source: Path, target: Path) -> None:
    """Copy all files of a shipped folder, without their permissions, which may be read-only."""
    for file in source.rglob("*"):
        if file.is_file():
            copied = target / file.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(file.read_bytes())


def _first_comment(path: Path) -> str:
    first, line, *_ = path.read_text(encoding="utf-8").splitlines()
    line = line if first.startswith(MODELINE) else first
    return line.removeprefix("#").strip() if line.startswith("#") else ""


def docs(
    topic: Annotated[
        str | None, named("TOPIC", "The name of a page. Default: list the pages.", shipped.pages)
    ] = None,
) -> None:
    """Show a page of the documentation; in a pipe, print it as Markdown."""
    pages = shipped.pages()
    if topic is None:
        width = max(map(len, pages))
        for group, files in shipped.NAVIGATION.items():
            typer.echo(group)
            for name in map(shipped.page_name, files):
                typer.echo(f"  {name:<{width}}  {shipped.title(pages[name])}")
        return
    name = topic.lower().removeprefix("docs/").removesuffix(".md").removesuffix("/readme")
    name = (
        name if name in pages else next((page for page in pages if page.endswith(f"/{name}")), name)
    )
    if name not in pages:
        known = f"write one of {', '.join(pages)}"
        raise UserError(
            f"{topic}: is no page of the documentation{did_you_mean(name, pages, known)}"
        )
    text = pages[name].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        typer.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    # As git does: colours, and no pager for a page that fits the screen.
    os.environ.setdefault("LESS", "FRX")
    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(re.sub(r"<!--.*?-->\n", "", text), hyperlinks=False))
