"""A study of the largest size that a report must manage, made without training: folders as `compare` leaves them.

    python -m tests.support.large_study FOLDER

makes the study of docs/comparison.md: 4 candidates with 20 trials and 5 final runs each, 10,000 held-out examples
(of which 5,000 judge), 30,000 questions; 1 kB for each answer. Then measure, with GNU time:

    /usr/bin/time -v soren-align compare FOLDER/large.yaml --report
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
from soren_align.core.files import file_sha256, write
from soren_align.core.text import print_labelled, stderr_console
from soren_align.evaluate.suite.suites import suite_of
from soren_align.recipe import load_resolved
from soren_align.run.folder import RunFolder
from soren_align.run.held_out import add_values
from soren_align.study.config import load_study
from soren_align.study.report.verdict import VERDICT, verdict_file
from soren_align.study.study import ENDED

from tests.support.study_runs import end, progress_of, written

LARGE = """\
recipe: quickstart/sft
set: {{trainer.max_steps: 1000, trainer.eval_steps: 50, eval: {{suite: open-llm-leaderboard-v1}}}}
candidates:
  adamw: {{set: {{optimizer.name: adamw}}}}
  muon: {{set: {{optimizer.name: muon}}}}
  htmuon: {{set: {{optimizer.name: htmuon}}}}
  soren: {{}}
search:
  space:
    optimizer.lr: {{low: 1.0e-3, high: 1.0e-1}}
    optimizer.aux_lr: =optimizer.lr
  trials: {trials}
verdict: {{seeds: {seeds}, reference: adamw, equivalence: {{held_out: 0.05, benchmarks: 1.0}}}}
output_dir: {folder}/study
"""
CLUSTERED = ("hellaswag", "mmlu")
SMALL = {"trials": 1, "num_seeds": 3, "examples": 40, "questions": 60, "answer_bytes": 10}
"""The arguments of `plant` for a study of a second."""


def plant(folder, *, trials=20, num_seeds=5, examples=10_000, questions=30_000, answer_bytes=1000):
    """Write the study's file, large.yaml, and the folders of all runs; return the file."""
    folder, file = Path(folder), Path(folder) / "large.yaml"
    file.write_text(LARGE.format(trials=trials, seeds=[*range(101, 101 + num_seeds)], folder=folder))
    study, rng = load_study(str(file)), np.random.default_rng(0)
    gains = dict(zip(study.candidates, (0.0, 0.02, 0.01, 0.02), strict=True))
    hardness = rng.normal(size=(6, questions // 6))
    easiness = rng.normal(size=examples)
    progress, start = progress_of(study), None
    while waiting := [run for run in progress.update() if run.status not in ENDED]:
        for run in waiting:
            rate = np.log10(run.parameters["optimizer.lr"])
            loss = 1.5 - gains[run.candidate] + 0.1 * (rate + 2) ** 2 + 0.002 * rng.normal()
            end(study, run, loss)
            place = RunFolder(Path(study.output_dir) / run.folder)
            place.metrics.write_text("".join(json.dumps(line) + "\n" for line in _metrics(loss)))
            if run.stage == "verdict":
                values = {"start": 5 + easiness, "end": loss + easiness + 0.1 * rng.normal(size=examples)}
                weights, clusters = [20.0] * examples, [i // 2 for i in range(examples)]
                for at, losses in values.items():
                    add_values(place.held_out, at, "e" * 64, weights, clusters, {"eval_loss": losses.tolist()})
            recipe = load_resolved(place.recipe)
            training = place.read()["training"] | {"steps": 1000}
            place.update(written=written(place, recipe, run.folder), training=training)
            if run.stage == "verdict":
                right = hardness + rng.normal(size=hardness.shape) < gains[run.candidate]
                start = _evaluate(place, recipe.eval, hardness < -1, right, answer_bytes, start)
    return file


def write_verdict(study, folder):
    """In the place of `write_report`: write verdict.json alone."""
    write(folder / VERDICT, json.dumps(verdict_file(study, folder)))


def _metrics(loss):
    """Return the lines of a metrics.jsonl: 100 logs, 21 evaluations."""
    lines = [{"step": 0, "eval_loss": 5.0}]
    for step in range(10, 1001, 10):
        now = loss + 3.5 * 0.99**step
        logged = {"learning_rate": 0.01, "grad_norm": 0.5, "entropy": 1.5, "tokens": 600.0}
        lines.append({"step": step, "loss": now, "relative_change": step / 1e4, "tokens_per_second": 60.0,
                      "num_tokens": 600.0 * step, "epoch": step / 100, **logged})  # fmt: skip
        if step % 50 == 0:
            lines.append({"step": step, "eval_loss": loss if step == 1000 else now, "eval_num_tokens": 600.0 * step})
    return lines


def _evaluate(run, options, start, own, answer_bytes, earlier):
    """Write the evaluation of a run; return its folder. start, own: [columns, questions], whether the answer is right.

    earlier: the evaluation of another run, whose samples of the start are linked.
    """
    suite, output, text = suite_of(options), run.evaluation(options.name), "x" * answer_bytes
    rows, points = [], {}
    for name, right in (("base", start), ("SFT", own)):
        folder, scores, points[name] = output / "samples" / name, {}, {}
        folder.mkdir(parents=True)
        for task, each in zip(suite.tasks, right.astype(float), strict=True):
            mean, file = 100 * float(each.mean()), folder / f"{task.column}.jsonl"
            scores[task.column] = {"value": mean, "low": mean - 1, "high": mean + 1, "n": len(each)}
            clusters = [i // 5 for i in range(len(each))] if task.column in CLUSTERED else None
            points[name][task.column] = {"points": each.tolist(), "clusters": clusters, "prompts": "0" * 64}
            if name == "base" and earlier:
                os.link(earlier / "samples" / name / file.name, file)
                continue
            with file.open("w") as stream:
                for number, point in enumerate(each):
                    sample = {"doc_id": number, "prompt": text, "choices": ["a", "b"], "target": 1}
                    sample |= {"filtered_resps": [[-1.5, False], [-1.25, True]], "filter": task.filter}
                    stream.write(json.dumps(sample | {"metrics": [task.metric], task.metric: point}) + "\n")
        scores["average"] = {"value": sum(score["value"] for score in scores.values()) / len(scores)}
        weights = run.read()["written"]["weights_sha256"] if name == "SFT" else "a" * 64
        rows.append({"name": name, "model": name, "weights_sha256": weights, "scores": scores})
    (output / "points.json").write_text(json.dumps({"format": 1, "rows": points}))
    settings = {"metrics": {task.column: f"{task.metric},{task.filter}" for task in suite.tasks}, "data": "hub"}
    results = {"format": 1, "title": suite.title, "suite": suite.name, "rows": rows, "published": [], "notes": []}
    results |= {"settings": settings, "points_sha256": file_sha256(output / "points.json")}
    (output / "results.json").write_text(json.dumps(results))
    return output


if __name__ == "__main__":
    print_labelled(stderr_console(), "study", str(plant(sys.argv[1])))
