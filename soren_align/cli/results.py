"""The commands for results: `stats`, `show`, `runs`, `curves`, `merge`, `export` and `push`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..core.errors import UserError
from ..core.files import local_path
from .grammar import WITH_JSON, AsJson, refuse_options


def stats(
    context: typer.Context,
    results: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RESULTS...", help="A file or folder of results per model, or NAME=PATH."
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The model that all others are compared with. Default: the first."
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC",
            help=(
                "A metric. You can repeat this option; each task uses the first of these metrics "
                "that its file has. exact_match,strict-match names a metric and a filter of "
                "lm-eval. Default: acc_norm, acc, exact_match, or else the first metric in the "
                "file."
            ),
        ),
    ] = None,
    id_: Annotated[
        str | None, typer.Option("--id", metavar="COLUMN", help="The column of the questions' ids.")
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="The column of scores: numbers from 0 to 1, or true and false."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help=(
                "The column that names the cluster of a question, such as doc.passage. Questions "
                "of one cluster are not independent."
            ),
        ),
    ] = None,
    common: Annotated[
        bool, typer.Option("--common", help="Compare only the questions that all models have.")
    ] = False,
    average: Annotated[
        bool, typer.Option("--average", help="Also compare the means over the tasks.")
    ] = False,
    gate: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A policy, `margins: {COLUMN: POINTS}`: exit with 1 if a model may lose more.",
        ),
    ] = None,
    junit: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the gate's checks as JUnit XML.")
    ] = None,
    as_json: AsJson = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Compare anybody's evaluation results, question by question.

    Reads lm-eval samples (--log_samples), CSV, JSONL and Parquet, and the eval folders of runs.
    Intervals and p-values are those of `eval`.
    """
    from ..evaluate.answers import comparison
    from ..evaluate.answers.files import Columns

    columns = Columns(tuple(metric or ()), id_, score, cluster)
    # Options without an effect are refused, not ignored: who writes one expects something of it.
    if as_json:
        refuse_options(context, ["as_markdown"], "with --json")
    if score is not None:
        refuse_options(context, ["metric"], "with --score, which names the column")
    if not results:
        raise UserError("stats: no results; name a file or folder per model")
    if gate is None:
        refuse_options(context, ["junit"], "without --gate", "add --gate FILE")
    code = comparison.stats(
        results,
        columns,
        reference=reference,
        common=common,
        mean=average,
        as_json=as_json,
        as_markdown=as_markdown,
        gate=gate,
        junit=junit,
    )
    raise typer.Exit(code)


def show(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run folder. Default: the newest run below runs/."),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Also show the notes under the scores, and the angles of the updates."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a run's status, curve, scores, samples and the next commands."""
    if as_json:
        refuse_options(context, ["full"], WITH_JSON)
    from ..launch import show as showing

    showing.show(run, full=full, as_json=as_json)


def runs(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A folder of runs.")] = "runs",
    as_json: AsJson = False,
) -> None:
    """List the runs below a folder."""
    from ..launch import show as showing

    showing.runs(folder, as_json=as_json)


def curves(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN...", help="Run folders. Default: the newest run below runs/."),
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            metavar="FILE.png", help="The file of the picture. A dark version is written beside it."
        ),
    ] = "curves.png",
) -> None:
    """Draw the losses, margins and scores of runs in one picture."""
    from ..launch import show as showing

    showing.curves(runs or (), output=output)


def merge(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The folder of a run that trained an adapter.")
    ],
) -> None:
    """Merge a LoRA adapter with its base model into RUN/merged."""
    from ..launch import commands

    commands.merge(run)


def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The folder of a finished run, or of a model. Or the word optimizer: Soren and "
            "Muon as one file of plain torch, on standard output.",
        ),
    ],
    to: Annotated[
        Literal["gguf"], typer.Option("--to", help="The format: GGUF, of llama.cpp and Ollama.")
    ] = "gguf",
    quantize: Annotated[
        str,
        typer.Option(metavar="TYPE", help="F16, BF16, Q8_0, Q4_K_M or another type of llama.cpp."),
    ] = "Q8_0",
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="The folder of the file. Default: RUN/gguf.")
    ] = None,
) -> None:
    """Write the model as a GGUF file, with an Ollama Modelfile.

    llama.cpp converts the model. The command then prints how much of the fine-tune's change the
    quantized weights still have, and, where llama-cpp-python is installed, what the file answers.
    """
    if run == "optimizer" and not local_path(run).exists():
        file = Path(__file__).parents[1] / "optim/one_file.py"
        sys.stdout.write(file.read_text(encoding="utf-8"))
        return
    from ..core.silence import quiet_libraries
    from ..core.text import stderr_console

    with quiet_libraries():  # bitsandbytes, where it is installed, prints at its import
        from ..publish import gguf

    gguf.export(run, quantize, output, stderr_console())


def push(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    repo: Annotated[
        str,
        typer.Argument(
            metavar="OWNER/NAME", help="The repository, which is created if it is missing."
        ),
    ],
    merged: Annotated[
        bool, typer.Option("--merged", help="Upload RUN/merged instead of the adapter.")
    ] = False,
    private: Annotated[
        bool,
        typer.Option(
            "--private",
            help="Upload only to a private repository, which is created if it is missing.",
        ),
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="BRANCH", help="The branch, which is created if it is missing. Default: main."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files and their sizes; upload nothing.")
    ] = False,
) -> None:
    """Upload a run's model to the Hugging Face hub.

    The command uploads the model, its card with pictures, the recipe and run.json. It uploads no
    local paths and no other files.
    """
    from ..publish.push import push as upload

    typer.echo(
        upload(run, repo, merged=merged, private=private, revision=revision, dry_run=dry_run)
    )
