"""The conclusion of a study: its runs are audited, then compared, and the report is written."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..compare.audit import audit
from ..compare.cautions import cautions
from ..compare.study import Run, Study
from ..compare.study_progress import read_study, write_study
from ..compare.study_report import write_report
from ..compare.verdict import Rules, is_complete, verdict
from ..evaluate.points import Points, read_points
from ..evaluate.results import read_results
from ..evaluate.suites import suite_of
from ..recipe import Eval, load_resolved
from ..run_folder import RunFolder


def conclude(folder: Path, failures: Mapping[str, str] | None = None) -> Study:
    """Return the study in a folder with its verdict, after writing study.json and the report.

    With a problem there is no verdict. failures: reasons of runs that ended without a record, by folder.
    """
    study = read_study(folder, failures)
    problems = audit(study.candidates, folder, study.file)
    contamination = _contamination(folder, study)
    study = replace(
        study,
        problems=problems,
        cautions=[*study.cautions, *cautions(study.candidates, folder, study.file, contamination)],
        contamination=contamination,
    )
    if not problems:
        study = replace(study, differences=_differences(folder, study))
    write_study(folder, study)
    write_report(study, folder)
    return study


def _differences(folder: Path, study: Study) -> list[Any]:
    """Return the verdict of the candidates whose runs with fresh seeds have all finished."""
    points: dict[str, list[Points]] = {}
    base, options = None, None
    for candidate in filter(is_complete, study.candidates):
        options = _evaluation(folder, candidate.verdict[0])
        if options is None:
            continue
        for run in candidate.verdict:
            rows = list(read_points(RunFolder(folder / run.folder).evaluation(options.name)).values())
            points.setdefault(candidate.name, []).append(rows[-1])
            base = base or rows[-2]
    section = study.file["verdict"]
    retention: dict[str, Any] = section["retention"] or {"columns": [], "margin": 0.0}
    rules = Rules(
        reference=section["reference"],
        power=section["power"],
        higher_is_better=study.higher_is_better,
        average=options is not None and suite_of(options).average,
        margins={column: retention["margin"] for column in retention["columns"]},
    )
    return verdict(rules, study.candidates, points, base)


def _contamination(folder: Path, study: Study) -> dict[str, Any] | None:
    """Return the overlaps that the first evaluation of the verdict has counted: all runs train on the same examples."""
    for run in (run for candidate in study.candidates for run in candidate.verdict):
        options = _evaluation(folder, run) if run.scores else None
        results = read_results(RunFolder(folder / run.folder).evaluation(options.name)) if options else None
        if results is not None:
            return results.get("contamination")
    return None


def _evaluation(folder: Path, run: Run) -> Eval | None:
    """Return the evaluation in a run's recipe."""
    return load_resolved(RunFolder(folder / run.folder).recipe).eval
