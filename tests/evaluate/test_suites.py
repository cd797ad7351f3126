"""A suite is read strictly, and its data are there before anything is trained."""

import re
import shutil

import pytest
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.evaluate.suite.suites import Suite, SuiteTask, load_suite
from soren_align.evaluate.suite.tasks import load_tasks
from tests.support.edited_files import replace

SHIPPED = shipped.ROOT / "eval" / "quickstart"


@pytest.fixture
def folder(tmp_path):
    """A copy of the shipped suite that may be damaged."""
    return shutil.copytree(SHIPPED, tmp_path / "mine")


def change(folder, old, new, file="suite.yaml"):
    replace(folder / file, old, new)


def test_the_shipped_suite_is_found_by_name_by_file_and_by_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load_suite("quickstart") == load_suite(SHIPPED / "suite.yaml") == load_suite(str(SHIPPED))
    assert load_suite("quickstart").name == "quickstart"
    load_tasks(load_suite("quickstart"))


def test_a_data_root_is_taken_from_the_suites_folder(folder):
    shutil.copytree(shipped.ROOT / "recipes/quickstart/data", folder / "data")
    change(folder, "shipped:recipes/quickstart/data", "data")
    suite = load_suite(folder)
    assert suite.data_folder() == folder / "data"
    load_tasks(suite)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("title: Quickstart zoo", "titel: Quickstart zoo", "suite.yaml:2 titel: unknown key; did you mean 'title'?"),
    ("title: Quickstart zoo", "", "title: is required"),
    ("title:", "path: here\ntitle:", "path: unknown key"),
    ("fewshot: 1234", "fewshots: 1234", "seeds.fewshots: unknown key; did you mean 'fewshot'?"),
    ("metric: acc,", "metrik: acc,", "suite.yaml:8 tasks.0.metrik: unknown key; did you mean 'metric'?"),
    ("batch_size: 60", "batch_size: auto", "batch_size: found 'auto'"),
    ("batch_size: 60", "batch_size: 0", "batch_size: found 0"),
    ("apply_chat_template: true", "apply_chat_template: yes please", "apply_chat_template: found 'yes please'"),
    ("column: zoo_gen", "column: zoo_mc", "column 'zoo_mc' occurs twice"),
    ("column: zoo_gen", "column: zoo/gen", "tasks.1.column: found 'zoo/gen'"),
    ("tasks/zoo_mc.yaml", "tasks/zoo_mcc.yaml", "suite.yaml:8 tasks.0.file: there is no task file"),
    ("title: Quickstart zoo", "title: [", "not valid YAML"),
])  # fmt: skip
def test_a_mistake_in_a_suite_is_named(folder, old, new, message):
    change(folder, old, new)
    with pytest.raises(UserError, match=re.escape(message)):
        load_suite(folder)


def test_errors_name_the_page_of_all_keys(folder):
    change(folder, "metric: acc,", "metrik: acc,")
    with pytest.raises(UserError) as error:
        load_suite(folder)
    assert error.value.problems[-1].startswith("`soren-align docs evaluation` lists all keys")
    page = (shipped.ROOT / "docs/evaluation.md").read_text()
    assert all(f"\n| `{key}` |" in page for form in (Suite, SuiteTask) for key in form.model_fields if key != "path")


def test_a_suite_needs_no_more_than_a_title_and_tasks_with_a_metric(folder):
    data = "data_root: shipped:recipes/quickstart/data\n"
    (folder / "suite.yaml").write_text(f"title: Mine\n{data}tasks:\n- {{task: zoo_mc, metric: acc}}\n")
    shutil.copy(folder / "tasks/zoo_mc.yaml", folder)
    suite = load_suite(folder)
    assert (suite.batch_size, suite.apply_chat_template, suite.dtype) == (8, False, "float32")
    assert suite.seeds == load_suite("quickstart").seeds
    assert suite.tasks[0].column == "zoo_mc"
    assert load_tasks(suite)["zoo_mc"].config.num_fewshot in (None, 0)


def test_a_task_file_without_metrics_has_lm_evals(folder):
    file = folder / "tasks/zoo_mc.yaml"
    text = file.read_text()
    before, _, after = text.partition("metric_list:")
    file.write_text(before + after[after.index("metadata") :])
    load_tasks(load_suite(folder))
    change(folder, "metric: acc,", "metric: f1,")
    with pytest.raises(UserError, match="zoo_mc has no metric 'f1'; write acc or acc_norm"):
        load_tasks(load_suite(folder))


@pytest.mark.parametrize(("own", "expected"), [(None, 2), (0, 0), (1, 1)])
def test_without_num_fewshot_the_task_files_number_holds(folder, own, expected):
    file = folder / "tasks/zoo_mc.yaml"
    file.write_text(file.read_text() + "num_fewshot: 2\n")
    suite = load_suite(folder)
    task = suite.tasks[0].model_copy(update={"num_fewshot": own})
    assert load_tasks(suite.model_copy(update={"tasks": [task]}))["zoo_mc"].config.num_fewshot == expected


def test_an_unknown_suite_is_a_question_back():
    with pytest.raises(UserError, match="did you mean 'quickstart'"):
        load_suite("quikstart")


@pytest.mark.parametrize(("old", "new", "message"), [
    ("shipped:recipes/quickstart/data", "nowhere", "there is no dataset folder"),
    ("metric: exact_match", "metric: acc", "zoo_gen has no metric 'acc'; write exact_match"),
    ("filter: none", "filter: strict", "zoo_mc has no filter 'strict'; write none"),
    ("metric: acc,", "metric: mcc,", "zoo_mc: mcc is not a mean over questions, and models can be compared only by"),
    ("metric: acc,", "metric: perplexity+acc,", "perplexity is not a mean over questions"),
    ("metric: acc,", "metric: acc, also: [bits_per_byte],", "such means; write acc"),
    ("", "several", "zoo_gen.yaml: the filter 'numbers' gives a list of answers, but a score is of one; add"),
    ("task: zoo_gen,", "task: zoo_generate,", None),  # an alias of ours is a name of lm-eval's
])  # fmt: skip
def test_preflight_finds_what_would_fail_after_training(folder, old, new, message):
    for metric in ("mcc", "perplexity", "bits_per_byte"):
        change(folder, "metric_list:", f"metric_list:\n  - metric: {metric}", "tasks/zoo_mc.yaml")
    if new == "several":
        filters = (
            "filter_list:\n  - {name: numbers, filter: [{function: regex, regex_pattern: '[0-9]+'}]}\nmetric_list:"
        )
        change(folder, "metric_list:", filters, "tasks/zoo_gen.yaml")
    else:
        change(folder, old, new)
    suite = load_suite(folder)
    if message is None:
        load_tasks(suite)
        return
    with pytest.raises(UserError, match=re.escape(message)):
        load_tasks(suite)
