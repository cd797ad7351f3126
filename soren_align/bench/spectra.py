"""Recorded spectra: the singular values of Nesterov momenta, the inputs of a map, in real trainings.

    smollm2      SmolLM2-135M-Instruct, full SFT with Soren (exact) on Python's documentation as chat, one example of at
                 most 700 tokens a step; all matrices of the layers 0, 9, 19 and 29 at the steps 1 and 12
    quickstart   the quickstart's SFT of 102,272 random weights; all 14 matrices at the steps 1, 10, 100, 300 and 600

A map commutes with rotations of its input, so a spectrum with any singular vectors stands for the recorded matrix.
docs/studies/record_spectra.py wrote the file, one JSON record per line: on 2 CPU cores (the quickstart: of an Intel
Xeon, with its recipe of 2026-11-22), Python 3.11.7, torch 2.13.0 CPU, transformers 5.23, trl 1.16.
"""

import gzip
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ..spectral.exact import null_space_bound

PATH = Path(__file__).with_name("spectra.jsonl.gz")


@dataclass(frozen=True)
class Spectrum:
    """The singular values of one matrix's momentum before one step, in descending order; and its set above, or ""."""

    name: str
    step: int
    shape: tuple[int, int]
    singular_values: tuple[float, ...]
    set: str = ""

    @cached_property
    def sigma(self) -> Tensor:
        """The singular values, float64. Do not modify them."""
        return torch.tensor(self.singular_values, dtype=torch.float64)

    @property
    def nu(self) -> float:
        """(sum of sigma^8)^(1/8)."""
        return float(torch.linalg.vector_norm(self.sigma, 8))

    @property
    def without_null_space(self) -> Tensor:
        """The singular values with 0 for those of the numerical null space, which are noise that no map should see."""
        bound = null_space_bound(torch.empty(self.shape, dtype=torch.float32, device="meta"))
        return self.sigma.where(self.sigma > bound * self.sigma[0], 0.0)


def load(path: Path = PATH) -> list[Spectrum]:
    """All recorded spectra, set by set, step by step, to four digits."""
    with gzip.open(path, "rt") as file:
        records = [json.loads(line) for line in file]
    return [
        Spectrum(r["name"], r["step"], (r["shape"][0], r["shape"][1]), tuple(r["singular_values"]), r["set"])
        for r in records
    ]


def save(spectra: Iterable[Spectrum], path: Path = PATH) -> None:
    """Write the file; the same spectra give the same bytes."""
    lines = "".join(json.dumps(asdict(spectrum)) + "\n" for spectrum in spectra)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))
