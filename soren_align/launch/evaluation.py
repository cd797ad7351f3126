"""Run `eval` and `chat`: check the options without torch, then load the libraries and answer."""

import gc
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ..core import shipped
from ..core.document import Document
from ..core.errors import UserError
from ..core.extras import require
from ..core.files import default_cache_folder, local_path, refuse_unwritable, resolve_path
from ..core.signals import deferred
from ..core.silence import quiet_libraries
from ..core.text import Terminal, loading, print_labelled, stderr_console
from ..evaluate.suite.suites import check_suite
from ..recipe import Eval, Recipe, evaluation_problems, is_local, load_resolved
from ..recipe.model import refuse_unloadable
from ..recipe.schema import ADAPTER
from ..run.folder import RunFolder
from .environment import refuse_ranks, set_environment

DTYPES = ("float32", "bfloat16", "float16")


def evaluate(
    models: list[str],
    options: dict[str, Any],
    *,
    output: str | None = None,
    summary: str | None = None,
    cache: str | None = None,
) -> None:
    """Evaluate models and runs. Options that are not given come from the first run's recipe.

    options: keys of `Eval`, None if not given. output: the folder for results; default: the first
    run's own. summary: a JSON file for the scores alone. cache: the folder of cached responses.
    Raises UserError before torch is imported.
    """
    require("lm_eval", "soren-align eval")
    for model in models:
        refuse_missing(model)
    first = RunFolder(models[0])
    writes_into_run = output is None and bool(first.read())
    if writes_into_run:
        refuse_unwritable(first.path, "--output")
    # Shared: several evaluations may write into one run, and no training may start meanwhile.
    with first.locked(shared=True) if writes_into_run else nullcontext():
        run = first.read()  # again, now that it is locked
        recipe = load_resolved(first.recipe) if run and first.recipe.is_file() else None
        if recipe and recipe.eval:
            # A suite's path is relative to the folder that run.output_dir is relative to, unless it
            # names one here.
            suite, output_dir, place = (
                recipe.eval.suite,
                local_path(recipe.run.output_dir),
                first.path.resolve(),
            )
            depth = len(output_dir.parts)
            is_here = suite in shipped.suites() or resolve_path(suite).exists()
            if not is_here and place.parts[-depth:] == output_dir.parts:
                there = Path(*place.parts[:-depth], suite)
                if there.exists():
                    recipe = recipe.model_copy(
                        update={"eval": recipe.eval.model_copy(update={"suite": str(there)})}
                    )
        if run is None and not options.get("suite") and not local_path(models[0]).exists():
            raise UserError(
                f"{models[0]}: there is no such folder; correct the path, or add --suite SUITE for"
                " a model on the hub"
            )
        settings = evaluation_settings(recipe, options)
        check_suite(settings)
        if output is None and (recipe is None or len(models) > 1):
            raise UserError(
                "--output: is required, because the results belong to no single run; write --output"
                " FOLDER"
            )
        refuse_ranks("eval")
        set_environment(recipe, num_gpus=settings.processes or (run or {}).get("processes") or 1)
        run_evaluation(
            models, settings, stderr_console(), output=output, summary=summary, cache=cache
        )


def refuse_missing(model: str) -> None:
    """Raise UserError if a model is neither a folder that can be loaded here nor a name on the
    hub.
    """
    files = [local_path(model) / name for name in ("run.json", "config.json", ADAPTER)]
    if is_local(model) and not any(file.is_file() for file in files):
        runs = [
            str(Path(model, file.parent.name))
            for file in sorted(local_path(model).glob("*/run.json"))
        ]
        hint = (
            f"one of its runs: {', '.join(runs)[:300]}"
            if runs
            else "a folder with one of these files"
        )
        raise UserError(
            f"{model}: contains no run.json (a run), no config.json (a model) and no {ADAPTER} (an"
            f" adapter); give the path of {hint}"
        )
    if "/" in model and not is_local(model) and Path(model).parent.is_dir():
        raise UserError(
            f"{model}: there is no such folder, and the name is not looked up on the hub, because"
            f" {Path(model).parent} is a folder; correct the path"
        )
    if is_local(model):
        for adapter in (local_path(model), RunFolder(model).model):
            refuse_unloadable(adapter)


def evaluation_settings(recipe: Recipe | None, options: dict[str, Any]) -> Eval:
    """Return the recipe's evaluation section with the command line's options.
    Raises UserError for invalid ones.
    """
    # trust_suite: the recipe may come from anyone.
    section = recipe.eval.model_dump(exclude={"trust_suite"}) if recipe and recipe.eval else {}
    options = {key: value for key, value in options.items() if value is not None}
    if options.get("suite", section.get("suite")) != section.get("suite"):
        section = {}  # the batch size and the data belong to the other suite
    if not (section | options).get("suite"):
        raise UserError(
            "--suite: is required, because the first model is not a run whose recipe has an eval"
            f" section; write one of {', '.join(shipped.suites())}"
        )
    places = {(): "eval", **{(key,): f"--{key.replace('_', '-')}" for key in Eval.model_fields}}
    document = Document(section | options, places)
    settings = document.validated(Eval)
    document.problems += evaluation_problems(settings.model_dump())
    document.refuse_problems()
    return settings


def run_evaluation(
    models: list[str],
    settings: Eval,
    console: Terminal,
    *,
    output: str | None = None,
    summary: str | None = None,
    cache: str | None = None,
    brief: bool = False,
) -> None:
    """Evaluate models beside the checkpoints that their training started from; see `evaluate`.

    brief: print those notes alone that put the scores in question.
    """
    from ..evaluate.report.results import refuse_foreign_summary, write_summary
    from ..publish.answers import describe_answers
    from ..publish.card import write_card

    with deferred(), loading(console, "Loading lm-eval"):
        import torch

        from ..evaluate.run import lineage, stage
    gc.collect()
    torch.cuda.empty_cache()  # memory of the training before
    run = RunFolder(models[0])
    if settings.processes is None:
        # As many processes as trained the run, since so many devices were there.
        trained = (run.read() or {}).get("processes") or 1
        settings = settings.model_copy(
            update={"processes": min(trained, torch.cuda.device_count() or trained)}
        )
    folder = Path(output) if output else stage.output_of(run, settings)
    # Refused before the evaluation, whose results could not be written.
    if output:
        refuse_unwritable(folder, "--output")
    if summary:
        refuse_unwritable(Path(summary).parent, "--summary")
        refuse_foreign_summary(Path(summary))
    omitted: dict[str, str] = {}
    cache_folder = Path(cache) if cache else default_cache_folder()
    with quiet_libraries():
        rows = lineage.lineages(models, omitted.__setitem__)
        for sentence, path in omitted.items():
            print_labelled(console, "notice", f"{sentence} ({path})")
        results = stage.evaluate(
            rows, settings, folder, cache=cache_folder, console=console, notes=[*omitted]
        )
    answers = describe_answers(folder, results) if len(models) == 1 else []
    stage.print_results(results, folder, console, Terminal(), answers=answers, brief=brief)
    if not output:
        write_card(run)
    if summary:
        write_summary(results, Path(summary))


def chat(
    model: str,
    prompts: Sequence[str] = (),
    *,
    compare: str | None = None,
    dtype: str | None = None,
    **settings: Any,
) -> None:
    """Answer prompts, or else all of standard input as one question; on a terminal, converse.

    Each prompt is the only question of its own conversation; answers go to standard output.
    compare: a second model, or "start": the checkpoint that the run was trained from. settings: of
    `Conversation`. Raises UserError before torch is imported if a model is missing.
    """
    for name in (model, *([compare] if compare not in (None, "start") else [])):
        refuse_missing(name)
    if dtype not in (None, *DTYPES):
        raise UserError(f"--dtype: found {dtype!r}; write {', '.join(DTYPES)}")
    if not prompts and not sys.stdin.isatty():
        prompts = (sys.stdin.read().strip(),)
    if not all(prompts):
        raise UserError(
            "--prompt: the question is empty; write --prompt TEXT, or pipe a text into the command"
        )
    run = RunFolder(model)
    is_run = run.read() is not None and run.recipe.is_file()
    set_environment(load_resolved(run.recipe) if is_run else None)
    console = stderr_console()
    with loading(console, "Loading torch and transformers"):
        from .chat import converse
    with quiet_libraries():
        converse(model, compare, dtype, prompts, console, **settings)
