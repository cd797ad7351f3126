"""What people get wrong and what strangers write: recipes, data, models, configs. Each is one message and exit code 2.

A case is a damage and the message that the command must give. A case that ever failed stays here: a fuzzer and a review
found some that ended in a traceback, or not at all.
"""

import json
import re
import shutil
import time

import pytest
import torch
from soren_align import recipe
from soren_align.cli import app
from soren_align.core import shipped
from soren_align.core.errors import UserError

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

# Mistakes in a recipe that are found before torch is loaded: what is replaced, by what, and the message.
RECIPES = {
    "unknown task": ("task: sft", "task: rlhf", r"my.yaml:1 task: found 'rlhf'; write sft, dpo, kto or pretrain"),
    "no task": ("task: sft\n", "", r"task: is required"),
    "bfloat16 parameters": (
        "  init_seed: 0", "  init_seed: 0\n  dtype: bfloat16", r"model.dtype: .*bfloat16 .* Write float32"),
    "a key of a section at the top": ("task: sft", "task: sft\nlr: 1e-3", r"my.yaml:2 lr: .*mean 'optimizer.lr'\?"),
    "a key of TRL at the top": ("task: sft", "task: sft\nmax_steps: 1", r"max_steps: .*'trainer.max_steps'\?"),
    "bitsandbytes' flag": (
        "  init_seed: 0", "  init_seed: 0\n  load_in_4bit: true", r"model.load_in_4bit: .*mean `quantize: 4bit`\?"),
    "folder in TRL's words": ("max_steps: 2", "output_dir: x", r"trainer.output_dir: .*; write run.output_dir"),
    "length of nothing": ("max_length: 64", "max_length: 1", r"trainer.max_length: found 1; write .* at least 2"),
    "a secret": ("max_steps: 2", "hub_token: hf_x", r"trainer.hub_token: .*HF_TOKEN"),
    "deepspeed": ("max_steps: 2", "deepspeed: ds.json", r"trainer.deepspeed: .*; write run.parallel"),
    "evaluation without rows": ("max_steps: 2", "eval_strategy: steps", r"trainer.eval_strategy: .*add data.eval"),
    "a number out of TRL's range": ("max_steps: 2", "max_steps: 0\n  num_train_epochs: 0", r"epochs: .*above"),
    "a kernel that is not there": ("max_steps: 2", "use_liger_kernel: true", r"use_liger_kernel: .*\[liger\]"),
    "not YAML": ("task: sft", "task: [sft", r"my.yaml:\d+ not valid YAML"),
    "a tab": ("  lr: 1e-3\n", "\tlr: 1e-3\n", r"my.yaml:9 not valid YAML: .*; indent with spaces instead of tabs"),
    "a key too far to the left": (
        "  name: soren", " name: soren", r"my.yaml:9 not .*; correct the syntax or indentation"
        r"   8 \|  name: soren   9 \|   lr: 1e-3     \|     \^"),
    "a key twice": ("  lr: 1e-3\n", "  lr: 1e-3\n  lr: 2e-3\n", r"my.yaml:\d+ not valid YAML: .*duplicate key"),
    "missing data": ("rows.jsonl", "row.jsonl", r"data.train.path: no file row.jsonl; did you mean 'rows.jsonl'"),
    "missing model": ("shipped:recipes/quickstart/base", "./nothing", r"model.name_or_path: no folder ./nothing"),
    "model yet to be trained": ("shipped:recipes/quickstart/base", "runs/a/b/model", r"first run the recipe"),
    "name a model's folder": ("shipped:recipes/quickstart/base", "./", r"./ has no config.json"),
    "no weights": ("  init_seed: 0\n", "", r"has no weights .*set model.init_seed"),
    "a checkpoint that is not there": ("output_dir: out", "output_dir: out\n  resume: c-5", r"run.resume: found 'c-5'"),
    "output folder is a file": ("output_dir: out", "output_dir: rows.jsonl", r"run.output_dir: rows.jsonl is a file"),
    "a folder in a file": ("output_dir: out", "output_dir: my.yaml/x", r"my.yaml/x cannot be created: .*is a file"),
    "unknown suite": ("run:", "eval: {suite: quickstrat}\nrun:", r"eval.suite: .*did you mean 'quickstart'"),
}  # fmt: skip

# The same of mistakes that show when the libraries, the data and the model are there.
TRAININGS = {
    "half precision twice": ("bf16: false", "bf16: true\n  fp16: true", r"trainer: .*fp16.*bf16"),
    "no GPU and no word of it": (
        "use_cpu: true", "seed: 1", r"trainer.use_cpu: this machine has no GPU; write trainer.use_cpu"),
    "unknown hub data": ("rows.jsonl", "nobody/nothing", r"nobody/nothing"),
    "a schedule without its settings": (
        "max_steps: 2", "lr_scheduler_type: warmup_stable_decay",
        r"trainer.lr_scheduler_type .*missing 1 required .*num_decay_steps"),
    "a schedule's setting that there is not": (
        "max_steps: 2", "lr_scheduler_type: cosine_with_restarts\n  lr_scheduler_kwargs: {cycles: 2}",
        r"trainer.lr_scheduler_type and lr_scheduler_kwargs: .*unexpected keyword argument 'cycles'"),
    "fewer rows than a batch": (
        "max_steps: 2", "dataloader_drop_last: true\n  per_device_train_batch_size: 4",
        r"trainer.dataloader_drop_last: would drop all data, as 1 examples are less than one batch of 4"),
    "aux that matches nothing": ("name: soren", "name: soren\n  aux: ['*.experts.*']", r"optimizer: aux: .*matches no"),
    "everything is aux": ("name: soren", "name: soren\n  aux: ['*']", r"optimizer: .*no weight matrix"),
    "nothing fits": (
        "max_length: 64", "max_length: 2\n  assistant_only_loss: true", r"none of 1 examples can be trained on"),
}  # fmt: skip

# A file of the model's folder, its content, None if it is missing, and the message.
MODELS = {
    "config is not JSON": ("config.json", "{", r"base: the model cannot be loaded: .*config.json"),
    "config of an unknown kind": (
        "config.json", '{"model_type": "perceptron"}', r"the model cannot be loaded: .*perceptron"),
    "tokenizer is not JSON": ("tokenizer.json", "{", r"base: the tokenizer cannot be loaded: "),
    "no tokenizer": ("tokenizer_config.json", None, r"./base has no tokenizer_config.json"),
    "no template": ("chat_template.jinja", None, r"has no chat template; set model.chat_template"),
}  # fmt: skip

# A training example, and the message.
ROWS = {
    "columns of dpo": ({"chosen": ROW["messages"], "rejected": chat("Hello", "blue")},
                       r"for these columns run `soren-align dpo`"),
    "other columns": (
        {"question": "x", "answer": "y"}, r"sft needs 'messages'.* such as {instruction: question, output: answer}"),
    "content is a number": ({"messages": chat("x", 3)}, r"messages\[1\] has a number as content; write text"),
}  # fmt: skip

# The files that a command finds beside those of `folder`, its arguments and its message, by what is wrong.
SFT = ("sft", "my.yaml")
LIGHT = {
    **{f"recipe: {case}": ({"my.yaml": RECIPE.replace(old, new, 1)}, SFT, message)
       for case, (old, new, message) in RECIPES.items()},
    "data: an empty file": ({"rows.jsonl": ""}, SFT, r"rows.jsonl is empty"),
}  # fmt: skip
HEAVY = {
    **{f"training: {case}": ({"my.yaml": RECIPE.replace(old, new, 1)}, SFT, message)
       for case, (old, new, message) in TRAININGS.items()},
    **{f"model: {case}": ({f"base/{name}": text}, (*SFT, "--set", "model.name_or_path=./base"), message)
       for case, (name, text, message) in MODELS.items()},
    **{f"data: {case}": ({"rows.jsonl": json.dumps(row)}, SFT, message) for case, (row, message) in ROWS.items()},
    "data: columns of sft": ({}, ("dpo", "my.yaml", "--set", "task=dpo"), r"for these columns run `soren-align sft`"),
    "data: no rejected answers": (
        {"rows.jsonl": json.dumps({"chosen": ROW["messages"], "prompt": "Hello"})},
        ("dpo", "my.yaml", "--set", "task=dpo"), r"dpo needs 'chosen' and 'rejected'"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder: the recipe `my.yaml`, its `rows.jsonl`, a model `base` and a suite `questions`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    shutil.copytree(shipped.ROOT / "recipes/quickstart/base", tmp_path / "base")
    shutil.copytree(shipped.ROOT / "configs/new/questions", tmp_path / "questions")
    return tmp_path


def refused(capsys, command, message):
    """What a command writes to stderr, which refuses with this message."""
    code, told = app.main(command), capsys.readouterr().err
    assert code == 2, told
    assert re.search(message, told.replace("\n", " ")), told
    for forbidden in ("Traceback", "\x1b", "root:x:"):  # the last is of /etc/passwd
        assert forbidden not in told
    return told


def write(folder, files):
    """Write these files; remove those that are None."""
    for name, text in files.items():
        (folder / name).unlink(missing_ok=True)
        if text is not None:
            (folder / name).write_text(text)


@pytest.mark.parametrize("case", LIGHT)
def test_a_mistake_is_one_message_before_anything_is_loaded(folder, capsys, case):
    files, command, message = LIGHT[case]
    write(folder, files)
    began = time.process_time()
    refused(capsys, command, message)
    assert time.process_time() - began < 5


@pytest.mark.model
@pytest.mark.parametrize("case", HEAVY)
def test_a_mistake_that_shows_in_a_library_is_one_message_too(folder, capsys, case):
    if "no GPU" in case and torch.accelerator.is_available():
        pytest.skip("there is a GPU here; the refusal is for machines without one")
    files, command, message = HEAVY[case]
    write(folder, files)
    refused(capsys, command, message)


@pytest.mark.model
def test_the_unbroken_recipe_is_not_refused(folder, capsys):
    """Or every case above would pass for a reason of its own."""
    assert app.main(SFT) == 0
    assert "trained   2 steps" in capsys.readouterr().err


def test_900_unknown_keys_are_20_lines(folder):
    keys = "".join(f"  key{i}: 1\n" for i in range(900))
    write(folder, {"my.yaml": RECIPE.replace("trainer:\n", "trainer:\n" + keys)})
    with pytest.raises(UserError, match=r"\.\.\. and 880 more") as caught:
        recipe.load("my.yaml")
    assert len(caught.value.problems) == 900
    assert len(str(caught.value).splitlines()) == 21
