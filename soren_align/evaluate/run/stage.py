"""Evaluate several models on the same questions."""

import fcntl
import gc
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console

from ...core.errors import ResumableError, UserError
from ...core.figures import NO_PICTURES
from ...core.files import default_cache_folder, is_component, remove, write
from ...core.text import loading, print_labelled
from ...recipe import Eval, Model
from ...run.folder import RunFolder
from ...run.provenance import commit, fingerprint
from ..report import tables
from ..report.results import NAME, POINTS, Results, Row, read_results, refuse_foreign
from ..stats.paired import points_json
from ..stats.significance import compare, compare_pairs, refuse_unlike, unpaired
from ..suite.answer_match import match_rule
from ..suite.suites import Suite, check_suite, load_published, suite_of
from ..suite.tasks import Tasks, num_questions
from .backends import require_backend
from .harness import ModelResults, Options, ProgressDisplay, evaluate_model
from .lineage import parents
from .preflight import PlannedRow, check, planned_rows, saved_row, with_base_template
from .workers import OutOfMemory

Rows = Sequence[tuple[str, Path | str]]
"""(name in the table, model) of each row, the starting checkpoint first."""
Samples = dict[str, dict[str, list[dict[str, Any]]]]
"""lm-eval's samples by row and column."""
UNSAFE = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that JSON allows in a string and that control a terminal, end a line, or cannot be
written in UTF-8. They alone are escaped in samples, which can so be read in a terminal."""


def evaluate(
    rows: Rows,
    options: Eval,
    output: Path,
    *,
    device: str | None = None,
    cache: Path | None = None,
    console: Console | None = None,
    notes: Sequence[str] = (),
) -> Results:
    """Evaluate the models in order; write the results and return them.

    cache: the cache folder; None is the user's. console: for progress. notes: printed under the
    table.
    Writes into `output`: results.json (as returned), points.json, table.md, scores.png,
    scores-dark.png, and samples/<row>/<column>.jsonl. Nothing is changed there before all models
    are evaluated.
    """
    console, cache, output = console or Console(), cache or default_cache_folder(), Path(output)
    # Refuse what can be refused before the tasks are loaded, which takes seconds, and the models,
    # which takes minutes.
    names = [name for name, _ in rows]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            f"two models would have the name {duplicates[0]!r} in the table; rename one of the"
            " folders"
        )
    require_backend(options.backend)
    suite = suite_of(options)
    refuse_foreign(output, names)
    published = [row for name in options.published for row in load_published(name, suite.name)]
    if options.omit:  # the published average is one over other columns
        for row in published:
            row["scores"].pop("average", None)
    # The tasks are loaded once, with the suite's seeds: lm-eval shuffles the choices of GPQA as it
    # loads them, so that a second loading would ask other questions.
    planned = with_base_template([saved_row(*row) for row in rows], options.base_template)
    with loading(console, "Loading tasks") as status:
        tasks, notices = check(
            planned, suite, options, lambda name: status.update(f"Loading tasks: {name}")
        )
    for notice in notices:
        print_labelled(console, "notice", notice)
    model_options = Options(
        backend=options.backend,
        device=device,
        limit=options.limit,
        strict=options.strict,
        num_processes=options.processes or 1,
        cache=cache,
    )
    # One model after another, each with every process: two 7B models do not fit one GPU.
    evaluated = _evaluate_models(planned, suite, tasks, model_options, console)
    requests = [
        (name, results.num_requests["cached"], results.num_requests["computed"])
        for name, results in evaluated
    ]
    if cached := [
        f"{name} {cached:,} of {cached + computed:,}"
        for name, cached, computed in requests
        if cached
    ]:
        unit = "requests; a multiple-choice question has one request per choice"
        print_labelled(console, "cached", f"{', '.join(cached)} {unit}")
    # Nothing of the results is written before all models have answered. A kill leaves the earlier
    # results whole, and the answers so far in the cache.
    shortfall = _shortfall(suite, tasks, options)
    settings = {  # those that the first model's results do not have, or that may differ in its row
        "chat_template": suite.apply_chat_template,
        "num_processes": model_options.num_processes,
        "data": suite.data_root or "hub",
        "commit": commit(),
    }
    results: Results = {
        "format": 1,
        "title": f"{suite.title}: {shortfall}" if shortfall else suite.title,
        "suite": suite.name,
        "rows": _result_rows(planned, evaluated, suite),
        "published": published,
        "settings": cast(Any, evaluated[0][1].settings | settings),
        "notes": [*suite.notes, *notes],
        "about": {task.column: task.about for task in suite.tasks if task.about},
    }
    points = points_json(dict(evaluated))
    results["points_sha256"] = hashlib.sha256(points.encode()).hexdigest()
    write_results(results, {name: each.samples for name, each in evaluated}, output, points)
    return results


def write_results(results: Results, samples: Samples, output: Path, points: str = "") -> None:
    """Write results.json, points.json, samples/<row>/<column>.jsonl, table.md and figures in place
    of earlier ones.

    points: content of points.json.
    Raises UserError if this would replace files that no evaluation wrote.
    """
    folder = output / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(output):
        # again: another evaluation may have written there since the first time
        refuse_foreign(output, list(samples))
        earlier = read_results(output)
        # no other evaluation's samples stay beside new ones
        for row in earlier["rows"] if earlier else []:
            remove(folder / row["name"])
        # First: it marks the folder as an evaluation's, so that after a kill the same command
        # replaces the other files.
        write(output / NAME, json.dumps(results, indent=2) + "\n")
        write(output / POINTS, points)
        for row, columns in samples.items():
            (folder / row).mkdir()
            for column, each in columns.items():
                lines = (
                    json.dumps(_compact(sample), default=str, ensure_ascii=False) for sample in each
                )
                escaped = (
                    UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", line) + "\n"
                    for line in lines
                )
                write(folder / row / f"{column}.jsonl", "".join(escaped))
        write(output / "table.md", tables.markdown(results))
        if NO_PICTURES in os.environ:
            for name in ("scores.png", "scores-dark.png"):  # of earlier scores
                (output / name).unlink(missing_ok=True)
        else:
            tables.draw(results, output / "scores.png")


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock a folder, waiting for another evaluation that is writing there, so that its files are
    all of one.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # a file system without locks: the results of hours are written nevertheless
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compact(sample: dict[str, Any]) -> dict[str, Any]:
    """Return lm-eval's sample with a prompt that all choices share written once: 25 shots are 5 kB.

    First what a reader looks for: prompt, answer, right answer and scores.
    """
    prompts, choices = zip(*sample["arguments"], strict=True)
    arguments = {"prompt": prompts[0] if len(set(prompts)) == 1 else prompts, "choices": choices}
    omitted = {"arguments"} | (
        {"resps"} if [r[0] for r in sample["resps"]] == sample["filtered_resps"] else set()
    )
    first = ("doc_id", "prompt", "choices", "filtered_resps", "target", *sample.get("metrics", ()))
    content = {key: value for key, value in sample.items() if key not in omitted} | arguments
    if "answer_match" in sample and isinstance(sample["target"], str):
        # A reader of the samples sees why an answer counts as right.
        content["matched_by"] = match_rule(sample["filtered_resps"][0], sample["target"])
    return {key: content[key] for key in first if key in content} | content


def print_results(
    results: Results,
    output: Path,
    console: Console,
    table: Console | None = None,
    *,
    answers: Sequence[str] = (),
    brief: bool = False,
) -> None:
    """Print the table on `table` (None: on `console`), then the folder of the results on `console`.

    answers: lines below the table, with some of the models' answers. brief: with those
    notes alone that put the scores in question.
    """
    table = table or console
    table.print()
    table.print(tables.terminal(results, brief=brief), highlight=False)
    if answers:
        print_labelled(table, "answers", *answers)
    files = [
        "table.md (all notes)",
        *["scores.png"] * (output / "scores.png").is_file(),
        "samples/",
    ]
    print_labelled(console, "written", f"{output}: {', '.join(files)}", wrap=False)


def preflight(
    options: Eval,
    model: Model,
    start: str,
    tokenizer: Any,
    on_column: Callable[[str], object] | None = None,
) -> tuple[Tasks, list[str]]:
    """Check all that the evaluation after a training needs except the models' weights.

    model: of the recipe. start: the starting checkpoint. tokenizer: of the training, with its chat
    template.
    on_column: called before a column is loaded.
    Returns the tasks with their data, and notices. Raises UserError with all problems found.
    """
    require_backend(options.backend)
    suite = check_suite(options)
    omitted: list[str] = []
    rows = planned_rows(
        model, start, tokenizer, lambda sentence, path: omitted.append(f"{sentence} ({path})")
    )
    rows = with_base_template(rows, options.base_template)
    tasks, notices = check(rows, suite, options, on_column=on_column)
    return tasks, [*omitted, *notices]


def output_of(run: RunFolder, options: Eval) -> Path:
    """Return the folder of an evaluation's results in a run folder.
    Raises UserError if it would lie outside.
    """
    if not is_component(options.name):
        raise UserError(
            "--suite: the results are written into a folder with the suite's name, but"
            f" {options.suite!r} cannot be such a name; rename the suite's folder: printable"
            " characters without / and \\, at most 200 bytes"
        )
    output = run.evaluation(options.name)
    # Refused, not resolved: a run folder from elsewhere must not direct writes to other places.
    for link in (output.parent, output):
        if link.is_symlink():
            raise UserError(
                f"{link}: is a symbolic link, but results must lie in the run's folder; remove the"
                " link, or use --output for another folder"
            )
    return output


def _evaluate_models(
    rows: Sequence[PlannedRow], suite: Suite, tasks: Tasks, options: Options, console: Console
) -> list[tuple[str, ModelResults]]:
    """Return each model's results, all with one batch size: the suite's, halved until all models
    fit the memory.
    """
    evaluated: list[tuple[str, ModelResults]] = []
    while len(evaluated) < len(rows):
        # All rows have one batch size: padding changes the last digits of log-likelihoods (1.5e-5
        # at -160 in float32), and with them a few answers. So a batch that does not fit begins
        # anew.
        row = rows[len(evaluated)]
        template = (row.tokenizer.chat_template or "") if suite.apply_chat_template else None
        try:
            with ProgressDisplay(row.name, console) as display:
                own = replace(options, chat_template=template)
                results = evaluate_model(row.model, suite, own, tasks=tasks, display=display)
        except OutOfMemory as error:
            problem = f"{row.name}: out of memory with batch size {suite.batch_size}"
            if suite.batch_size == 1:
                raise ResumableError(
                    f"{problem}: {error}; free memory, then rerun the same command"
                ) from None
        else:
            if evaluated:
                # before the next model is evaluated for nothing
                refuse_unlike(evaluated[0], (row.name, results))
            evaluated.append((row.name, results))
            continue
        # After `except`, whose error holds the model that failed, with its batch.
        evaluated.clear()
        gc.collect()
        torch.cuda.empty_cache()
        suite = suite.model_copy(update={"batch_size": suite.batch_size // 2})
        console.print(
            f"{problem}; all models are evaluated again, with batch size {suite.batch_size},"
            " because the batch size changes the last digits of scores",
            highlight=False,
            soft_wrap=True,
        )
    return evaluated


def _result_rows(
    rows: Sequence[PlannedRow], evaluated: list[tuple[str, ModelResults]], suite: Suite
) -> list[Row]:
    """Return the rows of results.json."""
    entries: list[Any] = []
    for row, (_, results), differences in zip(
        rows, evaluated, compare(evaluated, suite.average), strict=True
    ):
        entry = {
            "name": row.name,
            "model": str(row.model),
            "weights_sha256": fingerprint(str(row.model)),
            "scores": results.scores,
            "truncated": results.truncated,
            "eos_token_id": results.eos_token_id,
            "num_requests": results.num_requests,
        }
        if suite.apply_chat_template:
            entry["chat_template_of"] = row.template_of
        if differences is not None:
            entry["differences"] = differences
            if reasons := unpaired(evaluated[0][1], results):
                average = {"average": "not all columns are compared"} if suite.average else {}
                entry["unpaired"] = reasons | average
        entries.append(entry)
    # Of a chain base, SFT, DPO: DPO with SFT. Each row is compared with the first one already.
    trained = {
        child: parent
        for child, parent in parents([row.model for row in rows]).items()
        if parent > 0
    }
    pairs = [(evaluated[parent][1], evaluated[child][1]) for child, parent in trained.items()]
    for (child, parent), differences in zip(
        trained.items(), compare_pairs(pairs, suite.average), strict=True
    ):
        entries[child]["start"] = {"name": rows[parent].name, "differences": differences}
    return entries


def _shortfall(suite: Suite, tasks: Tasks, options: Eval) -> str:
    """Return the reason why the scores are, or may be, no result of the suite; "" if they are."""
    reasons = [f"without {', '.join(options.omit)}"] if options.omit else []
    for task in suite.tasks:
        sizes = num_questions(tasks[task.column]).values()
        if options.limit and max(sizes) > options.limit:
            reasons.append(f"the first {options.limit} questions of each task")
            break
        if task.questions and sum(sizes) != task.questions:
            reasons.append(
                f"on other data ({sum(sizes):,} of {task.questions:,} questions of {task.column})"
            )
            break
    if reasons:
        return f"{', '.join(reasons)}, not the suite's result"
    return f"on the data in {options.data_root}" if options.data_root else ""
