"""Draws nested in seeds: their runs, their mean in the verdict, their part of the variance, and the audit of them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from soren_align.core.errors import UserError
from soren_align.evaluate.stats.paired import ColumnPoints
from soren_align.recipe import load_resolved
from soren_align.run.folder import RunFolder
from soren_align.study import runner
from soren_align.study.audit import audit, conclude
from soren_align.study.config import recipe_of_run, verdict_runs
from soren_align.study.draws import draw_spreads, mean_candidate, over_draws, variance_components
from soren_align.study.report import text
from soren_align.study.runs import read_files
from soren_align.study.search import read_study
from soren_align.study.stats import Answers
from soren_align.study.study import HELD_OUT, Candidate, Run, Study
from tests.study.test_runner import train_here
from tests.support import command
from tests.support.report_study import make_study
from tests.support.study_runs import TINY, end_all, study_of

DRAWS = "verdict.draws=[0, 7]"
RNG = np.random.default_rng(0)


def candidate(name, scores, **changes):
    """One whose verdict has these losses [seeds, draws], and scores in percent of 100 - loss."""
    runs = [
        Run(name, "verdict", s, 101 + s, f"verdict/{name}/{101 + s}-{d}", {}, "finished", metric=float(loss),
            scores={"x": 100 - float(loss)}, draw=d, **changes)
        for s, of_seed in enumerate(scores)
        for d, loss in enumerate(of_seed)
    ]  # fmt: skip
    return Candidate(name, {}, {}, [], 0, {}, runs)


def test_the_components_are_those_of_explicit_sums():
    scores = RNG.normal(size=(2, 3, 4)) + RNG.normal(size=(2, 3, 1)) + RNG.normal(size=(2, 1, 1))
    within = between = 0.0
    for of_candidate in scores:
        center = sum(sum(draws) / 4 for draws in of_candidate) / 3
        for draws in of_candidate:
            mean = sum(draws) / 4
            within += sum((score - mean) ** 2 for score in draws)
            between += 4 * (mean - center) ** 2
    within, between = within / (2 * 3 * 3), between / (2 * 2)
    assert variance_components(scores) == pytest.approx(((between - within) / 4, within))


def test_the_components_are_unbiased():
    """Over 4,000 studies of 3 seeds and 2 draws with variances 4 and 1, whose seeds' part is not cut at 0 here."""
    estimates = []
    for _ in range(4000):
        scores = 10 + 2 * RNG.normal(size=(4, 3, 1)) + RNG.normal(size=(4, 3, 2))
        estimates.append(variance_components(scores))
    seeds, draws = np.mean(estimates, axis=0)
    # Standard errors of a variance with 8 and 12 degrees of freedom are 2.3 and 0.41, over sqrt(4000) 0.036 and 0.006.
    assert seeds == pytest.approx(4, abs=0.15)
    assert draws == pytest.approx(1, abs=0.03)


def test_draws_that_change_nothing_have_no_part_and_seeds_that_change_nothing_neither():
    same_draws = np.array([[[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]]])
    seeds, draws = variance_components(same_draws)
    assert (seeds, draws) == (pytest.approx(np.var([1, 2, 4], ddof=1)), 0.0)
    assert variance_components(np.array([[[1.0, 3.0], [2.0, 2.0], [0.0, 4.0]]])) == (0.0, pytest.approx(10 / 3))


def test_the_score_of_a_seed_is_the_mean_over_its_draws():
    soren = candidate("soren", [[1.0, 2.0], [3.0, 5.0], [4.0, 4.0]])

    def column(values, prompts="a"):
        return ColumnPoints(np.array(values), None, prompts)

    points = {
        "soren": [{"x": column([d, 1.0]), "y": column([0.0], "b" if s == d == 1 else "a")}
                  for s in range(3) for d in range(2)]
    }  # fmt: skip
    (averaged,), means = over_draws([soren], Answers(points, points))
    assert [run.metric for run in averaged.verdict] == [1.5, 4.0, 4.0]
    assert [run.scores for run in averaged.verdict] == [{"x": 98.5}, {"x": 96.0}, {"x": 96.0}]
    assert [each["x"].each.tolist() for each in means.runs["soren"]] == [[0.5, 1.0]] * 3
    assert [[*each] for each in means.runs["soren"]] == [["x", "y"], ["x"], ["x", "y"]]  # one has other prompts


def test_a_draw_that_diverged_is_a_seed_without_a_score():
    soren = candidate("soren", [[1.0, 2.0], [3.0, 5.0]])
    runs = [*soren.verdict[:3], replace(soren.verdict[3], status="diverged", metric=None)]
    averaged = mean_candidate(replace(soren, verdict=runs))
    assert [run.status for run in averaged.verdict] == ["finished", "diverged"]
    assert draw_spreads([replace(soren, verdict=runs)]) == []


def test_without_draws_the_verdict_has_the_same_runs():
    study = make_study()
    assert [*map(mean_candidate, study.candidates)] == study.candidates
    assert draw_spreads(study.candidates) == []


def test_the_report_states_the_share_of_the_draws():
    candidates = [candidate("adamw", [[1.0, 1.2], [1.4, 1.2], [1.1, 1.3]]), candidate("soren", [[1.0, 1.2]] * 3)]
    spreads = draw_spreads(candidates)
    assert [(each.measure, each.num_candidates, each.num_seeds, each.num_draws) for each in spreads] == [
        (HELD_OUT, 2, 3, 2), ("x", 2, 3, 2),
    ]  # fmt: skip
    expected = variance_components(np.array([[[1.0, 1.2], [1.4, 1.2], [1.1, 1.3]], [[1.0, 1.2]] * 3]))
    assert spreads[0].share == pytest.approx(expected[1] / sum(expected))
    study = Study("s", {}, False, candidates, None, draws=spreads)
    first, second = text.draw_sentences(study)
    assert first == (
        "held-out loss: 100% of the variance between runs with different seeds also occurs between the draws of "
        "one seed (standard deviations: 0.14 of draws, 0 of seeds)."
    )
    assert second.startswith("x: 100% of ")
    assert "0.14 points of draws" in second


def test_each_seed_is_trained_from_every_draw_by_all_candidates_before_the_next(tmp_path):
    study = study_of(tmp_path, DRAWS)
    assert [run.folder for run in verdict_runs(study, "soren", {})][:3] == [
        "verdict/soren/101-0", "verdict/soren/101-7", "verdict/soren/102-0",
    ]  # fmt: skip
    ended = end_all(study, lambda run: 1.0 + 0.01 * run.seed)
    final = [place for place in ended if place.startswith("verdict/")]
    assert final[:5] == [f"verdict/{name}" for name in ("adamw/101-0", "soren/101-0", "adamw/101-7", "soren/101-7",
                                                        "adamw/102-0")]  # fmt: skip
    assert len(final) == 2 * 3 * 2
    perturb = {place: load_resolved(Path(study.output_dir) / place / "recipe.yaml").run.perturb for place in ended}
    assert {str(perturb[place]) for place in final} == {"size=1e-07 seed=0", "size=1e-07 seed=7"}
    assert {perturb[place].seed for place in ended if place.startswith("search/")} == {0}


@pytest.mark.rest
def test_the_verdict_over_draws_is_that_of_their_means(tmp_path):
    """The losses of a study with draws, and of one without whose losses are their means."""
    with_draws, without = tmp_path / "with", tmp_path / "without"
    differences = []
    for folder, overrides in ((with_draws, [DRAWS]), (without, [])):
        folder.mkdir()
        study = study_of(folder, *overrides)

        def loss(run):
            if run.stage == "search":
                return 1.0
            gain = 0.1 * (run.candidate == "soren") + 0.001 * run.seed * (1 + (run.candidate == "soren"))
            return 2.0 - gain + {0: 0.02, 7: -0.02}.get(run.draw, 0.0)

        end_all(study, loss)
        result = conclude(Path(study.output_dir))
        assert result.problems == []
        differences.append(result.differences)
        if overrides:
            (spread,) = result.draws
            assert spread.draws == pytest.approx(np.sqrt(2) * 0.02)
            assert json.loads((Path(study.output_dir) / "study.json").read_text())["draws"][0]["measure"] == HELD_OUT
            page = (Path(study.output_dir) / "report.md").read_text()
            assert "Seeds and draws (2 candidates, 3 seeds, 2 draws)" in page
            assert "101, draw 7" in page
    for one, other in zip(*differences, strict=True):
        assert one.value == pytest.approx(other.value)
        assert one.p == pytest.approx(other.p)


@pytest.fixture
def ended(tmp_path):
    study = study_of(tmp_path, DRAWS)
    end_all(study, lambda run: 1.0 + 0.001 * run.seed)
    return Path(study.output_dir)


def problems(folder):
    runs, unreadable = read_files(folder)
    return [*unreadable, *audit(read_study(folder), folder, runs)]


def start_from(folder, *places):
    """Let these runs have other starting weights."""
    for place in places:
        run = RunFolder(folder / place)
        run.update(identity=run.read()["identity"] | {"starting_weights": "f" * 16})


def test_draws_start_from_other_weights_and_the_runs_of_one_draw_from_the_same(ended):
    assert problems(ended) == []
    draws = [f"verdict/{name}/{seed}-7" for name in ("adamw", "soren") for seed in (101, 102, 103)]
    start_from(ended, *draws)
    assert problems(ended) == []
    start_from(ended, "verdict/soren/102-0")
    (problem,) = problems(ended)
    assert problem.startswith("verdict/soren/102-0: has other initial weights than the other runs with draw 0 ")


def test_a_draw_that_misses_or_is_not_declared_is_a_problem(ended):
    place = ended / "verdict/soren/102-7"
    recipe = place / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("seed: 7", "seed: 9"))
    found = problems(ended)
    assert "\nverdict/soren/102-7: has draw 9, which is not in verdict.draws" in "\n".join(["", *found])
    assert "verdict/soren: has no run with draw 7 and seed 102; rerun the study" in found
    assert any("recipe.yaml" in problem for problem in found)


def test_another_size_of_the_perturbation_is_a_problem(ended):
    recipe = ended / "verdict/soren/102-7/recipe.yaml"
    recipe.write_text(re.sub(r"(perturb:\s+size: )\S+", r"\g<1>0.01", recipe.read_text()))
    assert "run.perturb.size" in "".join(problems(ended))


@pytest.mark.parametrize(("setting", "words"), [
    ("verdict.draws=[1, 1]", r"verdict\.draws: found \[1, 1\]; write each seed once"),
    ("set.run.perturb.seed=3", r"set\.run\.perturb\.seed: is set by verdict\.draws"),
    ("set.model.dtype=bfloat16", "bfloat16 weights would lose this change by rounding"),
])  # fmt: skip
def test_draws_that_cannot_be_are_refused(tmp_path, setting, words):
    with pytest.raises(UserError, match=words):
        study_of(tmp_path, DRAWS, setting)


def test_the_size_of_the_perturbation_is_the_recipes(tmp_path):
    study = study_of(tmp_path, DRAWS, "set.run.perturb.size=1.0e-5")
    perturb = recipe_of_run(study, verdict_runs(study, "soren", {"optimizer.lr": 0.01})[1]).run.perturb
    assert (perturb.size, perturb.seed) == (1e-5, 7)


@pytest.mark.slow
@pytest.mark.model
def test_a_study_with_draws_is_trained_to_its_verdict(tmp_path, monkeypatch):
    (tmp_path / "tiny.yaml").write_text(TINY.replace("trials: 3", "trials: 1"))
    folder = tmp_path / "study"
    monkeypatch.setattr(runner, "start_run", train_here)
    arguments = ["compare", tmp_path / "tiny.yaml", "--set", f"output_dir={folder}", "--set", DRAWS]
    result = command.run(*arguments)
    assert result.returncode == 0, result.stderr
    assert "seed 103, draw 7" in result.stderr
    study = json.loads((folder / "study.json").read_text())
    assert study["problems"] == []
    assert study["differences"]
    runs = [run for each in study["candidates"] for run in each["verdict"]]
    assert len(runs) == 12
    starts = {(run["draw"], run["identity"]["starting_weights"]) for run in runs}
    assert len(starts) == 2  # the same for all candidates and seeds
    metrics = {(run["candidate"], run["seed"]): set() for run in runs}
    for run in runs:
        metrics[run["candidate"], run["seed"]].add(run["metric"])
    assert study["draws"][0]["num_draws"] == 2
    assert study["draws"][0]["draws"] > 0 or all(len(each) == 1 for each in metrics.values())
    assert "Seeds and draws" in (folder / "report.md").read_text()
    changed = command.run(*arguments[:-1], "verdict.draws=[0, 8]")
    assert changed.returncode == 2
    assert "verdict.draws" in changed.stderr
