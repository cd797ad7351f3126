"""The texts of a suite's questions, and their overlaps with the training examples, which are cached."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval import utils

from ...core.errors import UserError
from ...core.files import digest, read_json, write
from ...core.silence import silence
from ...data import texts_of
from ..suite.sandbox import rendering
from ..suite.tasks import Tasks, subtasks
from .contamination import Overlaps, overlaps

FORMAT = 1
"""Of the cache. Increased when the rules for texts, words or overlaps change."""


def question_texts(tasks: Tasks, limit: int | None = None) -> dict[str, list[str]]:
    """Return the texts of the questions by column, without few-shot examples, in the order of the scores' points.

    A question's text is lm-eval's decontamination query if the task has one, else its prompt. limit: only the first
    questions of each task.
    """
    with silence(), rendering():
        return {
            column: [_text(subtask, doc) for subtask in subtasks(task) for doc in list(subtask.eval_docs)[:limit]]
            for column, task in tasks.items()
        }


def overlaps_with(
    dataset: Dataset,
    questions: Mapping[str, Sequence[str]],
    cache: Path,
    on_examples: Callable[[int], object] | None = None,
) -> Overlaps:
    """Return the questions that the examples of a dataset from `load_split` contain.

    cache: the cache folder, in which the result is a file named after a hash of examples and questions.
    """
    file = cache / "contamination" / f"{digest([FORMAT, dataset._fingerprint, len(dataset), questions])}.json"
    if file.is_file():
        try:
            return Overlaps(**read_json(file))
        except (UserError, TypeError):
            pass  # damaged: computed again
    result = overlaps(questions, texts_of(dataset), on_examples)
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, json.dumps(asdict(result)) + "\n")
    return result


def _text(task: Any, doc: dict[str, Any]) -> str:
    """Return a question's text; "" if the task has none, but several prompts of each question."""
    # Not lm-eval's own method, which evaluates a template's result as Python, and so fails on ARC's.
    query = task.config.doc_to_decontamination_query if task.config.should_decontaminate else None
    if query is None:
        text = task.doc_to_text(doc)
    elif callable(query):
        text = query(doc)
    else:
        text = doc[query] if query in doc else utils.apply_template(query, doc)
    return text if isinstance(text, str) else ""
