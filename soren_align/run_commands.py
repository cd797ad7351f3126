"""The commands on run folders: universal, spectrum, merge, push."""

from typing import Annotated

import typer

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
    from .launch import commands

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
    from .launch.spectrum import spectrum as show

    show(run, matrices or ["*"], output=output, as_json=as_json)


def merge(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run that trained an adapter.")],
) -> None:
    """Merge a LoRA adapter with its base model into RUN/merged."""
    from .launch import commands

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
    from .push import push as upload

    typer.echo(upload(run, repo, merged=merged, private=private, revision=revision, dry_run=dry_run))
