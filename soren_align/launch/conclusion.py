"""The conclusion of a study: its runs are audited, then compared, and the report is written."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..compare import answers, cautions
from ..compare.audit import audit
from ..compare.evidence import read_evidence
from ..compare.study import Study
from ..compare.study_progress import read_study, write_study
from ..compare.study_report import write_report
from ..compare.verdict import Rules, verdict
from ..evaluate.results import read_results
from ..evaluate.suites import suite_of
from ..recipe import Eval, load_resolved
from ..run_folder import RunFolder


def conclude(folder: Path, failures: Mapping[str, str] | None = None) -> Study:
    """Return the study in a folder with its verdict, after writing study.json and the report.

    With a problem there is no verdict. failures: reasons of runs that ended without a record, by folder.
    """
    study = read_study(folder, failures)
    options = _evaluation(folder, study)
    contamination = _contamination(folder, study, options)
    evidence = read_evidence(folder)
    study = replace(
        study,
        problems=audit(study.candidates, folder, study.file, evidence),
        cautions=cautions.cautions(study.candidates, folder, study.file, evidence[0], contamination),
        contamination=contamination,
    )
    if not study.problems:
        study = _with_verdict(folder, study, options)
    write_study(folder, study)
    write_report(study, folder)
    return study


def _with_verdict(folder: Path, study: Study, options: Eval | None) -> Study:
    """Return the study with the differences of the candidates whose runs with fresh seeds have all finished."""
    section = study.file["verdict"]
    points, base, weaknesses = {}, None, []
    if options:
        points, base, weaknesses = answers.read_answers(folder, study.candidates, options.name)
    retention: dict[str, Any] = section["retention"] or {"columns": [], "margin": 0.0}
    rules = Rules(
        reference=section["reference"],
        power=section["power"],
        higher_is_better=study.higher_is_better,
        average=options is not None and suite_of(options).average,
        margins={column: retention["margin"] for column in retention["columns"]},
    )
    return replace(
        study,
        differences=verdict(rules, study.candidates, points, base),
        cautions=[*study.cautions, *weaknesses, *answers.cautions(study.candidates, points)],
    )


def _contamination(folder: Path, study: Study, options: Eval | None) -> dict[str, Any] | None:
    """Return the overlaps that the first evaluation has counted: all runs train on the same examples."""
    for run in (run for candidate in study.candidates for run in candidate.verdict):
        if options and run.scores:
            results = read_results(RunFolder(folder / run.folder).evaluation(options.name))
            return results.get("contamination") if results else None
    return None


def _evaluation(folder: Path, study: Study) -> Eval | None:
    """Return the evaluation of the verdict's runs; None before the first one."""
    for run in (run for candidate in study.candidates for run in candidate.verdict):
        if (recipe := RunFolder(folder / run.folder).recipe).is_file():
            return load_resolved(recipe).eval
    return None
