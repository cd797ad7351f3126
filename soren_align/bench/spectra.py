"""Recorded spectra: the singular values of Nesterov momenta, the inputs of a map, in real trainings.

    smollm2      SmolLM2-135M-Instruct, full SFT with Soren (exact) on Python's documentation as chat, one example of at
                 most 700 tokens a step; all matrices of the layers 0, 9, 19 and 29 at the steps 1 and 12
    quickstart   the quickstart's SFT of 102,272 random weights; all 14 matrices at the steps 1, 10, 100, 300 and 600

A map commutes with rotations of its input, so a spectrum with any singular vectors stands for the recorded matrix.
docs/record_spectra.py wrote the file, one JSON record per line. Nothing here imports torch.
"""

import gzip
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

PATH = Path(__file__).with_name("spectra.jsonl.gz")


@dataclass(frozen=True)
class Spectrum:
    """The singular values of one matrix before one step, in descending order, to four digits."""

    set: str
    name: str
    step: int
    shape: tuple[int, ...]
    singular_values: tuple[float, ...]


def load(path: Path = PATH) -> list[Spectrum]:
    """All recorded spectra, set by set, step by step; none if there is no file."""
    if not path.is_file():
        return []
    with gzip.open(path, "rt") as file:
        records = [json.loads(line) for line in file]
    return [Spectrum(r["set"], r["name"], r["step"], tuple(r["shape"]), tuple(r["singular_values"])) for r in records]


def save(spectra: Iterable[Spectrum], path: Path = PATH) -> None:
    """Write the file; the same spectra give the same bytes."""
    lines = "".join(json.dumps(asdict(spectrum)) + "\n" for spectrum in spectra)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))
