"""The recorded spectra: the singular values of momenta in two trainings, the inputs of a map in
practice.

    smollm2      SmolLM2-135M-Instruct, full SFT with Soren (exact) on Python's documentation as chat, one example
                 of at most 700 tokens a step; all matrices of the layers 0, 9, 19 and 29 at the steps 1 and 12
    quickstart   the quickstart's SFT of 102,272 random weights; all 14 matrices at steps 1, 10, 100, 300 and 600

    smollm2-adamw   AdamW's updates at step 12 of SmolLM2's SFT, of the same matrices: exp_avg over the root of
                 exp_avg_sq, both bias-corrected; learning rate 2e-5 after 5 steps of warmup

Recorded on 2 CPU cores (the quickstart: of an Intel Xeon, with its recipe of 2026-11-22; AdamW: one
of an AMD EPYC), Python 3.11.7, torch 2.13.0 CPU, transformers 5.23, trl 1.16. They are in
studies/spectra.jsonl.gz, one JSON record per line; studies/record_spectra.py writes it.
"""

import gzip
import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from soren_align.run.spectra import Spectrum

RECORDED = Path(__file__).with_name("studies") / "spectra.jsonl.gz"
MOMENTA = ("smollm2", "quickstart")
ADAMW = "smollm2-adamw"
"""A set of updates, not of momenta."""


@dataclass(frozen=True)
class RecordedSpectrum(Spectrum):
    """A spectrum, and its set."""

    set: str = ""


def recorded_spectra(
    path: Path = RECORDED, sets: Collection[str] = MOMENTA
) -> list[RecordedSpectrum]:
    """The recorded spectra of these sets, set by set, step by step, to four digits."""
    with gzip.open(path, "rt") as file:
        records = [json.loads(line) for line in file]
    return [
        RecordedSpectrum(
            r["name"], r["step"], tuple(r["shape"]), tuple(r["singular_values"]), set=r["set"]
        )
        for r in records
        if r["set"] in sets
    ]


def save(spectra: Iterable[RecordedSpectrum], path: Path = RECORDED) -> None:
    """Write the file; the same spectra give the same bytes."""
    lines = "".join(json.dumps(asdict(spectrum)) + "\n" for spectrum in spectra)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))
