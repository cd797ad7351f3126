"""The commands for those who look into the optimizer or the machine: learning rates of other tools,
spectra, checkpoints of several processes, doctor.
"""

from typing import Annotated

import typer

from ..core.errors import UserError
from .grammar import AsJson, refuse_options


def reshard(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of an unfinished run.")],
) -> None:
    """Convert a checkpoint for another number of processes.

    The command rewrites the run's last checkpoint. Rerun the training command afterwards.
    """
    from ..launch import commands

    commands.reshard(run)


def spectrum(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder with spectra.jsonl or a checkpoint.")
    ],
    matrices: Annotated[
        list[str] | None,
        typer.Option(
            "--matrices",
            metavar="GLOB",
            help="Show only matrices of this name: '*q_proj*'. You can repeat this option.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare every map with the exact sigmoid on a run's momenta, without training."""
    from ..launch import commands

    commands.spectrum(run, matrices or ["*"], as_json=as_json)


def lr(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="A folder with a config.json, or a hub name."
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TOOL[:MODE][,FACTOR],LR",
            help="The rate in a tool: megatron:spectral,0.2,2e-5. Default: list the tools.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="TOOL[:MODE][,FACTOR]",
            help="Another tool, to find its learning rate. AdamW's and ours are always printed.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Translate a learning rate of Muon between tools, by the size of the updates.

    Tools scale Muon's update differently. For each shape of the model's matrices, the command
    prints the RMS of one update, and AdamW's learning rate for this RMS, which is taken to be 0.2
    of its rate.
    """
    from ..planning import rates

    if start is None:
        refuse_options(context, ["model", "target", "as_json"], "without --from", "add --from")
        from ..core.text import Terminal

        rates.print_conventions(Terminal())
        return
    convention = rates.parse(start, "--from", has_lr=True)
    other = None if target is None else rates.parse(target, "--to", has_lr=False)
    if model is None:
        raise UserError("--model: is missing; name a folder with a config.json, or a hub model")
    from ..launch import commands
    from ..recipe import load_for_model

    commands.translate_rate(load_for_model(model), convention, other, as_json=as_json)


def doctor(
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of processes of the collectives. Default: one per GPU; without a GPU, 2.",
        ),
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="The folder of doctor.json, on the file system of your runs."
        ),
    ] = "runs/doctor",
    capture: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write who has and updates which matrix, and all collectives, to this file.",
        ),
    ] = None,
) -> None:
    """Check whether this machine is fit to train, in a minute or two.

    Checked are libraries, GPUs, the file system, communication, sharded steps, and Soren's maps.
    """
    from ..doctor import run

    raise typer.Exit(run.doctor(processes, output=output, capture=capture))
