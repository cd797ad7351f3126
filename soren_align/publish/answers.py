"""Compare three answers of a trained model with the answers of its starting checkpoint.

They are not selected: the first prompts of the run's samples (`run.samples`), at step 0 and at the end; without samples
the first questions of an evaluation that the models answered in words. A run folder may come from anyone: files are
read up to a length, links are not followed, and what cannot be read is left out.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.figures import short
from ..core.files import is_component
from ..evaluate.report.results import Results, Row
from ..run.folder import RunFolder, parse_metrics, read_metrics

NUM_ANSWERS = 3
MAX_CHARACTERS = 240
"""Of a prompt, and of an answer."""
MAX_BYTES = 1 << 20
"""At the beginning of a file of samples, and at its end, in which they are looked for."""


@dataclass(frozen=True)
class Answers:
    """Answers before and after training. rows: (prompt, answer before, answer after), each in one line."""

    source: str
    before: str
    after: str
    rows: list[tuple[str, str, str]]


def of_samples(run: RunFolder) -> Answers | None:
    """Return answers from samples.jsonl; None if it lacks those of the start or of the end."""
    if run.samples.is_symlink() or not run.samples.is_file():
        return None
    ends: dict[int, dict[str, str]] = {}
    with run.samples.open("rb") as stream:
        first = filter(None, map(parse_metrics, stream.read(MAX_BYTES).splitlines()))
    for line in (*first, *read_metrics(run.samples, last_bytes=MAX_BYTES)):
        if isinstance(line.get("completion"), str) and (prompt := _text(line.get("prompt"))):
            ends.setdefault(int(line["step"]), {})[prompt] = line["completion"]
    if len(ends) < 2 or 0 not in ends:
        return None
    last = max(ends)
    rows = [(prompt, answer, ends[last][prompt]) for prompt, answer in ends[0].items() if prompt in ends[last]]
    return _answers("The first prompts of the run's samples", "before training", f"after step {last:,}", rows)


def of_evaluation(folder: Path, results: Results, own: Row, start: Row) -> Answers | None:
    """Return answers to the first questions of a column of generated text; None without such a column.

    folder: of the results. own, start: the rows of the trained model, and of the checkpoint that it started from.
    """
    for column in filter(is_component, own["scores"]):
        before, after = (_responses(folder / "samples" / row["name"] / f"{column}.jsonl") for row in (start, own))
        rows = [(prompt, before[key][1], answer) for key, (prompt, answer) in after.items() if key in before]
        if answers := _answers(f"The first questions of {column}", start["name"], own["name"], rows):
            return answers
    return None


def _answers(source: str, before: str, after: str, rows: list[tuple[str, str, str]]) -> Answers | None:
    shown = [(short(prompt, MAX_CHARACTERS), _answer(a), _answer(b)) for prompt, a, b in rows[:NUM_ANSWERS]]
    return Answers(source, before, after, shown) if shown else None


def _answer(text: str) -> str:
    return short(text, MAX_CHARACTERS) or "(empty)"


def _text(prompt: Any) -> str:
    """Return the text of a prompt, or that of its last turn; "" of anything else."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content")
    return prompt if isinstance(prompt, str) else ""


def _responses(file: Path) -> dict[str, tuple[str, str]]:
    """Return (question, response) of a file of lm-eval's samples by question, without those of multiple choice."""
    if any(path.is_symlink() for path in (file, file.parent, file.parent.parent)) or not file.is_file():
        return {}
    with file.open("rb") as stream:
        lines = stream.read(MAX_BYTES).splitlines()
    responses = {}
    for sample in _parsed(lines):
        response = sample.get("resps", sample.get("filtered_resps"))
        while isinstance(response, list) and response:  # not extracted from, if it was kept
            response = response[0]
        doc = sample.get("doc")
        named = [doc[key] for key in ("question", "prompt") if isinstance(doc, dict) and isinstance(doc.get(key), str)]
        prompt = sample.get("prompt")
        if not named and isinstance(prompt, str):
            named = [prompt if len(prompt) < MAX_CHARACTERS else f"…{prompt[1 - MAX_CHARACTERS :]}"]  # behind its shots
        if isinstance(response, str) and named:
            responses.setdefault(f"{sample.get('task')}:{sample.get('doc_id')}", (named[0], response))
    return responses


def _parsed(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the objects among lines of JSON; the last line may be cut."""
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(line), dict):
                yield value
