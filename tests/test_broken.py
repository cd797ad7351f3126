"""What people get wrong: recipes, data, models, templates. Each has its one clear message, exit code 2, no traceback.

A case is a mistake and the message that it must give, from the command line on.
"""

import json
import re
import shutil

import pytest
import torch

from soren_align.cli import app
from soren_align.core import shipped

pytestmark = pytest.mark.model

RECIPE = """\
task: sft
model:
  name_or_path: shipped:recipes/quickstart/base
  init_seed: 0
data:
  train: {path: rows.jsonl}
optimizer:
  name: soren
  lr: 1e-3
  aux_lr: 1e-3
trainer:
  max_steps: 2
  use_cpu: true
  bf16: false
  max_length: 64
run:
  output_dir: out
"""


def chat(*contents):
    roles = ("user", "assistant") * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


ROW = {"messages": chat("What is the color of the cat?", "red")}
PAIR = {"chosen": chat("Hello", "red"), "rejected": chat("Hello", "blue")}


@pytest.fixture
def soren_align(tmp_path, monkeypatch, capsys):
    """Run a command in a folder with `rows.jsonl`; returns its exit code and what it wrote to stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")

    def run(*arguments):
        return app.main(arguments), capsys.readouterr().err

    return run


def refused(result, message):
    code, said = result
    assert code == 2, said
    assert re.search(message, said.replace("\n", " ")), said
    assert "Traceback" not in said
    return said


# what is replaced in RECIPE, by what, what the message says
RECIPES = {
    "typo in a section": ("optimizer:", "optimiser:", r"my.yaml:7 optimiser: unknown key; did you mean 'optimizer'"),
    "typo in a key": ("  lr:", "  learning_rat:", r"my.yaml:9 optimizer.learning_rat: unknown key"),
    "typo in the data section": ("{path:", "{pth:", r"my.yaml:6 data.train.pth: unknown key; did you mean 'path'"),
    "typo in a trainer key": ("max_steps", "max_step", r"my.yaml:12 trainer.max_step: .*did you mean 'max_steps'"),
    "unknown optimizer": (
        "name: soren", "name: sorn", r"my.yaml:8 optimizer.name: found 'sorn'; .*did you mean 'soren'"),
    "unknown task": ("task: sft", "task: rlhf", r"my.yaml:1 task: found 'rlhf'; write sft, dpo or pretrain"),
    "no task": ("task: sft\n", "", r"task: is required"),
    "no model": ("model:\n  name_or_path: shipped:recipes/quickstart/base\n  init_seed: 0\n", "",
                 r"model: is required"),
    "no output folder": ("  output_dir: out", "  resume: auto", r"run.output_dir: is required"),
    "rate as a word": ("lr: 1e-3\n  aux", "lr: small\n  aux", r"my.yaml:9 optimizer.lr: found 'small'; write a number"),
    "negative rate": ("lr: 1e-3\n  aux", "lr: -1\n  aux", r"my.yaml:9 optimizer.lr: found -1; it must be more than 0"),
    "rate of zero": ("lr: 1e-3\n  aux", "lr: 0\n  aux", r"optimizer.lr: found 0; it must be more than 0"),
    "infinite rate": ("lr: 1e-3\n  aux", "lr: .inf\n  aux", r"optimizer.lr: found inf; it must be finite"),
    "rate in quotes": ("lr: 1e-3\n  aux", "lr: '1e-3'\n  aux", r"optimizer.lr: found '1e-3'; write a number"),
    "no rate for the rest": (
        "  aux_lr: 1e-3\n", "", r"optimizer.aux_lr: is required: the AdamW learning rate of embed"),
    "momentum of one": ("name: soren", "name: soren\n  momentum: 1.0", r"optimizer.momentum: found 1.0; .*less than 1"),
    "negative decay": ("name: soren", "name: soren\n  weight_decay: -1", r"optimizer.weight_decay: .*at least 0"),
    "three betas": ("name: soren", "name: soren\n  betas: [0.9, 0.9, 0.9]", r"optimizer.betas: .*write 2 values"),
    "unknown map": ("name: soren", "name: soren\n  map: snss", r"optimizer.map.name: .*did you mean 'sns'"),
    "no steps in the map": (
        "name: soren", "name: soren\n  map: {name: sns, steps: 0}", r"optimizer.map.steps: .*at least 1"),
    "half a step": (
        "name: soren", "name: soren\n  map: {name: sns, steps: 1.5}", r"map.steps: found 1.5; write a whole"),
    "unknown scale": ("name: soren", "name: soren\n  adjust_lr_fn: rms", r"optimizer.adjust_lr_fn: found 'rms'; write"),
    "truth value for text": ("output_dir: out", "output_dir: true", r"run.output_dir: found True; write a text"),
    "text for truth value": ("output_dir: out", "output_dir: out\n  offline: 'yes'", r"run.offline: .*true or false"),
    "None for null": ("output_dir: out", "output_dir: out\n  num_threads: None", r"run.num_threads: .*null"),
    "a list for a section": ("run:\n  output_dir: out", "run: [out]", r"my.yaml:16 run: .*write a section"),
    "bfloat16 parameters": (
        "  init_seed: 0", "  init_seed: 0\n  dtype: bfloat16", r"model.dtype: bfloat16 .* Write float32"),
    "rate in TRL's words": ("max_steps: 2", "learning_rate: 1e-3", r"trainer.learning_rate: belongs to optimizer.lr"),
    "folder in TRL's words": ("max_steps: 2", "output_dir: x", r"trainer.output_dir: belongs to run.output_dir"),
    "optimizer in TRL's words": ("max_steps: 2", "optim: adamw_torch", r"trainer.optim: belongs to optimizer.name"),
    "a key of the other task": ("max_steps: 2", "beta: 0.1", r"trainer.beta: is a key of TRL's DPOConfig"),
    "a key that is gone": ("max_steps: 2", "warmup_ratio: 0.1", r"trainer.warmup_ratio: .*write warmup_steps"),
    "an older name": ("max_steps: 2", "evaluation_strategy: steps", r"trainer.evaluation_strategy: .*eval_strategy"),
    "unknown schedule": ("max_steps: 2", "lr_scheduler_type: cosin", r"trainer.lr_scheduler_type: .*'cosine'"),
    "unknown packing": ("max_steps: 2", "packing_strategy: bdf", r"trainer.packing_strategy: .*did you mean 'bfd'"),
    "steps as a word": ("max_steps: 2", "max_steps: two", r"trainer.max_steps: found 'two'; write a whole number"),
    "batch of nothing": ("max_steps: 2", "per_device_train_batch_size: 0", r"trainer.per_device.*at least 1"),
    "length of nothing": ("max_length: 64", "max_length: 1", r"trainer.max_length: found 1; it must be at least 2"),
    "a secret": ("max_steps: 2", "hub_token: hf_x", r"trainer.hub_token: .*HF_TOKEN"),
    "deepspeed": ("max_steps: 2", "deepspeed: ds.json", r"trainer.deepspeed: belongs to run.parallel"),
    "evaluation without rows": ("max_steps: 2", "eval_strategy: steps", r"trainer.eval_strategy: .*add data.eval"),
    "a number out of TRL's range": ("max_steps: 2", "max_steps: 0\n  num_train_epochs: 0", r"num_train_epochs: .*more"),
    "half precision twice": ("bf16: false", "bf16: true\n  fp16: true", r"trainer: .*fp16.*bf16"),
    "no GPU and no word of it": (
        "use_cpu: true", "seed: 1", r"trainer.use_cpu: this machine has no GPU; write `use_cpu"),
    "a tracker that is not installed": (
        "max_steps: 2", "report_to: comet_ml", r"trainer\.report_to: comet_ml is not installed"),
    "a setting of another optimizer": (
        "name: soren", "name: muon\n  p: 0.5", r"optimizer.p: unknown key for muon; htmuon has it"),
    "not YAML": ("task: sft", "task: [sft", r"my.yaml:\d+ not valid YAML"),
    "a tab": ("  lr: 1e-3\n", "\tlr: 1e-3\n", r"my.yaml:\d+ not valid YAML"),
    "a key twice": ("  lr: 1e-3\n", "  lr: 1e-3\n  lr: 2e-3\n", r"my.yaml:\d+ not valid YAML: .*duplicate key"),
    "missing data": ("rows.jsonl", "row.jsonl", r"data.train.path: no file row.jsonl; did you mean 'rows.jsonl'"),
    "data pattern of no file": (
        "rows.jsonl", "./*.csv", r"data.train.path: ./\*.csv: has no data file \(.jsonl, .json, "),
    "data of an unknown kind": ("rows.jsonl", "my.yaml", r"data.train.path: my.yaml: cannot read '.yaml'"),
    "a limit of zero": ("rows.jsonl}", "rows.jsonl, limit: 0}", r"data.train.limit: found 0; it must be at least 1"),
    "missing model": ("shipped:recipes/quickstart/base", "./nothing", r"model.name_or_path: no folder ./nothing"),
    "model yet to be trained": ("shipped:recipes/quickstart/base", "runs/a/b/model", r"run that recipe first"),
    "not a model folder": ("shipped:recipes/quickstart/base", "./", r"./ has no config.json"),
    "no weights": ("  init_seed: 0\n", "", r"has no weights .*set model.init_seed"),
    "a checkpoint that is not there": ("output_dir: out", "output_dir: out\n  resume: c-5", r"run.resume: found 'c-5'"),
    "output folder is a file": ("output_dir: out", "output_dir: rows.jsonl", r"run.output_dir: rows.jsonl is a file"),
    "unknown suite": ("run:", "eval: {suite: quickstrat}\nrun:", r"eval.suite: .*did you mean 'quickstart'"),
    "unknown hub data": ("rows.jsonl", "nobody/nothing", r"nobody/nothing"),
    "a schedule without its settings": (
        "max_steps: 2", "lr_scheduler_type: warmup_stable_decay",
        r"trainer.lr_scheduler_type .*missing 1 required .*num_decay_steps"),
    "a schedule's setting that there is not": (
        "max_steps: 2", "lr_scheduler_type: cosine_with_restarts\n  lr_scheduler_kwargs: {cycles: 2}",
        r"trainer.lr_scheduler_type and lr_scheduler_kwargs: .*unexpected keyword argument 'cycles'"),
    "fewer rows than a batch": (
        "max_steps: 2", "dataloader_drop_last: true\n  per_device_train_batch_size: 4",
        r"trainer.dataloader_drop_last: 1 examples are less than one batch of 4"),
    "aux that matches nothing": ("name: soren", "name: soren\n  aux: ['*.experts.*']", r"optimizer: aux: .*matches no"),
    "everything is aux": ("name: soren", "name: soren\n  aux: ['*']", r"optimizer: .*no matrix"),
    "nothing fits": (
        "max_length: 64", "max_length: 2\n  assistant_only_loss: true", r"none of 1 examples can be trained on"),
    "no answer fits": (
        "max_length: 64", "max_length: 4",
        r"trainer.max_length: 4 cuts every example before its answer; the shortest prompt has \d+ tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", RECIPES)
def test_a_broken_recipe(soren_align, tmp_path, case):
    old, new, message = RECIPES[case]
    assert old in RECIPE
    if case == "no GPU and no word of it" and torch.accelerator.is_available():
        pytest.skip("there is a GPU here; the refusal is for machines without one")
    (tmp_path / "my.yaml").write_text(RECIPE.replace(old, new, 1))
    refused(soren_align("sft", "my.yaml"), message)


ROWS = {
    "no rows": ("\n", "has no examples"),
    "an empty file": ("", r"rows.jsonl is empty"),
    "not JSON": ('{"messages": [}\n', r"rows.jsonl:1: not JSON"),
    "the second line is cut": (json.dumps(ROW) + '\n{"messages": [{"role"', r"rows.jsonl:2: not JSON"),
    "not an object": ("[1, 2]\n", r"rows.jsonl:1: not an object"),
    "other columns": (
        {"question": "x", "answer": "y"}, r"sft needs 'messages'.* such as {instruction: question, output: answer}"),
    "columns of the other task": (PAIR, r"these columns are for dpo: `soren-align dpo`"),
    "messages is text": ({"messages": "hello"}, r"rows.jsonl:1: messages is text, not a list"),
    "messages is empty": ({"messages": []}, r"rows.jsonl:1: messages is an empty list"),
    "a turn is text": ({"messages": ["hello"]}, r"messages\[0\] is text"),
    "no assistant turn": (
        {"messages": chat("hello")}, r"rows.jsonl:1: messages has no assistant turn: nothing to learn"),
    "ends with the user": ({"messages": chat("a", "b", "c")}, r"messages ends with a user turn"),
    "an unknown role": ({"messages": [{"role": "poet", "content": "x"}]}, r"has the role 'poet'; write system, user"),
    "no role": ({"messages": [{"content": "x"}]}, r"messages\[0\] has no role"),
    "no content": ({"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}, r"\[0\] has no content"),
    "empty content": ({"messages": chat("x", " ")}, r"messages\[1\] has empty content \(role assistant\)"),
    "content is a number": ({"messages": chat("x", 3)}, r"messages\[1\] has a number as content; write text"),
    "two user turns": ({"messages": [*chat("a")[:1], *chat("b", "c")]}, r"are both user turns"),
    "ShareGPT's words": ({"messages": [{"from": "poet", "value": "x"}]}, r"has the role 'poet'; write system, user"),
    "tool calls": ({"messages": [{**chat("x", "y")[1], "tool_calls": [1]}]}, r"has a tool call that is no object"),
}  # fmt: skip


PAIRS = {
    "columns of the other task": (ROW, r"these columns are for sft: `soren-align sft`"),
    "no rejected": ({"chosen": PAIR["chosen"], "prompt": "Hello"}, r"dpo needs 'chosen' and 'rejected'"),
    "identical answers": ({**PAIR, "rejected": PAIR["chosen"]}, r"chosen and rejected are identical"),
    "different prompts": ({**PAIR, "rejected": chat("Bye", "blue")}, r"share a prompt: they differ at turn \[0\]"),
    "answers as text, no prompt": ({"chosen": "red", "rejected": "blue"}, r"chosen is text, not a list"),
    "equal answers as text": ({"prompt": "Hello", "chosen": "red", "rejected": "red"}, r"are identical"),
    "no question": ({k: v[1:] for k, v in PAIR.items()}, r"starts with the assistant"),
}


@pytest.mark.parametrize(("task", "case"), [*(("sft", case) for case in ROWS), *(("dpo", case) for case in PAIRS)])
def test_broken_chat_and_preference_rows(soren_align, tmp_path, task, case):
    rows, message = (ROWS if task == "sft" else PAIRS)[case]
    (tmp_path / "my.yaml").write_text(RECIPE.replace("task: sft", f"task: {task}"))
    (tmp_path / "rows.jsonl").write_text(rows if isinstance(rows, str) else json.dumps(rows) + "\n")
    refused(soren_align(task, "my.yaml"), message)


def test_many_bad_rows_are_counted_and_the_first_are_named(soren_align, tmp_path):
    (tmp_path / "my.yaml").write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": []}) + "\n" for _ in range(40)))
    said = refused(soren_align("sft", "my.yaml"), r"40 of 40 examples cannot be used")
    assert "and 35 more" in said
    assert len(said.splitlines()) < 10


TEMPLATES = {
    "loops in loops": ("{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}",
                       r"the chat template fails on the first example: more than"),
    "no template": (None, r"has no chat template; set model.chat_template"),
    "neither marks nor stable": (
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
        r"renders earlier turns differently once others follow"),
    "not Jinja": (
        "{% for m in messages %}{% generation %}{{ m.content }}", r"the chat template fails on the first example"),
    "it raises": (
        "{% generation %}{% endgeneration %}{{ raise_exception('only one turn') }}", r"fails .*only one turn"),
    "the answer is missing": (
        "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
        r"leaves out the assistant's turns"),
    "nothing is marked": ("{% for m in messages %}{% generation %}{% endgeneration %}{{ m.content }}{% endfor %}",
                          r"marks no token of the first example"),
}  # fmt: skip


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(shipped.ROOT / "recipes/quickstart/base", folder)
    return folder


@pytest.mark.rest
@pytest.mark.parametrize("case", TEMPLATES)
def test_a_template_that_cannot_be_trained(soren_align, tmp_path, base, case):
    template, message = TEMPLATES[case]
    (base / "chat_template.jinja").unlink()
    if template:
        (base / "chat_template.jinja").write_text(template)
    recipe = RECIPE.replace("shipped:recipes/quickstart/base", "./base")
    (tmp_path / "my.yaml").write_text(recipe.replace("max_steps: 2", "assistant_only_loss: true"))
    refused(soren_align("sft", "my.yaml"), message)


MODELS = {
    "config is not JSON": ("config.json", "{", r"base: not a model that can be loaded: .*config.json"),
    "config of an unknown kind": (
        "config.json", '{"model_type": "perceptron"}', r"not a model .* loaded: .*perceptron"),
    "tokenizer is not JSON": ("tokenizer.json", "{", r"base: has no tokenizer that can be loaded: "),
    "no tokenizer": ("tokenizer_config.json", None, r"./base has no tokenizer_config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_a_broken_model_folder(soren_align, tmp_path, base, case):
    name, content, message = MODELS[case]
    (base / name).unlink()
    if content is not None:
        (base / name).write_text(content)
    (tmp_path / "my.yaml").write_text(RECIPE.replace("shipped:recipes/quickstart/base", "./base"))
    refused(soren_align("sft", "my.yaml"), message)


def test_the_corpus_is_large_enough():
    assert len(RECIPES) + len(ROWS) + len(PAIRS) + len(TEMPLATES) + len(MODELS) >= 90


def test_the_unbroken_recipe_is_not_refused(soren_align, tmp_path):
    """Or every case above would pass for a reason of its own."""
    (tmp_path / "my.yaml").write_text(RECIPE)
    code, said = soren_align("sft", "my.yaml")
    assert code == 0, said
    assert "trained   2 steps" in said
