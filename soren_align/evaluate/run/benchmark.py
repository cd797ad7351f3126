"""Score the model that is being trained on a few questions of a suite, always the same ones.

The model is run where it is, in its own precision: no second copy is made. lm-eval makes the
prompts and scores the responses, as after training, so that a score is that of an evaluation of the
checkpoint on these questions.
"""

import json
import math
import statistics
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lm_eval.utils import handle_non_serializable, hash_string

from ...core.errors import ResumableError, UserError
from ...core.silence import silence
from ...recipe import Recipe, parallel
from ...sharding.ranks import Ranks
from ...tasks import BENCHMARK
from ..stats.points import normalize
from ..stats.scores import NotNumbers, points_of
from ..suite.suites import Suite, benchmark_suite
from ..suite.tasks import load_tasks, num_questions, score_keys, subtasks
from .backends import BackendSettings, hf_lm, run_requests
from .harness import run_lm_eval
from .preflight import Probe, read_row
from .requests import RequestDispatcher, ResponseCache
from .workers import Chunk, OutOfMemory, guarded

OMIT = "write the names of the suite's other columns into run.benchmark.columns"


@dataclass(frozen=True)
class Questions:
    """The questions of one column."""

    indices: list[tuple[Any, list[int]]]
    """lm-eval's tasks, each with the indices of its questions."""
    record: dict[str, Any]
    """{"task": lm-eval's name, "questions": their number, "of": that of all questions,
    "last_doc_hash": the largest `doc_hash`}: they are the questions of this task whose hash is not
    larger."""


@dataclass(frozen=True)
class Benchmark:
    """A suite, and some questions of each column, equal on all ranks."""

    suite: Suite
    questions: dict[str, Questions]
    tokenizer: Any
    ranks: Ranks
    is_sharded: bool
    """Whether each rank holds a part of the weights: then all ranks answer all questions together;
    otherwise each answers a share."""
    notices: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return the suite's name and the columns' questions, for run.json."""
        return {
            "suite": self.suite.name,
            "columns": {column: questions.record for column, questions in self.questions.items()},
        }

    def scores(self, model: Any, config: Any, device: Any) -> dict[str, float]:
        """Return {"eval_benchmark/COLUMN": score, at most 1}, and of several columns
        "eval_benchmark/average".

        A score is NaN if a log-likelihood is not a number. model: in evaluation mode. config: its
        PretrainedConfig. The generators of random, numpy and torch are seeded. Collective.
        """
        # The suite's batch size, as an evaluation of the checkpoint has it: padding moves the last
        # digits of log-likelihoods.
        settings = BackendSettings("hf", self.suite.dtype, str(device), self.suite.batch_size)
        tokenizer = deepcopy(self.tokenizer)  # HFLM adds a padding token
        with silence():
            workers = _TrainedModel(
                hf_lm(_Callable(model, config, device), tokenizer, settings.batch_size), self
            )
        # A batch is a chunk, as many of them as possible: each rank gets its share, and the
        # batches, with their padding, do not depend on the number of ranks.
        responses = ResponseCache(None, {})  # of these weights alone
        lm = RequestDispatcher(workers, self.tokenizer, settings, responses, batches_per_chunk=1)
        scores = {}
        for task in self.suite.tasks:
            lm.label = f"run.benchmark: {task.column}"
            chosen = self.questions[task.column].indices
            samples = {subtask.task_name: indices for subtask, indices in chosen}
            output = run_lm_eval(
                lm, self.suite, [subtask for subtask, _ in chosen], samples=samples
            )
            key = score_keys(task)[0]
            try:
                points = {name: points_of(output, name, key, lm.label) for name in samples}
                score = statistics.fmean(chain(*normalize(points, task.num_choices).values()))
            except NotNumbers:
                score = math.nan
            scores[f"eval_{BENCHMARK}{task.column}"] = score
        if len(scores) > 1:
            scores[f"eval_{BENCHMARK}average"] = statistics.fmean(scores.values())
        return scores


def read_benchmark(recipe: Recipe, start: str, tokenizer: Any, ranks: Ranks) -> Benchmark:
    """Return the questions of `run.benchmark`, which the recipe has, and check that they can be
    scored. No collective.

    start: the starting checkpoint. tokenizer: of the training, with its chat template. Raises
    UserError if the suite cannot be loaded, a prompt cannot be made, or an answer does not fit the
    context.
    """
    section, suite, shared = (
        recipe.run.benchmark,
        benchmark_suite(recipe),
        parallel(recipe.run.parallel),
    )
    assert section is not None
    assert suite is not None
    # Sharded weights are gathered layer by layer in each forward pass by all ranks together, so
    # that all of them must answer the same questions.
    is_sharded = shared.kind == "fsdp2" or shared.stage == 3
    tasks = load_tasks(suite, None, trusted=section.trust_suite)
    questions = {
        task.column: choose_questions(task.task, tasks[task.column], section.questions)
        for task in suite.tasks
    }
    if is_sharded:
        for column, chosen in questions.items():
            if any(subtask.OUTPUT_TYPE == "generate_until" for subtask, _ in chosen.indices):
                raise UserError(
                    f"run.benchmark: the answers of {column} are generated, which is not possible"
                    f" while run.parallel {recipe.run.parallel} shards the weights; {OMIT}"
                )
    row = read_row("this run", start, tokenizer, recipe.model.revision)
    if suite.apply_chat_template and not row.template_of:
        raise UserError(
            f"run.benchmark: the tokenizer has no chat template, but suite {suite.name} applies"
            " one; set model.chat_template, or choose another suite"
        )
    # Prompts of these very questions are made now: an error at the first evaluation would come in
    # the middle of the training.
    probe = Probe(row, suite, omit=OMIT)
    for task in suite.tasks:
        chosen = questions[task.column].indices
        probe.add(
            task,
            [(subtask, [subtask.eval_docs[i] for i in indices]) for subtask, indices in chosen],
        )
    if probe.problems:
        raise UserError(*dict.fromkeys(probe.problems))
    truncates = (
        f"run.benchmark: the context of {row.context} tokens truncates prompts of"
        f" {', '.join(probe.truncated)}"
    )
    notices = (truncates,) if probe.truncated else ()
    return Benchmark(suite, questions, tokenizer, ranks, is_sharded, notices)


def choose_questions(name: str, task: Any, number: int) -> Questions:
    """Return the questions of lm-eval's task or group with the smallest `doc_hash`, or all if there
    are no more.
    """
    # The smallest hashes: a fixed sample that depends neither on the order of the questions nor on
    # a seed, so that two runs and a later evaluation agree on it.
    hashes = sorted(
        (doc_hash(doc), position, index)
        for position, subtask in enumerate(subtasks(task))
        for index, doc in enumerate(subtask.eval_docs)
    )[:number]
    indices = [
        (subtask, sorted(index for _, own, index in hashes if own == position))
        for position, subtask in enumerate(subtasks(task))
    ]
    total = sum(num_questions(task).values())
    record = {"task": name, "questions": len(hashes), "of": total, "last_doc_hash": hashes[-1][0]}
    return Questions([(subtask, own) for subtask, own in indices if own], record)


def doc_hash(question: Any) -> str:
    """Return lm-eval's hash of a question, the `doc_hash` of its samples (lm_eval/evaluator.py)."""
    return hash_string(
        json.dumps(question, indent=2, default=handle_non_serializable, ensure_ascii=False)
    )


class _Callable:
    """The model with the attributes that HFLM uses.
    No torch.nn.Module, whose embeddings HFLM would tie again.
    """

    def __init__(self, model: Any, config: Any, device: Any):
        self.model, self.config, self.device = model, config, device

    def __call__(self, input_ids: Any) -> Any:
        return self.model(input_ids=input_ids, use_cache=False)

    def generate(self, *args: Any, **options: Any) -> Any:
        return self.model.generate(*args, **options)


class _TrainedModel:
    """Runs requests on the model in training, on all ranks; see `workers.InProcess`."""

    def __init__(self, lm: Any, benchmark: Benchmark):
        self.lm, self.benchmark = lm, benchmark

    def run(self, chunks: list[Chunk]) -> Iterator[tuple[str, list[Any], int]]:
        """Yield (key, responses, number of truncated prompts) of each chunk, in order.
        Collective.
        """
        ranks = self.benchmark.ranks
        if self.benchmark.is_sharded or ranks.num_ranks == 1:
            yield from map(self._responses, chunks)
            return
        # An error on one rank is raised on all: the others would otherwise wait in `gather`.
        with ranks.shared_errors():
            own = [self._responses(chunk) for chunk in chunks[ranks.rank :: ranks.num_ranks]]
        shares = ranks.gather(own)
        for number in range(len(chunks)):
            yield shares[number % ranks.num_ranks][number // ranks.num_ranks]

    def _responses(self, chunk: Chunk) -> tuple[str, list[Any], int]:
        key, kind, requests = chunk
        try:
            return key, *guarded(run_requests, self.lm, kind, requests)
        except OutOfMemory as error:
            problem = str(error)
        # After `except`, whose error holds the batch that did not fit, and with it the model.
        raise ResumableError(
            f"run.benchmark: out of memory with batch size {self.benchmark.suite.batch_size}:"
            f" {problem}; resume with a smaller run.benchmark.batch_size"
        )

    def close(self) -> None:
        """The model belongs to the training."""
