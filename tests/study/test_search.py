"""Trials are drawn, selected and extended alike for all candidates, whatever the order in which runs end."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from soren_align import recipe
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.run.folder import read_metrics
from soren_align.run.provenance import read_declaration
from soren_align.study import search as study_search
from soren_align.study.audit import cautions, conclude
from soren_align.study.config import first_run, recipe_of_run
from soren_align.study.declaration import declare
from soren_align.study.runner import _move_another_setting
from soren_align.study.runs import finer_gain, read_curve
from soren_align.study.search import read_study
from soren_align.study.study import ENDED, Run
from tests.support.study_runs import end, end_all, progress_of, study_of


def loss_of(run):
    """Lowest at 0.01, with a little of the seed."""
    return 1 + abs(math.log(run.parameters["optimizer.lr"] / 0.01)) + run.seed / 1000


def trials_of(study):
    progress = progress_of(study)
    return {name: progress.trials(name) for name in study.candidates}


@pytest.fixture
def study(tmp_path):
    """The study of TINY, without runs."""
    return study_of(tmp_path)


@pytest.fixture
def concluded(study):
    """The folder of the same study, whose runs have ended."""
    end_all(study, loss_of)
    return Path(study.output_dir)


def test_all_candidates_have_the_same_points_in_their_own_intervals(tmp_path):
    study = study_of(tmp_path, "candidates.soren.space.optimizer.lr={low: 1.0e-2, high: 1.0}")
    drawn = trials_of(study)
    for own, other in zip(drawn["soren"], drawn["adamw"], strict=True):
        assert own["optimizer.lr"] == pytest.approx(10 * other["optimizer.lr"])


@pytest.mark.parametrize("seed", range(5))
def test_six_trials_leave_no_third_of_the_interval_empty(tmp_path, seed):
    study = study_of(tmp_path, "search.trials=6", f"search.sampling_seed={seed}")
    thirds = {int(3 * math.log(t["optimizer.lr"] / 1e-3) / math.log(100)) for t in trials_of(study)["soren"]}
    assert thirds == {0, 1, 2}


def test_a_grid_is_every_combination_once(tmp_path):
    lists = ["search.space.optimizer.lr=[0.001, 0.01]", "search.space.optimizer.weight_decay=[0.0, 0.1, 0.2]"]
    study = study_of(tmp_path, *lists, "search.method=grid", "search.trials=6")
    points = {(trial["optimizer.lr"], trial["optimizer.weight_decay"]) for trial in trials_of(study)["soren"]}
    assert points == {(lr, decay) for lr in (0.001, 0.01) for decay in (0.0, 0.1, 0.2)}


def test_the_verdict_has_the_best_setting_and_starts_when_its_search_has_ended(study):
    progress = progress_of(study)
    for run in progress.update():
        if run.candidate == "soren":
            end(study, run, loss_of(run))
    runs = progress.update()
    verdict = [run for run in runs if run.stage == "verdict"]
    best = min((run for run in runs if run.candidate == "soren" and run.stage == "search"), key=loss_of)
    assert [(run.candidate, run.seed) for run in verdict] == [("soren", 101), ("soren", 102), ("soren", 103)]
    assert all(run.parameters == best.parameters for run in verdict)
    assert progress.num_runs(runs) == {"search": 6, "verdict": 6}
    for run in runs:
        if run.stage == "search" and run.candidate == "adamw":
            end(study, run, 2.0, error="refused")  # no trial of adamw has a result
    runs = progress.update()
    assert progress.num_runs(runs) == {"search": 6, "verdict": 3}


def test_a_study_is_declared_before_its_first_run_and_holds_to_it(study):
    folder = Path(study.output_dir)
    progress_of(study)
    declared = read_declaration(folder)
    recipes = {name: recipe_of_run(study, first_run(study, name)) for name in study.candidates}
    assert declared["sha256"] == declare(study, recipes)["sha256"]  # what `plan` prints
    assert {name.rpartition("/")[2] for name in declared["files"]} == {"chat_train.jsonl", "chat_test.jsonl"}
    (folder / "declaration.json").unlink()
    progress_of(study)  # a command was killed before it was written
    assert read_declaration(folder) == declared
    text = (folder / "declaration.json").read_text()
    (folder / "declaration.json").write_text(text.replace('"power": 0.8', '"power": 0.9'))
    with pytest.raises(UserError, match=r"declaration\.json: was edited"):
        progress_of(study)


def test_examples_that_changed_since_the_declaration_are_refused(tmp_path):
    data = tmp_path / "chat.jsonl"
    data.write_bytes((shipped.ROOT / "recipes/quickstart/data/chat_train.jsonl").read_bytes())
    study = study_of(tmp_path, f"set.data.train.path={data}")
    progress_of(study)
    data.write_text(data.read_text().replace("?", "!", 1))
    with pytest.raises(UserError, match=r"contains another study[\s\S]*chat\.jsonl: .* instead of"):
        progress_of(study)


@pytest.mark.rest
def test_an_earlier_look_is_counted_and_a_caution(study, concluded):
    def looks():
        return [caution for caution in conclude(concluded).cautions if "verdicts" in caution]

    assert looks() == looks() == []  # the same runs are one look
    run = next(run for run in progress_of(study).update() if run.folder == "verdict/soren/103")
    end(study, run, 1.0)
    (caution,) = looks()
    assert caution.startswith("`compare` has computed 2 verdicts, each from a different set of runs. ")
    assert caution.endswith("multiplied by 2")
    lines = (concluded / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["looked"] * 2
    (concluded / "history.jsonl").write_text("\n".join(lines) + '\n{"event": "loo')  # of a command that was killed
    assert len(looks()) == 1


def test_a_seed_of_the_verdict_is_run_for_all_candidates_before_the_next(study):
    progress = progress_of(study)
    for run in progress.update():
        end(study, run, loss_of(run))
    verdict = [run for run in progress.update() if run.stage == "verdict"]
    assert [(run.candidate, run.seed) for run in verdict[:3]] == [("adamw", 101), ("soren", 101), ("adamw", 102)]


def test_several_seeds_of_the_search_select_by_their_mean(tmp_path):
    study = study_of(tmp_path, "search.seeds=[0, 1]")
    best = {"soren": 1, "adamw": 2}

    def loss(run):  # trial 0 is the best at seed 0 alone
        if run.stage == "search" and run.number == 0:
            return 0.1 if run.seed == 0 else 4.0
        return 1.0 if run.number == best[run.candidate] else 2.0

    end_all(study, loss)
    result = read_study(Path(study.output_dir))
    assert {each.name: each.selected for each in result.candidates} == best
    assert len(result.candidates[0].trials) == 6


def test_failed_and_diverged_trials_are_results(study):
    progress = progress_of(study)
    soren = [run for run in progress.update() if run.candidate == "soren"]
    adamw = [run for run in progress.update() if run.candidate == "adamw"]
    end(study, soren[0], 9.0)
    end(study, soren[1], 2.0, error="step 4: NaN or infinity in the gradient of x", diverged=True)
    end(study, soren[2], 2.0, error="no space left")
    for run in adamw:
        end(study, run, 3.0 + run.number)
    end(study, progress.update()[-1], 2.0, error="stopped by a signal")  # is resumed
    result = read_study(Path(study.output_dir))
    candidates = {each.name: each for each in result.candidates}
    assert [run.status for run in candidates["soren"].trials] == ["diverged", "diverged", "failed"]
    reason = "the held-out loss was 5 at the start, rose to 9, and was 9 at the end"
    assert candidates["soren"].trials[0].reason == reason
    assert candidates["soren"].selected is None
    assert candidates["soren"].verdict == []
    assert candidates["adamw"].selected == 0
    assert [run.status for run in candidates["adamw"].verdict] == ["waiting", "waiting", "running"]
    found = [*cautions(result, study, [])]
    assert any("soren: no trial has finished" in caution for caution in found)


def at_the_end(run):
    """soren's loss is the lowest at the largest rate, adamw's within."""
    return 0.1 / run.parameters["optimizer.lr"] if run.candidate == "soren" else loss_of(run)


def test_a_winner_at_an_end_is_reported_and_extended_with_as_many_trials_for_all(study):
    assert progress_of(study).extension(progress_of(study).update()) is None  # the search has not ended
    end_all(study, at_the_end)
    folder = Path(study.output_dir)
    before = {each.name: each for each in read_study(folder).candidates}
    assert before["soren"].at_edge == {"optimizer.lr": "high"}
    assert before["adamw"].at_edge == {}
    progress = progress_of(study)
    extension = progress.extension(progress.update())
    largest = max(run.parameters["optimizer.lr"] for run in before["soren"].trials)
    wider = {"low": largest, "high": pytest.approx(1.0), "log": True}
    assert (extension.trials, extension.spaces["soren"]) == (2, {"optimizer.lr": wider})
    # the other's lie around its best one, in an interval half as wide as its own
    other, whole = extension.spaces["adamw"]["optimizer.lr"], study.free("adamw")["optimizer.lr"]
    best = before["adamw"].trials[before["adamw"].selected].parameters["optimizer.lr"]
    assert other["low"] < best < other["high"]
    assert whole.low <= other["low"] < other["high"] <= whole.high * (1 + 1e-9)
    assert other["high"] / other["low"] == pytest.approx((whole.high / whole.low) ** study_search.WIDER)
    progress.extend(extension)
    verdict = {run.folder for run in progress_of(study).update() if run.stage == "verdict"}
    assert not verdict  # of no candidate, before its further trials have ended
    progress = progress_of(study)
    further = [run for run in progress.update() if run.stage == "search" and run.status not in ENDED]
    assert sorted(run.candidate for run in further) == ["adamw", "adamw", "soren", "soren"]
    assert all(largest < run.parameters["optimizer.lr"] < 1.0 for run in further if run.candidate == "soren")
    assert all(
        other["low"] < run.parameters["optimizer.lr"] < other["high"] for run in further if run.candidate == "adamw"
    )


def test_a_study_is_extended_a_few_times_and_never_to_values_that_its_recipe_refuses(tmp_path):
    study = study_of(tmp_path, "candidates.soren.space.optimizer.momentum={low: 0.5, high: 0.99, log: false}")

    def loss(run):  # the lowest at the smallest rate and the largest momentum
        return 1 + run.parameters["optimizer.lr"] ** 0.5 - run.parameters.get("optimizer.momentum", 0.0)

    extensions = []
    while True:
        end_all(study, loss)
        progress = progress_of(study)
        if (extension := progress.extension(progress.update())) is None:
            break
        extensions.append(extension)
        progress.extend(extension)
    assert len(extensions) == study_search.MOST_EXTENSIONS
    assert all(each.spaces["soren"]["optimizer.momentum"]["high"] <= 0.99 for each in extensions)


def test_another_study_is_refused_with_the_differences(tmp_path):
    progress_of(study_of(tmp_path)).update()
    progress_of(study_of(tmp_path, "jobs=4", "title=Mine"))
    with pytest.raises(UserError, match=r"search.trials: 4 instead of 3"):
        progress_of(study_of(tmp_path, "search.trials=4"))


def test_a_changed_recipe_is_refused_too(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text("extends: quickstart/sft\ndata: {train: {limit: 100}}\n")
    progress_of(study_of(tmp_path, f"recipe={base}"))
    base.write_text("extends: quickstart/sft\ndata: {train: {limit: 101}}\n")
    assert recipe.load(str(base)).data.sources[0].limit == 101
    with pytest.raises(UserError, match=r"adamw.data.train.limit: 101 instead of 100"):
        progress_of(study_of(tmp_path, f"recipe={base}"))


def test_a_run_with_other_values_than_its_trial_is_refused(study):
    end_all(study, loss_of)
    file = Path(study.output_dir) / "search/soren/01/recipe.yaml"
    file.write_text(file.read_text().replace("lr: 0.0", "lr: 0.01", 1))
    with pytest.raises(UserError, match=r"recipe\.yaml has other values than trial 2 of soren, .* rerun the same"):
        progress_of(study).update()


def test_the_study_is_plain_data(concluded):
    written = json.loads(json.dumps(asdict(read_study(concluded))))
    run = written["candidates"][1]["verdict"][0]
    assert run["metric"] == run["curve"][-1]["metric"] == pytest.approx(loss_of(SimpleNamespace(**run)))
    assert [point["step"] for point in run["curve"]] == [0, 6]
    assert run["curve"][-1]["seconds"] == pytest.approx(10)


def test_a_verdict_of_an_earlier_setting_is_set_aside_where_the_audit_does_not_look(tmp_path):
    run, progress = SimpleNamespace(stage="verdict"), SimpleNamespace(is_own=lambda *_: False)
    path = tmp_path / "verdict/muon/101"
    for number in (1, 2):
        path.mkdir(parents=True)
        (path / "run.json").write_text(str(number))
        _move_another_setting(run, progress, path)
        assert not path.exists()
        assert (tmp_path / f"earlier/muon/101-{number}/run.json").read_text() == str(number)


@pytest.mark.parametrize("count", [{"eval_num_tokens": 700.0}, {}], ids=["of TRL", "of a pre-training"])
def test_a_curve_has_the_tokens_of_training_at_each_evaluation(tmp_path, count):
    train = {"loss": 4.0, "tokens_per_second": 60.0}
    lines = [{"step": 0, "eval_loss": 5.0}, {"step": 3, **train, "num_tokens": 300.0}]
    lines += [{"step": 6, **train, "num_tokens": 600.0}, {"step": 6, "eval_loss": 4.0, **count}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    points = read_curve(read_metrics(tmp_path / "metrics.jsonl"), "eval_loss")
    expected = [(0, 0, 0.0), (6, count.get("eval_num_tokens", 600), 10.0)]
    assert [(point.step, point.tokens, point.seconds) for point in points] == expected


@pytest.mark.parametrize("best", [0.7, 1.0, 1.2])
def test_the_gain_of_a_finer_search_is_that_of_the_parabola_through_the_best_three(tmp_path, best):
    """On an axis of logarithms: a parabola's own best value is found from three values around it."""
    study = study_of(tmp_path)
    values = [1e-3 * 3**i for i in range(5)]

    def trials(metrics):
        return [
            Run("adamw", "search", i, 0, "", {"optimizer.lr": value}, "finished" if m is not None else "diverged", metric=m)
            for i, (value, m) in enumerate(zip(values, metrics, strict=True))
        ]  # fmt: skip

    x = np.log(values) - np.log(values[2]) - (best - 1)
    curve = (2 + 0.3 * x**2).tolist()
    selected = int(np.argmin(curve))
    assert finer_gain(study, trials(curve), selected) == pytest.approx(curve[selected] - 2, abs=1e-12)
    assert finer_gain(study, trials([-m for m in curve]), selected) == pytest.approx(curve[selected] - 2, abs=1e-12)
    assert finer_gain(study, trials([1, 2, 3, 4, 5]), 0) == 0  # an end: `edges` says so
    assert finer_gain(study, trials([None, 2, 1, None, None]), 2) == 0
    assert finer_gain(study, trials([1.0] * 5), 2) == 0
