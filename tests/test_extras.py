"""Without lm-eval and DeepSpeed soren-align trains, plans and chats; what needs them is one sentence with its command."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.command import Result

ROOT = Path(__file__).resolve().parent.parent
# Modules that cannot be found, as if they were not installed; then each command in this one process.
CODE = """
import json, sys
from importlib.machinery import PathFinder
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return name.partition(".")[0] not in {"lm_eval", "deepspeed"} and super().find_spec(name, path, target) or None
sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
from tests.support.command import run
print(json.dumps([run(*words.split()) for words in sys.argv[1:]]))
assert not {"lm_eval", "deepspeed"} & {*sys.modules}
"""
STUDY = "studies/quickstart-optimizers-sft"
NEEDS = 'needs {}, which is not installed; run `pip install "soren-align[{}]"`'
EVAL, DEEPSPEED = NEEDS.format("lm-eval", "eval"), NEEDS.format("DeepSpeed", "deepspeed")
NEEDS_EVAL, NEEDS_DEEPSPEED = f"eval: {EVAL}, or add --no-eval", f"run.parallel: {DEEPSPEED}, or write ddp or fsdp2"
WORKING = ["--help", "recipes", "suites", "schema recipe", "stats a.csv b.csv", "new mine --data faq.csv",
           "lr --from torch,0.02 --model Qwen/Qwen2.5-0.5B", "plan quickstart/sft --json", f"plan {STUDY}",
           "plan quickstart/sft --set run.parallel=zero3 eval=null"]  # fmt: skip
REFUSED = {
    "eval owner/model --suite quickstart --output out": [f"soren-align eval: {EVAL}"],
    "sft quickstart/sft": [NEEDS_EVAL],
    "sft mine/sft.yaml": [NEEDS_EVAL],
    "sft quickstart/sft --no-eval --set run.parallel=zero2": [NEEDS_DEEPSPEED],
    "sft quickstart/sft --set run.parallel=zero2": [NEEDS_DEEPSPEED, NEEDS_EVAL],
    f"compare {STUDY}": [f"eval: {EVAL}, or add --set set.eval=null to compare held-out losses alone"],
}


def without_extras(folder, commands):
    """{command: Result} in `folder`, of one process that finds neither lm-eval nor DeepSpeed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", CODE, *commands], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: Result(*result) for name, result in zip(commands, json.loads(done.stdout), strict=True)}


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    folder = tmp_path_factory.mktemp("core")
    (folder / "a.csv").write_text("id,score\n" + "".join(f"{i},1\n" for i in range(60)))
    (folder / "b.csv").write_text("id,score\n" + "".join(f"{i},{i % 2}\n" for i in range(60)))
    (folder / "faq.csv").write_text("question,answer\n" + "".join(f"Which code has {i}?,c{7 * i}\n" for i in range(30)))
    return SimpleNamespace(folder=folder, results=without_extras(folder, [*WORKING, *REFUSED]))


@pytest.mark.process
@pytest.mark.parametrize("command", WORKING)
def test_a_command_works_without_extras(core, command):
    assert core.results[command].returncode == 0, core.results[command].stderr


@pytest.mark.process
@pytest.mark.parametrize("command", REFUSED)
def test_what_needs_an_extra_is_refused_before_anything_is_loaded_or_written(core, command):
    result = core.results[command]
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.partition("error: ")[2].splitlines() == REFUSED[command]
    assert "Loading" not in result.stderr
    assert not (core.folder / "runs").exists()


@pytest.mark.process
def test_a_plan_names_what_is_missing_and_leaves_out_what_only_lm_eval_knows(core):
    as_json, study, zero = (core.results[command].stdout for command in WORKING[-3:])
    plan = json.loads(as_json)
    assert f"training would not start on this machine: {NEEDS_EVAL}" in plan["notices"]
    assert (plan["problems"], plan["evaluation"]["num_questions"]) == ([], None)
    assert f"compare would not start on this machine: eval: {EVAL}" in " ".join(study.split())
    assert NEEDS_DEEPSPEED in " ".join(zero.split())


@pytest.mark.process
@pytest.mark.rest
def test_without_extras_the_quickstart_is_trained_shown_and_asked(tmp_path):
    run = "runs/quickstart/sft"
    commands = ["sft quickstart/sft --no-eval trainer.max_steps=2", f"show {run}", f"chat {run} --prompt owl"]
    results = without_extras(tmp_path, commands)
    assert [result.returncode for result in results.values()] == [0, 0, 0], results
    assert (tmp_path / run / "model/model.safetensors").is_file()


@pytest.mark.parametrize("sizes", [{"n_positions": 7}, {"max_position_embeddings": 9, "n_ctx": 5}, {}])
def test_the_context_of_a_chat_is_that_of_lm_eval(sizes):
    from lm_eval.models.utils import resolve_max_length
    from soren_align.evaluate.run.models import context_length

    for tokenizer in (SimpleNamespace(model_max_length=length) for length in (100, int(1e30))):
        for config in (SimpleNamespace(**sizes), SimpleNamespace(text_config=SimpleNamespace(**sizes), n_ctx=3)):
            assert context_length(config, tokenizer) == resolve_max_length(config, tokenizer)
