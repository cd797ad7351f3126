"""The plan of a study: counts, cost and detectable effects; the shipped studies; the array job."""

import json
import math
import re
import subprocess

import pytest
import typer
from rich.console import Console
from soren_align.cli.app import app
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.recipe import OPTIMIZER_SECTIONS
from soren_align.study.config import first_run, load_study, recipe_of_run
from soren_align.study.estimates import Assumed, Design, detectable_loss, detectable_score
from soren_align.study.plan import ColumnSize, plan_study, print_study_plan
from tests.support import command

STUDIES = [name for name in shipped.studies() if name.startswith("studies/")]
DATA = "shipped:recipes/quickstart/data/chat_train.jsonl"
ALL_DATA = [f"set.data.{key}.path={DATA}" for key in ("train", "eval", "retention")]
MISSING = {  # files that the user names, or another run makes
    "studies/quickstart-optimizers-dpo": ["set.model.name_or_path=org/model"],
    "studies/smollm2-lora": ["set.model.name_or_path=org/model", f"set.data.train.path={DATA}"],
    "studies/boolq": ["set.model.name_or_path=org/model", *ALL_DATA[:2], "set.eval.data_root=null"],
    "studies/pretrained-by": ["set.model.name_or_path=org/model", *ALL_DATA],
    "studies/muon-or-soren": ["set.model.name_or_path=org/model", *ALL_DATA],
}


def run_plan(name, training=3.0e15, maps=1.0e12):
    """The plan of a run of 100 steps, as far as a study's plan reads it."""
    memory = {"device": {"forward_backward": 2e9, "optimizer_step": 3e9 if name == "soren" else 1e9}}
    columns = ["few", "many", "clustered"]
    return {
        "task": "sft",
        "model": {"name_or_path": "org/model", "num_parameters": 7},
        "steps": {"total": 100},
        "optimizer_description": name,
        "compute": {"training_flops": training, "tokens_are_measured": False, "maps_are_counted": name != "htmuon",
                    "hours": {"CPU core": 2.0 if name == "soren" else 1.0}, "hours_assume": "40 GFLOP/s"},
        "processes": {"map_flops": {"all_ranks": maps} if name in ("soren", "muon") else None, "memory_total": memory},
        "evaluation": {"suite": "made-up", "columns": columns, "has_average": True, "num_requests_per_model": 1000},
        "disk": {"model_bytes": 10, "checkpoint_bytes": 40 if name == "adamw" else 30, "num_checkpoints": 2}
            | {"start_bytes": 5},
        "data": {"eval": {"num_kept": 120}},
        "notices": ["the same for all"],
        "problems": [],
    }  # fmt: skip


SIZES = {"few": ColumnSize(120), "many": ColumnSize(12_000), "clustered": ColumnSize(12_000, [1200] * 10)}


def planned(*overrides, **flops):
    study = load_study("quickstart/compare", list(overrides))
    plans = {name: run_plan(name, **flops) for name in study.candidates}
    return plan_study(study, plans, SIZES, "c" * 64)


def test_runs_and_cost_are_those_of_all_candidates():
    plan = planned("search.trials=5", "search.seeds=[0, 1]", "verdict.seeds=[7, 8, 9]")
    assert plan["runs"] == {"search": 40, "verdict": 12, "total": 52}
    runs = 5 * 2 + 3
    assert plan["candidates"]["adamw"]["flops"] == runs * 3.0e15
    assert plan["candidates"]["soren"]["flops"] == runs * (3.0e15 + 100 * 1.0e12)
    assert plan["flops"] == runs * (4 * 3.0e15 + 2 * 100 * 1.0e12)
    assert [name for name, each in plan["candidates"].items() if not each["maps_are_counted"]] == ["htmuon"]
    assert plan["hours"] == {"CPU core": runs * (2.0 + 3 * 1.0)}
    assert plan["candidates"]["soren"]["memory_bytes"] == 3e9
    assert (plan["evaluation"]["num_models"], plan["evaluation"]["num_requests"]) == (13, 13_000)
    assert plan["notices"] == ["the same for all"]
    assert planned(training=None)["flops"] is None


def test_detectable_effects_are_those_of_the_power_analysis():
    retention = "verdict.retention={columns: [zoo_mc], margin: 5.0}"
    plan = planned("verdict.seeds=[7, 8, 9]", "verdict.assume={seed_sd: 0.25}", "verdict.power=0.9", retention)
    section = plan["detectable"]
    # Three columns, their average and the loss, of four candidates with the base and of six pairs, which are tested for
    # equivalence too; one column is retained.
    assert section["comparisons"] == 4 * (5 + 1) + 2 * 6 * 5
    design = Design(seeds=3, num_tests=section["comparisons"], power=0.9)
    for column, size in SIZES.items():
        for kind, to_base in (("to_base", True), ("to_reference", False)):
            expected = detectable_score(design, Assumed(seed_sd=0.25), size.questions, size.clusters, to_base=to_base)
            assert section["columns"][column][kind] == expected
    expected = detectable_loss(design, Assumed(), 120, to_base=True)
    assert section["held_out"]["to_base"] == expected > detectable_loss(design, Assumed(), 1000, to_base=True)
    effects = {column: section["columns"][column]["to_base"] for column in SIZES}
    assert effects["many"] < effects["clustered"] < effects["few"]
    more = planned("verdict.seeds=[7, 8, 9, 10, 11, 12]", "verdict.assume={seed_sd: 0.25}", "verdict.power=0.9")
    assert more["detectable"]["held_out"]["to_base"] < section["held_out"]["to_base"]


def test_disk_space_is_that_of_all_runs_and_of_checkpoints_that_are_being_written():
    seeds = ("search.seeds=[0]", "verdict.seeds=[7, 8, 9]")
    plan = planned("search.trials=5", "jobs=3", *seeds)
    per_study = (10 + 2 * 40 + 5) + 3 * (10 + 2 * 30 + 5)  # of one run of each candidate
    assert plan["disk_bytes"] == (5 + 3) * per_study + 3 * 40
    fewer = planned("search.trials=5", "jobs=3", *seeds, "search.keep_models=false")
    assert fewer["disk_bytes"] == 3 * per_study + 3 * 40 + 3 * (10 + 2 * 40 + 5)
    assert "disk      2.68 kB at most" in printed(plan)


def test_all_pairs_are_a_larger_family_and_need_larger_effects():
    one, pairs = (
        planned(f"verdict.reference={name}", "verdict.equivalence=null")["detectable"] for name in ("adamw", "all")
    )
    assert (one["comparisons"], pairs["comparisons"]) == (7 * 5, 10 * 5)
    assert pairs["held_out"]["to_reference"] > one["held_out"]["to_reference"]
    assert "to each other" in printed(planned())


def test_an_unknown_assumption_is_refused():
    with pytest.raises(UserError, match=r"verdict.assume.seed_std: unknown key; did you mean 'seed_sd'"):
        planned("verdict.assume={seed_std: 1.0}")


def printed(plan):
    console = Console(width=80, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_study_plan(plan, console)
    return console.export_text()


def test_the_plan_fits_eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # as on a terminal: in a file one record is one line
    for plan in (planned(), planned(training=None)):
        text = printed(json.loads(json.dumps(plan)))
        assert max(map(len, text.splitlines())) <= 80
        assert re.search(r"runs +80\n +60 of the search: 4 candidates x 5 trials x 3 seeds\n +20 of the verdict", text)
        assert "80% power, Holm over" in text


@pytest.mark.model
def test_the_command_plans_a_study_and_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sets = ["--set", "candidates={adamw: {set: {optimizer.name: adamw}}, soren: {set: {optimizer.name: soren}}}"]
    result = command.run("plan", "quickstart/compare", "--json", *sets)
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["runs"] == {"search": 30, "verdict": 10, "total": 40}
    assert plan["steps"] == 100
    assert {column: each["questions"] for column, each in plan["detectable"]["columns"].items()} == {
        "zoo_mc": 120, "zoo_gen": 120, "preference": 120,
    }  # fmt: skip
    assert plan["candidates"]["adamw"]["flops"] < plan["candidates"]["soren"]["flops"]
    num_bytes = 4 * plan["model"]["num_parameters"]
    # A model, its random start, and two checkpoints of the weights and one or two moments.
    assert 40 * num_bytes * (1 + 1 + 2 * 2) < plan["disk_bytes"] <= 41 * num_bytes * (1 + 1 + 2 * 3)
    assert list(tmp_path.iterdir()) == []


def relative(space):
    """A search space as plain data; a list of rates as their number and width, in half decades: AdamW's are smaller."""
    plain = {key: each if isinstance(each, list | str) else each.model_dump() for key, each in space.items()}
    rates = {key: each for key, each in plain.items() if isinstance(each, list) and key.endswith("lr")}
    return plain | {key: [len(each), round(2 * math.log10(max(each) / min(each)))] for key, each in rates.items()}


@pytest.mark.parametrize("name", STUDIES)
def test_every_shipped_study_loads_and_is_equal_for_all(name):
    study = load_study(name, MISSING.get(name, []))
    recipes = {candidate: recipe_of_run(study, first_run(study, candidate)) for candidate in study.candidates}
    optimizers = {each.optimizer.name for each in recipes.values()}
    if name == "studies/pretrained-by":  # candidates are maps
        assert optimizers == {"adamw", "muon", "soren"}
    else:
        assert optimizers == {"soren" if c == "released-exact" else c.removeprefix("released-") for c in recipes}
    assert {*study.candidates} >= {"adamw", "muon", "soren"}
    assert len({json.dumps(relative(study.space(candidate))) for candidate in recipes}) == 1
    others = [recipe.model_dump(exclude={"optimizer", "run", "extends"}) for recipe in recipes.values()]
    assert all(other == others[0] for other in others)
    assert study.output_dir == f"runs/{name}"


@pytest.mark.parametrize(("name", "family"), [("qwen2.5-3b-sft", "qwen2.5-3b"), ("mistral-7b-dpo", "mistral-7b")])
def test_the_papers_selected_adamw_lies_inside_the_space(name, family):
    grids = json.loads((shipped.ROOT / "recipes" / family / "paper-grid.json").read_text())
    study = load_study(f"studies/{name}")
    space = study.free("adamw")["optimizer.lr"]
    assert 2 * space.low <= grids["lr"]["adamw"]["selected"] <= space.high / 2
    assert {*study.candidates} == {*OPTIMIZER_SECTIONS}


ARRAY_JOB = shipped.ROOT / "configs/slurm/compare.sbatch"


def test_the_array_job_is_bash_that_calls_existing_options():
    subprocess.run(["bash", "-n", ARRAY_JOB], check=True)
    text = ARRAY_JOB.read_text()
    options = {option for each in typer.main.get_command(app).commands["compare"].params for option in each.opts}
    (call,) = re.findall(r"^srun .* soren-align compare (.*) &$", text, re.MULTILINE)
    written = set(re.findall(r"--[a-z-]+", call)) | {"--processes"}
    assert written <= options
    assert "--jobs 1" in call
    for line in re.findall(r"compare.sbatch (\S+)", text):
        assert line in ("STUDY", "recipes/studies/qwen2.5-3b-sft.yaml")
    assert (shipped.ROOT / "recipes/studies/qwen2.5-3b-sft.yaml").is_file()
