"""A study's file is checked before anything runs, and every mistake has its place."""

import re

import pytest
import yaml
from soren_align.core import shipped
from soren_align.core.document import dump
from soren_align.core.errors import UserError
from soren_align.study.config import first_run, load_resolved_study, load_study, recipe_of_run
from tests.support import command
from tests.support.study_runs import TINY, study_of

MISSING = {
    "studies/quickstart-optimizers-dpo": ("first run the recipe", 1),
    "studies/smollm2-lora": ("no file data/train.jsonl", 1),
    "studies/boolq": ("no file data/boolq/train.jsonl", 3),  # two files, and the questions
    "studies/pretrained-by": ("no file data/short-docstrings/train.jsonl", 4),  # three files of data, and a model
    "studies/muon-or-soren": ("no file data/short-docstrings/train.jsonl", 4),
}
"""Studies that need files of the user's, or of another run: what is found first, and how many."""


@pytest.mark.rest
def test_the_shipped_studies_are_studies_and_no_recipes():
    assert "quickstart/compare" in shipped.studies()
    assert "quickstart/sft" in shipped.recipes()
    assert not shipped.studies().keys() & shipped.recipes().keys()
    for name in shipped.studies():
        if name in MISSING:
            finding, num_missing = MISSING[name]
            with pytest.raises(UserError, match=finding) as caught:
                load_study(name)
            assert len(caught.value.problems) == num_missing
        else:
            load_study(name)


def test_the_page_of_the_studies_has_their_runs_and_names_those_with_unequal_search_spaces():
    page = (shipped.ROOT / "recipes/studies/README.md").read_text(encoding="utf-8")
    unequal = set()
    for name, file in shipped.studies().items():
        study = yaml.safe_load(file.read_text(encoding="utf-8"))
        candidates, search, verdict = study["candidates"], study["search"], study["verdict"]
        num_runs = len(candidates) * (search["trials"] * len(search.get("seeds", [0])) + len(verdict["seeds"]))
        assert re.search(rf"^\| `{name.removeprefix('studies/')}` \| .* \| {num_runs}\b", page, re.MULTILINE), name
        unequal |= {name.removeprefix("studies/")} if any("space" in each for each in candidates.values()) else set()
    paragraphs = [" ".join(text.split()) for text in page.split("\n\n")]
    (paragraph,) = [text for text in paragraphs if "search space" in text and "except" in text]
    names = {*re.findall(r"`([\w/.-]+)`", paragraph)} & {each.removeprefix("studies/") for each in shipped.studies()}
    assert names == unequal


def test_the_resolved_file_reads_back_equal(tmp_path):
    study = study_of(tmp_path)
    file = tmp_path / "resolved.yaml"
    file.write_text(dump(study.model_dump()))
    assert load_resolved_study(file) == study == load_study(str(file))


def test_the_recipe_of_a_run_has_its_keys_and_no_evaluation_in_the_search(tmp_path):
    study = load_study("quickstart/compare", [f"output_dir={tmp_path}"])
    run = first_run(study, "muon", high=True)
    recipe = recipe_of_run(study, run)
    assert recipe.optimizer.name == "muon"
    assert recipe.optimizer.lr == recipe.optimizer.aux_lr == study.search.space["optimizer.lr"].high
    assert recipe.trainer["seed"] == 101
    assert recipe.run.output_dir == f"{tmp_path}/verdict/muon/101"
    assert recipe.eval.suite == "quickstart"


@pytest.mark.parametrize(("change", "message"), [
    ("verdict.seeds=[101,102]", "verdict.seeds: found [101, 102]; write at least 3"),
    ("verdict.seeds=[0,101,102]", "search.seeds also has 0"),
    ("verdict.seeds=[1,1,2,3]", "write each seed once"),
    ("verdict.reference=lion", "there is no candidate 'lion'"),
    ("set.eval={suite: quickstart} | search.metric=eval_zoo_mc", "a benchmark, which must not select settings"),
    ("search.metric=eval_rewards/margins", "no metric of held-out examples; write eval_loss or"),
    ("search.method=grid", "a grid needs a list of values"),
    ("search.space.optimizer.aux_lr==optimizer.rate", "but this key is not searched; write = and one of optimizer.lr"),
    ("search.space.optimizer.lr.low=0", "low must be more than 0, or write log: false"),
    ("search.space.optimizer.lr.high=1e-4", "low must be less than high"),
    ("search.space.optimizer.lr=fast", "write {low: 1.0e-3, high: 1.0e-1}, a list of values"),
    ("set.trainer.seed=3", "is set by the study itself"),
    ("set.trainer.eval_steps=4", "the last step, 6, is not evaluated with trainer.eval_steps 4"),
    ("set.data.eval=null | set.trainer.eval_strategy=no", "has no data.eval"),
    ("candidates.soren.set.optimizer.momentun=0.9", "optimizer.momentun: unknown key; did you mean 'momentum'?"),
    ("candidates.soren.space.optimizer.momentum={low: 0.5, high: 1.5, log: false}", "optimizer.momentum: found 1.5"),
    ("candidates.so/ren={}", "candidates.so/ren"),
    ("candidates.base={}", "candidates.base: is a reserved name"),
    ("verdict.retention={columns: [zoo_mc], margin: 1.0}", "the suite has no column 'zoo_mc'"),
    ("recipe=quickstart/sgd", "no such file, nor a shipped recipe"),
])  # fmt: skip
def test_a_mistake_is_reported(tmp_path, change, message):
    with pytest.raises(UserError) as error:
        study_of(tmp_path, *change.split(" | "))
    assert message in str(error.value)


def test_a_mistake_in_a_candidates_recipe_has_the_line_of_the_study(tmp_path):
    with pytest.raises(UserError) as error:
        study_of(tmp_path, text=TINY.replace("soren: {}", "soren: {set: {optimizer.lrr: 1}}"))
    assert f"{tmp_path}/tiny.yaml:12 candidates.soren.set optimizer.lrr: unknown key" in str(error.value)


@pytest.mark.parametrize("values", ["{low: 1.0e-3, high: 20.0}", "[0.001, 20.0, 0.01]"])
def test_a_space_that_reaches_a_decay_of_all_weights_is_refused(tmp_path, values):
    with pytest.raises(UserError) as error:
        study_of(tmp_path, f"candidates.soren.space.optimizer.lr={values}")
    assert "candidates.soren.space optimizer.lr: 20 times weight_decay 0.1 is 2" in str(error.value)


def test_a_grid_has_one_trial_per_point(tmp_path):
    with pytest.raises(UserError, match=r"the grid of .* has 2 points, but search.trials is 3"):
        study_of(tmp_path, "search.method=grid", "search.space.optimizer.lr=[0.001, 0.01]")


def test_a_recipe_is_no_study_and_the_list_of_recipes_has_no_study(tmp_path):
    result = command.run("compare", "quickstart/sft", cwd=tmp_path)
    assert result.returncode == 2
    assert "is a recipe, not a study; to train it" in result.stderr
    file = shipped.recipes()["quickstart/sft"]
    assert "is a recipe, not a study; to train it" in command.run("compare", file).stderr
