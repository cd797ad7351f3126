"""The lines of a plan about its evaluation."""

from typing import Any

from rich.console import Console

from ..evaluate.contamination import NGRAM
from ..terminal import print_labelled


def print_evaluation(evaluation: dict[str, Any] | None, console: Console) -> None:
    """Print suite and size of the evaluation, and its questions in the training examples."""
    text = "none: the recipe has no eval section"
    if evaluation:
        requests = evaluation["num_requests_per_model"]
        loaded = evaluation["num_questions"]
        number = f"{loaded:,} question{'s' * (loaded != 1)}" if loaded else "all questions"
        if requests:
            number = f"{requests:,} requests, one per choice of a multiple-choice question"
        if evaluation["limit"]:
            number = f"the first {evaluation['limit']} questions of each task"
        text = f"{evaluation['suite']}, of the trained model and its starting checkpoints. Per model: {number}"
    print_labelled(console, "eval", text)
    _print_contamination(evaluation, console)


def _print_contamination(evaluation: dict[str, Any] | None, console: Console) -> None:
    columns = (evaluation or {}).get("contamination")
    if not columns:
        return
    number = next(iter(columns.values()))["examples_read"]
    print_labelled(
        console, "", f"questions in this run's {number:,} training examples (as a whole, or {NGRAM} words in a row):"
    )
    for column, each in columns.items():
        whole = f", {each['exact']:,} as a whole" if each["exact"] else ""
        print_labelled(console, "", f"  {column}: {each['overlapping']:,} of {each['questions']:,}{whole}")


def print_problems(plan: dict[str, Any], console: Console) -> None:
    """Print why training would not start, after an empty line each."""
    for problem in plan["problems"]:
        console.print()
        print_labelled(console, "problem", problem)
