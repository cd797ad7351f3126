"""The scores of a table without the questions that training examples contain."""

from typing import Any

import numpy as np

from .contamination import Overlaps
from .harness import ModelResults
from .significance import difference_on, unpaired


def contamination_section(overlaps: Overlaps, rows: list[tuple[str, ModelResults]]) -> dict[str, Any]:
    """Return results.json's "contamination": `Overlaps.by_column`, with the scores without the overlapping questions.

    "scores": by row, if some questions overlap and others do not, {"value":
    the score of the others in percent, "change": from the score of all; "difference": to the first row, as in the
    row's "differences" but without Holm's correction; if it is compared}.
    """
    section = overlaps.by_column()
    for column, entry in section.items():
        if 0 < entry["overlapping"] < entry["questions"]:
            others = np.delete(np.arange(entry["questions"]), entry["indices"])
            entry["scores"] = _scores(column, others, rows)
    return section


def _scores(column: str, others: np.ndarray, rows: list[tuple[str, ModelResults]]) -> dict[str, dict[str, Any]]:
    first, scores = rows[0][1], {}
    for name, results in rows:
        points = np.array(results.points[column])
        value = 100 * float(points[others].mean())
        scores[name] = {"value": value, "change": value - 100 * float(points.mean())}
        if results is not first and column not in unpaired(first, results):
            scores[name]["difference"] = difference_on(first, results, column, others)
    return scores
