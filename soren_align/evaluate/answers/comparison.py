"""`soren-align stats`: compare models by anybody's evaluation results, with the tests of our own
table.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import UserError, did_you_mean
from ...core.files import local_path
from ...core.text import Terminal, count, join_words, print_labelled
from ..report.results import NAME, Results, evaluations, read_results
from ..report.tables import has_too_few, markdown, terminal
from ..stats.intervals import average, score_points
from ..stats.paired import ModelAnswers, read_points
from ..stats.power import POWER, Part, detectable_by, mean_part, part_of
from ..stats.significance import compare, pair_column, unpaired
from .files import SAMPLES, Columns, Scores, read_scores
from .gate import checks, read_policy, write_junit

if TYPE_CHECKING:
    import pandas as pd

AVERAGE = "average"
REMEDY = "add --common to compare only the tasks and questions that all models have"

Model = dict[str, Scores]
"""A row of the table: its scores by task."""


def read_models(arguments: Sequence[str], columns: Columns) -> dict[str, Model]:
    """Return the models by name. arguments: files or folders, or `name=path`.

    Raises UserError if one cannot be read, or if two have the same name.
    """
    models: dict[str, Model] = {}
    for argument in arguments:
        name, equals, path_text = argument.partition("=")
        # A path that exists may contain `=` itself.
        if not equals or Path(argument).exists():
            name, path_text = "", argument
        path = local_path(path_text)
        if not path.is_file() and not path.is_dir():
            finding = "is no regular file" if path.exists() else "there is no such file or folder"
            raise UserError(f"{path_text}: {finding}; name a file or folder of results")
        if (path / "run.json").is_file():
            path = _evaluation(path)
        # An evaluation of our own has several rows, one metric per task, and no ids; anything else
        # is one model.
        if (path / NAME).is_file():
            if columns != Columns():
                raise UserError(
                    f"{path}: is a folder of results of soren-align, which has one metric per task;"
                    " remove --metric, --id, --score and --cluster, or name the folder of one model"
                    " in its samples folder"
                )
            rows = _own_rows(path)
        else:
            place = path.absolute()
            own = place.parent.name if SAMPLES.fullmatch(place.name) else place.stem
            own = name or (place.name if place.is_dir() else own)
            if not name and own in models:
                own = f"{place.parent.name}/{own}"
            rows = {own: read_scores(path, columns)}
        # Two runs share their base: the same row is shown once, another row of that name gets the
        # run's name.
        *_, last = rows
        for row, model in rows.items():
            # the last row of a table is the run's own model
            key = name if name and row == last else row
            if key in models and _are_equal(model, models[key]):
                continue  # such as the base of two runs
            if key in models and name and row != last:
                key = f"{name}/{row}"
            if key in models:
                finding = f"two models have the name {key}"
                raise UserError(f"{argument}: {finding}; write NAME={path_text}")
            models[key] = model
    return models


def _evaluation(run: Path) -> Path:
    """Return the folder of a run's only evaluation. Raises UserError if it has none, or several."""
    folders = evaluations(run)
    if not folders:
        raise UserError(f"{run}: this run has no evaluation; run soren-align eval {run} first")
    if len(folders) > 1:
        names = join_words([folder.name for folder in folders])
        finding = f"this run was evaluated with {len(folders)} suites ({names})"
        raise UserError(f"{run}: {finding}; name one: {folders[0]}")
    return folders[0]


def _are_equal(a: Model, b: Model) -> bool:
    return a.keys() == b.keys() and all(
        a[task].digest == b[task].digest and a[task].table.equals(b[task].table) for task in a
    )


def _own_rows(folder: Path) -> dict[str, Model]:
    """Return the rows of an evaluation of our own; points.json has no ids, but a hash of all
    questions and prompts.
    """
    import pandas as pd

    results, rows = read_results(folder), {}
    assert results is not None
    metrics = results["settings"].get("metrics", {})
    for row, (name, points) in zip(results["rows"], read_points(folder).items(), strict=True):
        rows[name] = {}
        for column, each in points.items():
            own = {"points": np.asarray(each.each, float), "content": None, "prompt": None}
            rows[name][column] = Scores(
                metrics.get(column, "score").removesuffix(",none"),
                str(folder),
                pd.DataFrame(own | {"cluster": each.clusters}),
                each.prompts,
                dict(row["scores"][column]),
                AVERAGE in row["scores"],
            )
    return rows


def align(models: dict[str, Model], common: bool) -> tuple[dict[str, ModelAnswers], list[str]]:
    """Return the points of all models on the same questions, in the order of the first model's, and
    notes.

    common: leave out the questions that not all have. Raises UserError if questions differ
    otherwise.
    """
    first_name, first = next(iter(models.items()))
    names = [*dict.fromkeys(task for model in models.values() for task in model if task)]
    if len(names) < 2 and all(len(model) == 1 for model in models.values()):
        _name_task(models, names)
    # Pairing is by question: a model that lacks some, or has other texts under the same ids, would
    # be compared with something else.
    answers = {name: ModelAnswers({}) for name in models}
    notes: list[str] = []
    for task in dict.fromkeys(task for model in models.values() for task in model):
        chosen = {name: model[task] for name, model in models.items() if task in model}
        if absent := [name for name in models if name not in chosen]:
            if not common:
                finding = f"has the task {task or 'without a name'}, but {absent[0]} has not"
                raise UserError(f"{next(iter(chosen))} {finding}; {REMEDY}")
            notes.append(f"{task}: left out, because {absent[0]} has no such task")
            continue
        for name, scores in chosen.items():
            _refuse_other_kind(task, first_name, first[task], name, scores)
        shared = _shared(task, {name: scores.table for name, scores in chosen.items()}, common)
        tables = {name: scores.table.loc[shared] for name, scores in chosen.items()}
        # Not every file has clusters. The questions are the same, so that another model's labels
        # hold.
        clusters = next((t.cluster for t in tables.values() if t.cluster.notna().any()), None)
        # A question that was asked ten times is not ten questions.
        texts = tables[first_name].content
        if clusters is None and texts.notna().all() and texts.duplicated().any():
            clusters = texts
            notes.append(
                f"{task}: {len(shared):,} answers to {texts.nunique():,} different questions;"
                " answers to one question count as a cluster"
            )
        for name, table in tables.items():
            model = answers[name]
            points: Any = table.points.to_numpy()
            model.points[task] = points
            if clusters is not None:  # the tests need only to know which are equal
                model.clusters[task] = clusters.tolist()
            # A digest is of all prompts, and `unpaired` compares it; single prompts are compared
            # here.
            if chosen[name].digest:
                model.prompt_hashes[task] = [("", chosen[name].digest)]
            elif changed := int(_differ(table.prompt, tables[first_name].prompt).sum()):
                notes.append(
                    f"{task}: {changed:,} of {len(shared):,} prompts of {name} are not those of "
                    f"{first_name} (few-shot examples or chat template), so the difference is one "
                    "of model and prompt"
                )
        notes += _left_out(task, {name: len(s.table) for name, s in chosen.items()}, len(shared))
    if not answers[first_name].points:
        raise UserError("the models have no task in common; name results of the same tasks")
    return answers, notes


def _name_task(models: dict[str, Model], names: list[str]) -> None:
    """Name the task of files of one task, some or all of which do not name it; in place."""
    # The first model's metric: another one is no other task, and is refused as what it is.
    ((_, first),) = next(iter(models.values())).items()
    for model in models.values():
        ((task, _),) = model.items()
        model[names[0] if names else first.metric] = model.pop(task)


def _left_out(task: str, sizes: dict[str, int], num_shared: int) -> list[str]:
    """Return a note with the number of questions that each model loses, if one loses any.
    sizes: each model's questions.
    """
    if all(size == num_shared for size in sizes.values()):
        return []
    listed = ", ".join(f"{size - num_shared:,} of {name}" for name, size in sizes.items())
    finding = f"compared on the {num_shared:,} questions that all have"
    return [f"{task}: {finding}; left out: {listed}"]


def _refuse_other_kind(
    task: str, first_name: str, first: Scores, name: str, scores: Scores
) -> None:
    """Raise UserError if two models have other metrics, or one has no ids of questions."""
    if scores.metric != first.metric:
        finding = f"{first_name} is scored by {first.metric}, but {name} by {scores.metric}"
        raise UserError(f"{task}: {finding}; name a metric that both have: --metric NAME")
    if bool(scores.digest) != bool(first.digest):
        finding = f"is compared with {first.source}, but only one of them is a folder of results"
        remedy = "name the folder of one model in its samples folder instead"
        raise UserError(f"{scores.source}: {finding} of soren-align; {remedy}")


def _differ(a: "pd.Series", b: "pd.Series") -> "pd.Series":
    """Whether the texts differ, where both are known."""
    return (a != b) & a.notna() & b.notna()


def _shared(task: str, tables: "dict[str, pd.DataFrame]", common: bool) -> "pd.Index":
    """Return the ids of the questions that all models have, in the order of the first model's.

    Raises UserError if some differ, unless `common`, or if there are none.
    """
    (first_name, first), *others = tables.items()
    in_all = np.ones(len(first), bool)
    for name, table in others:
        in_both = first.index.isin(table.index)
        differing = _differ(first.content, table.content.reindex(first.index)).to_numpy()
        in_all &= in_both & ~differing
        num = len(first) + len(table) - 2 * int(in_both.sum()) + int(differing.sum())
        if common or not num:
            continue
        if not in_both.all():
            key, reason = first.index[~in_both][0], f"only {first_name} has it"
        elif len(table) > len(first):
            key, reason = table.index[~table.index.isin(first.index)][0], f"only {name} has it"
        else:
            key, reason = first.index[differing][0], "its content differs"
        raise UserError(
            f"{task}: {num:,} question{'s differ' if num > 1 else ' differs'} between {first_name}"
            f" ({len(first):,} questions) and {name} ({len(table):,}), first {str(key)[:60]}"
            f" ({reason}); {REMEDY}"
        )
    if not in_all.any():
        finding = "no question is in the results of all models"
        raise UserError(f"{task}: {finding}; check the ids (--id COLUMN)")
    return first.index[in_all]


def make_results(
    models: dict[str, Model], answers: dict[str, ModelAnswers], notes: list[str], mean: bool
) -> Results:
    """Return the table's content, as results.json has it; the first model is the reference.

    mean: add the plain mean of the tasks.
    """
    rows: list[Any] = []
    first = next(iter(answers.values()))
    for (name, model), differences in zip(
        answers.items(), compare([*answers.items()], mean), strict=True
    ):
        # A score of our own knows the subjects of its questions, if it has any.
        own = {task: scores.score for task, scores in models[name].items() if scores.score}
        scores = {
            task: own.get(task) or score_points([p], model.clusters.get(task))
            for task, p in model.points.items()
        }
        if mean:
            scores[AVERAGE] = average(list(scores.values()))
        row: dict[str, Any] = {
            "name": name,
            "model": None,
            "scores": scores,
            "differences": differences,
        }
        if reasons := unpaired(first, model):
            row["unpaired"] = reasons | ({AVERAGE: "not all tasks are compared"} if mean else {})
        rows.append(row)
    title = f"{count(len(rows), 'model')}, {count(len(first.points), 'task')}"
    return {"format": 1, "title": title, "suite": "", "rows": rows, "published": [], "settings": {}, "notes": notes,
            "intervals": True}  # fmt: skip


def variance_of(first: ModelAnswers, later: ModelAnswers, task: str) -> Part:
    """Return the variance of the mean difference of two models on a task."""
    column = pair_column(first, later, task)
    return part_of(column, smooth=column.is_right_or_wrong)


def stats(
    arguments: Sequence[str],
    columns: Columns,
    *,
    reference: str | None = None,
    common: bool = False,
    mean: bool = False,
    as_json: bool = False,
    as_markdown: bool = False,
    gate: str | None = None,
    junit: str | None = None,
) -> int:
    """Print the table of the models, what it shows, and what so many questions can detect.
    Returns the exit code: 1 if a model does not pass the policy in the file `gate`.

    junit: a file for the checks of the gate.
    """
    policy = read_policy(gate) if gate else None
    models, answers, notes = load(arguments, columns, reference, common)
    first, *later = answers
    mean = mean or any(scores.has_average for scores in models[first].values())
    mean = mean or (policy is not None and AVERAGE in policy.margins)
    metrics = {task: scores.metric for task, scores in models[first].items()}
    results = make_results(models, answers, notes, mean)
    done = [*checks(policy, results)] if policy else []
    if policy and not done:
        raise UserError("--gate: compares models with the first one; name two models or more")
    if junit:
        write_junit(junit, done)
    code = int(any(check.failure for check in done))
    # The minimum detectable effects of all differences, in points, by model and column.
    # A difference that is not significant is no finding without the effect that so many questions
    # would have shown.
    smallest: dict[str, dict[str, float]] = {}
    differences = {row["name"]: row.get("differences") or {} for row in results["rows"]}
    num_tests = sum(map(len, differences.values()))
    for name, columns_of_row in differences.items():
        parts = {
            task: variance_of(answers[first], answers[name], task)
            for task in columns_of_row
            if task != AVERAGE
        }
        if AVERAGE in columns_of_row:
            parts[AVERAGE] = mean_part([*parts.values()], len(parts))
        smallest[name] = {
            task: 100 * (detectable_by(part, num_tests) or 0.0) for task, part in parts.items()
        }
    if as_json:
        content = _json(results, metrics, smallest)
        content |= {"gate": [asdict(check) for check in done]} if policy else {}
        sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        return code
    sizes = {task: len(points) for task, points in answers[first].points.items()}
    if named := [f"{task} {metric}" for task, metric in metrics.items() if task != metric]:
        notes.append(f"metrics: {', '.join(named)}")
    notes.append(f"questions: {', '.join(f'{task} {size:,}' for task, size in sizes.items())}")
    if as_markdown:
        sys.stdout.write(markdown(results))
        return code
    console = Terminal()
    console.print(terminal(results), highlight=False)
    console.print()
    for row in results["rows"][1:]:
        print_labelled(console, "result", _finding(first, row))
    if later:
        tasks = dict.fromkeys(task for columns in smallest.values() for task in columns)
        largest = [max(each[task] for each in smallest.values() if task in each) for task in tasks]
        known = {task: effect for task, effect in zip(tasks, largest, strict=True) if effect <= 100}
        listed = [f"{effect:.2g} points ({task})" for task, effect in known.items()]
        power = (
            f"{POWER:.0%} for a true difference of {join_words(listed)}; smaller ones are often"
            " missed"
        )
        print_labelled(
            console, "power", power if known else "too few questions to detect any difference"
        )
    else:
        print_labelled(console, "next", "name a second model to compare")
    for check in done:
        outcome = f"FAILED: {check.failure}" if check.failure else "passed"
        print_labelled(console, "gate", f"{check.model}, {check.column}: {outcome} ({check.text})")
    return code


def load(
    arguments: Sequence[str], columns: Columns, reference: str | None, common: bool
) -> tuple[dict[str, Model], dict[str, ModelAnswers], list[str]]:
    """Return the models, the reference first, their points on the same questions, and notes."""
    models = read_models(arguments, columns)
    if reference is not None:
        if reference not in models:
            hint = did_you_mean(reference, models, f"write one of {', '.join(models)}")
            raise UserError(f"--reference: no model has the name {reference}{hint}")
        models = {reference: models[reference]} | models
    answers, notes = align(models, common)
    return models, answers, notes


def _finding(first: str, row: Any) -> str:
    """Return a sentence about which differences of a row are significant, and which are not."""
    columns: dict[str, list[str]] = {}
    for column, d in (row.get("differences") or {}).items():
        is_open, word = d["p_holm"] >= 0.05, "better" if d["value"] > 0 else "worse"
        key = (
            "too few questions"
            if has_too_few(row, column)
            else "no significant difference"
            if is_open
            else word
        )
        columns.setdefault(key, []).append(column)
    parts = [
        f"{word} than {first} in {join_words(columns[word])}"
        for word in ("better", "worse")
        if word in columns
    ]
    for words in ("no significant difference", "too few questions"):
        to = f" to {first}" if not parts and words == "no significant difference" else ""
        parts += [f"{words}{to} in {join_words(columns[words])}"] if words in columns else []
    parts += [f"not compared in {join_words(list(row['unpaired']))}"] if row.get("unpaired") else []
    return f"{row['name']}: {'; '.join(parts)}"


def _json(
    results: Any, metrics: dict[str, str], smallest: dict[str, dict[str, float]]
) -> dict[str, Any]:
    first, *later = results["rows"]
    comparisons = []
    for row in later:
        for task, d in (row.get("differences") or {}).items():
            a, b = first["scores"][task], row["scores"][task]
            entry: dict[str, Any] = {
                "model": row["name"],
                "task": task,
                "metric": metrics.get(task),
                "n": a.get("n"),
            }
            entry |= {"reference_score": a["value"], "score": b["value"], "difference": d["value"]}
            entry |= {key: number for key, number in d.items() if key != "value"}
            comparisons.append(entry | {"detectable": smallest[row["name"]][task]})
    keys = ("value", "stderr", "low", "high", "n")
    scores = {
        row["name"]: {
            task: {key: score[key] for key in keys if key in score}
            for task, score in row["scores"].items()
        }
        for row in results["rows"]
    }
    content = {"reference": first["name"], "unit": "percent", "power": POWER, "scores": scores}
    skipped = {row["name"]: row["unpaired"] for row in later if row.get("unpaired")}
    return content | {
        "comparisons": comparisons,
        "not_compared": skipped,
        "notes": results["notes"],
    }
