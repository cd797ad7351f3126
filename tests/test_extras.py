"""Without lm-eval and DeepSpeed soren-align trains, plans and chats; what needs them is one sentence with its command."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from soren_align.core.errors import UserError
from soren_align.core.extras import EXTRAS, is_installed, require

from tests.support.command import Result, overrides

ROOT = Path(__file__).resolve().parent.parent
# Modules that cannot be found, as if they were not installed; then each command in this one process.
CODE = """
import json, sys
from importlib.machinery import PathFinder
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {"lm_eval", "deepspeed"}:
            return None
        return super().find_spec(name, path, target)
sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
from tests.support.command import run
results = [run(*words) for words in json.loads(sys.argv[1])]
assert not {"lm_eval", "deepspeed"} & {*sys.modules}
print(json.dumps(results))
"""
STUDY = "studies/quickstart-optimizers-sft"
INSTALL_EVAL = 'needs lm-eval, which is not installed; run `pip install "soren-align[eval]"`'
NEEDS_EVAL = f"eval: {INSTALL_EVAL}, or add --no-eval"
NEEDS_DEEPSPEED = "run.parallel: needs DeepSpeed, which is not installed; run `pip install"
NEEDS_DEEPSPEED += ' "soren-align[deepspeed]"`, or write ddp or fsdp2'


def without_extras(folder, commands):
    """{name: Result} of the commands in `folder`, in one process that finds neither lm-eval nor DeepSpeed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CODE, json.dumps([*commands.values()])]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    return {name: Result(*result) for name, result in zip(commands, results, strict=True)}


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """The folder of the commands, and their results."""
    folder = tmp_path_factory.mktemp("core")
    for name, step in {"a": 1, "b": 2}.items():
        scores = "".join(f"{i},{i % step}\n" for i in range(60))
        (folder / f"{name}.csv").write_text(f"id,score\n{scores}")
    questions = "".join(f"What is the code of item {i}?,code {7 * i}\n" for i in range(30))
    (folder / "faq.csv").write_text(f"question,answer\n{questions}")
    commands = {
        "help": ["--help"],
        "recipes": ["recipes"],
        "suites": ["suites"],
        "schema": ["schema", "recipe"],
        "stats": ["stats", "a.csv", "b.csv"],
        "new": ["new", "mine", "--data", "faq.csv"],
        "eval": ["eval", "owner/model", "--suite", "quickstart", "--output", "out"],
        "sft": ["sft", "quickstart/sft"],
        "own suite": ["sft", "mine/sft.yaml"],
        "zero": ["sft", "quickstart/sft", "--no-eval", "--set", "run.parallel=zero2"],
        "both": ["sft", "quickstart/sft", "--set", "run.parallel=zero2"],
        "study": ["compare", STUDY],
        "plan": ["plan", "quickstart/sft", "--json"],
        "plan of zero": ["plan", "quickstart/sft", *overrides("run.parallel=zero3", "eval=null")],
        "plan of a study": ["plan", STUDY],
        "lr": ["lr", "--from", "torch,0.02", "--model", "Qwen/Qwen2.5-0.5B"],
    }
    return SimpleNamespace(folder=folder, results=without_extras(folder, commands))


@pytest.mark.process
@pytest.mark.parametrize("name", ["help", "recipes", "suites", "schema", "stats", "new", "plan", "plan of zero", "lr"])
def test_a_command_works_without_extras(core, name):
    assert core.results[name].returncode == 0, core.results[name].stderr


@pytest.mark.process
@pytest.mark.parametrize(("name", "sentences"), [
    ("eval", [f"soren-align eval: {INSTALL_EVAL}"]),
    ("sft", [NEEDS_EVAL]),
    ("own suite", [NEEDS_EVAL]),
    ("zero", [NEEDS_DEEPSPEED]),
    ("both", [NEEDS_DEEPSPEED, NEEDS_EVAL]),
    ("study", [f"eval: {INSTALL_EVAL}, or add --set set.eval=null to compare held-out losses alone"]),
])  # fmt: skip
def test_what_needs_an_extra_is_refused_before_anything_is_loaded_or_written(core, name, sentences):
    result = core.results[name]
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.partition("error: ")[2].splitlines() == sentences
    assert not (core.folder / "runs").exists()


@pytest.mark.process
def test_a_plan_names_what_is_missing_and_leaves_out_what_only_lm_eval_knows(core):
    plan = json.loads(core.results["plan"].stdout)
    assert f"training would not start on this machine: {NEEDS_EVAL}" in plan["notices"]
    assert plan["problems"] == []
    assert (plan["evaluation"]["num_tasks"], plan["evaluation"]["num_questions"]) == (3, None)
    assert NEEDS_DEEPSPEED.split(";")[0] in " ".join(core.results["plan of zero"].stdout.split())
    study = core.results["plan of a study"]
    assert study.returncode == 0
    assert f"compare would not start on this machine: eval: {INSTALL_EVAL}" in " ".join(study.stdout.split())


@pytest.mark.process
@pytest.mark.rest
def test_without_extras_the_quickstart_is_trained_shown_and_asked(tmp_path):
    run = "runs/quickstart/sft"
    results = without_extras(tmp_path, {
        "sft": ["sft", "quickstart/sft", "--no-eval", *overrides("trainer.max_steps=2")],
        "show": ["show", run],
        "chat": ["chat", run, "--prompt", "Say what the home of the owl is , now !", "--compare", "start"],
    })  # fmt: skip
    assert [result.returncode for result in results.values()] == [0, 0, 0], results
    assert (tmp_path / run / "model/model.safetensors").is_file()


@pytest.mark.parametrize("module", EXTRAS)
def test_every_missing_package_has_one_sentence_with_its_command(module, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not is_installed(module)
    name, extra = EXTRAS[module]
    with pytest.raises(UserError) as error:
        require(module, "eval.key", "write hf")
    remedy = f'run `pip install "soren-align[{extra}]"`, or write hf'
    assert error.value.problems == (f"eval.key: needs {name}, which is not installed; {remedy}",)


@pytest.mark.parametrize("sizes", [{"n_positions": 7}, {"max_position_embeddings": 9, "n_ctx": 5}, {}])
def test_the_context_of_a_chat_is_that_of_lm_eval(sizes):
    from lm_eval.models.utils import resolve_max_length
    from soren_align.evaluate.run.models import context_length

    for length in (100, int(1e30)):
        tokenizer = SimpleNamespace(model_max_length=length)
        for config in (SimpleNamespace(**sizes), SimpleNamespace(text_config=SimpleNamespace(**sizes), n_ctx=3)):
            assert context_length(config, tokenizer) == resolve_max_length(config, tokenizer)
