"""The commands. Nothing here imports torch: a typo is answered within a second.

soren-align sft RECIPE     train on conversations        soren-align eval MODEL_OR_RUN   measure
soren-align dpo RECIPE     train on preferences          soren-align recipes             what is shipped
soren-align plan RECIPE    what would happen             soren-align schema              for editors
soren-align bench maps     time and error of the maps    soren-align bench step          time of optimizer steps
soren-align universal RUN  for another number of processes
soren-align merge RUN      one model of a LoRA adapter and its base
soren-align push RUN OWNER/NAME  its model, card and manifest to the Hugging Face hub
soren-align import FILE    TRL's, the alignment handbook's or Axolotl's YAML as a recipe
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .errors import UserError, of_the_system, printable

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipes_app = typer.Typer(help="Show or copy the shipped recipes.", invoke_without_command=True)
app.add_typer(recipes_app, name="recipes")
bench_app = typer.Typer(help="Measure the maps and the optimizers on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or a shipped name.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key: optimizer.lr=1e-3. Repeatable.")
]
Shapes = Annotated[str, typer.Option(help="llama-60m, qwen2.5-3b, mistral-7b, or shapes: 512x1376,512x512.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU, if there is one.")]
Page = Annotated[
    str | None, typer.Option("--output", metavar="FILE.md", help="Also put the tables into this page of Markdown.")
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
NoEval = Annotated[bool, typer.Option("--no-eval", help="Leave the evaluation out.")]
Processes = Annotated[
    int | None,
    typer.Option("--processes", min=1, metavar="N", help="Start N processes on this machine, one per GPU. Default: 1."),
]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"soren-align {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fine-tune language models with Soren, Muon, HTMuon or AdamW, and see whether it helped."""


@app.command()
def sft(recipe: RecipeArgument, set_: Overrides = None, no_eval: NoEval = False, processes: Processes = None) -> None:
    """Train on conversations, then evaluate."""
    _train("sft", recipe, set_, no_eval, processes)


@app.command()
def dpo(recipe: RecipeArgument, set_: Overrides = None, no_eval: NoEval = False, processes: Processes = None) -> None:
    """Train on preference pairs, then evaluate."""
    _train("dpo", recipe, set_, no_eval, processes)


def _train(task: str, recipe: str, overrides: list[str] | None, no_eval: bool, processes: int | None) -> None:
    from .launch import commands
    from .recipe import load

    extra = ["eval=null"] if no_eval else []
    commands.train(load(recipe, [*(overrides or []), *extra], task, _print_notice), processes)


def _print_notice(line: str) -> None:
    typer.echo(f"notice    {printable(line)}", err=True)


@app.command("eval")
def evaluate(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL_OR_RUN...", help="Model, adapter or run folders, or names on the hub.")
    ],
    suite: Annotated[str | None, typer.Option(help="A shipped suite, or a suite.yaml. Default: the run's own.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder for the results. Default: the run folder's.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Deal the questions among N processes, one per GPU.")
    ] = None,
    data_root: Annotated[
        str | None, typer.Option(metavar="DIR", help="Datasets as downloaded from the hub: DIR/allenai/ai2_arc, ...")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first questions of each task: a rehearsal.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Prompts in a forward pass. Default: the suite's.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: the suite's, float32.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="hf, or vllm where it is installed. Default: hf.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="An error where a prompt is too long for the model.")
    ] = False,
    trust_suite: Annotated[
        bool, typer.Option("--trust-suite", help="Let the files of a suite that is not shipped run code.")
    ] = False,
    published: Annotated[
        list[str] | None,
        typer.Option(help="Published scores to show under the table: paper/sft, or a file. Repeatable."),
    ] = None,
    quote: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
    cache: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where answers are kept. Default: the user's cache folder.")
    ] = None,
    summary: Annotated[str | None, typer.Option(help="Also write the scores, bare, to this JSON file.")] = None,
) -> None:
    """Measure models beside the checkpoints that they started from."""
    from .launch import commands

    given = {
        "suite": suite,
        "batch_size": batch_size,
        "dtype": dtype,
        "backend": backend,
        "processes": processes,
        "data_root": data_root,
        "limit": limit,
        "strict": strict or None,
        "trust_suite": trust_suite or None,
        "published": published or None,
    }
    if quote:
        raise UserError(f"--quote: unknown option; write --published {quote[0]}")
    commands.evaluate(models, given, output, summary, cache)


@app.command()
def plan(
    recipe: RecipeArgument,
    set_: Overrides = None,
    as_json: AsJson = False,
    processes: Annotated[
        int, typer.Option("--processes", min=1, metavar="N", help="What each of N processes would do. Starts none.")
    ] = 1,
) -> None:
    """Show what a recipe would do, without training."""
    from .launch import commands
    from .recipe import load

    raise typer.Exit(commands.plan(load(recipe, set_, notify=_print_notice), as_json, processes))


@app.command()
def universal(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of an unfinished run.")],
) -> None:
    """Let an unfinished run go on with another number of processes."""
    from .launch import commands

    commands.universal(run)


@app.command()
def merge(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run that trained an adapter.")],
) -> None:
    """Make one model of a LoRA adapter and its base: RUN/merged."""
    from .launch import commands

    commands.merge(run)


@app.command()
def push(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository; made if it is not there.")],
    merged: Annotated[bool, typer.Option("--merged", help="RUN/merged, not the adapter.")] = False,
    private: Annotated[
        bool, typer.Option("--private", help="Make it private; one that is there and public is refused.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="A branch; made if it is not there. Default: main.")
    ] = None,
) -> None:
    """Upload a run's model with its card, recipe and manifest to the Hugging Face hub."""
    from .push import push as upload

    typer.echo(upload(run, repo, merged=merged, private=private, revision=revision))


@app.command("import")
def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help="SFT or DPO YAML of TRL, its handbook or Axolotl.")],
    dest: Annotated[str | None, typer.Argument(help="File or folder. Default: printed.")] = None,
    task: Annotated[str | None, typer.Option(help="sft or dpo. Default: as the file's keys or name say.")] = None,
) -> None:
    """Make a recipe of another tool's file, and tell what became of every key."""
    from .files import local_path
    from .importers import import_file

    if task not in (None, "sft", "dpo"):
        raise UserError(f"--task: found {task!r}; write sft or dpo")
    source = local_path(file)
    if not source.is_file():
        raise UserError(f"{file}: no such file")
    text, table = import_file(source, task)
    if dest is None:
        typer.echo(printable(text) if sys.stdout.isatty() else text, nl=False)
    else:
        target = _free(dest, source.name)
        target.write_text(text, encoding="utf-8")
        table += f"\n\n{target}: read it, then run soren-align plan {target}"
    typer.echo(printable(table), err=True)


@app.command()
def schema() -> None:
    """Print the recipe's JSON Schema."""
    from .recipe import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@bench_app.command()
def maps(shapes: Shapes = "llama-60m", device: Device = None, as_json: AsJson = False, output: Page = None) -> None:
    """Time, FLOPs and error of every map of singular values, beside Muon's iteration."""
    from .launch import commands

    commands.bench(["maps"], shapes, device, as_json, output)


@bench_app.command()
def step(
    shapes: Shapes = "llama-60m",
    device: Device = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a training step, for the optimizer's share.")] = 32768,
    as_json: AsJson = False,
    output: Page = None,
) -> None:
    """Time and memory of whole optimizer steps on a model's matrices."""
    from .launch import commands

    commands.bench(["step", "--tokens", str(tokens)], shapes, device, as_json, output)


@recipes_app.callback()
def recipes(context: typer.Context) -> None:
    """List the shipped recipes."""
    if context.invoked_subcommand is None:
        from . import shipped

        for name, path in shipped.recipes().items():
            typer.echo(f"{name:24} {_first_comment(path)}")


@recipes_app.command()
def copy(
    name: Annotated[str, typer.Argument(help="A shipped recipe, e.g. quickstart/sft.")],
    dest: Annotated[str | None, typer.Argument(help="File or folder. Default: here, under the same name.")] = None,
) -> None:
    """Copy a shipped recipe to edit it; the copy works from any folder."""
    from . import shipped
    from .recipe import task_of

    known = shipped.recipes()
    if (source := known.get(name)) is None:
        raise UserError(f"{name}: no shipped recipe; write one of {', '.join(known)}")
    target = _free(dest or ".", f"{name.replace('/', '-')}.yaml")
    shutil.copyfile(source, target)
    typer.echo(printable(f"{target}: edit it, then run soren-align {task_of(source)} {target}"))


def _free(dest: str, name: str) -> Path:
    """The file to be written: `dest`, or `name` in the folder `dest`; never one that exists."""
    from .files import local_path

    target = local_path(dest)
    target = target / name if target.is_dir() else target
    if target.exists() or target.is_symlink():
        raise UserError(f"{target}: exists already; name another file")
    if not target.parent.is_dir():
        raise UserError(f"{target.parent}: no such folder")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UserError(f"{target.parent}: takes no new files")
    return target


def _first_comment(path: Path) -> str:
    line = path.read_text(encoding="utf-8").splitlines()[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""


def main() -> None:
    """Run the command line; a mistake that the user can mend ends with its message and exit code 2."""
    # `deepspeed` hands this to every script; the environment says it too.
    arguments = [a for a in sys.argv[1:] if not a.startswith("--local_rank=")]
    try:
        app(arguments)
    except (UserError, OSError) as error:
        said = of_the_system(error) if isinstance(error, OSError) else error
        if said is None:
            raise
        typer.echo(said, err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
