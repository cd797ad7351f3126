"""The commands on models: eval, chat."""

from typing import Annotated

import typer

from ..core import shipped


def add_to(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("eval")(evaluate)
    app.command()(chat)


Models = Annotated[
    list[str], typer.Argument(metavar="MODEL_OR_RUN...", help="Model, adapter or run folders, or names on the hub.")
]
SuiteOption = Annotated[
    str | None,
    typer.Option(
        metavar="SUITE",
        help="A shipped suite or a suite.yaml. Default: the run's own.",
        autocompletion=lambda incomplete: [name for name in shipped.suites() if name.startswith(incomplete)],
    ),
]
Output = Annotated[str | None, typer.Option(metavar="DIR", help="Folder for the results. Default: RUN/eval/SUITE.")]
EvalProcesses = Annotated[int | None, typer.Option(min=1, metavar="N", help="Evaluate with N processes, one per GPU.")]
DataRoot = Annotated[
    str | None, typer.Option(metavar="DIR", help="Datasets downloaded from the hub: DIR/allenai/ai2_arc, ...")
]
Limit = Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N questions of each task.")]
BatchSize = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Prompts in a forward pass. Default: the suite's.")
]
Dtype = Annotated[
    str | None, typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16. Default: the suite's, float32.")
]
Backend = Annotated[str | None, typer.Option(metavar="BACKEND", help="hf, or vllm if it is installed. Default: hf.")]
Strict = Annotated[bool | None, typer.Option("--strict/--no-strict", help="Fail if a prompt does not fit the model.")]
BaseTemplate = Annotated[str | None, typer.Option(metavar="WHICH", help="The base's template: own, run or none.")]
Omit = Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Leave out a column. Repeatable.")]
TrustSuite = Annotated[
    bool, typer.Option("--trust-suite", help="Allow the files of a suite that is not shipped to run code.")
]
Published = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SCORES",
        help="Published scores to print below: paper/sft, or a file. Repeatable.",
        autocompletion=lambda incomplete: [name for name in shipped.published() if name.startswith(incomplete)],
    ),
]
Cache = Annotated[str | None, typer.Option(metavar="DIR", help="Folder of cached responses. Default: the user's own.")]
Summary = Annotated[
    str | None, typer.Option(metavar="FILE.json", help="Also write the scores alone to this JSON file.")
]


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
    """Evaluate models beside the checkpoints that they started from."""
    from ..launch import evaluation

    settings = {
        "suite": suite,
        "batch_size": batch_size,
        "dtype": dtype,
        "backend": backend,
        "processes": processes,
        "data_root": data_root,
        "limit": limit,
        "strict": strict,
        "base_template": base_template,
        "omit": omit or None,
        "trust_suite": trust_suite or None,
        "published": published or None,
    }
    evaluation.evaluate(models, settings, output=output, summary=summary, cache=cache)


def chat(
    model: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RUN", help="A model, adapter or run folder, or a hub name.")
    ],
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A second model; `start`: the run's starting checkpoint. Side by side from 100 columns on.",
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Answer this question, and exit. Repeatable.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="The longest answer, in tokens.")] = 512,
    temperature: Annotated[
        float, typer.Option(min=0, metavar="T", help="Of sampling. Default: 0, the most likely token.")
    ] = 0.0,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16. Default: the model's own.")
    ] = None,
) -> None:
    """Talk to a model, with its own chat template."""
    from ..launch import conversation

    options = conversation.ChatOptions(compare, tuple(prompt or ()), system, max_new_tokens, temperature, dtype)
    conversation.chat(model, options)
