"""The command on studies: compare."""

from typing import Annotated

import typer

from . import shipped
from .files import local_path


def add_to(app: typer.Typer) -> None:
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
    from .compare.study_file import load_study
    from .launch import runner

    file = load_study(study, set_)
    if report:
        runner.report(file)
    else:
        raise typer.Exit(runner.compare(file, runner.RunnerOptions(jobs, processes, extend)))
