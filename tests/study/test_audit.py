"""The audit reads run folders: each accident is a problem, and an undisturbed study has none."""

import json
import shutil

import pytest
from soren_align import recipe
from soren_align.core.version import __version__
from soren_align.recipe import Eval, recipe_hash, to_yaml
from soren_align.run.folder import RunFolder
from soren_align.study.audit import accidents, audit, cautions
from soren_align.study.config import StudyFile
from soren_align.study.runs import STAGES, read_files, read_run, select
from soren_align.study.study import Candidate, Run, Study
from soren_align.tasks import TASKS
from tests.support.run_folders import add_results
from tests.support.study_runs import put_held_out, written

RATES = {"adamw": (0.001, 0.002, 0.004), "soren": (0.003, 0.005, 0.009)}
LOSSES = (1.4, 1.2, 1.3)  # the second trial is the best
FRESH = (101, 102, 103)
VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0", "trl": "1.16.0", "soren-align": __version__}


def study_file():
    space = {"optimizer.lr": {"low": 1e-3, "high": 1e-1, "log": True}, "optimizer.aux_lr": "=optimizer.lr"}
    return {
        "recipe": "quickstart/sft",
        "set": {"trainer.max_steps": 150},
        "candidates": {name: {"set": {"optimizer.name": name}, "space": {}} for name in RATES},
        "search": {"space": space, "method": "random", "trials": 3, "seeds": [0], "metric": "eval_loss"},
        "verdict": {"seeds": [*FRESH], "reference": "adamw"},
        "output_dir": "runs/planted",
    }


class PlantedStudy:
    """A study of two optimizers in a folder; `runs` are those that it lists."""

    def __init__(self, folder):
        self.folder, self.file = folder, study_file()
        self.runs, self.at_edge = [], {name: {} for name in RATES}
        for name, rates in RATES.items():
            self.runs += [self.add(name, f"{i:02}", 0, rates[i], LOSSES[i]) for i in range(3)]
            self.runs += [self.add(name, str(seed), seed, rates[1], 1.25, stage="verdict") for seed in FRESH]

    @property
    def study(self):
        return Study("planted", self.file, False, self.candidates, None)

    @property
    def candidates(self):
        """The listed runs, as their folders record them, and the trials that they select."""
        metric, candidates = self.file["search"]["metric"], []
        for name in RATES:
            runs = [read_run(run, RunFolder(self.folder / run.folder), metric) for run in self.runs]
            trials, verdict = ([r for r in runs if (r.candidate, r.stage) == (name, stage)] for stage in STAGES)
            selected = select(trials, higher_is_better=False)
            settings = {"optimizer.name": name}
            candidates.append(Candidate(name, settings, {}, trials, selected, self.at_edge[name], verdict))
        return candidates

    def add(self, name, last, seed, rate, loss, stage="search", sets=(), **identity):
        """Make a finished run's folder; return the run as a study lists it."""
        place = f"{stage}/{name}/{last}"
        sets = [f"optimizer.name={name}", f"optimizer.lr={rate}", f"optimizer.aux_lr={rate}", *sets]
        common = [f"trainer.seed={seed}", "trainer.max_steps=150", f"run.output_dir={self.folder / place}", "eval=null"]
        common += [f"data.eval_part={stage}"]
        made = recipe.load("quickstart/sft", [*common, *sets])
        folder = RunFolder(self.folder / place)
        folder.path.mkdir(parents=True)
        folder.recipe.write_text(to_yaml(made))
        identity = {
            "starting_weights": "a" * 16, "batches": f"{seed:016}", "num_batches": 150, "data": "b" * 16,
            "recipe": recipe_hash(made),
            "precision": {"weights": ["float32"], "updated": ["float32"], "autocast": "no"}, "processes": 1,
            "global_batch_size": 64, "versions": VERSIONS, "device": "cpu",
        } | identity  # fmt: skip
        folder.replace(status="finished", task="sft", versions=VERSIONS, seeds={"trainer": seed, "init": 1},
                       identity=identity, training={"steps": 150, "first_loss": 4.0, "last_loss": 1.0})  # fmt: skip
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in curve(loss)))
        if stage == "verdict":
            put_held_out(folder, 5.0, loss)
        self.seal(place)
        number = int(last) if stage == "search" else FRESH.index(seed)
        return Run(name, stage, number, seed, place, {"optimizer.lr": rate}, "waiting")

    def seal(self, place, weights=None):
        """Record a run's files as they are."""
        folder = RunFolder(self.folder / place)
        folder.update(written=written(folder, recipe.load_resolved(folder.recipe), weights or str(place)))

    def change(self, place, **keys):
        """Change keys of a run's identity."""
        folder = RunFolder(self.folder / place)
        folder.update(identity=folder.read()["identity"] | keys)

    def edit(self, place, old, new):
        """Change the text of a file of a run."""
        file = self.folder / place
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new, 1))

    def drop(self, place, key):
        """Remove a key of run.json."""
        folder = RunFolder(self.folder / place)
        folder.replace(**{name: value for name, value in folder.read().items() if name != key})

    def problems(self):
        runs, unreadable = read_files(self.folder, self.runs)
        return [*unreadable, *audit(runs, self.folder)]

    def cautions(self):
        file, runs = StudyFile.model_validate(self.file), read_files(self.folder, self.runs)[0]
        return [*cautions(self.study, file, runs), *accidents(self.study, runs, self.folder)]


def diverge(folder):
    """Make a finished run one that diverged."""
    record = {key: value for key, value in folder.read().items() if key != "training"}
    folder.replace(**record | {"status": "training", "last_error": "step 3: NaN", "diverged": True})
    folder.metrics.write_text('{"step": 2, "loss": NaN}\n{"step": 3, "lo')


def curve(loss):
    return [{"step": 0, "eval_loss": 4.2}, {"step": 10, "loss": 3.9}, {"step": 150, "eval_loss": loss}]


@pytest.fixture
def study(tmp_path):
    return PlantedStudy(tmp_path)


def test_an_undisturbed_study_has_no_problem(study):
    assert study.problems() == []


def only(problems, *words):
    """The one problem, which contains the words and ends with a remedy."""
    assert len(problems) == 1, problems
    for word in words:
        assert word in problems[0], problems
    assert ";" in problems[0], "a remedy"


def train_longer(study):
    folder = RunFolder(study.folder / "verdict/adamw/101")
    folder.update(training=folder.read()["training"] | {"steps": 300})
    study.change("verdict/adamw/101", batches="e" * 16, num_batches=300)


def copy_held_out(study):
    shutil.copy(study.folder / "verdict/adamw/101/held_out.json", study.folder / "verdict/soren/101")


# By accident: how it is planted, and what the one problem contains.
ACCIDENTS = {
    "other initial weights": (
        lambda s: s.change("verdict/soren/102", starting_weights="0" * 16),
        "verdict/soren/102: has other initial weights than the other runs ("),
    "another number of steps": (
        train_longer, "verdict/adamw/101: has another number of steps than the other runs (300 instead of 150)"),
    "the weights of one seed for two": (
        lambda s: s.seal("verdict/soren/103", weights="verdict/soren/101"),
        "verdict/soren/103: has the same weights as verdict/soren/101, although the two runs"),
    "the held-out losses of another run": (
        copy_held_out, "has the same held-out losses as verdict/", "although their weights differ"),
    **{part: (lambda s, part=part, new=value: s.change("search/adamw/01", **{part: new}), "search/adamw/01: ", words)
       for part, value, words in (
           ("precision", {"weights": ["bfloat16"], "updated": ["float32"], "autocast": "no"}, "another precision"),
           ("processes", 2, "another number of processes than the other runs (2 instead of 1)"),
           ("versions", VERSIONS | {"torch": "2.12.0"}, "torch: '2.12.0' instead of '2.13.0'"),
           ("data", "c" * 16, "other training or held-out examples"),
           ("global_batch_size", 32, "another global batch size"),
           ("device", "NVIDIA H200", "another kind of device"),
           ("batches", None, "other batches"))},
}  # fmt: skip


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_an_accident_is_one_problem_with_a_remedy(study, accident):
    plant, *words = ACCIDENTS[accident]
    plant(study)
    only(study.problems(), *words)


def test_another_data_order_for_one_optimizer_is_caught(study):
    for number in range(3):
        study.change(f"search/soren/{number:02}", batches="f" * 16)
    study.runs.append(study.add("adamw", "03", 0, 0.006, 1.5))  # so that most have the other order
    only(study.problems(), "search/soren/00 and 2 more runs: has other batches, or the same in another order", "f" * 16)


@pytest.mark.parametrize("places", ["*/*/102", "verdict/*/*"])
@pytest.mark.parametrize(("part", "value", "words"), [
    ("data", "c" * 16, "other training or held-out examples than the other runs"),
    ("versions", VERSIONS | {"torch": "2.12.0"}, "other versions of packages than the other runs"),
])  # fmt: skip
def test_terms_that_differ_for_a_seed_of_all_candidates_or_for_the_whole_verdict_are_caught(
    study, places, part, value, words
):
    for place in study.folder.glob(places):
        study.change(place, **{part: value})
    problems = study.problems()
    assert problems
    assert all(words in problem for problem in problems)


def test_new_adapters_start_from_other_weights_at_each_seed(study):
    for place in study.folder.glob("*/*/*"):
        folder = RunFolder(place)
        values = recipe.load_resolved(folder.recipe).model_dump()
        values["model"]["lora"] = {"r": 4}
        folder.recipe.write_text(to_yaml(recipe.Recipe.model_validate(values)))
        study.change(place, starting_weights=place.name if place.name.startswith("10") else "a" * 16)
    assert study.problems() == []
    study.change("verdict/soren/102", starting_weights="0" * 16)
    only(study.problems(), "verdict/soren/102: has other initial weights than the other runs with seed 102")


def put_evaluation(study, place, answer):
    """The evaluation of a final run, by its own weights; the folder of the results."""
    folder = RunFolder(study.folder / place)
    planted = recipe.load_resolved(folder.recipe)
    folder.recipe.write_text(to_yaml(planted.model_copy(update={"eval": Eval(suite="quickstart")})))
    add_results(folder)
    output = folder.evaluation("quickstart")
    results = json.loads((output / "results.json").read_text())
    results["rows"][-1]["weights_sha256"] = folder.read()["written"]["weights_sha256"]
    columns = ("zoo_mc", "zoo_gen", "preference")
    each = {name: {"points": [1.0] * 5, "clusters": None, "prompts": "0" * 64} for name in columns}
    for row in results["rows"]:
        row["scores"] = {name: {"value": 100.0} for name in columns}
        row.pop("differences", None), row.pop("start", None)
    points = {"format": 1, "rows": {row["name"]: each for row in results["rows"]}}
    (output / "results.json").write_text(json.dumps(results))
    (output / "points.json").write_text(json.dumps(points))
    (output / "samples/SFT").mkdir(parents=True, exist_ok=True)
    (output / "samples/SFT/zoo_mc.jsonl").write_text(json.dumps({"acc": 1.0, "answer": answer}) + "\n")
    return output


def test_answers_of_another_run_are_caught(study):
    outputs = {
        f"{name}/{seed}": put_evaluation(study, f"verdict/{name}/{seed}", f"{name} {seed}")
        for name in RATES
        for seed in FRESH
    }
    assert study.problems() == []
    shutil.copy(outputs["soren/101"] / "samples/SFT/zoo_mc.jsonl", outputs["soren/103"] / "samples/SFT")
    only(study.problems(), "verdict/soren/103: has the same answers as verdict/soren/101, although their weights")
    shutil.rmtree(outputs["soren/103"])
    shutil.copytree(outputs["soren/101"], outputs["soren/103"])
    weights, answers = study.problems()
    assert weights.startswith("verdict/soren/103: the evaluated weights are not the weights of this run's model")
    assert "the same answers" in answers


def test_questions_that_were_not_answered_are_caught(study):
    output = put_evaluation(study, "verdict/soren/102", "")
    for file in ("points.json", "results.json"):
        content = json.loads((output / file).read_text())
        for row in content["rows"].values() if file == "points.json" else [row["scores"] for row in content["rows"]]:
            del row["zoo_gen"]
        (output / file).write_text(json.dumps(content))
    only(study.problems(), "verdict/soren/102: no question of zoo_gen was answered", "evaluate the run again")


@pytest.mark.parametrize("key", ["written", "identity"])
def test_a_record_without_its_hashes_is_a_caution(study, key):
    study.drop("search/soren/01", key)
    assert study.problems() == []
    words = "search/soren/01: run.json has no hashes, so equal terms were not checked"
    assert words in study.cautions()


def test_held_out_losses_far_from_the_last_evaluation_are_a_caution(study):
    put_held_out(RunFolder(study.folder / "verdict/soren/102"), 5.0, 3.0)
    (caution,) = (each for each in study.cautions() if "held_out.json" in each)
    assert caution.startswith("verdict/soren/102: held_out.json has a mean of 3, but the last evaluation 1.25")


def test_a_step_chosen_by_the_examples_that_judge_is_a_caution(study):
    study.edit("verdict/soren/101/recipe.yaml", "trainer:\n", "trainer:\n  load_best_model_at_end: true\n")
    assert any("chose the step of each model" in caution for caution in study.cautions())


def test_differences_of_the_schedule_that_a_study_declares_are_cautions(study):
    study.file["candidates"]["soren"]["set"]["trainer.max_grad_norm"] = 1.0
    assert any("soren: its trainer.max_grad_norm differ" in caution for caution in study.cautions())


def test_a_search_of_another_size_for_all_is_a_caution(study):
    study.runs += [study.add(name, "03", 0, 0.0033, 1.5) for name in RATES]
    assert study.problems() == []
    assert "the search was extended from 3 to 4 trials of each candidate" in study.cautions()


def test_a_diverged_trial_is_no_problem_but_a_caution(study):
    diverge(RunFolder(study.folder / "search/soren/00"))
    study.at_edge["soren"] = {"optimizer.lr": "high"}
    assert study.problems() == []
    found = study.cautions()
    for words in ("soren: 1 of 3 trials diverged", "unequal numbers of finished trials (adamw 3, soren 2)",
                  "soren: the selected optimizer.lr is the largest value that was tried", "the verdict has 3 seeds"):  # fmt: skip
        assert any(words in caution for caution in found), (words, found)
    for place in study.folder.glob("search/soren/*"):
        diverge(RunFolder(place))
    assert "soren: no trial has finished" in " ".join(study.cautions())


def test_the_metrics_of_a_selection_are_those_that_training_measures():
    for task in TASKS.values():
        assert {metric.removeprefix("eval_") for metric in task.higher_is_better} <= {*task.metrics}
