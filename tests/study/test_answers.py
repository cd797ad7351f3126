"""The points behind a verdict, read from evaluations, and the cautions about them."""

import json

import numpy as np
import pytest
from soren_align.core.errors import UserError
from soren_align.run.held_out import add_values, read_held_out
from soren_align.study.config import VerdictSection
from soren_align.study.stats import cautions, read_answers, verdict
from soren_align.study.study import HELD_OUT, Candidate, Run

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
            loss = 2.0 - rate + rng.normal(size=50) / 10
            put_held_out(root / run.folder, start=[2.0] * 50, end=loss.tolist())
        candidates.append(Candidate(name, {}, {}, [], 0, {}, runs))
    return candidates


def put_held_out(folder, start, end, weights=None, clusters=None):
    """The held_out.json of a run, with one metric."""
    for at, values in (("start", start), ("end", end)):
        own = weights or [1.0] * len(values)
        add_values(folder / "held_out.json", at, "0" * 64, own, clusters, {"eval_loss": values})


def read(root, candidates, suite="zoo"):
    return read_answers(root, candidates, "eval_loss", suite, higher_is_better=False)


def write(folder, rows):
    scores = [{"name": row, "model": None, "scores": {"x": {"value": 100 * np.mean(p)}}} for row, p in rows.items()]
    head = {"format": 1, "title": "t", "suite": "s", "published": [], "settings": {}, "notes": []}
    (folder / "results.json").write_text(json.dumps(head | {"rows": scores}))
    points = {row: {"x": {"points": list(p), "clusters": None, "prompts": "0" * 64}} for row, p in rows.items()}
    (folder / "points.json").write_text(json.dumps({"format": 1, "rows": points}))


def test_a_verdict_is_read_from_the_run_folders(tmp_path):
    candidates = put_study(tmp_path)
    answers, sentences = read(tmp_path, candidates)
    assert sentences == []
    start = answers.starts["soren"][2]["x"].each.tolist()
    assert start == [0.0, 1.0] * 50  # the row before the run's: the starting checkpoint of DPO
    found = {(d.candidate, d.reference, d.measure): d.answer for d in verdict(RULES, candidates, answers)}
    for measure, of_adamw in (("x", "worse"), (HELD_OUT, "better")):
        assert found["adamw", "base", measure] == of_adamw
        assert found["soren", "base", measure] == found["soren", "adamw", measure] == "better"
    answers, _ = read(tmp_path, candidates, suite=None)
    assert {d.measure for d in verdict(RULES, candidates, answers)} == {HELD_OUT}


def test_evaluations_that_disagree_about_the_start_are_a_caution(tmp_path):
    candidates = put_study(tmp_path, lambda run: [0.0, 1.0] * 50 if run.seed < 103 else [1.0] * 100)
    answers, (sentence,) = read(tmp_path, candidates)
    assert [start["x"].each.mean() for start in answers.starts["adamw"]] == [0.5, 0.5, 1.0]
    assert sentence.startswith("x: 2 of 6 later evaluations gave the starting checkpoint other scores than the first")


def test_runs_on_other_held_out_examples_are_not_compared(tmp_path):
    candidates = put_study(tmp_path)
    file = tmp_path / candidates[1].verdict[0].folder / "held_out.json"
    file.write_text(file.read_text().replace("0" * 64, "1" * 64))
    answers, sentences = read(tmp_path, candidates)
    assert any(sentence.startswith("held-out metric: not compared") for sentence in sentences)
    assert {d.measure for d in verdict(RULES, candidates, answers)} == {"x"}


@pytest.mark.parametrize(("content", "finding"), [
    (None, "is missing"),
    ("{}", "was not written by this version"),
    ('{"format": 1, "weights": [1], "clusters": null, "start": {"eval_loss": [1]}}', "end.eval_loss: has 0 values"),
])  # fmt: skip
def test_damaged_values_of_held_out_examples_are_refused(tmp_path, content, finding):
    file = tmp_path / "held_out.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=finding):
        read_held_out(file, "eval_loss")


def test_weighted_values_have_the_mean_by_weight_and_the_error_of_a_ratio(tmp_path):
    """The error by the textbook's formula, from the deviations of the weighted values from the weighted mean."""
    rng = np.random.default_rng(0)
    weights, start, end = rng.integers(1, 20, 30), rng.normal(size=30), rng.normal(size=30)
    put_held_out(tmp_path, start.tolist(), end.tolist(), weights.astype(float).tolist())
    values = read_held_out(tmp_path / "held_out.json", "eval_loss")
    d = start - end
    mean = (weights * d).sum() / weights.sum()
    found = values.start - values.end
    assert found.mean() == pytest.approx(mean)
    error = sum((weights[i] * (d[i] - mean)) ** 2 for i in range(30)) * 30 / 29 / weights.sum() ** 2
    assert found.var(ddof=1) / 30 == pytest.approx(error)


def test_equal_held_out_examples_are_one_cluster(tmp_path):
    put_held_out(tmp_path, [1.0, 2.0, 3.0], [1.0, 1.0, 2.0], clusters=[4, 4, 7])
    assert read_held_out(tmp_path / "held_out.json", "eval_loss").clusters.tolist() == [0, 0, 1]


def test_a_diverged_run_is_a_caution():
    runs = [Run("muon", "verdict", s, s, "", {}, "finished" if s else "diverged") for s in range(3)]
    (caution,) = cautions([Candidate("muon", {}, {}, [], 0, {}, runs)])
    assert caution == "muon: 1 of 3 runs with fresh seeds diverged, so this candidate has no verdict"
