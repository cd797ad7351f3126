"""The commands of the command line, except those in results.py, files.py and expert.py.

Nothing here imports torch: help and a wrong recipe take less than a second.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from ..core import shipped, signals
from ..core.errors import UserError
from ..core.files import local_path
from ..core.version import __version__
from ..tasks import TASKS
from . import expert, files, results
from .grammar import HELP, WITH_JSON, AsJson, KeyCommand, refuse_options

# For the message of an interrupted command: rerunning another one starts it again.
RESUMABLE = (*TASKS, "eval", "compare")


class _Commands(TyperGroup):
    def get_help(self, ctx: Any) -> str:
        return HELP.rstrip()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        parameters: list[Any] = command.params if command else []
        for parameter in parameters:
            # The metavar names what is expected; typer adds "<str>" and "[x>=1]" to it.
            parameter._get_number_range_help_str = lambda: None
            if parameter.param_type_name == "argument":
                parameter.display_type_rich = lambda ctx: None
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # typer would end without a message
            from ..launch.exit_codes import report

            raise typer.Exit(
                report(error, resumable=ctx.invoked_subcommand in RESUMABLE)
            ) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


RecipeArgument = Annotated[
    str | None,
    files.named(
        "RECIPE", "A recipe: a file, or a name that `soren-align recipes` lists.", shipped.recipes
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key of the recipe: optimizer.lr=1e-3. You may omit `--set`.",
    ),
]
NoEval = Annotated[bool, typer.Option("--no-eval", help="Do not evaluate after training.")]
Processes = Annotated[
    int | None,
    typer.Option(
        "--processes",
        min=1,
        metavar="N",
        help="Start N processes on this machine, one per GPU. Default: 1.",
    ),
]


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"soren-align {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Fine-tune language models with Soren, Muon, HTMuon or AdamW, and evaluate them."""


ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="The model to train: a folder, or a hub name."),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="DATA", help="The training examples: a file, a folder, or a hub name."
    ),
]
OutputOption = Annotated[
    str | None,
    typer.Option(
        "--output", metavar="RUN", help="The run folder, for all files that the run writes."
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Delete an earlier run in the run folder.")
]


def _add_training(task: str, help_text: str, *, needs_recipe: bool) -> None:
    """Add the command that trains a recipe of this task, or, unless it needs one, the options in
    its place.
    """

    def column(texts: str) -> Any:
        help_text = f"The column of DATA with the {texts}, if its name is unusual."
        return typer.Option(metavar="COLUMN", help=help_text, hidden=task != "sft")

    def train(
        recipe: RecipeArgument = (... if needs_recipe else None),  # pyright: ignore[reportArgumentType]
        model: ModelOption = None,
        data: DataOption = None,
        question: Annotated[str | None, column("questions")] = None,
        answer: Annotated[str | None, column("answers")] = None,
        output: OutputOption = None,
        overwrite: Overwrite = False,
        set_: Overrides = None,
        no_eval: NoEval = False,
        processes: Processes = None,
    ) -> None:
        from ..launch import commands
        from ..launch.environment import has_gpu
        from ..recipe import OPTIONS, load

        # The last words win: what a person writes comes after what is set for them.
        settings = [*(set_ or []), *["eval=null"] * no_eval]
        # A recipe states its device; the options in its place take that of this machine.
        if recipe is None and not has_gpu():
            settings = ["trainer.use_cpu=true", "trainer.bf16=false", *settings]
        options = dict(zip(OPTIONS, (model, data, output, overwrite or None), strict=True))
        loaded = load(recipe, settings, task, _print_notice, options, (question, answer))
        raise typer.Exit(commands.train(loaded, processes))

    app.command(task, cls=KeyCommand, help=help_text)(train)


_WITHOUT_RECIPE = "Name a recipe, or use --model, --data and --output instead."
_add_training(
    "sft", f"Train on conversations, then evaluate.\n\n{_WITHOUT_RECIPE}", needs_recipe=False
)
_add_training(
    "dpo", f"Train on preference pairs, then evaluate.\n\n{_WITHOUT_RECIPE}", needs_recipe=False
)
_add_training(
    "kto",
    f"Train on answers with thumbs up or down, then evaluate.\n\n{_WITHOUT_RECIPE}",
    needs_recipe=False,
)
_add_training(
    "pretrain",
    "Train on plain texts from random weights, and report the perplexity.",
    needs_recipe=True,
)


def _print_notice(line: str) -> None:
    from ..core.text import print_labelled, stderr_console

    print_labelled(stderr_console(), "notice", line)


@app.command(cls=KeyCommand)
def plan(
    context: typer.Context,
    what: Annotated[
        str,
        files.named(
            "RECIPE_STUDY_OR_MODEL",
            "A recipe or study: a file, or a name that `soren-align recipes` lists. Or a model: a "
            "folder with a config.json, or a hub name.",
            shipped.recipes,
            shipped.studies,
        ),
    ],
    set_: Overrides = None,
    as_json: AsJson = False,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            min=1,
            metavar="N",
            help="The number of processes of the planned run. Default: 1; of a model's optimizer "
            "states: 8. No process is started.",
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="GB",
            help="Memory of each GPU (recipes only). Default: of this machine's GPUs, or 80.",
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show all details (recipes only).")] = False,
) -> None:
    """Show what a recipe or a study would do and cost, or how a model would be trained.

    Nothing is trained. Of a model, the config is enough: which optimizer updates which parameters,
    what would stop training, optimizer states per GPU, chat template and special tokens.
    """
    from ..launch import commands

    if as_json:
        refuse_options(context, ["full"], WITH_JSON)
    words = [*(set_ or ()), *(["--processes", str(processes)] if processes else [])]
    path = local_path(what)
    # Files come before shipped names: a user's own study may have the name of a shipped one.
    is_file = path.is_file()
    if shipped.is_study(path) if is_file else what in shipped.studies():
        refuse_options(context, ["full", "gpu_memory"], "on a study")
        from ..study import plan as study_planning
        from ..study.config import load_study

        next_command = shlex.join(["soren-align", "compare", what, *words])
        study = load_study(what, set_)
        study_planning.plan(study, next_command, as_json=as_json, processes=processes or 1)
    elif not is_file and _is_model(what):
        refuse_options(context, ["full", "gpu_memory"], "on a model")
        from ..recipe import load_for_model

        recipe = load_for_model(what, set_, _print_notice)
        next_command = shlex.join(["soren-align", "sft", "--model", what, *(set_ or [])])
        next_command += " --data DATA --output RUN"
        options = {"processes": processes or 8, "as_json": as_json}
        raise typer.Exit(commands.plan_model(recipe, next_command, **options))
    else:
        from ..recipe import load

        recipe = load(what, set_, notify=_print_notice)
        next_command = shlex.join(["soren-align", recipe.task, what, *words])
        options = {"full": full, "as_json": as_json, "processes": processes or 1}
        options |= {"gpu_memory": gpu_memory}
        raise typer.Exit(commands.plan(recipe, next_command, **options))


def _is_model(name: str) -> bool:
    """Return whether a name that is no file means a model: a folder, or OWNER/NAME of the hub, but
    not what may be a mistyped recipe.
    """
    # A mistyped recipe, quickstart/sfd, would be looked up as a model of the hub: names whose first
    # part is a folder of recipes are recipes.
    owner, slash, rest = name.partition("/")
    folders = {recipe.partition("/")[0] for recipe in shipped.recipes_and_studies()}
    is_hub_name = bool(slash) and "/" not in rest and not rest.endswith((".yaml", ".yml"))
    return local_path(name).is_dir() or (is_hub_name and owner not in folders)


@app.command(cls=KeyCommand)
def compare(
    context: typer.Context,
    study: Annotated[
        str,
        files.named(
            "STUDY", "A study: a file, or a name that `soren-align recipes` lists.", shipped.studies
        ),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a key of the study: search.trials=8. You can repeat this option.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of runs at a time. Default: the study's jobs, or one per GPU.",
        ),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Start N processes per run, one per GPU.")
    ] = 1,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="Extend the search without asking where a selected value is the largest or "
            "smallest that was tried.",
        ),
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Start no runs; report on the runs that have ended.")
    ] = False,
) -> None:
    """Compare optimizers: tune each, then train it on fresh seeds."""
    if report:
        refuse_options(context, ["jobs", "processes", "yes"], "with --report, which starts no runs")
    from ..study import runner
    from ..study.config import load_study

    file = load_study(study, set_)
    if report:
        runner.report(file)
    else:
        raise typer.Exit(runner.compare(file, jobs=jobs, processes=processes, yes=yes))


Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL_OR_RUN...", help="Folders (of models, adapters or runs), or hub names."
    ),
]
SuiteOption = Annotated[
    str | None,
    files.named(
        "SUITE",
        "A benchmark suite: a name that `soren-align suites` lists, or a suite.yaml. Default: the"
        " recipe's suite.",
        shipped.suites,
        of=typer.Option,
    ),
]
Output = Annotated[
    str | None, typer.Option(metavar="DIR", help="Folder for the results. Default: RUN/eval/SUITE.")
]
EvalProcesses = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Evaluate with N processes, one per GPU.")
]
DataRoot = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Folder of downloaded hub datasets: DIR/allenai/ai2_arc, ..."),
]
Limit = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Evaluate only the first N questions of each task."),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Number of prompts per forward pass. Default: the suite's batch size.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16. Default: the suite's dtype."),
]
Backend = Annotated[
    str | None, typer.Option(metavar="BACKEND", help="hf, or vllm if it is installed. Default: hf.")
]
Strict = Annotated[
    bool | None,
    typer.Option(
        "--strict/--no-strict", help="Fail if a prompt is longer than the model's context."
    ),
]
BaseTemplate = Annotated[
    str | None,
    typer.Option(
        metavar="WHICH", help="Chat template for the base model: own, run (the run's) or none."
    ),
]
Omit = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN",
        help=(
            "Leave out this benchmark, named by its column of the table. You can repeat this"
            " option."
        ),
    ),
]
TrustSuite = Annotated[
    bool,
    typer.Option(
        "--trust-suite",
        help="Run the code in the files of a suite that does not come with soren-align.",
    ),
]
Published = Annotated[
    list[str] | None,
    files.named(
        "SCORES",
        "Scores of other authors to print under the table: paper/sft, or a file. You can repeat"
        " this option.",
        shipped.published,
        of=typer.Option,
    ),
]
Cache = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Folder of cached responses. Default: in your cache folder."),
]
Summary = Annotated[
    str | None, typer.Option(metavar="FILE.json", help="Also write the scores to this JSON file.")
]


@app.command("eval")
def evaluate(
    models: Models,
    suite: SuiteOption = None,
    output: Output = None,
    processes: EvalProcesses = None,
    data_root: DataRoot = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    dtype: Dtype = None,
    backend: Backend = None,
    strict: Strict = None,
    base_template: BaseTemplate = None,
    omit: Omit = None,
    trust_suite: TrustSuite = False,
    published: Published = None,
    cache: Cache = None,
    summary: Summary = None,
) -> None:
    """Evaluate models and the checkpoints that they started from."""
    from ..launch import evaluation

    settings = {
        "suite": suite,
        "batch_size": batch_size,
        "dtype": dtype,
        "backend": backend,
        "processes": processes,
    }
    settings |= {
        "data_root": data_root,
        "limit": limit,
        "strict": strict,
        "base_template": base_template,
    }
    settings |= {
        "omit": omit or None,
        "trust_suite": trust_suite or None,
        "published": published or None,
    }
    evaluation.evaluate(models, settings, output=output, summary=summary, cache=cache)


@app.command()
def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN", help="The folder of a model, adapter or run, or a hub name."
        ),
    ],
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A second model that answers too; `start` is the run's starting checkpoint.",
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Answer this question and exit. You can repeat this option."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="The maximum length of an answer, in tokens.")
    ] = 512,
    temperature: Annotated[
        float,
        typer.Option(
            min=0, metavar="T", help="Sampling temperature. Default: 0 (the most likely token)."
        ),
    ] = 0.0,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", help="float32, bfloat16 or float16. Default: the model's own."
        ),
    ] = None,
) -> None:
    """Chat with a model, with its own chat template."""
    from ..launch import evaluation

    settings = {"system": system, "max_new_tokens": max_new_tokens, "temperature": temperature}
    evaluation.chat(model, prompt or (), compare=compare, dtype=dtype, **settings)


app.command()(results.show)
app.command()(results.runs)
app.command()(results.curves)
app.command()(expert.lr)
app.command()(expert.reshard)
app.command()(expert.spectrum)
app.command()(results.merge)
app.command()(results.export)
app.command()(results.push)
app.command()(files.new)
app.add_typer(files.recipes_app, name="recipes")
app.add_typer(files.suites_app, name="suites")
app.command("import")(files.import_)
app.command()(results.stats)
app.command()(files.schema)
app.command()(files.docs)
app.command()(expert.doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors that the user can fix are printed.
    os.environ is restored.

    arguments: default: sys.argv. Raises only defects, for Python to print their traceback.
    """
    words = sys.argv[1:] if arguments is None else arguments
    environment, code = dict(os.environ), 0
    with signals.raising_interrupts():
        try:
            # Tried first: every relative path would fail, somewhere in a library and without this
            # reason.
            try:
                os.getcwd().encode()
            except UnicodeEncodeError:
                raise UserError(
                    "the path of the working directory is not UTF-8; rename that folder, or change "
                    "to another directory (cd)"
                ) from None
            except FileNotFoundError:
                raise UserError(
                    "the working directory was removed; change to another directory (cd) and rerun"
                    " the command"
                ) from None
            # `deepspeed` passes --local_rank to every script; the environment has it too.
            words = [word for word in words if not word.startswith("--local_rank=")]
            code = app(words, prog_name="soren-align", standalone_mode=False) or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except TyperException as refusal:  # what typer has against the words of a command
            from ..launch.exit_codes import report

            error: Any = refusal
            message, context = error.format_message(), getattr(error, "ctx", None)
            # The message is the help of a command that lacks a word.
            if context and message == context.get_help():
                typer.echo(message, err=True)
                code = error.exit_code
            else:
                remedy = (
                    f"; run `{context.command_path} --help` for its arguments" if context else ""
                )
                code = report(UserError(message.rstrip(".") + remedy))
        except (Exception, KeyboardInterrupt) as error:
            from ..launch.exit_codes import report

            code = report(error)
        finally:
            # A process may run several commands: the next one must not inherit this one's settings.
            os.environ.clear()
            os.environ.update(environment)
    if arguments is None:
        signals.end_with_code()
    return code
