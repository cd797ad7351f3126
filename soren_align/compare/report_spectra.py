"""The figure of spectra over training, from the run folders of a study that recorded them (run.log_spectra)."""

import json
from math import isfinite
from pathlib import Path
from statistics import fmean

from .report_blocks import Panel, Panels, Paragraph
from .report_curves import Curve, shown_runs, thin
from .report_figures import lines_panel, panels_or_sentence
from .study import Run, Study

MAX_BYTES = 1 << 26
"""Of a spectra.jsonl that is read; a larger one is left to `soren-align spectrum`."""
Spectra = dict[tuple[int, str], list[float]]


def spectra_figure(study: Study, folder: Path) -> Panels | Paragraph:
    """Return the stable rank of the momenta over training, and the spectrum of one matrix at the last step."""
    ranks: dict[int, list[Curve]] = {}
    last: dict[int, list[Curve]] = {}
    for i, candidate in enumerate(study.candidates):
        spectra = next((each for run in shown_runs(candidate) if (each := _read(folder, run))), {})
        steps = sorted({step for step, _ in spectra})
        means = [fmean(_stable_rank(s) for (at, _), s in spectra.items() if at == step) for step in steps]
        ranks[i] = [[*zip(map(float, steps), means, strict=True)]]
        if spectra:
            step, name = max(spectra, key=lambda key: (key[0], len(spectra[key]), key[1]))
            values = spectra[step, name]
            last[i] = [thin([(mode / len(values), value / values[0]) for mode, value in enumerate(values, 1)])]
    if not last:
        return Paragraph("No figure of spectra: none were recorded (run.log_spectra).", kind="muted")
    panels: list[Panel | None] = [
        lines_panel(study, "stable rank of the momentum", "steps", ranks, "r0", cut=False),
        lines_panel(study, "singular value / the largest", "share of the modes", last, "r1", cut=False),
    ]
    caption = (
        "Singular values s of the momenta, the input of the optimizers' maps. First: stable rank, the sum of s^2 over"
        " the largest s^2, mean over the recorded matrices. Second: the largest matrix at the last recorded step."
    )
    return panels_or_sentence(study, panels, caption, [], "spectra", "r")


def _read(folder: Path, run: Run) -> Spectra:
    """Return the singular values of a run by step and matrix; nothing if there are none, or the file is damaged."""
    file = folder / run.folder / "spectra.jsonl"
    try:
        if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file() or file.stat().st_size > MAX_BYTES:
            return {}
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        spectra = {
            (int(line["step"]), str(line["name"])): [float(s) for s in line["singular_values"]] for line in lines
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {key: values for key, values in spectra.items() if values and all(map(isfinite, values)) and values[0] > 0}


def _stable_rank(values: list[float]) -> float:
    return sum((value / values[0]) ** 2 for value in values)
