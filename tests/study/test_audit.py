"""The audit reads run folders, and each planted cheat is a problem; an honest study has none."""

import itertools
import json
import math
import re
import shutil

import pytest
from soren_align import recipe
from soren_align.core import shipped
from soren_align.core.version import __version__
from soren_align.recipe import Eval, recipe_hash, to_yaml
from soren_align.run.folder import RunFolder
from soren_align.study.audit import audit, cautions, conclude
from soren_align.study.config import load_study
from soren_align.study.runs import STAGES, read_files, read_run, select
from soren_align.study.study import Candidate, Run, Study
from soren_align.tasks import TASKS
from tests.support.run_folders import add_results
from tests.support.study_runs import end_all, put_held_out, written

RATES = {"adamw": (0.001, 0.002, 0.004), "soren": (0.003, 0.005, 0.009)}
LOSSES = (1.4, 1.2, 1.3)  # the second trial is the best
FRESH = (101, 102, 103)
VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0", "trl": "1.16.0", "soren-align": __version__}


def study_file(**search):
    space = {"optimizer.lr": {"low": 1e-3, "high": 1e-1, "log": True}, "optimizer.aux_lr": "=optimizer.lr"}
    return {
        "set": {"trainer.max_steps": 150},
        "candidates": {name: {"set": {"optimizer.name": name}, "space": {}} for name in RATES},
        "search": {"space": space, "method": "random", "trials": 3, "seeds": [0], "metric": "eval_loss"} | search,
        "verdict": {"seeds": [*FRESH], "reference": "adamw"},
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
        declared = self.folder / f"candidates/{name}.yaml"
        declared.parent.mkdir(exist_ok=True)
        if not declared.is_file():
            declared.write_text(to_yaml(made))
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

    def again(self, place, *arguments, **changes):
        """Put another run, of `add`'s arguments, in the place of one."""
        shutil.rmtree(self.folder / place)
        stage, name, last = place.split("/")
        self.add(name, last, *arguments, stage=stage, **changes)

    def edit(self, place, old, new, *, is_sealed=False):
        """Change the text of a file of a run; is_sealed: as if it had been so in the training."""
        file = self.folder / place
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new, 1))
        if is_sealed:
            self.seal(place.rpartition("/")[0])

    def drop(self, place, key):
        """Remove a key of run.json."""
        folder = RunFolder(self.folder / place)
        folder.replace(**{name: value for name, value in folder.read().items() if name != key})

    def problems(self):
        runs, unreadable = read_files(self.folder)
        return [*unreadable, *audit(self.study, self.folder, runs)]

    def cautions(self, overlaps=None):
        return list(cautions(self.study, self.folder, read_files(self.folder)[0], overlaps))


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


def test_an_honest_study_has_no_problem(study):
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


# By cheat: how it is planted, and what the one problem contains.
CHEATS = {
    "other initial weights": (
        lambda s: s.change("verdict/soren/102", starting_weights="0" * 16),
        "verdict/soren/102: has other initial weights than the other runs ("),
    "selection on a benchmark": (
        lambda s: s.file["search"].update(metric="zoo_mc"),
        "search.metric: found 'zoo_mc', which is no metric of held-out examples"),
    "another parameter in the verdict": (
        lambda s: s.again("verdict/soren/102", 102, 0.005, 1.25, sets=["optimizer.momentum=0.9"]),
        "verdict/soren/102: differs from other runs of soren", "optimizer.momentum: 0.9 instead of"),
    "a setting that was not searched": (
        lambda s: s.again("verdict/soren/102", 102, 0.006, 1.25),
        "verdict/soren/102: the setting (", "was not tried in the search", "but the best setting of the search"),
    "another recipe": (
        lambda s: s.again("search/soren/00", 0, 0.003, 1.4, sets=["trainer.lr_scheduler_type=constant"]),
        "search/soren/00: differs from", "trainer.lr_scheduler_type: 'constant' instead of 'cosine'"),
    "another number of steps": (
        train_longer, "verdict/adamw/101: has another number of steps than the other runs (300 instead of 150)"),
    "edited values of held-out examples": (
        lambda s: s.edit("verdict/soren/101/held_out.json", '"end": {"eval_loss": [1.', '"end": {"eval_loss": [0.'),
        "verdict/soren/101: held_out.json differs from the file that the training wrote; restore this file"),
    "a run judged by the examples that selected the settings": (
        lambda s: s.edit("verdict/soren/101/recipe.yaml", "part: verdict", "part: search", is_sealed=True),
        "verdict/soren/101: data.eval_part is search, but a run of this stage has verdict"),
    "the weights of one seed for two": (
        lambda s: s.seal("verdict/soren/103", weights="verdict/soren/101"),
        "verdict/soren/103: has the same weights as verdict/soren/101, although the two runs"),
    "a run without hashes of its files": (
        lambda s: s.drop("search/soren/01", "written"),
        "search/soren/01: run.json has no hashes of the training's files"),
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


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_is_one_problem_with_a_remedy(study, cheat):
    plant, *words = CHEATS[cheat]
    plant(study)
    only(study.problems(), *words)


def test_another_data_order_for_one_optimizer_is_caught(study):
    for number in range(3):
        study.change(f"search/soren/{number:02}", batches="f" * 16)
    study.runs.append(study.add("adamw", "03", 0, 0.006, 1.5))  # so that most have the other order
    study.file["search"]["trials"] = 4
    problems = [problem for problem in study.problems() if "order" in problem]
    only(problems, "search/soren/00 and 2 more runs: has other batches, or the same in another order", "f" * 16)


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_trial_more_for_one_optimizer_is_caught(study, is_listed):
    run = study.add("soren", "03", 0, 0.004, 1.5)
    if is_listed:
        study.runs.append(run)
        only(study.problems(), "search/soren: has 4 trials, but the study declares 3 per candidate")
    else:
        unlisted, number = study.problems()
        assert unlisted.startswith("search/soren/03: is a run that the study does not list")
        assert "has 4 trials" in number


def test_a_trial_less_for_one_optimizer_is_caught_and_less_for_all_is_not(study):
    shutil.rmtree(study.folder / "search/adamw/02")
    only(study.problems(), "search/adamw: has 2 trials, but the study declares 3 per candidate")
    shutil.rmtree(study.folder / "search/soren/02")
    study.runs = [run for run in study.runs if not run.folder.endswith("02") or run.stage == "verdict"]
    assert study.problems() == []
    assert "2 trials instead of the declared 3" in " ".join(study.cautions())


def test_a_search_that_was_extended_for_all_is_no_problem(study):
    study.runs += [study.add(name, "03", 0, 0.0033, 1.5) for name in RATES]
    assert study.problems() == []
    assert "extended from 3 to 4 trials" in " ".join(study.cautions())


def test_a_candidate_of_which_no_trial_finished_has_no_verdict_and_is_no_problem(study):
    shutil.rmtree(study.folder / "verdict/soren")
    assert any("verdict/soren: has no run with seed 101, 102, 103" in problem for problem in study.problems())
    for place in study.folder.glob("search/soren/*"):
        diverge(RunFolder(place))
    study.runs = [run for run in study.runs if (run.candidate, run.stage) != ("soren", "verdict")]
    assert study.problems() == []
    assert "soren: no trial has finished" in " ".join(study.cautions())


def test_a_verdict_on_a_seed_of_the_search_is_caught(study):
    for name, rates in RATES.items():
        shutil.rmtree(study.folder / f"verdict/{name}/103")
        run = study.add(name, "103", 0, rates[1], 1.25, stage="search")
        (study.folder / run.folder).rename(study.folder / f"verdict/{name}/103")
    problems = study.problems()
    seeds = [problem for problem in problems if "has seed 0, which the search also used" in problem]
    assert len(seeds) == 2
    assert any(problem.startswith("verdict/soren: has no run with seed 103") for problem in problems)


def test_a_setting_that_is_not_the_best_on_held_out_examples_is_caught(study):
    study.edit("search/soren/02/metrics.jsonl", '"eval_loss": 1.3', '"eval_loss": 1.1', is_sealed=True)
    (problem,) = study.problems()
    setting = (
        "the setting (optimizer.aux_lr 0.005, optimizer.lr 0.005) has eval_loss 1.2, but the best setting of the search"
    )
    assert problem.startswith(
        f"verdict/soren/101 and 2 more runs: {setting} (optimizer.aux_lr 0.009, optimizer.lr 0.009) has 1.1"
    )


def test_an_optimizer_that_is_not_the_declared_one_is_caught(study):
    shutil.rmtree(study.folder / "search/adamw/00")
    run = study.add("soren", "09", 0, 0.001, 1.4)
    (study.folder / run.folder).rename(study.folder / "search/adamw/00")
    problems = study.problems()
    assert any("optimizer.name is 'soren', but the study declares 'adamw'" in problem for problem in problems)


def test_a_recipe_that_was_edited_after_training_and_a_run_without_an_identity_are_caught(study):
    study.edit("search/soren/00/recipe.yaml", "warmup_steps: 20", "warmup_steps: 10")
    study.drop("search/soren/01", "identity")
    problems = study.problems()
    assert any("search/soren/00: recipe.yaml differs from the recipe of the training" in p for p in problems)
    assert any("search/soren/01: run.json has no section `identity`" in p for p in problems)


def test_metrics_that_were_edited_after_training_are_caught(study):
    for seed in FRESH:
        study.edit(f"verdict/soren/{seed}/metrics.jsonl", "1.25", "1.85")
    problems = study.problems()
    assert len(problems) == 3
    words = "metrics.jsonl differs from the file that the training wrote; restore this file"
    assert problems[0].startswith(f"verdict/soren/101: {words}")


def test_a_step_chosen_by_the_examples_that_judge_is_a_caution(study):
    study.edit("verdict/soren/101/recipe.yaml", "trainer:\n", "trainer:\n  load_best_model_at_end: true\n")
    assert any("chose the step of each model" in caution for caution in study.cautions())


def test_an_undeclared_key_that_all_runs_of_a_candidate_have_is_caught(study):
    for place in study.folder.glob("*/soren/*"):
        study.edit(f"{place}/recipe.yaml", "weight_decay: 0.1", "weight_decay: 0.0")
    edited = [problem for problem in study.problems() if "recipe.yaml differs from the recipe" in problem]
    assert len(edited) == 6
    for place in study.folder.glob("*/soren/*"):  # as if all runs had been trained with it
        study.seal(place)
    problems = study.problems()
    assert len(problems) == 6
    assert "search/soren/00: optimizer.weight_decay is 0.0 in this run, but 0.1 in candidates/soren.yaml" in problems[0]
    (study.folder / "candidates/soren.yaml").unlink()
    only(study.problems(), "candidates/soren.yaml: is missing; rerun the study")


@pytest.mark.parametrize("places", ["*/*/102", "verdict/*/*"])
@pytest.mark.parametrize(("part", "value", "words"), [
    ("data", "c" * 16, "other training or held-out examples than the other runs"),
    ("starting_weights", "c" * 16, "other initial weights than the other runs"),
    ("versions", VERSIONS | {"torch": "2.12.0"}, "other versions of packages than the other runs"),
    ("precision", {"weights": ["bfloat16"]}, "another precision than the other runs"),
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
        if folder.recipe.is_file():
            values = recipe.load_resolved(folder.recipe).model_dump()
            values["model"]["lora"] = {"r": 4}
            folder.recipe.write_text(to_yaml(recipe.Recipe.model_validate(values)))
            study.change(place, starting_weights=place.name if place.name.startswith("10") else "a" * 16)
            study.seal(place)
    for name in RATES:
        shutil.copy(study.folder / f"verdict/{name}/101/recipe.yaml", study.folder / f"candidates/{name}.yaml")
    assert study.problems() == []
    study.change("verdict/soren/102", starting_weights="0" * 16)
    only(study.problems(), "verdict/soren/102: has other initial weights than the other runs with seed 102")


def put_points(output, rows):
    """The points of both rows in zoo_mc, and the samples that they are of."""
    points = {name: {"zoo_mc": {"points": each, "clusters": None, "prompts": "0" * 64}} for name, each in rows.items()}
    (output / "points.json").write_text(json.dumps({"format": 1, "rows": points}))
    for name, each in rows.items():
        (output / "samples" / name).mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"filter": "none", "acc": point}) + "\n" for point in each]
        (output / "samples" / name / "zoo_mc.jsonl").write_text("".join(lines))


def put_evaluation(study, place):
    """The evaluation of a final run, by its own weights; the folder of the results."""
    folder = RunFolder(study.folder / place)
    planted = recipe.load_resolved(folder.recipe)
    folder.recipe.write_text(to_yaml(planted.model_copy(update={"eval": Eval(suite="quickstart")})))
    add_results(folder)
    output = folder.evaluation("quickstart")
    results = json.loads((output / "results.json").read_text())
    results["rows"][-1]["weights_sha256"] = folder.read()["written"]["weights_sha256"]
    (output / "results.json").write_text(json.dumps(results))
    put_points(output, {"base": [1.0, 0.0, 0.0, 0.0, 0.0], "SFT": [1.0] * 5})
    return output


def test_points_that_were_edited_with_their_scores_are_caught(study):
    """points.json and results.json alike; the samples have the answers."""
    file = put_evaluation(study, "verdict/soren/102") / "samples/SFT/zoo_mc.jsonl"
    assert study.problems() == []
    file.write_text(file.read_text().replace("1.0", "0.0", 1))
    only(study.problems(), "the scores of SFT in zoo_mc differ from its samples")
    file.unlink()
    only(study.problems(), "SFT/zoo_mc.jsonl: is missing; evaluate the run again")


def test_answers_of_another_run_are_caught(study):
    for name, seed in itertools.product(RATES, FRESH):
        put_evaluation(study, f"verdict/{name}/{seed}")
    assert study.problems() == []
    evaluations = {name: study.folder / f"verdict/{name}/eval" for name in ("adamw/101", "soren/101", "soren/103")}
    shutil.rmtree(evaluations["soren/103"])
    shutil.copytree(evaluations["soren/101"], evaluations["soren/103"])
    only(study.problems(), "verdict/soren/103: the evaluated weights are not the weights of this run's model")
    shutil.rmtree(evaluations["adamw/101"])
    shutil.copytree(evaluations["soren/101"], evaluations["adamw/101"])
    assert len(study.problems()) == 2


def test_differences_of_the_schedule_that_a_study_declares_are_cautions(study):
    study.file["candidates"]["soren"]["set"]["trainer.max_grad_norm"] = 1.0
    for place in [*study.folder.glob("*/soren/*")]:
        study.edit(f"{place}/recipe.yaml", "  seed:", "  max_grad_norm: 1.0\n  seed:", is_sealed=True)
        study.change(place, recipe=recipe_hash(recipe.load_resolved(place / "recipe.yaml")))
        shutil.copy(place / "recipe.yaml", study.folder / "candidates/soren.yaml")
    assert study.problems() == []
    assert any("soren: its trainer.max_grad_norm differ" in caution for caution in study.cautions())


@pytest.mark.rest
@pytest.mark.parametrize(
    ("searched", "name", "edited"),
    [([], "adamw", ("aux_lr: .*", "aux_lr: 0.5", "optimizer.aux_lr: 0.5 instead of 'not set'")),
     (["set.model.lora=null"], "soren", ("aux_lr: .*", "aux_lr: 0.5", "optimizer.aux_lr: 0.5 instead of 'not set'")),
     (["set.model.lora.alpha=null", "search.space.model.lora.r=[4, 8, 16]"], "adamw",
      ("alpha: .*", "alpha: 3.0", "model.lora.alpha: 3.0 instead of 'not set'"))],
    ids=["AdamW's aux_lr", "Soren's aux_lr", "LoRA's alpha"],
)  # fmt: skip
def test_a_key_that_follows_a_searched_one_is_no_undeclared_difference(tmp_path, searched, name, edited):
    """The shipped study searches lr, which aux_lr is unless it is set; LoRA's alpha is its r."""
    data = shipped.ROOT / "recipes/quickstart/data/chat_train.jsonl"
    model = ["set.model.name_or_path=shipped:configs/models/tiny", "set.model.init_seed=1"]
    overrides = [f"output_dir={tmp_path / 'study'}", "search.trials=3", f"set.data.train.path={data}", *model]
    study = load_study("studies/smollm2-lora", [*overrides, *searched])
    end_all(study, lambda run: 1 + abs(math.log(run.parameters["optimizer.lr"] / 0.003)) + run.seed / 1e4)
    result = conclude(tmp_path / "study")
    assert result.problems == []
    assert {(d.candidate, d.reference) for d in result.differences} >= {("soren", "adamw"), ("adamw", "base")}
    rates = [recipe.load_resolved(file).optimizer for file in (tmp_path / f"study/search/{name}").glob("*/recipe.yaml")]
    assert len({rate.aux_lr for rate in rates}) == 3
    assert all(rate.aux_lr == rate.lr for rate in rates)
    pattern, value, words = edited
    last = tmp_path / f"study/search/{name}/02/recipe.yaml"
    last.write_text(re.sub(pattern, value, last.read_text()))
    assert any(problem.startswith(f"search/{name}/02: differs from other runs of {name}") and words in problem
               for problem in conclude(tmp_path / "study").problems)  # fmt: skip


def test_a_diverged_trial_is_no_problem_but_a_caution(study):
    diverge(RunFolder(study.folder / "search/soren/00"))
    study.at_edge["soren"] = {"optimizer.lr": "high"}
    assert study.problems() == []
    overlaps = {"zoo_mc": {"questions": 40, "overlapping": 3, "examples_read": 960}}
    found = study.cautions(overlaps)
    for words in ("soren: 1 of 3 trials diverged", "unequal numbers of finished trials (adamw 3, soren 2)",
                  "soren: the selected optimizer.lr is the largest value that was tried", "the verdict has 3 seeds",
                  "the search has 1 seed, so it is unknown",
                  "zoo_mc: 3 of 40 questions overlap"):  # fmt: skip
        assert any(words in caution for caution in found), (words, found)
    study.file["search"]["seeds"] = [0, 1, 2]
    assert not any("the search has" in caution for caution in study.cautions(overlaps))


def test_the_metrics_of_a_selection_are_those_that_training_measures():
    for task in TASKS.values():
        assert {metric.removeprefix("eval_") for metric in task.higher_is_better} <= {*task.metrics}
