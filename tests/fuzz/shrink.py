"""A failing input made smaller, as long as it fails in the same way, and kept."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.fuzz import trial
from tests.fuzz.box import Box
from tests.fuzz.kinds import Input

SECONDS = 20
MOST_BYTES = 20_000
"""A larger one is not kept."""


def keep(box: Box, given: Input, folder: Path) -> None:
    """Write the input into `folder`, as small as it gets in SECONDS; nothing, if it does not fail."""
    outcome = trial.attempt(box, given)
    if outcome.is_fine:
        return
    until = time.monotonic() + SECONDS
    while (smaller := _smaller(box, given, outcome.group, until)) is not None:
        given = smaller
    text = json.dumps(given.to_json(), indent=1) + "\n"
    if len(text) > MOST_BYTES:
        print(f"too large to be kept: {given.kind} {outcome.group} ({len(text)} bytes)")
        return
    folder.mkdir(exist_ok=True)
    what = outcome.what if outcome.verdict == "failed" else outcome.verdict
    name = f"{given.kind}-{what}-{outcome.where.partition(':')[0].replace('/', '-').removesuffix('.py')}"
    (folder / f"{name}-{given.digest()[:6]}.json").write_text(text)


def _smaller(box: Box, given: Input, group: tuple, until: float) -> Input | None:
    for candidate in _candidates(given):
        if time.monotonic() > until:
            return None
        if trial.attempt(box, candidate).group == group:
            return candidate
    return None


def _candidates(given: Input) -> Iterator[Input]:
    for name in given.files:
        yield replace(given, files={k: v for k, v in given.files.items() if k != name})
    texts = given.arguments.get("texts", [])
    for i in range(len(texts) if len(texts) > 1 else 0):
        yield replace(given, arguments=given.arguments | {"texts": texts[:i] + texts[i + 1 :]})
    for i, text in enumerate(texts):
        for shorter in _shorter(text.encode("utf-8", "surrogatepass")):
            text = shorter.decode("utf-8", "surrogateescape")
            yield replace(given, arguments=given.arguments | {"texts": [*texts[:i], text, *texts[i + 1 :]]})
    for name, content in given.files.items():
        if isinstance(content, bytes) and not name.endswith(".safetensors"):
            for shorter in _shorter(content):
                yield replace(given, files=given.files | {name: shorter})


def _shorter(content: bytes) -> Iterator[bytes]:
    """Without a half, a quarter, ... of its lines; then of its bytes."""
    rows = content.splitlines(keepends=True)
    yield from (b"".join(rows[:a] + rows[b:]) for a, b in _spans(len(rows), 1) if len(rows) > 1)
    yield from (content[:a] + content[b:] for a, b in _spans(len(content), max(1, len(content) // 64)))


def _spans(length: int, least: int) -> Iterator[tuple[int, int]]:
    size = length // 2
    while size >= least:
        yield from ((start, start + size) for start in range(0, length, size))
        size //= 2
