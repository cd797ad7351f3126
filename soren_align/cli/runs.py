"""The commands on run folders: universal, spectrum, merge, push."""

from typing import Annotated

import typer

from ..core import shipped
from ..core.files import local_path

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    for command in (universal, spectrum, merge, push):
        app.command()(command)


def universal(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of an unfinished run.")],
) -> None:
    """Convert a checkpoint for another number of processes.

    Rewrites the run's last checkpoint; then rerun the training command. Not for FSDP2.
    """
    from ..launch import commands

    commands.universal(run)


def spectrum(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder with spectra.jsonl or a checkpoint.")],
    matrices: Annotated[
        list[str] | None, typer.Option("--matrices", metavar="GLOB", help="Only these, such as '*q_proj*'. Repeatable.")
    ] = None,
    output: Annotated[str | None, typer.Option(metavar="DIR", help="A folder for pictures of the spectra.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare every map with the exact sigmoid on a run's momenta, without training."""
    from ..launch.commands import spectrum as show

    show(run, matrices or ["*"], output=output, as_json=as_json)


def merge(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run that trained an adapter.")],
) -> None:
    """Merge a LoRA adapter with its base model into RUN/merged."""
    from ..launch import commands

    commands.merge(run)


def push(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository; created if missing.")],
    merged: Annotated[bool, typer.Option("--merged", help="Upload RUN/merged instead of the adapter.")] = False,
    private: Annotated[
        bool, typer.Option("--private", help="Create it private; an existing public one is refused.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="A branch; created if missing. Default: main.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files and their sizes; upload nothing, without a network.")
    ] = False,
) -> None:
    """Upload a run's model to the Hugging Face hub.

    With its model card, recipe and run.json; without local paths, and without files that are no part of a model.
    """
    from ..publish.push import push as upload

    typer.echo(upload(run, repo, merged=merged, private=private, revision=revision, dry_run=dry_run))


# ---
# The command on studies: compare.


def add_compare_to(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command()(compare)


def complete_study(incomplete: str) -> list[str]:
    """Return the shipped studies that begin so, for the shell's completion."""
    return [name for name in shipped.studies() if name.startswith(incomplete)]


def is_study(name_or_path: str) -> bool:
    """Whether this is a study's file or a shipped study."""
    path = local_path(name_or_path)
    if path.is_file():
        return path.suffix in (".yaml", ".yml") and shipped.is_study(path)
    return name_or_path in shipped.studies()


def compare(
    study: Annotated[
        str,
        typer.Argument(metavar="STUDY", help="A study's file or a shipped name.", autocompletion=complete_study),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the study: search.trials=8. Repeatable."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Runs at a time. Default: the study's, else one per GPU.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="Processes of each run, one per GPU.")] = 1,
    extend: Annotated[
        bool, typer.Option("--extend", help="Add trials to all candidates, beyond the ends where the best lie.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Start no run; conclude from those that have ended.")
    ] = False,
) -> None:
    """Compare optimizers: search each one's setting, then run it on fresh seeds."""
    from ..study import runner
    from ..study.config import load_study

    file = load_study(study, set_)
    if report:
        runner.report(file)
    else:
        raise typer.Exit(runner.compare(file, runner.RunnerOptions(jobs, processes, extend)))
