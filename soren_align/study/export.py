"""`soren-align export`: the evaluations of a run, or of a study's final runs, in a format that
other tools read.
"""

import re
from pathlib import Path

from ..core.errors import UserError
from ..core.files import local_path
from ..core.text import count
from ..publish.every_eval_ever import Names, export_run
from ..run.folder import RunFolder
from ..run.provenance import declared_digits
from .report.verdict import read_verdict_file
from .runs import run_folders
from .search import STUDY_FILE


def export(path: str, output: str, *, owner: str, samples: bool = False) -> list[Path]:
    """Write records of Every Eval Ever below the folder `output`; return their files.

    path: of a run folder or of a study's folder. owner: the user or organization in the names of
    its models. samples: with the questions and answers. Raises UserError if it is neither, if an
    evaluation is missing or damaged, and if the study has no verdict.
    """
    folder, target = local_path(path), local_path(output)
    if not re.fullmatch(r"\w[\w.-]*", owner, re.ASCII) or owner.lower() in ("data", "unknown"):
        raise UserError(
            f"--owner {owner}: the records are written into a folder with this name, which may have only letters, "
            "digits, _, - and ., and may not be data or unknown; write the name of a user or an organization"
        )
    if target.exists() and not target.is_dir():
        raise UserError(f"--output: {target} is not a folder; write the path of a folder")
    if (folder / STUDY_FILE).is_file():
        # The records of a study's final runs. The starting checkpoint has one record if all runs
        # agree on it.
        verdict, name = read_verdict_file(folder), folder.resolve().name
        if verdict.problems:
            raise UserError(
                f"{folder}: has no verdict because of {count(len(verdict.problems), 'problem')}, which its report "
                f"lists; fix each problem and rerun soren-align compare. The first problem: {verdict.problems[0]}"
            )
        if not verdict.differences or not verdict.digits:
            raise UserError(
                f"{folder}: has no verdict yet; rerun soren-align compare until all runs have ended"
            )
        records = []
        for run in map(
            RunFolder, (path for path in run_folders(folder) if path.parents[1].name == "verdict")
        ):
            candidate = run.path.parent.name
            details = {
                "study": verdict.title,
                "study_declaration": verdict.digits,
                "candidate": candidate,
            }
            names = Names(owner, f"{name}-{candidate}-{run.name}", name, details)
            records += export_run(run, target, names, samples=samples)
        return list(dict.fromkeys(records))
    run = RunFolder(folder)
    if run.read() is None:
        remedy = f"name a folder with run.json or {STUDY_FILE}"
        raise UserError(f"{folder}: is neither a run folder nor a study's folder; {remedy}")
    digits = declared_digits(run.path)
    details = {"study_declaration": digits} if digits else {}
    return export_run(run, target, Names(owner, run.name, run.name, details), samples=samples)
