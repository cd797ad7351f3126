"""The evaluation stage: every model is asked the same questions, and compared with the one in the first row."""

import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..errors import UserError
from ..files import is_component, remove, write
from ..provenance import commit
from ..recipe import Eval
from ..run_folder import RunFolder
from . import figure, tables
from .backends import folder_of, load_tokenizer, refuse_absent
from .cache import default_root
from .harness import Answers, evaluate_model
from .published import load_quoted
from .results import NAME, refuse_foreign, remove_samples, summary
from .showing import Showing
from .significance import compare, same_questions
from .suites import Suite, load_suite
from .tasks import Tasks, load_tasks, sizes_of
from .workers import OutOfMemory


def evaluate(
    rows: Sequence[tuple[str, Path | str]],
    asked: Eval,
    output: Path,
    *,
    device: str | None = None,
    cache: Path | None = None,
    console: Console | None = None,
    table: Console | None = None,
) -> dict[str, Any]:
    """Evaluate each (name, model) in order, the starting checkpoint first; print and write the table.

    cache: the folder of all journals; None is the user's. Answers found there are not asked for again.
    console: for what happens. table: for the table; None is `console`.
    Writes into `output`: results.json (what is returned), table.md, scores.png, and samples/<row>/<column>.jsonl.
    Nothing there is touched before all models have answered.
    """
    console = console or Console()
    names = [name for name, _ in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"two models would stand in the table as {twice[0]!r}; give one folder another name")
    cache = cache or default_root()
    suite, output = suite_of(asked), Path(output)
    refuse_foreign(output, names)
    quoted = [entry for name in asked.quote for entry in load_quoted(name, suite.name)]
    if not console.is_terminal:
        console.print("loading   tasks", highlight=False)
    with console.status("Loading tasks") as status:
        show = lambda column: status.update(f"Loading tasks: {column}")  # noqa: E731
        tasks = load_tasks(suite, cache, show, trusted=asked.trust_suite)
    for _, model in rows:  # said now, and not when the rows before it are done
        load_tokenizer(folder_of(model))
    answers = _at_the_largest_batch(rows, suite, tasks, asked, device, cache, console)
    kept = [f"{name} {found.asked['before']:,}" for name, found in answers if found.asked["before"]]
    if kept:
        console.print(f"kept      requests answered before: {', '.join(kept)}", highlight=False, soft_wrap=True)
    first = answers[0][1]
    entries = [
        {
            "name": name,
            "model": str(model),
            "scores": found.scores,
            "cut": found.cut,
            "ends": found.ends,
            "answered": found.asked,
        }
        for (name, model), (_, found) in zip(rows, answers, strict=True)
    ]
    for entry, differences in zip(entries, compare(answers, suite.average), strict=True):
        if differences:
            entry["differences"] = differences
    shortfall = _shortfall(suite, tasks, asked)
    results = {
        "title": f"{suite.title}: {shortfall}" if shortfall else suite.title,
        "suite": suite.name,
        "rows": entries,
        "quoted": quoted,
        "settings": first.settings
        | {"num_processes": asked.processes or 1, "data": suite.data_root or "hub", "commit": commit()},
        "notes": suite.notes,
    }
    _write(results, answers, output)
    (table or console).print()
    (table or console).print(tables.terminal(results), highlight=False)
    console.print(f"written   {output}", highlight=False, soft_wrap=True)
    return results


def suite_of(asked: Eval) -> Suite:
    """The suite, with what a recipe or the command line changes in it."""
    suite = load_suite(asked.suite)
    given = {"batch_size": asked.batch_size, "dtype": asked.dtype}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if asked.data_root is not None:
        changes["data_root"] = str(Path(asked.data_root).expanduser().absolute())
    return suite.model_copy(update=changes)


def preflight(asked: Eval, on_column: Callable[[str], object] | None = None) -> dict[str, int]:
    """Load all that an evaluation needs but the models; by column, its number of questions."""
    refuse_absent(asked.backend)
    suite = suite_of(asked)
    for name in asked.quote:
        load_quoted(name, suite.name)
    tasks = load_tasks(suite, None, on_column, trusted=asked.trust_suite)
    return {column: sum(sizes_of(task).values()) for column, task in tasks.items()}


def output_of(run: RunFolder, asked: Eval) -> Path:
    """Where a run folder keeps the results of an evaluation. UserError where they would be written outside of it."""
    if not is_component(asked.name):
        raise UserError(f"--suite: {asked.suite!r} does not name a folder, which the results are named by; rename it")
    output = run.evaluation(asked.name)
    for link in (output.parent, output):
        if link.is_symlink():
            raise UserError(f"{link}: is a link, and results stay in their run's folder; name it with --output")
    return output


def write_summary(results: dict[str, Any], file: Path) -> None:
    """Write the scores, bare; see `refuse_foreign_summary`, which is to be called before the evaluation."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, json.dumps(summary(results), indent=2) + "\n")


def _at_the_largest_batch(
    rows: Sequence[tuple[str, Path | str]],
    suite: Suite,
    tasks: Tasks,
    asked: Eval,
    device: str | None,
    cache: Path,
    console: Console,
) -> list[tuple[str, Answers]]:
    """Every model's answers, all at the same batch size: the suite's, or the first half of it that fits all."""
    while True:
        answers: list[tuple[str, Answers]] = []
        lacked = ""
        for name, model in rows:
            show = Showing(name, console)
            try:
                with show.progress:
                    found = evaluate_model(
                        model,
                        suite,
                        tasks=tasks,
                        backend=asked.backend,
                        device=device,
                        limit=asked.limit,
                        strict=asked.strict,
                        num_processes=asked.processes or 1,
                        cache=cache,
                        on_progress=show.on_progress,
                        on_score=show.on_score,
                    )
            except OutOfMemory as error:
                lacked = f"{name}: out of memory with batches of {suite.batch_size}"
                if suite.batch_size == 1:
                    raise UserError(f"{lacked}: {error}") from None
                break
            if answers:
                same_questions(answers[0], (name, found))  # before the next model is asked in vain
            answers.append((name, found))
        if not lacked:
            return answers
        gc.collect()  # the model that failed, with its batch
        torch.cuda.empty_cache()
        suite = suite.model_copy(update={"batch_size": suite.batch_size // 2})
        console.print(
            f"{lacked}; all rows with {suite.batch_size} now, since batches change the last digits of scores",
            highlight=False,
            soft_wrap=True,
        )


def _shortfall(suite: Suite, tasks: Tasks, asked: Eval) -> str:
    """Why this is not, or not surely, the suite's result; empty where it is."""
    for task in suite.tasks:
        sizes = sizes_of(tasks[task.column]).values()
        if asked.limit and max(sizes) > asked.limit:
            return f"the first {asked.limit} questions of each task, not the suite's result"
        if task.questions and sum(sizes) != task.questions:
            counted = f"{sum(sizes):,} of {task.questions:,} questions of {task.column}"
            return f"on other data ({counted}), not the suite's result"
    return f"on the data in {asked.data_root}" if asked.data_root else ""


def _write(results: dict[str, Any], answers: list[tuple[str, Answers]], output: Path) -> None:
    remove_samples(output)
    samples = output / "samples"
    samples.mkdir(parents=True, exist_ok=True)
    # First: it marks the folder as ours, so that after a kill the same command replaces the rest.
    write(output / NAME, json.dumps(results, indent=2) + "\n")
    for name, found in answers:
        folder = samples / name
        folder.mkdir()
        for column, asked in found.samples.items():
            write(folder / f"{column}.jsonl", "".join(json.dumps(_brief(s), default=str) + "\n" for s in asked))
    write(output / "table.md", tables.markdown(results))
    aside = output / "scores.png.part"
    remove(aside)
    figure.draw(results, aside)
    aside.replace(output / "scores.png")


def _brief(sample: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's record of a question, with a prompt that its choices share once: 25 shots are 5 kB."""
    prompts, choices = zip(*sample["arguments"], strict=True)
    said = {"prompt": prompts[0] if len(set(prompts)) == 1 else prompts, "choices": choices}
    left_out = {"arguments"} | ({"resps"} if [r[0] for r in sample["resps"]] == sample["filtered_resps"] else set())
    return {key: value for key, value in sample.items() if key not in left_out} | said
