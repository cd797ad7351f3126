"""The command line. Nothing here imports torch: help and a wrong recipe take less than a second."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..core import signals
from ..core.errors import UserError, printable
from ..core.version import __version__
from ..tasks import TASKS
from . import files, models, runs
from .runs import AsJson

RESUMABLE = (*TASKS, "eval", "compare")


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # typer would end without a message
            from ..launch.exit_codes import report

            raise typer.Exit(report(error, resumable=ctx.invoked_subcommand in RESUMABLE)) from error


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
bench_app = typer.Typer(
    help="Measure the maps and the optimizers on this machine.", no_args_is_help=True, rich_markup_mode=None
)


RecipeArgument = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe file or a shipped name.", autocompletion=files.complete_recipe),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key: optimizer.lr=1e-3. Repeatable.")
]
NoEval = Annotated[bool, typer.Option("--no-eval", help="Do not evaluate.")]
Processes = Annotated[
    int | None,
    typer.Option("--processes", min=1, metavar="N", help="Start N processes on this machine, one per GPU. Default: 1."),
]
Shapes = Annotated[
    str, typer.Option(metavar="SHAPES", help="llama-60m, qwen2.5-3b, mistral-7b, or shapes: 512x1376,512x512.")
]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", help="cpu or cuda. Default: the GPU, if there is one.")]
Page = Annotated[
    str | None,
    typer.Option(
        "--output", metavar="FILE.md", help="Also write the tables into this Markdown file, over earlier ones."
    ),
]


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"soren-align {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fine-tune language models with Soren, Muon, HTMuon or AdamW, and evaluate them."""


@app.command()
def sft(recipe: RecipeArgument, set_: Overrides = None, no_eval: NoEval = False, processes: Processes = None) -> None:
    """Train on conversations, then evaluate."""
    _train("sft", recipe, set_, no_eval, processes)


@app.command()
def dpo(recipe: RecipeArgument, set_: Overrides = None, no_eval: NoEval = False, processes: Processes = None) -> None:
    """Train on preference pairs, then evaluate."""
    _train("dpo", recipe, set_, no_eval, processes)


@app.command()
def pretrain(
    recipe: RecipeArgument, set_: Overrides = None, no_eval: NoEval = False, processes: Processes = None
) -> None:
    """Train on plain texts from random weights, to a validation perplexity."""
    _train("pretrain", recipe, set_, no_eval, processes)


def _train(task: str, recipe: str, overrides: list[str] | None, no_eval: bool, processes: int | None) -> None:
    from ..launch import commands
    from ..recipe import load

    no_evaluation = ["eval=null"] if no_eval else []
    raise typer.Exit(commands.train(load(recipe, [*(overrides or []), *no_evaluation], task, _print_notice), processes))


def _print_notice(line: str) -> None:
    typer.echo(f"notice    {printable(line)}", err=True)


@app.command()
def plan(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_STUDY",
            help="A recipe's or a study's file, or a shipped name.",
            autocompletion=lambda incomplete: files.complete_recipe(incomplete) + runs.complete_study(incomplete),
        ),
    ],
    set_: Overrides = None,
    as_json: AsJson = False,
    processes: Annotated[
        int, typer.Option("--processes", min=1, metavar="N", help="Plan for N processes. Starts none.")
    ] = 1,
    full: Annotated[bool, typer.Option("--full", help="Of a recipe: all details.")] = False,
) -> None:
    """Show what a recipe or a study would do and cost, without training."""
    if runs.is_study(recipe):
        from ..study import plan as study_planning
        from ..study.config import load_study

        study_planning.plan(load_study(recipe, set_), as_json=as_json, processes=processes)
        return
    from ..launch import commands
    from ..recipe import load

    resolved = load(recipe, set_, notify=_print_notice)
    raise typer.Exit(commands.plan(resolved, full=full, as_json=as_json, processes=processes))


@bench_app.command()
def maps(shapes: Shapes = "llama-60m", device: Device = None, as_json: AsJson = False, output: Page = None) -> None:
    """Time, FLOPs and error of every map, beside Muon's."""
    from ..launch import commands

    commands.bench("maps", shapes, device=device, as_json=as_json, output=output)


@bench_app.command()
def step(
    shapes: Shapes = "llama-60m",
    device: Device = None,
    tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens per training step, for the optimizer's share.")
    ] = 32768,
    as_json: AsJson = False,
    output: Page = None,
) -> None:
    """Time and memory of whole optimizer steps on a model's matrices."""
    from ..launch import commands

    commands.bench("step", shapes, device=device, tokens=tokens, as_json=as_json, output=output)


for add_commands in (runs.add_compare_to, models.add_to, runs.add_to, files.add_to, files.add_docs_to):
    add_commands(app)
app.add_typer(bench_app, name="bench")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors that the user can fix are printed. os.environ is restored.

    arguments: default: sys.argv. Raises only defects, for Python to print their traceback.
    """
    code = _run(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        signals.end_with_code()
    return code


def _run(words: Sequence[str]) -> int:
    environment = dict(os.environ)
    with signals.raising_interrupts():
        try:
            _refuse_removed_folder()
            # `deepspeed` passes --local_rank to every script; the environment has it too.
            app([word for word in words if not word.startswith("--local_rank=")], prog_name="soren-align")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
        except (Exception, KeyboardInterrupt) as error:
            from ..launch.exit_codes import report

            return report(error)
        finally:
            os.environ.clear()
            os.environ.update(environment)
    return 0


def _refuse_removed_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory has been removed; change to another one (cd), then rerun") from None
