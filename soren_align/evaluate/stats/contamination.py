"""Find the questions of a suite that occur in the training examples.

As in GPT-3's check (Brown et al. 2020, appendix C) and lm-eval's `decontamination/janitor.py`, a
word is lower-case, between whitespace, and without punctuation. (lm-eval 0.4.13 still has that
file, but nothing calls it; it reads n-grams of the Pile that were written beforehand.) A question
of fewer words counts only if it equals a text of an example.

The examples are read once. Memory is bounded by the questions: about 300 bytes for each of their
n-grams, which are found by Python's hash of their words. A hash only finds a candidate, whose words
are then compared, so that no collision counts as an overlap. (notes/log.md has the comparison with
rolling hashes in numpy.)

No torch, datasets or lm-eval are imported until a suite's or a run's own texts are read.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import UserError
from ...core.files import digest, read_json, write
from ...core.silence import silence

if TYPE_CHECKING:
    from datasets import Dataset

NGRAM = 13
"""Words of an n-gram: GPT-3's largest, and lm-eval's."""
MIN_FIXED = 10
"""An n-gram in more questions than this, and in more than half of a benchmark's, is the task's own
wording."""
FORMAT = 1
"""The version of the cache. Increased when the rules for texts, words or overlaps change."""
REPORTED_EXAMPLES = 1000
"""Examples between two calls of `on_examples`."""
_NOT_WORDS = re.compile(r"[^\w\s]|_")
_ASCII = {code: None for code in range(128) if not (chr(code).isalnum() or chr(code).isspace())}


@dataclass(frozen=True)
class Overlaps:
    """Indices of a suite's questions, by column, in the order of the questions."""

    questions: dict[str, int]
    """The number of questions."""
    overlapping: dict[str, list[int]]
    """Those with an n-gram of an example, or equal to a text of one."""
    exact: dict[str, list[int]]
    """Those that equal a text of an example."""
    examples_read: int

    def by_column(self) -> dict[str, dict[str, Any]]:
        """Return a record per column: {"questions", "overlapping", "exact", "examples_read",
        "indices": of the overlapping}.
        """
        return {
            column: {
                "questions": number,
                "overlapping": len(self.overlapping[column]),
                "exact": len(self.exact[column]),
                "examples_read": self.examples_read,
                "indices": self.overlapping[column],
            }
            for column, number in self.questions.items()
        }

    def __or__(self, other: "Overlaps") -> "Overlaps":
        """The overlaps of the same questions with both sets of examples."""
        overlapping, exact = (
            {column: sorted({*mine[column], *theirs[column]}) for column in mine}
            for mine, theirs in ((self.overlapping, other.overlapping), (self.exact, other.exact))
        )
        return Overlaps(
            self.questions, overlapping, exact, self.examples_read + other.examples_read
        )


def overlaps(
    columns: Mapping[str, Sequence[str]],
    examples: Iterable[Sequence[str]],
    on_examples: Callable[[int], object] | None = None,
) -> Overlaps:
    """Return the questions that the examples contain.

    columns: the texts of the questions. examples: the texts of each. on_examples: called with the
    number of examples just read.
    """
    # Only the questions are indexed: they are few, and the examples may be millions. Memory does
    # not grow with the training data.
    texts: list[str] = []
    by_hash: dict[int, set[int]] = {}
    by_words: dict[tuple[str, ...], list[int]] = {}
    for questions in columns.values():
        words_of_questions = [words_of(question) for question in questions]
        # An n-gram counts once per question, so that a phrase that is repeated within one question
        # does not pass for the wording of the task.
        counts = Counter(
            key for words in words_of_questions for key in {hash(ngram) for ngram in _ngrams(words)}
        )
        most = max(MIN_FIXED, len(questions) / 2)
        for words in words_of_questions:
            # N-grams that most questions share ("choose the right answer") are the template's: any
            # example of the same format would contain them, and every question would count as
            # contaminated.
            for key in (hash(ngram) for ngram in _ngrams(words)):
                if counts[key] <= most:
                    by_hash.setdefault(key, set()).add(len(texts))
            if words:
                by_words.setdefault(tuple(words), []).append(len(texts))
            texts.append(f" {' '.join(words)} ")
    lengths = {len(words) for words in by_words}
    overlapping: set[int] = set()
    exact: set[int] = set()
    num_read = 0
    for num_read, example in enumerate(examples, start=1):
        for words in map(words_of, example):
            if len(words) in lengths:
                exact.update(by_words.get(tuple(words), ()))
            # A hash only nominates a question. The words are compared too, so that no collision
            # counts as an overlap; questions that are already marked are not compared again.
            for ngram in _ngrams(words):
                if (key := hash(ngram)) in by_hash:
                    phrase = f" {' '.join(ngram)} "
                    overlapping.update(i for i in by_hash[key] - overlapping if phrase in texts[i])
        if on_examples and num_read % REPORTED_EXAMPLES == 0:
            on_examples(REPORTED_EXAMPLES)
    if on_examples:
        on_examples(num_read % REPORTED_EXAMPLES)
    # The questions were numbered across columns; each column gets its own indices again.
    result, first = Overlaps({}, {}, {}, num_read), 0
    for column, questions in columns.items():
        result.questions[column] = len(questions)
        for indices, marks in ((result.overlapping, overlapping | exact), (result.exact, exact)):
            indices[column] = [i for i in range(len(questions)) if first + i in marks]
        first += len(questions)
    return result


def _ngrams(words: list[str]) -> Iterator[tuple[str, ...]]:
    return zip(*(words[i:] for i in range(NGRAM)), strict=False)


def words_of(text: str) -> list[str]:
    """Return the words of a text: lower-case, without any character that is neither letter, digit
    nor whitespace.

    A label before and after is left out, as in ARC's "Question: ... Answer:", which training data
    need not have.
    """
    text = text.lower()
    # translate is several times faster on ASCII, and several times slower on any other text.
    words = (text.translate(_ASCII) if text.isascii() else _NOT_WORDS.sub("", text)).split()
    start = int(words[:1] in (["question"], ["q"]))
    end = len(words) - (words[-1:] in (["answer"], ["a"]))
    return words[start:end] if start or end < len(words) else words


def question_texts(tasks: Mapping[str, Any], limit: int | None = None) -> dict[str, list[str]]:
    """Return the texts of the questions by column, without few-shot examples, in the order of the
    scores' points.

    A question's text is lm-eval's decontamination query if the task has one, else its prompt.
    limit: only the first questions of each task.
    """
    from lm_eval import utils

    from ..suite.sandbox import rendering
    from ..suite.tasks import subtasks

    texts: dict[str, list[str]] = {}
    with silence(), rendering():
        for column, task in tasks.items():
            docs = [
                (subtask, doc)
                for subtask in subtasks(task)
                for doc in list(subtask.eval_docs)[:limit]
            ]
            texts[column] = []
            for subtask, doc in docs:
                # Not lm-eval's own method, which evaluates a template's result as Python, and so
                # fails on ARC's.
                query = (
                    subtask.config.doc_to_decontamination_query
                    if subtask.config.should_decontaminate
                    else None
                )
                if query is None:
                    text = subtask.doc_to_text(doc)
                elif callable(query):
                    text = query(doc)
                else:
                    text = doc[query] if query in doc else utils.apply_template(query, doc)
                # several prompts per question: no text
                texts[column].append(text if isinstance(text, str) else "")
    return texts


def overlaps_with(
    dataset: "Dataset",
    questions: Mapping[str, Sequence[str]],
    cache: Path,
    on_examples: Callable[[int], object] | None = None,
) -> Overlaps:
    """Return the questions that the examples of a dataset from `load_split` contain.

    cache: the cache folder, in which the result is a file named after a hash of examples and
    questions.
    """
    from ...data import texts_of

    # The key contains the dataset's fingerprint and the questions: another split or suite reads the
    # examples again, and never gets the answer for other data.
    file = (
        cache
        / "contamination"
        / f"{digest([FORMAT, dataset._fingerprint, len(dataset), questions])}.json"
    )
    if file.is_file():
        try:
            return Overlaps(**read_json(file))
        except (UserError, TypeError):
            pass  # damaged: computed again
    result = overlaps(questions, texts_of(dataset), on_examples)
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, json.dumps(asdict(result)) + "\n")
    return result
