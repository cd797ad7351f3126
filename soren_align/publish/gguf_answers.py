"""What a GGUF file answers to the questions of a run's own evaluation, by llama-cpp-python."""

import json
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..core.errors import in_one_line
from ..core.text import join_words
from ..evaluate.report.results import NAME, evaluations, read_results
from ..evaluate.report.tables import MIN_QUESTIONS
from ..evaluate.stats.paired import ModelAnswers
from ..evaluate.stats.significance import compare_pairs
from ..evaluate.suite.answer_match import match_rule

MOST = 100
"""Questions of a column that are asked: each costs an answer."""


def answers_text(file: Path, run: Path | None, tokenizer: Any) -> str:
    """Return how many questions the file is right on, beside the model; or why this is not known.

    Asked are the generated questions of the run's newest evaluation, whose answers of the model are
    its samples; prompts are the same tokens, and answers greedy.
    """
    if find_spec("llama_cpp") is None:
        return "not asked: `pip install llama-cpp-python` to compare the file's answers"
    if not (columns := [*_columns(run)] if run else []):
        return "not asked: the run has no evaluation with generated answers"
    every = [sample for _, samples in columns for sample in samples]
    for sample in every:
        sample["ids"] = tokenizer(sample["prompt"], add_special_tokens=False).input_ids
    longest = max(len(sample["ids"]) + _limit(sample) for sample in every)
    try:
        llm = import_module("llama_cpp").Llama(str(file), n_ctx=longest + 8, verbose=False, seed=0)
    except ValueError as error:
        return f"not asked: llama.cpp cannot load the file: {in_one_line(error, 100)}"
    parts = []
    for column, samples in columns:
        theirs = [answer_of(llm, sample, tokenizer) for sample in samples]
        right = [
            float(bool(match_rule(own, s["target"])))
            for own, s in zip(theirs, samples, strict=True)
        ]
        before = [float(sample["answer_match"]) for sample in samples]
        equal = sum(
            own == s["filtered_resps"][0].strip() for own, s in zip(theirs, samples, strict=True)
        )
        points = [ModelAnswers({}, {column: each}) for each in (before, right)]
        ((difference,),) = (row.values() for row in compare_pairs([(points[0], points[1])], False))
        low, high = (f"{difference[end]:+.1f}" for end in ("low", "high"))
        interval = f", 95% interval of the difference {low} to {high} points" * (
            len(right) >= MIN_QUESTIONS
        )
        parts.append(
            f"right on {sum(right):.0f} of {len(right)} {column} questions (the model:"
            f" {sum(before):.0f}{interval}); {equal} answers are the model's word for word"
        )
    return join_words(parts)


def answer_of(llm: Any, sample: dict[str, Any], tokenizer: Any) -> str:
    """Return the file's greedy answer to a prompt, to the end token or the limit of the suite.
    sample: with the prompt's `ids`.
    """
    ends = {tokenizer.eos_token_id, llm.token_eos()}
    answer: list[int] = []
    llm.reset()
    for token in llm.generate(sample["ids"], temp=0.0, repeat_penalty=1.0):
        if token in ends or len(answer) == _limit(sample):
            break
        answer.append(token)
    return tokenizer.decode(answer, skip_special_tokens=True).strip()


def _limit(sample: dict[str, Any]) -> int:
    return int(sample["choices"][0]["max_gen_toks"])


def _columns(run: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each column whose answers are generated and judged by answer_match, with samples."""
    if not (folders := evaluations(run)):
        return
    newest = max(folders, key=lambda folder: (folder / NAME).stat().st_mtime)
    results = read_results(newest)
    name = results["rows"][-1]["name"] if results else ""  # of a run's evaluation, its own model
    for file in sorted((newest / "samples" / name).glob("*.jsonl")) if name else ():
        lines = file.read_text(encoding="utf-8").splitlines()[:MOST]
        samples = [json.loads(line) for line in lines]
        if samples and all("answer_match" in sample for sample in samples):
            yield file.stem, samples
