"""The recorded spectra: the singular values of momenta in two trainings, the inputs of a map in
practice.

They are in spectra.jsonl.gz, one JSON record per line; docs/studies/record_spectra.py writes it.
"""

import gzip
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..core.shipped import ROOT
from .spectra import Spectrum

RECORDED = ROOT / "docs/studies/spectra.jsonl.gz"
MOMENTA = ("smollm2", "quickstart")


@dataclass(frozen=True)
class RecordedSpectrum(Spectrum):
    """A spectrum, and its set."""

    set: str = ""
    """docs/studies/recorded_spectra.py explains the sets."""


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
