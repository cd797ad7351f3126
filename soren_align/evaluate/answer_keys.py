"""The choices of multiple-choice questions, the keys of the right ones, and the length of answers to be written.

lm-eval counts a question whose key is no choice as answered wrong, and of equally likely choices the first as answered.
"""

from collections.abc import Iterator
from typing import Any

from ..errors import UserError
from ..silence import silence
from .sandbox import rendering


def refuse_wrong_keys(task: Any, file: Any) -> None:
    """Raises UserError if the key of a question is none of its choices. task: lm-eval's. file: its place."""
    with silence(), rendering():
        wrong = list(_wrong_keys(task))
    if wrong:
        number, key, choices = wrong[0]
        more = f" (and {len(wrong) - 1:,} more questions)" if len(wrong) > 1 else ""
        raise UserError(
            f"{file}: {task.task_name}, question {number}{more}: doc_to_target gives {key!r:.60}, none of its"
            f" {len(choices)} choices ({', '.join(map(repr, choices)):.200}); the key is the number of the right"
            f" choice, from 0, or its text{_of_letter(key)}"
        )


def _of_letter(key: Any) -> str:
    """The number for a key such as "B", which many datasets have."""
    letters = "ABCDEFGHIJ"
    return (
        f": for {key!r} write {letters.index(key)}" if isinstance(key, str) and len(key) == 1 and key in letters else ""
    )


def equal_choices(task: Any, tokenizer: Any, limit: int | None = None) -> str:
    """Return a sentence about questions with two choices of the same tokens; "" if there are none.

    They are equally likely for any model with this tokenizer, as when both are unknown words. task: lm-eval's.
    """
    if task.OUTPUT_TYPE != "multiple_choice" or task.multiple_input:
        return ""
    with silence(), rendering():
        questions = [list(map(str, task.doc_to_choice(question))) for question in list(task.eval_docs)[:limit]]
    tokens = iter(tokenizer([text for choices in questions for text in choices], add_special_tokens=False)["input_ids"])
    equal = []
    for number, choices in enumerate(questions, 1):
        if len({tuple(next(tokens)) for _ in choices}) < len(choices):
            equal.append(f"question {number}: {', '.join(choices):.100}")
    if not equal:
        return ""
    return (
        f"{len(equal):,} of {len(questions):,} questions have choices that are the same tokens to this tokenizer, of "
        f"which the first counts as answered ({equal[0]})"
    )


def long_answers(task: Any, tokenizer: Any, max_tokens: int, limit: int | None = None) -> str:
    """Return a sentence about right answers that have more than max_tokens tokens; "" if there are none.

    A model that gives one is cut off before its end, and counts as wrong. Tasks that read only a part of an answer, by
    a filter or a function, are left out. task: lm-eval's; its own max_gen_toks takes precedence.
    """
    settings = task.config
    if task.OUTPUT_TYPE != "generate_until" or settings.filter_list or callable(settings.process_results):
        return ""
    max_tokens = (settings.generation_kwargs or {}).get("max_gen_toks", max_tokens)
    with silence(), rendering():
        answers = [task.doc_to_target(question) for question in list(task.eval_docs)[:limit]]
    texts = [min(map(str, answer), key=len) if isinstance(answer, list) else str(answer) for answer in answers]
    sizes = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []
    long = [number for number, size in enumerate(sizes, 1) if size > max_tokens]
    if not long:
        return ""
    first = f"question {long[0]}: {texts[long[0] - 1]:.60}, {sizes[long[0] - 1]} tokens"
    return (
        f"{len(long):,} of {len(texts):,} right answers are longer than max_gen_toks, {max_tokens} tokens, so that no "
        f"model can give them ({first}); write a larger max_gen_toks into the task's generation_kwargs"
    )


def _wrong_keys(task: Any) -> Iterator[tuple[int, Any, list[Any]]]:
    """Yield (number from 1, key, choices) of each question without a right choice."""
    if task.OUTPUT_TYPE != "multiple_choice" or callable(task.config.process_results):
        return  # a task's own function may read another field
    for number, question in enumerate(task.eval_docs, 1):
        choices = task.doc_to_choice(question)
        key = task.doc_to_text(question) if task.multiple_input else task.doc_to_target(question)
        for each in key if isinstance(key, list) else [key]:
            if not (0 <= each < len(choices) if isinstance(each, int) else each in choices):
                yield number, key, choices
                break
