"""The commands for those who look into the optimizer: spectra, maps, checkpoints of several
processes, benchmarks.
"""

from typing import Annotated, Literal

import typer

from .grammar import WITH_JSON, AsJson, refuse_options

bench_app = typer.Typer(
    help="Measure the maps and the optimizers on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Shapes = Annotated[
    str,
    typer.Option(
        metavar="SHAPES",
        help="Shapes of llama-60m, qwen2.5-3b or mistral-7b, or a list: 512x1376,512x512.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="The device to measure: cpu or cuda. Default: the GPU, if there is one.",
    ),
]
Page = Annotated[
    str | None,
    typer.Option(
        "--output",
        metavar="FILE.md",
        help="Also write the tables to this Markdown file, in place of earlier tables.",
    ),
]


def reshard(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of an unfinished run.")],
) -> None:
    """Convert a checkpoint for another number of processes.

    The command rewrites the run's last checkpoint. Rerun the training command afterwards. FSDP2 is
    not supported.
    """
    from ..launch import commands

    commands.reshard(run)


def spectrum(
    context: typer.Context,
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
    gradients: Annotated[
        bool,
        typer.Option(
            "--gradients",
            help="Use the recorded gradients in place of the momenta (if run.log_spectra.of has `gradient`).",
        ),
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Also draw the singular values, as pictures in this folder."
        ),
    ] = None,
    preset: Annotated[
        Literal["paper-spectra", "paper-log-centered"] | None,
        typer.Option(
            metavar="NAME",
            help="Draw the gradients as a figure of the paper: paper-spectra or paper-log-centered. Needs --output.",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Show every matrix, not only the means.")
    ] = False,
    advise: Annotated[
        bool,
        typer.Option(
            "--advise",
            help="Show how much the updates of several maps differ from those of Muon and of momentum SGD.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare every map with the exact sigmoid on a run's momenta, without training."""
    if advise:
        refuse_options(
            context,
            ["full", "output", "preset", "gradients"],
            "with --advise, which prints one table",
        )
    if as_json:
        refuse_options(context, ["full"], WITH_JSON)
    if preset:
        refuse_options(context, ["gradients"], "with --preset, which draws gradients")
    if output is None:
        refuse_options(context, ["preset"], "without --output", "add --output DIR")
    from ..launch import commands

    of = "gradient" if gradients or preset else "momentum"
    options = {"full": full, "advise": advise, "as_json": as_json}
    commands.spectrum(run, matrices or ["*"], of, output, preset, **options)


def show_map(
    context: typer.Context,
    formula: Annotated[
        str,
        typer.Argument(
            metavar="FORMULA", help="A function of x: 'tanh(x / 0.1)'; or a map's name: minimax."
        ),
    ],
    of: Annotated[
        str | None,
        typer.Option(
            metavar="NORM",
            help="The size of the matrix by which the singular value is divided to get x: nu, norm, rms or none. "
            "Default: nu.",
        ),
    ] = None,
    error: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="The largest error of the polynomials, as a share of the function's largest value. Default: 0.01.",
        ),
    ] = None,
    resolution: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="The smallest x at which this error holds. Default: 0.0004."
        ),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(metavar="X", help="The largest x, with --of rms and none. Default: 1."),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Also draw the function and its polynomials (of a map: its target): .png or .svg.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the polynomials of a function of singular values: their proved error, their cost, and a
    picture.
    """
    from ..launch import commands

    settings = {"of": of, "error": error, "resolution": resolution, "limit": limit}
    commands.show_map(
        formula,
        {key: v for key, v in settings.items() if v is not None},
        plot=plot,
        as_json=as_json,
    )


def doctor(
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of processes of each training. Default: one per GPU; without a GPU, 2.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check less, in at most 3 minutes.")
    ] = False,
    output: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="The folder of doctor.json, on the file system of your runs."
        ),
    ] = "runs/doctor",
) -> None:
    """Check whether this machine is fit to train, in at most 15 minutes.

    Checked are libraries, GPUs, the file system, communication, Soren's maps, and short trainings.
    """
    from ..doctor import run

    raise typer.Exit(run.doctor(processes, quick=quick, output=output))


@bench_app.command()
def maps(
    shapes: Shapes = "llama-60m",
    device: Device = None,
    as_json: AsJson = False,
    output: Page = None,
) -> None:
    """Measure time, FLOPs and error of every map, beside Muon's."""
    from ..launch import commands

    commands.bench("maps", shapes, device=device, as_json=as_json, output=output)


@bench_app.command()
def step(
    shapes: Shapes = "llama-60m",
    device: Device = None,
    tokens: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens per step, to compute the optimizer's share of a step's time.",
        ),
    ] = 32768,
    as_json: AsJson = False,
    output: Page = None,
) -> None:
    """Measure time and memory of optimizer steps on a model's matrices."""
    from ..launch import commands

    commands.bench("step", shapes, device=device, tokens=tokens, as_json=as_json, output=output)
