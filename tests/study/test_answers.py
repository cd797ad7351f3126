"""The points behind a verdict, read from evaluations, and the cautions about them."""

import json
from dataclasses import replace

import numpy as np

from soren_align.study.config import VerdictSection
from soren_align.study.stats import cautions, read_answers, verdict
from soren_align.study.study import Candidate, Run

RULES = VerdictSection(seeds=[1, 2, 3], reference="adamw")


def put_study(root, start=None):
    """Two candidates with three runs each, evaluated on two columns; the tables have a row before the start's."""
    rng, candidates = np.random.default_rng(0), []
    for name, rate in (("adamw", 0.3), ("soren", 0.9)):
        runs = [Run(name, "verdict", s, 101 + s, f"verdict/{name}/{101 + s}", {}, "finished") for s in range(3)]
        for run in runs:
            folder = root / run.folder / "eval" / "zoo"
            folder.mkdir(parents=True)
            each = (rng.random(100) < rate).astype(float).tolist()
            rows = {"base": [0.0] * 100, "SFT": (start or (lambda run: [0.0, 1.0] * 50))(run), "DPO": each}
            write(folder, rows)
        candidates.append(Candidate(name, {}, {}, [], 0, {}, runs))
    return candidates


def write(folder, rows):
    scores = [{"name": row, "model": None, "scores": {"x": {"value": 100 * np.mean(p)}}} for row, p in rows.items()]
    head = {"format": 1, "title": "t", "suite": "s", "published": [], "settings": {}, "notes": []}
    (folder / "results.json").write_text(json.dumps(head | {"rows": scores}))
    points = {row: {"x": {"points": list(p), "clusters": None, "prompts": "0" * 64}} for row, p in rows.items()}
    (folder / "points.json").write_text(json.dumps({"format": 1, "rows": points}))


def test_a_verdict_is_read_from_the_run_folders(tmp_path):
    candidates = put_study(tmp_path)
    answers, base, sentences = read_answers(tmp_path, candidates, "zoo")
    assert sentences == []
    assert base["x"].each.tolist() == [0.0, 1.0] * 50  # the row before the run's: the starting checkpoint of DPO
    found = {(d.candidate, d.reference): d.answer for d in verdict(RULES, candidates, answers, base)}
    assert found == {("adamw", "base"): "worse", ("soren", "base"): "better", ("soren", "adamw"): "better"}


def test_evaluations_that_disagree_about_the_start_are_a_caution(tmp_path):
    candidates = put_study(tmp_path, lambda run: [0.0, 1.0] * 50 if run.seed < 103 else [1.0] * 100)
    _, base, sentences = read_answers(tmp_path, candidates, "zoo")
    assert base["x"].each.mean() == 0.5
    assert sentences == ["x: 2 of 6 evaluations gave the starting checkpoint other points than the first, which counts"]


def test_a_diverged_run_and_unequal_spreads_are_cautions():
    def candidate(name, metrics, status="finished"):
        runs = [Run(name, "verdict", s, s, "", {}, status, metric=metric) for s, metric in enumerate(metrics)]
        return Candidate(name, {}, {}, [], 0, {}, runs)

    equal = [candidate("adamw", [1.0, 1.1, 1.2]), candidate("soren", [1.1, 1.05, 1.2])]
    assert [*cautions(equal, {})] == []
    wide = candidate("adamw", [1.0, 2.0, 3.0])
    narrow = replace(equal[1], verdict=[replace(run, metric=1 + run.seed / 1e4) for run in equal[1].verdict])
    diverged = candidate("muon", [None, 1.0, 1.0])
    diverged = replace(diverged, verdict=[replace(diverged.verdict[0], status="diverged"), *diverged.verdict[1:]])
    assert [*cautions([wide, narrow, diverged], {})] == [
        "muon: 1 of 3 runs with fresh seeds diverged: it has no verdict",
        "held-out: the standard deviation over seeds is 1 with adamw and 0.0001 with soren; the verdict expects about"
        " equal ones",
    ]
