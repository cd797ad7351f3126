"""Options that a person can type: commands in groups, and keys of a recipe as words.

`optimizer.lr=1e-3`, `--optimizer.lr 1e-3` and TRL's `--learning_rate 1e-3` mean `--set
optimizer.lr=1e-3`. A word that is none of a command's options, but a key, is rewritten before typer
parses the words.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Context, Option
from typer.core import TyperCommand

from ..core.errors import UserError

HELP = """\
Usage: soren-align COMMAND ...

Fine-tune language models with AdamW, Muon or Soren, and find out whether it
helped.

Start     new        write a folder to start with: data, recipe, questions
          recipes, suites, docs, import
Train     sft        train on conversations, then evaluate
          dpo, kto   train on preference pairs; on thumbs up and down
          pretrain   train on plain texts, from random weights
          plan       show what a recipe or model would do and cost
Judge     eval       evaluate models beside the checkpoints they started from
          compare    compare optimizers: search their rates, then fresh seeds
          stats      compare anybody's evaluation results
          chat       talk to a model
Look      show, runs, curves
Share     merge, export (to llama.cpp, Ollama), push
Expert    lr, spectrum, reshard, doctor, schema

Examples  soren-align sft quickstart/sft
          soren-align sft --model MODEL --data faq.csv --output runs/faq

`soren-align COMMAND --help` explains a command, `soren-align docs` everything.
"""
"""23 lines, for a terminal of 24. tests/test_cli.py compares its names with the commands."""
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
WITH_JSON = "with --json, which prints everything"
"""A condition of `refuse_options`."""
_KEY_VALUE = re.compile(r"[A-Za-z_]\w*(\.\w+)*=")


class KeyCommand(TyperCommand):
    """A command with `--set`: other words that name a key are taken as its values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line, with keys of a recipe as `--set`."""
        options: list[Any] = [
            parameter for parameter in self.params if parameter.param_type_name == "option"
        ]
        # The options are read off the command, so that a new one needs no entry here.
        flags = {name: option.is_flag for option in options for name in option.opts}
        return super().parse_args(
            ctx, as_settings(args, dict.fromkeys(ctx.help_option_names, True) | flags)
        )


def as_settings(words: Sequence[str], flags: dict[str, bool]) -> list[str]:
    """Return a command's words with `--set` before each that names a key.

    flags: the command's own options: whether each is one without a value. A word that is neither
    stays, and typer refuses it. A key without a value is true: `--trainer.bf16`.
    """
    rest, result = list(words), []
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        # Behind `--` all words are arguments, whatever they look like.
        if word == "--":
            return [*result, word, *rest]
        if name in flags:
            result += [word, *([rest.pop(0)] if rest and not equals and not flags[name] else [])]
        # After the command's own options: `--processes` stays one, even if TRL had a key of that
        # name.
        elif word.startswith("--") and (key := key_of(name[2:])):
            if not equals:
                value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
            result += ["--set", f"{key}={value}"]
        # A file of such a name is an argument.
        elif _KEY_VALUE.match(word) and not Path(word).exists():
            result += ["--set", word]
        else:
            result.append(word)
    return result


def key_of(name: str) -> str | None:
    """Return the key of a recipe that an option's name means: `optimizer.lr`, or one of TRL's; None
    for no key.
    """
    from ..recipe import trl

    # A dotted name is taken for a key, known or not: the loader's message on an unknown key has a
    # similar one.
    return name if re.fullmatch(r"\w+(\.\w+)+", name) else trl.recipe_key(name.replace("-", "_"))


def refuse_options(
    context: Context, names: Sequence[str], condition: str, remedy: str = ""
) -> None:
    """Raise UserError if the command line has one of these options, which have no effect under the
    condition.

    names: of the command's parameters, which are its function's. remedy: default: to remove the
    options.
    """
    options = []
    for parameter in context.command.params:
        # Only what was written counts: a default is no mistake.
        source = context.get_parameter_source(parameter.name) if parameter.name in names else None
        if source is not None and source.name == "COMMANDLINE":
            options.append(parameter.opts[0])
    if options:
        has, them = ("has", "this option") if len(options) == 1 else ("have", "these options")
        raise UserError(
            f"{', '.join(options)}: {has} no effect {condition}; {remedy or f'remove {them}'}"
        )
