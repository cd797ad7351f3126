"""Check every model of a table before the first model is loaded, and before training.

Tokenizer and config are read, no weights. A problem would make the evaluation fail; a notice is
about a row that will not be compared, or about prompts that lose their beginning.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lm_eval.models.utils import resolve_max_length

from ...core.errors import UserError, in_one_line
from ...core.files import local_path
from ...core.silence import silence
from ...recipe import Eval, Model, is_local, trains_adapter
from ...run.weights import load_config
from ..stats.scores import cluster_labels
from ..suite.sandbox import rendering
from ..suite.suites import Suite, SuiteTask
from ..suite.tasks import Tasks, load_tasks, subtasks
from .backends import (
    MAX_GEN_TOKS,
    BackendSettings,
    ContextTooShort,
    generation_settings,
    num_new_tokens,
    refuse_long_choice,
)
from .lineage import OnOmitted, lineage, run_of
from .models import base_folder, load_tokenizer, model_folder
from .requests import RequestDispatcher, ResponseCache
from .workers import InProcess

NUM_LONGEST = 2
"""Questions of each task whose prompts are made for every row, the longest."""


@dataclass(frozen=True)
class PlannedRow:
    """A row of the table whose model is not loaded."""

    name: str
    model: Path | str
    tokenizer: Any
    """Its chat_template, which may be another model's, renders the prompts; None: there is no
    template."""
    context: int
    """The length in tokens."""
    generation: dict[str, Any]
    """See `generation_settings`."""
    is_adapter: bool = False
    template_of: str | None = None
    """The row whose chat template is used; None: none."""


def read_row(
    name: str, model: Path | str, tokenizer: Any = None, revision: str | None = None
) -> PlannedRow:
    """Return the row of a model in a folder or on the hub, of which tokenizer and config are read.

    tokenizer: that of the model that training will make of this one; None: its own.
    Raises UserError if one of the files cannot be read.
    """
    # No weights: a problem is reported before many gigabytes are downloaded.
    with silence():
        folder = model_folder(model, revision, weights=False)
        base = base_folder(folder, weights=False)
        tokenizer = load_tokenizer(folder) if tokenizer is None else deepcopy(tokenizer)
        config = load_config(str(base or folder))
        generation, _ = generation_settings(folder)
    template_of = name if tokenizer.chat_template else None
    return PlannedRow(
        name,
        model,
        tokenizer,
        resolve_max_length(config, tokenizer),
        generation,
        base is not None,
        template_of,
    )


def saved_row(name: str, model: Path | str) -> PlannedRow:
    """Return the row of a model whose weights are on this machine, unlike a name on the hub.
    See `read_row`.
    """
    # Found before the other models are evaluated, and not when the turn of this one comes.
    row = read_row(name, model)
    folder = local_path(model)
    if is_local(str(model)) and not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{name}: {folder} has no weights in .safetensors files; save the weights as"
            " safetensors"
        )
    return row


def planned_rows(
    model: Model, start: str, tokenizer: Any, on_omitted: OnOmitted | None = None
) -> list[PlannedRow]:
    """Return the rows of the table after a training from `start`: the checkpoints before it, and
    the trained model.

    model: of the recipe. tokenizer: of the training, with its chat template.
    """
    is_trained = is_local(start) and run_of(local_path(start)) is not None
    earlier = lineage(start, on_omitted) if is_trained else []
    rows = [saved_row(*row) for row in earlier] or [
        read_row("base", start, revision=model.revision)
    ]
    trained = read_row("this run", start, tokenizer, model.revision)
    return [*rows, replace(trained, is_adapter=trains_adapter(model))]


def with_base_template(rows: Sequence[PlannedRow], which: str) -> list[PlannedRow]:
    """Return the rows with the first one's chat template chosen by `eval.base_template`.

    The run's template is that of the last row that has one.
    """
    # A base model often has no template of its own. With the run's, both models get equal prompts
    # and can be compared.
    first, *others = rows
    run = (
        None
        if which == "none"
        else next((row for row in reversed(others) if row.template_of), None)
    )
    if which == "none" or (run and (which == "run" or not first.template_of)):
        tokenizer = deepcopy(first.tokenizer)
        tokenizer.chat_template = run.tokenizer.chat_template if run else None
        first = replace(first, tokenizer=tokenizer, template_of=run.name if run else None)
    return [first, *others]


def check(
    rows: Sequence[PlannedRow],
    suite: Suite,
    options: Eval,
    on_column: Callable[[str], object] | None = None,
) -> tuple[Tasks, list[str]]:
    """Return (the suite's tasks with their data, notices). on_column: as in `load_tasks`.

    Raises UserError with all reasons why one of the rows could not be evaluated.
    """
    # All problems are collected, since each attempt loads the tasks again.
    problems = []
    plain = [row.name for row in rows if not row.template_of]
    if suite.apply_chat_template and plain and options.base_template != "none":
        problems.append(
            f"{' and '.join(plain)}: the tokenizer has no chat template, but suite {suite.name}"
            " applies one. Set model.chat_template before training, or evaluate without a template"
            " (eval.base_template: none; --base-template none)"
        )
    adapters = [row.name for row in rows if row.is_adapter]
    if options.backend == "vllm" and adapters:
        problems.append(
            f"{' and '.join(adapters)}: is an adapter, but eval.backend vllm loads only whole"
            " models. Write eval.backend: hf; or train with --no-eval, run `soren-align merge RUN`"
            " and evaluate RUN/merged"
        )
    try:
        tasks = load_tasks(suite, on_column, trusted=options.trust_suite)
    except UserError as error:
        raise UserError(*problems, *error.problems) from error
    probes = {row.name: Probe(row, suite, strict=options.strict) for row in rows}
    if not problems:
        for task in suite.tasks:
            loaded = [
                s for s in subtasks(tasks[task.column]) if s.OUTPUT_TYPE != "loglikelihood_rolling"
            ]
            # If the longest questions fit the context, the others do.
            questions = [(subtask, _longest(subtask, options.limit)) for subtask in loaded]
            for probe in probes.values():
                probe.add(task, questions)
        problems = [problem for probe in probes.values() for problem in probe.problems]
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return tasks, [*_row_notices(rows, suite, probes), *_question_notices(suite, tasks, options)]


def _row_notices(rows: Sequence[PlannedRow], suite: Suite, probes: dict[str, "Probe"]) -> list[str]:
    """Return notices about rows that will not be compared, and prompts that lose their
    beginning.
    """
    first, *others = rows
    notices = []
    if suite.apply_chat_template and first.template_of not in (first.name, None):
        notices.append(
            f"{first.name} is evaluated with the chat template of {first.template_of}"
            " (eval.base_template)"
        )
    for row in others:
        reasons = []
        if row.generation != first.generation:
            own = f"generation_config.json of {row.name} sets {row.generation}"
            reasons.append(f"{own}, but that of {first.name} sets {first.generation}")
        if (row.template_of is None) != (first.template_of is None) and suite.apply_chat_template:
            reasons.append("only one of the two models has a chat template")
        elif probes[row.name].prompts != probes[first.name].prompts:
            can_be_equal = row is rows[-1] and first.template_of != row.name
            remedy = " (for equal templates, write eval.base_template: run)" if can_be_equal else ""
            reasons.append(f"their chat templates differ, and therefore their prompts{remedy}")
        if reasons:
            notices.append(
                f"{row.name} will not be compared with {first.name}: {'; '.join(reasons)}"
            )
    alike: dict[tuple[int, str], list[str]] = {}
    for row in rows:
        if columns := probes[row.name].truncated:
            alike.setdefault((row.context, ", ".join(columns)), []).append(row.name)
    for (context, columns), names in alike.items():
        notices.append(
            f"{', '.join(names)}: the context of {context} tokens truncates the longest prompts of"
            f" {columns}"
        )
    return notices


def _question_notices(suite: Suite, tasks: Tasks, options: Eval) -> Iterator[str]:
    """Yield notices about questions that are not independent, where the suite names no cluster."""
    for task in suite.tasks:
        loaded = subtasks(tasks[task.column])
        if task.cluster:
            continue
        if len(loaded) > 1:
            yield (
                f"{task.column}: the suite names no cluster for this group of {len(loaded)} tasks."
                " Questions of one task are then treated as independent, which makes intervals too"
                " narrow. Write cluster: task into the suite"
            )
        docs = [
            (subtask, doc) for subtask in loaded for doc in list(subtask.eval_docs)[: options.limit]
        ]
        labels = cluster_labels(task, docs)
        if labels is None:
            continue
        first = {label: number for number, label in reversed([*enumerate(labels, 1)])}
        repeated, label = next(
            (number, label) for number, label in enumerate(labels, 1) if first[label] < number
        )
        yield (
            f"{task.column}: {len(labels) - len(first):,} of {len(labels):,} questions have the"
            f" prompt and the choices of an earlier question (question {repeated} equals question"
            f" {first[label]}). In intervals and p-values of differences, equal questions count as"
            " one cluster; in the score, each question counts. Remove the repeated questions"
        )


def _longest(subtask: Any, limit: int | None) -> list[dict[str, Any]]:
    """Return the longest questions of a task, their choices included."""
    docs = list(subtask.eval_docs)[:limit]
    return heapq.nlargest(NUM_LONGEST, docs, key=lambda doc: len(str(doc)))


def _as_list(requests: Any) -> list[Any]:
    return requests if isinstance(requests, list) else [requests]


class Probe:
    """The requests of one row for the longest questions, and the problems of these."""

    def __init__(self, row: PlannedRow, suite: Suite, *, strict: bool = False):
        self.row, self.suite, self.strict = row, suite, strict
        # This dispatcher gets no requests: it renders the chat template as the evaluation will, and
        # its model is never loaded.
        settings = BackendSettings("hf", suite.dtype, "cpu", suite.batch_size)
        self.lm = RequestDispatcher(
            InProcess(Path(row.model), row.tokenizer, settings),
            row.tokenizer,
            settings,
            ResponseCache(None, {}),
        )
        self.problems: list[str] = []
        self.prompts: dict[str, list[str]] = {}
        self.truncated: list[str] = []
        """Columns with a prompt that is longer than the context."""

    def add(self, task: SuiteTask, questions: list[tuple[Any, list[dict[str, Any]]]]) -> None:
        """Make the requests of a column. questions: some of each of lm-eval's tasks."""
        self.lm.label = f"{self.row.name}: {task.column}"
        has_template = self.suite.apply_chat_template and self.row.template_of is not None
        how = {"apply_chat_template": has_template, "chat_template": self.lm.apply_chat_template}
        requests = []
        try:  # as in `Task.build_all_requests`
            for subtask, docs in questions:
                subtask.set_fewshot_seed(seed=self.suite.seeds.fewshot)
                num_fewshot = subtask.config.num_fewshot or 0
                with silence(), rendering():
                    for doc in docs:
                        prefix = subtask.doc_to_prefix(doc)
                        prompt = subtask.fewshot_context(
                            doc,
                            num_fewshot,
                            fewshot_as_multiturn=has_template,
                            gen_prefix=prefix,
                            **how,
                        )
                        requests += _as_list(subtask.construct_requests(doc, prompt, **how))
        except Exception as error:  # a template may raise anything
            reason = in_one_line(error).removeprefix(f"{self.lm.label}: ")
            self.problems.append(
                f"{self.lm.label}: a question cannot be rendered as a prompt: {reason}; choose"
                f" another chat template, or {self._remedy(task)}"
            )
            return
        # For the comparison of models: they are compared only if their prompts are equal.
        self.prompts[task.column] = [request.args[0] for request in requests]
        context, is_truncated = self.row.context, False
        try:
            for request in requests:
                if request.request_type == "generate_until":
                    num_new = num_new_tokens(request.args[1], MAX_GEN_TOKS, context)
                    is_truncated |= self._num_tokens(request.args[0]) > context - num_new
                elif request.request_type == "loglikelihood":
                    num = self._num_tokens("".join(request.args))
                    refuse_long_choice(num - self._num_tokens(request.args[0]), context)
                    # One token more than the context: the last one is predicted, not an input
                    # (`_count_truncated`).
                    is_truncated |= num > context + 1
        except ContextTooShort as error:
            self.problems.append(f"{self.lm.label}: {error}; {self._remedy(task)}")
            return
        if is_truncated:
            self.truncated.append(task.column)
            if self.strict:
                self.problems.append(
                    f"{self.lm.label}: prompts do not fit the context of {self.row.context} tokens,"
                    " and eval.strict is true; write eval.strict: false (--no-strict) to truncate"
                    " and count such prompts"
                )

    def _remedy(self, task: SuiteTask) -> str:
        return f"omit this column: eval.omit: [{task.column}] (--omit {task.column})"

    def _num_tokens(self, text: str) -> int:
        return len(self.row.tokenizer(text, add_special_tokens=False)["input_ids"])
