"""A stranger's suite is data: of its files nothing runs, unless the user says that it may."""

import json
import shutil

import pytest
import yaml
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.evaluate.run import stage
from soren_align.evaluate.suite.suites import LM_EVAL_TASKS, load_suite
from soren_align.evaluate.suite.tasks import load_tasks
from soren_align.launch.evaluation import evaluation_settings
from soren_align.recipe import Eval, load, training_part
from tests.support.edited_files import replace
from tests.support.tiny_models import start_of

SHIPPED = shipped.ROOT / "eval" / "quickstart"
TASK = "tasks/zoo_mc.yaml"


@pytest.fixture
def folder(tmp_path):
    """A suite of one task, whose module leaves a mark where it runs."""
    folder = shutil.copytree(SHIPPED, tmp_path / "mine")
    text = (folder / "suite.yaml").read_text().splitlines()
    kept = [line for line in text if "column:" not in line or "zoo_mc" in line]
    (folder / "suite.yaml").write_text("\n".join(kept) + "\n")
    (folder / "tasks" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef docs(docs): return docs\n")
    return folder


def add(folder, text, file=TASK):
    path = folder / file
    path.write_text((path.read_text() if path.is_file() else "") + "\n" + text + "\n")


def change(folder, **keys):
    content = yaml.safe_load((folder / TASK).read_text())
    (folder / TASK).write_text(yaml.safe_dump(content | keys))


def refused(folder, message="--trust-suite"):
    with pytest.raises(UserError, match=message) as error:
        load_tasks(load_suite(folder))
    assert not (folder.parent / "ran").exists()
    return str(error.value)


def test_a_function_is_not_run(folder, models):
    add(folder, "process_docs: !function evil.docs")
    assert "runs code (!function evil.docs); read the suite's files, and add --trust-suite" in refused(folder)
    with pytest.raises(UserError, match="--trust-suite"):
        stage.preflight(Eval(suite=str(folder)), *start_of(models[0]))
    tasks, _ = stage.preflight(Eval(suite=str(folder), trust_suite=True), *start_of(models[0]))
    assert len(tasks["zoo_mc"].eval_docs) == 120
    assert (folder.parent / "ran").exists()


@pytest.mark.parametrize("where", ["beside", "absolute", "twice"])
def test_a_function_in_what_is_included_is_not_run(folder, where):
    add(folder, "process_docs: !function evil.docs", "tasks/more.yml")
    target = {"beside": "more.yml", "absolute": str(folder / "tasks" / "more.yml"), "twice": "between.yml"}[where]
    add(folder, "include: more.yml", "tasks/between.yml")
    add(folder, f"include: {target}")
    refused(folder)


def test_a_function_of_an_importable_module_and_a_class_are_not_run(folder):
    (folder / TASK).write_text((SHIPPED / TASK).read_text() + "\nprocess_docs: !function os.getcwd\n")
    refused(folder)
    (folder / TASK).write_text((SHIPPED / TASK).read_text() + "\nclass: !function evil.docs\n")
    refused(folder)


def test_a_function_in_a_groups_file_or_member_is_not_run(folder):
    group = {"group": "zoo_mc", "task": ["inner"], "aggregate_metric_list": [{"metric": "acc"}]}
    (folder / "tasks" / "inner.yaml").write_text(
        (SHIPPED / TASK).read_text().replace("task: zoo_mc", "task: inner") + "\nprocess_docs: !function evil.docs\n"
    )
    (folder / TASK).write_text(yaml.safe_dump(group))
    suite = load_suite(folder).model_copy(update={"data_root": None})
    with pytest.raises(UserError, match="--trust-suite"):
        load_tasks(suite)
    assert not (folder.parent / "ran").exists()


def test_a_file_by_a_way_through_lm_evals_folder_is_no_file_of_lm_evals(folder):
    up = "../" * len(LM_EVAL_TASKS.resolve().parts)
    add(folder, "process_docs: !function evil.docs")
    replace(folder / "suite.yaml", TASK, f"lm-eval:{up}{str(folder)[1:]}/{TASK}")
    refused(folder)


def test_tasks_that_run_what_a_model_writes_cannot_be_made_to_look_safe(folder):
    change(folder, include=str(LM_EVAL_TASKS / "humaneval" / "humaneval.yaml"), unsafe_code=False)
    assert "run code that a model writes" in refused(folder)
    (folder / TASK).write_text((SHIPPED / TASK).read_text() + "\nunsafe_code: true\n")
    refused(folder, "runs code that a model writes")


@pytest.mark.parametrize("metric", [{"metric": "{folder}/tasks/evil"}, {"metric": "acc", "hf_evaluate": True}])
def test_a_metric_that_is_a_script_is_not_loaded(folder, metric):
    metric = {key: value.format(folder=folder) if isinstance(value, str) else value for key, value in metric.items()}
    change(folder, metric_list=[metric | {"aggregation": "mean", "higher_is_better": True}])
    assert "would be run as a script" in refused(folder)


@pytest.mark.parametrize("escape", [
    "{{ cycler.__init__.__globals__.os.system('touch RAN') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ self._TemplateReference__context.parent }}{{ lipsum.__globals__['os'].popen('touch RAN').read() }}",
])  # fmt: skip
def test_a_template_sees_nothing_of_python(folder, escape):
    change(folder, doc_to_text=escape.replace("RAN", str(folder.parent / "ran")))
    refused(folder, "SecurityError|UndefinedError|is undefined")


@pytest.mark.parametrize("keys", [
    {"dataset_path": "pandas", "dataset_kwargs": {"data_files": "x"}},
    {"dataset_kwargs": {"cache_dir": "/tmp/elsewhere"}},
    {"dataset_kwargs": {"con": "sqlite:///x", "data_files": "y"}},
])  # fmt: skip
def test_loaders_that_do_more_than_read_are_refused(folder, keys):
    change(folder, **keys)
    replace(folder / "suite.yaml", "data_root: shipped:recipes/quickstart/data", "data_root: null")
    refused(folder)


@pytest.mark.parametrize("key", ["task", "column"])
@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/b", "..", ".", "", "x" * 300, "a\nb", ".hidden"])
def test_names_are_path_components(folder, key, name):
    replace(folder / "suite.yaml", f"{key}: zoo_mc", f"{key}: {json.dumps(name)}")
    with pytest.raises(UserError, match=rf"tasks\.0\.{key}: found"):
        load_suite(folder)


def test_a_files_name_is_no_yaml(folder):
    """A newline in it would have ended the generated line that includes it, and begun another."""
    odd = "x\nprocess_docs: !function evil.docs\n#.yaml"
    shutil.copy(folder / TASK, folder / "tasks" / odd)
    replace(folder / "suite.yaml", f"file: {TASK}", f"file: {json.dumps('tasks/' + odd)}")
    load_tasks(load_suite(folder))
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize("text", ["[1]", "a: [", "include: gone.yaml", "include: zoo_mc.yaml", "include: 3", "\x00"])
def test_what_is_no_tasks_file_is_one_sentence(folder, text):
    (folder / TASK).write_text(text)
    refused(folder, r"zoo_mc\.yaml: is no valid task file")


def test_a_run_folders_recipe_trusts_nothing(tmp_path):
    own = [f"run.output_dir={tmp_path}", f"eval.suite={SHIPPED}", "eval.trust_suite=true"]
    recipe = load("quickstart/sft", own)
    assert recipe.eval is not None
    assert recipe.eval.trust_suite  # the user's own recipe
    assert not evaluation_settings(recipe, {}).trust_suite
    assert evaluation_settings(recipe, {"trust_suite": True}).trust_suite
    assert training_part(recipe) == training_part(load("quickstart/sft", own[:-1]))
