"""Compare three answers of a trained model with the answers of its starting checkpoint.

They are not selected: the first prompts of the run's samples (`run.samples`), at step 0 and at the
end; without samples evenly spaced questions of an evaluation whose answers are generated. A run
folder may come from anyone: files are read up to a length, links are not followed, and what cannot
be read is left out.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..core.figures import short
from ..core.files import is_component
from ..evaluate.report.results import Results, Row
from ..evaluate.report.tables import start_of
from ..run.folder import RunFolder, parse_metrics, read_metrics

NUM_ANSWERS = 3
MAX_CHARACTERS = 240
"""The longest prompt, and the longest answer, that is shown."""
MAX_LINE = 100
"""The longest text of a line in the terminal."""
MAX_BYTES = 1 << 20
"""The bytes at the beginning and at the end of a file of samples in which they are looked for."""


@dataclass(frozen=True)
class Answers:
    """Answers before and after training.
    rows: (prompt, answer before, answer after), each in one line.
    """

    source: str
    before: str
    after: str
    rows: list[tuple[str, str, str]]
    targets: list[str] = field(default_factory=list)
    """The right answers of the rows, "" where there is none; of samples none at all."""


def of_samples(run: RunFolder) -> Answers | None:
    """Return answers from samples.jsonl; None if it lacks those of the start or of the end."""
    # The answers are published: a link could lead to any file of this machine.
    if run.samples.is_symlink() or not run.samples.is_file():
        return None
    ends: dict[int, dict[str, str]] = {}
    with run.samples.open("rb") as stream:
        first = filter(None, map(parse_metrics, stream.read(MAX_BYTES).splitlines()))
    for line in (*first, *read_metrics(run.samples, last_bytes=MAX_BYTES)):
        if isinstance(line.get("completion"), str) and (prompt := _text(line.get("prompt"))):
            ends.setdefault(int(line["step"]), {})[prompt] = line["completion"]
    # Both ends, or nothing: answers of the trained model alone would look like its merit.
    if len(ends) < 2 or 0 not in ends:
        return None
    last = max(ends)
    rows = [
        (prompt, answer, ends[last][prompt])
        for prompt, answer in ends[0].items()
        if prompt in ends[last]
    ]
    return _answers(
        "The first prompts of the run's samples", "before training", f"after step {last:,}", rows
    )


def of_evaluation(folder: Path, results: Results, own: Row, start: Row) -> Answers | None:
    """Return answers to evenly spaced questions of a column of generated text; None without such a
    column.

    folder: of the results. own, start: the rows of the trained model, and of the checkpoint that it
    started from.
    """
    # First what a model may fail: trained questions are often all right.
    first = [column for column in ("rephrased", "held-out") if column in own["scores"]]
    for column in filter(is_component, dict.fromkeys([*first, *own["scores"]])):
        before, after = (
            _responses(folder / "samples" / row["name"] / f"{column}.jsonl") for row in (start, own)
        )
        # The same questions of both, matched by task and number.
        keys = [key for key in after if key in before]
        # Questions are often sorted by kind.
        keys = keys[:: max(1, len(keys) // NUM_ANSWERS)][:NUM_ANSWERS]
        rows = [(after[key][0], before[key][1], after[key][1]) for key in keys]
        if answers := _answers(
            f"Evenly spaced questions of {column}", start["name"], own["name"], rows
        ):
            return replace(answers, targets=[short(after[key][2], MAX_CHARACTERS) for key in keys])
    return None


def describe_answers(folder: Path, results: Results) -> list[str]:
    """Return lines with three answers of the last row before and after its training; [] if there is
    no column of generated text.
    """
    own = results["rows"][-1]
    start, _ = start_of(results, own)
    if own is start or not (answers := of_evaluation(folder, results, own, start)):
        return []
    lines = [f"{answers.source.lower()}, before and after"]
    for (prompt, before, after), right in zip_longest(answers.rows, answers.targets, fillvalue=""):
        lines += [
            short(prompt, MAX_LINE),
            f"  {answers.before}: {short(before, MAX_LINE)}",
            f"  {answers.after}: {short(after, MAX_LINE)}",
            *[f"  right: {short(right, MAX_LINE)}"] * (bool(right) and right != after),
        ]
    return lines


def _answers(
    source: str, before: str, after: str, rows: list[tuple[str, str, str]]
) -> Answers | None:
    cut = [[short(text, MAX_CHARACTERS) for text in row] for row in rows[:NUM_ANSWERS]]
    shown = [(prompt, first or "(empty)", last or "(empty)") for prompt, first, last in cut]
    return Answers(source, before, after, shown) if shown else None


def _text(prompt: Any) -> str:
    """Return the text of a prompt, or that of its last turn; "" of anything else."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content")
    return prompt if isinstance(prompt, str) else ""


def _responses(file: Path) -> dict[str, tuple[str, str, str]]:
    """Return (question, response, right answer or "") of a file of lm-eval's samples by question;
    of multiple choice none."""
    if (
        any(path.is_symlink() for path in (file, file.parent, file.parent.parent))
        or not file.is_file()
    ):
        return {}
    with file.open("rb") as stream:
        lines = stream.read(MAX_BYTES).splitlines()
    responses = {}
    for line in lines:
        sample: Any = None
        with suppress(ValueError, RecursionError):  # the last line may be cut
            sample = json.loads(line)
        if not isinstance(sample, dict):
            continue
        response = sample.get("resps", sample.get("filtered_resps"))
        while isinstance(response, list) and response:  # not extracted from, if it was kept
            response = response[0]
        doc = sample.get("doc")
        named = [
            doc[key]
            for key in ("question", "prompt")
            if isinstance(doc, dict) and isinstance(doc.get(key), str)
        ]
        prompt = sample.get("prompt")
        if not named and isinstance(prompt, str):
            # The question stands behind the prompt's few-shot examples: its end is shown.
            named = [prompt if len(prompt) < MAX_CHARACTERS else f"…{prompt[1 - MAX_CHARACTERS :]}"]
        if isinstance(response, str) and named:
            target = sample.get("target")
            target = target if isinstance(target, str) else ""
            responses.setdefault(
                f"{sample.get('task')}:{sample.get('doc_id')}", (named[0], response, target)
            )
    return responses
