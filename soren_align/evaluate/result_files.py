"""The files of an evaluation, written into its folder in place of those of an earlier one."""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..files import remove, write
from . import figure, tables
from .results import NAME, POINTS, read_results, refuse_foreign

Samples = dict[str, dict[str, list[dict[str, Any]]]]
"""lm-eval's samples by row and column."""
UNSAFE = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that JSON allows in a string and that control a terminal, end a line, or cannot be written in UTF-8."""


def write_results(results: dict[str, Any], samples: Samples, output: Path, points: str = "") -> None:
    """Write results.json, points.json, samples/<row>/<column>.jsonl, table.md and scores.png.

    points: content of points.json.

    Raises UserError if this would replace files that no evaluation wrote.
    """
    folder = output / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(output):
        refuse_foreign(output, list(samples))  # again: another evaluation may have written there since the first time
        remove_samples(output)
        # First: it marks the folder as an evaluation's, so that after a kill the same command replaces the other files.
        write(output / NAME, json.dumps(results, indent=2) + "\n")
        write(output / POINTS, points)
        for row, columns in samples.items():
            (folder / row).mkdir()
            for column, each in columns.items():
                write(folder / row / f"{column}.jsonl", "".join(map(_line, each)))
        write(output / "table.md", tables.markdown(results))
        part = output / "scores.png.part"
        remove(part)
        figure.draw(results, part)
        part.replace(output / "scores.png")


def remove_samples(output: Path) -> None:
    """Remove the samples that results.json in `output` names, so that no other evaluation's stay beside new ones."""
    results = read_results(output)
    for row in results["rows"] if results else []:
        entry = output / "samples" / row["name"]
        if entry.is_symlink() or entry.is_file():
            entry.unlink()
        elif entry.is_dir():
            shutil.rmtree(entry)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock a folder, waiting for another evaluation that is writing there, so that its files are all of one."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks: the results of hours are written nevertheless
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _line(sample: dict[str, Any]) -> str:
    """Return a sample as a line of JSON that can be read in a terminal: only control characters are escaped."""
    text = json.dumps(_compact(sample), default=str, ensure_ascii=False)
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def _compact(sample: dict[str, Any]) -> dict[str, Any]:
    """Return lm-eval's sample with a prompt that all choices share written once: 25 shots are 5 kB.

    First what a reader looks for: prompt, answer, right answer and scores.
    """
    prompts, choices = zip(*sample["arguments"], strict=True)
    arguments = {"prompt": prompts[0] if len(set(prompts)) == 1 else prompts, "choices": choices}
    omitted = {"arguments"} | ({"resps"} if [r[0] for r in sample["resps"]] == sample["filtered_resps"] else set())
    first = ("doc_id", "prompt", "choices", "filtered_resps", "target", *sample.get("metrics", ()))
    content = {key: value for key, value in sample.items() if key not in omitted} | arguments
    return {key: content[key] for key in first if key in content} | content
