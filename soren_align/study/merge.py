"""`soren-align compare --merge A B ...`: the answers of one study that was run several times.

On another machine, or from starting weights that differ by rounding, a study has other runs, and it
may select other settings. Its answers are then another draw. An answer that every study gives is
wrong no more often than that of a single study, whatever the dependence between them (an
intersection-union test, Berger 1982), so it needs no correction.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group
from rich.text import Text

from ..core.errors import UserError
from ..core.files import local_path
from ..core.text import Table, Terminal, count, join_words
from ..recipe import differences
from ..run.provenance import read_declaration
from .audit import read_verdict
from .draws import draw_spreads, mean_candidate
from .report import text
from .report.page import SIGNS
from .search import STUDY_FILE
from .study import Answer, Difference, DrawSpread, Study


@dataclass(frozen=True)
class Replicated:
    """A difference in all studies."""

    candidate: str
    reference: str
    measure: str
    each: tuple[Difference, ...]
    """In the order of the studies."""

    @property
    def answer(self) -> Answer | None:
        """The answer that all studies give; None: they differ."""
        answers: set[Answer] = {difference.answer for difference in self.each}
        return answers.pop() if len(answers) == 1 else None


@dataclass(frozen=True)
class Merged:
    """Several runs of one study, with their differences side by side."""

    names: tuple[str, ...]
    studies: tuple[Study, ...]
    differences: tuple[Replicated, ...]
    spreads: tuple[DrawSpread, ...]
    """Over seeds, and over the studies of a seed: the draws."""
    equal: tuple[tuple[str, str], ...]
    """Pairs of studies with the same final runs to the last bit: one draw, not two."""


def merge(names: Sequence[str]) -> Merged:
    """Return the studies in these folders side by side, each audited and compared anew; nothing is
    written.

    Raises UserError for fewer than two folders, a folder twice, a folder that is no study, a study
    without a verdict, and for studies with other declarations, of which run.perturb, verdict.draws
    and the commit may differ.
    """
    folders = [local_path(name) for name in names]
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        remedy = "write the folders of two or more different studies"
        raise UserError(f"--merge: found {' '.join(names) or 'no folder'}; {remedy}")
    for folder in folders:
        if not (folder / STUDY_FILE).is_file():
            raise UserError(
                f"{folder}: is no study's folder; name folders that soren-align compare has written"
            )
    first = _comparable(read_declaration(folders[0]))
    for folder in folders[1:]:
        if lines := differences(first, _comparable(read_declaration(folder))):
            raise UserError(
                f"{folder}: differs from the study in {folders[0]} in these values:",
                *(f"  {line}" for line in lines[:5]),
                "studies that are merged may differ only in the machine, run.perturb and verdict.draws",
            )
    studies = []
    for folder in folders:
        study = read_verdict(folder)
        if not study.differences:
            reason = study.problems[0] if study.problems else text.no_verdict(study)
            raise UserError(
                f"{folder}: has no verdict ({reason}), so it cannot be merged; rerun soren-align compare on this "
                "study, or leave it out"
            )
        studies.append(study)
    by_key = [
        {(d.candidate, d.reference, d.measure): d for d in text.in_order(s, text.references_of(s))}
        for s in studies
    ]
    shared = [key for key in by_key[0] if all(key in each for each in by_key)]
    labels = [folder.name for folder in folders]
    labels = labels if len(set(labels)) == len(labels) else [*map(str, names)]
    results = [
        [(run.metric, run.scores) for c in study.candidates for run in c.verdict]
        for study in studies
    ]
    pairs = [(i, k) for k in range(len(studies)) for i in range(k) if results[i] == results[k]]
    over_studies = []  # the candidates, each study a draw of its seeds
    for candidates in zip(*(study.candidates for study in studies), strict=True):
        runs = [
            replace(run, draw=k)
            for k, each in enumerate(candidates)
            for run in mean_candidate(each).verdict
        ]
        over_studies.append(replace(candidates[0], verdict=runs))
    return Merged(
        tuple(labels),
        tuple(studies),
        tuple(Replicated(*key, tuple(each[key] for each in by_key)) for key in shared),
        tuple(draw_spreads(over_studies)),
        tuple((labels[i], labels[k]) for i, k in pairs),
    )


def _comparable(declaration: dict[str, Any]) -> dict[str, Any]:
    """Return a declaration's parts that merged studies share: the study, the hashes of its
    files.
    """
    study = json.loads(json.dumps(declaration["study"]))
    study["set"] = {
        key: value for key, value in study["set"].items() if not key.startswith("run.perturb")
    }
    study["verdict"].pop("draws", None)
    return {"study": study, "files": declaration["files"]}


def show(names: Sequence[str], *, as_json: bool = False) -> None:
    """Print the merged studies, 80 columns wide. Raises UserError as `merge` does."""
    merged = merge(names)
    if as_json:
        sys.stdout.write(json.dumps(merged_json(merged), indent=2) + "\n")
        return
    study = merged.studies[0]
    head, blank = ["", *merged.names], [""] * len(merged.names)
    parts: list[Any] = [Text(study.name, style="bold")]
    for reference in text.references_of(study):
        own = [each for each in merged.differences if each.reference == reference]
        rows = []
        for measure in dict.fromkeys(each.measure for each in own):
            rows.append([text.measure_name(study, measure), *blank])
            for each in (each for each in own if each.measure == measure):
                cells = [
                    text.signed_size(d.value, d.unit) + text.SIGNS.get(d.answer, "")
                    for d in each.each
                ]
                rows.append([f"  {each.candidate}", *cells])
        parts.append(
            Table(
                head, rows, title=f"Difference to {text.reference_name(reference)}", signs=SIGNS
            ).rich()
        )
        parts += [
            Text(),
            *(Text(f"- {sentence}") for sentence in answer_sentences(merged, reference)),
        ]
    rows = []
    for each in zip(*(study.candidates for study in merged.studies), strict=True):
        for key in (key for key, values in each[0].space.items() if not isinstance(values, str)):
            trials = [candidate.selected_trial for candidate in each]
            cells = [text.setting(trial.parameters[key] if trial else None) for trial in trials]
            rows.append([f"{each[0].name} {key.removeprefix('optimizer.')}", *cells])
    parts += [Table(head, rows, title="Selected settings").rich(), Text()]
    signs = (
        "▲ better, ▼ worse, = equivalent; without a sign: not distinguishable. Positive: better."
    )
    parts.append(Text(f"{signs}\n", style="dim"))
    for spread in merged.spreads:
        measure, points = text.measure_name(study, spread.measure), text.POINTS[spread.unit]
        of_seeds, of_studies = (f"{value:.2g}{points}" for value in (spread.seeds, spread.draws))
        sentence = (
            f"{measure}: the standard deviation is {of_seeds} over the seeds of a study, and {of_studies} over the "
            "studies with an equal seed."
        )
        parts.append(Text(sentence, style="dim"))
    for name, each in zip(merged.names, merged.studies, strict=True):
        if each.cautions:
            sentence = (
                f"{name}: the report of this study has {count(len(each.cautions), 'caution')}."
            )
            parts.append(Text(sentence, style="dim"))
    for a, b in merged.equal:
        sentence = f"{a} and {b} have runs that are equal bit for bit, so they count as one study."
        parts.append(Text(sentence, style="yellow"))
    Terminal().print(Group(*parts), highlight=False)


def answer_sentences(merged: Merged, reference: str) -> list[str]:
    """Return a sentence per candidate: the answers that every study gives, then the counts of those
    that differ.
    """
    study, number, sentences = merged.studies[0], len(merged.studies), []
    own = [each for each in merged.differences if each.reference == reference]
    for candidate in dict.fromkeys(each.candidate for each in own):
        answers, counts = [], []
        for answer, than in text.THAN.items():
            measures = [
                each.measure for each in own if (each.candidate, each.answer) == (candidate, answer)
            ]
            if measures:
                names = join_words([text.measure_name(study, measure) for measure in measures])
                answers.append(
                    f"{than} {'it' if answers else text.reference_name(reference)} on {names}"
                )
        for each in (each for each in own if each.candidate == candidate and each.answer is None):
            numbers = Counter(difference.answer for difference in each.each)
            words = join_words(
                [f"{answer} in {numbers[answer]}" for answer in text.THAN if numbers[answer]]
            )
            counts.append(f"on {text.measure_name(study, each.measure)} {words}")
        every = "both studies" if number == 2 else f"all {number} studies"
        always = [f"{candidate} is {join_words(answers)} in {every}"] if answers else []
        differing = (
            [f"{'' if answers else f'{candidate}: '}the answers differ {', '.join(counts)}"]
            if counts
            else []
        )
        sentences.append(f"{'; '.join([*always, *differing])}.")
    return sentences


def merged_json(merged: Merged) -> dict[str, Any]:
    """Return the merged studies as plain data, for --json."""
    return {
        "studies": [
            {
                "name": name,
                "declaration": study.declaration,
                "machine": study.machine,
                "versions": study.versions,
            }
            for name, study in zip(merged.names, merged.studies, strict=True)
        ],
        "differences": [
            {
                "candidate": each.candidate,
                "reference": each.reference,
                "measure": each.measure,
                "unit": each.each[0].unit,
                "answer": each.answer,
                "answers": [difference.answer for difference in each.each],
                "values": [difference.value for difference in each.each],
                "intervals": [[difference.low, difference.high] for difference in each.each],
                "p_holm": [difference.p_holm for difference in each.each],
            }
            for each in merged.differences
        ],
        "spreads": [asdict(spread) for spread in merged.spreads],
        "equal": [list(pair) for pair in merged.equal],
    }
