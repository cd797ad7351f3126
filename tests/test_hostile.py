"""What a fuzzer and a review found: recipes, overrides, imports and rows that ended in a traceback or not at all.

Each is refused, with the place and in one sentence, in seconds. A case that ever failed stays here.
"""

import json
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from soren_align import importers, recipe
from soren_align.core.errors import UserError
from soren_align.recipe import DataSplit

GOOD = """\
task: sft
model: {name_or_path: org/model}
data: {train: {path: org/data}}
optimizer: {name: adamw, lr: 1.0e-3}
trainer: {max_steps: 2}
run: {output_dir: out}
"""
LONG = "a" * 300


def refused(call, message):
    began = time.process_time()
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert time.process_time() - began < 5
    return caught.value


# what is replaced in GOOD, by what, what the message says
RECIPES = {
    "a list as the task": ("task: sft", "task: [sft]", r"my.yaml:1 task: found \['sft'\]"),
    "a mapping as the task": ("task: sft", "task: {sft: 1}", r"my.yaml:1 task: found"),
    "a number as a suite": ("run:", "eval: {suite: 3}\nrun:", r"eval.suite: found 3; write a text"),
    "a list as the map": (
        "adamw, lr: 1.0e-3", "soren, lr: 1.0e-3, aux_lr: 1.0e-3, precision: float32, map: [a]", r"optimizer.map"),
    "true as quoted tables": (
        "run:", "eval: {suite: quickstart, published: true}\nrun:", r"eval.published: found True; write a l"),
    "a number as a quoted table": (
        "run:", "eval: {suite: quickstart, published: [1]}\nrun:", r"eval.published.0: found 1"),
    "a number as a trainer key": ("max_steps: 2", "1: 0", r"trainer.1: unknown to TRL's SFTConfig"),
    "null as a trainer key": ("max_steps: 2", "~: 0", r"trainer.~: unknown to TRL's SFTConfig"),
    "a list in a list of trackers": ("max_steps: 2", "report_to: [[wandb]]", r"trainer.report_to: found \['wandb'\]"),
    "a mapping among trackers": ("max_steps: 2", "report_to: [{a: 1}]", r"trainer.report_to: found {'a': 1}"),
    "a seed that numpy refuses": ("max_steps: 2", "seed: 4294967296", r"trainer.seed: .*at most 4294967295"),
    "epochs without end": ("max_steps: 2", "num_train_epochs: .inf", r"trainer.num_train_epochs: .*finite"),
    "a rate that is no number": ("max_steps: 2", "max_grad_norm: .nan", r"trainer.max_grad_norm: .*finite"),
    "a rate beyond float32": ("lr: 1.0e-3", "lr: 1.0e+300", r"optimizer.lr: .*it must be at most 1e\+30"),
    "a batch without end": ("output_dir: out", "output_dir: out, global_batch_size: 1000000000000000",
                            r"run.global_batch_size: .*at most 1e\+09"),
    "threads without end": (
        "output_dir: out", "output_dir: out, num_threads: 100000000", r"run.num_threads: .*at most 1024"),
    "workers without end": ("max_steps: 2", "dataloader_num_workers: 100000", r"dataloader_num_workers: .*at most 256"),
    "processes without end": ("max_steps: 2", "dataset_num_proc: 100000", r"dataset_num_proc: .*at most 256"),
    "one token": ("max_steps: 2", "max_length: 1", r"trainer.max_length: found 1; it must be at least 2"),
    "a kernel that is not there": ("max_steps: 2", "use_liger_kernel: true", r"use_liger_kernel: .*pip install liger"),
    "a merge of a list of texts": ("{max_steps: 2}", "{<<: [a]}", r"my.yaml:5 not valid YAML: << merges mappings"),
    "a tag on a number": ("max_steps: 2", "max_steps: !!int zero", r"my.yaml:5 not valid YAML: the tag !!int"),
    "a tag on a list": ("run:", "eval: !x [1]\nrun:", r"the tag !x"),
    "5,000 digits": ("max_steps: 2", "max_steps: " + "9" * 5000, r"my.yaml:5 not valid YAML: a number of 5000 digits"),
    "nobody's home as model": ("org/model", "~nosuchuser/x", r"model.name_or_path: ~nosuchuser/x: cannot be used as a"),
    "nobody's home as data": ("org/data", "~nosuchuser/x.jsonl", r"data.train.path: .*cannot be used as a path"),
    "nobody's home as output": ("output_dir: out", "output_dir: ~nosuchuser/x", r"run.output_dir: .*cannot be used as"),
    "nobody's home to resume": (
        "output_dir: out", "output_dir: out, resume: ~nosuchuser/x", r"run.resume: .*cannot be"),
    "nobody's home as parallel": (
        "output_dir: out", "output_dir: out, parallel: ~nosuchuser/x", r"run.parallel: .*cannot"),
    "nobody's home as a suite": ("run:", "eval: {suite: ~nosuchuser/x}\nrun:", r"eval.suite: .*cannot be used as"),
    "nobody's home as data root": (
        "run:", "eval: {suite: quickstart, data_root: ~nosuchuser/x}\nrun:", r"eval.data_root"),
    "nobody's home as a table": (
        "run:", "eval: {suite: quickstart, published: [~nosuchuser/x]}\nrun:", r"eval.published.0: .*can"),
    "nobody's home as template": ("org/model", "org/model, chat_template: ~nosuchuser/x.jinja", r"model.chat_template"),
    "a long name as model": ("org/model", f"./{LONG}", r"model.name_or_path: .*File name too long"),
    "a long name as data": ("org/data", f"{LONG}.jsonl", r"data.train.path: .*File name too long"),
    "a long name as output": ("output_dir: out", f"output_dir: {LONG}", r"run.output_dir: .*File name too long"),
    "a NUL in a path": ("output_dir: out", 'output_dir: "a\\0b"', r"run.output_dir: .*null byte"),
    "the kernel's folder": ("output_dir: out", "output_dir: /proc/foo", r"run.output_dir: /proc/foo cannot be written"),
    "a folder in a file": ("output_dir: out", "output_dir: my.yaml/x", r"my.yaml/x cannot be created: .*is a file"),
    "a file as the base": (
        "task: sft", "extends: /etc/passwd\ntask: sft", r"my.yaml:1 extends: /etc/passwd: a recipe is"),
    "an escape sequence": ("max_steps: 2", '"\\e[2J": 1', r"trainer.\\x1b\[2J: unknown"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", RECIPES)
def test_recipes(folder, case):
    old, new, message = RECIPES[case]
    assert old in GOOD
    (folder / "my.yaml").write_text(GOOD.replace(old, new, 1))
    said = str(refused(lambda: recipe.load("my.yaml"), message))
    assert "\x1b" not in said
    assert "root:x:" not in said  # of /etc/passwd


def test_the_unharmed_recipe_loads(folder):
    """Or every case above would be refused for a reason of its own."""
    (folder / "my.yaml").write_text(GOOD)
    assert recipe.load("my.yaml").trainer == {"max_steps": 2}


def test_900_unknown_keys_are_20_lines(folder):
    (folder / "my.yaml").write_text(GOOD + "more: {" + ", ".join(f"k{i}: 1" for i in range(900)) + "}\n")
    keys = "".join(f"  key{i}: 1\n" for i in range(900))
    (folder / "my.yaml").write_text(GOOD.replace("trainer: {max_steps: 2}\n", "trainer:\n" + keys))
    error = refused(lambda: recipe.load("my.yaml"), r"\.\.\. and 880 more")
    assert len(error.problems) == 900
    assert len(str(error).splitlines()) == 21


OVERRIDES = {
    "digits": ("trainer.max_steps=" + "9" * 5000, "a number of 5000 digits"),
    "brackets": ("trainer.max_steps=" + "[" * 2000, "nested more than 50 deep"),
    "a tag": ("trainer.max_steps=!!python/object:os.system [x]", "the tag !!python/object"),
    "a list as the task": ("task=[sft]", "task: found"),
    "5,000 sections": (".".join(["a"] * 5000) + "=1", r"write --set section.key=value"),
    "an escape sequence": ("trainer.\x1b[2J=1", r"unknown to TRL"),
    "an index of 5,000 digits": ("data.train." + "9" * 5000 + ".path=x", "--set"),
    "a line number of 5,000 digits": ("x:" + "9" * 5000 + " =1", "unknown key"),
    "nobody's home": ("run.output_dir=~nosuchuser/x", r"run.output_dir: .*cannot be used as a path"),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_overrides(folder, case):
    text, message = OVERRIDES[case]
    (folder / "my.yaml").write_text(GOOD)
    assert "\x1b" not in str(refused(lambda: recipe.load("my.yaml", [text]), message))


PARALLEL = {
    "brackets.json": ("[" * 100_000, "nested more than 50 deep"),
    "digits.json": ('{"zero_optimization": {"stage": ' + "9" * 5000 + "}}", "a number of 5000 digits"),
    "list.json": ('{"zero_optimization": [1]}', r"zero_optimization.stage: found None"),
    "true.json": ('{"bf16": true, "zero_optimization": {"stage": 2}}', r"bf16: found True; write a mapping"),
    "text.json": ('{"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}', r"offload_optimizer: found 'cpu'"),
    "stage.json": ('{"zero_optimization": {"stage": true}}', r"stage: found True; write 1, 2 or 3"),
    "bytes.json": ("\x00", "cannot be read as JSON"),
    "brackets.yaml": ("[" * 2000, "nested more than 50 deep"),
    "list.yaml": ("[1]", "a config must be a mapping"),
}


@pytest.mark.parametrize("name", PARALLEL)
def test_configs_of_several_processes(folder, name):
    text, message = PARALLEL[name]
    (folder / name).write_text(text)
    refused(lambda: recipe.parallel(name), message)


FOREIGN = "model_name_or_path: org/model\ndataset_name: org/data\nmax_seq_length: 512\nuse_peft: true\n"
IMPORTS = {
    "a list as LoRA's alpha": (FOREIGN + "lora_alpha: [1]\n", r"model.lora.alpha: found \[1\]"),
    "a space as LoRA's alpha": (FOREIGN + "lora_alpha: ' '\n", r"model.lora.alpha: found ' '"),
    "a mapping as LoRA's rank": (FOREIGN + "lora_r: {a: 1}\n", r"model.lora.r: found"),
    "lists among trackers": (FOREIGN + "report_to: [[wandb]]\n", None),
    "a null key in a mixture": (
        FOREIGN.replace("dataset_name: org/data", "dataset_mixer: {~: 1}"),
        r"data.train.path: ~: is a whole home or disk; name a folder of data"),
    "a number as splits": (
        FOREIGN.replace("dataset_name: org/data", "dataset_mixer: {a/b: 1}\ndataset_splits: 3"), None),
    "configurations as a number": (
        FOREIGN.replace("dataset_name: org/data", "dataset_mixer: {a/b: 1}\ndataset_configs: 3"), None),
    "a mixture of numbers": (FOREIGN.replace("dataset_name: org/data", "datasets: [1]"), r"datasets: found \[1\]"),
    "nobody's home as model": (FOREIGN.replace("org/model", "~nosuchuser/x"), r"cannot be used as a path"),
    "nobody's home as data": (FOREIGN.replace("org/data", "~nosuchuser/x"), r"cannot be used as a path"),
    "5,000 digits": (FOREIGN + "seed: " + "9" * 5000, r"a number of 5000 digits"),
    "brackets": (FOREIGN + "seed: " + "[" * 2000, r"nested more than 50 deep"),
    "a tag": (FOREIGN + "seed: !!int zero", r"the tag !!int"),
    "a mapping as the strategy of evaluation": (
        FOREIGN + "test_datasets: [{path: org/test}]\neval_strategy: {a: b}\nearly_stopping_patience: 2\n", None),
    "900 unknown keys": (FOREIGN + "".join(f"unheard_of_{i}: 1\n" for i in range(900)), None),
    "lines in a key": (FOREIGN + '"a\\nrun: {output_dir: /}\\e[2J": 1\n', None),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPORTS)
def test_imports(folder, case):
    """A source is refused, or becomes a recipe that loads and holds nothing that the source hid in it."""
    text, message = IMPORTS[case]
    (folder / "theirs.yaml").write_text(text)
    if message:
        refused(lambda: importers.import_file(folder / "theirs.yaml", "sft"), message)
        return
    began = time.process_time()
    made, _ = importers.import_file(folder / "theirs.yaml", "sft")
    assert time.process_time() - began < 5
    assert "\x1b" not in made
    assert recipe.load_text(made).run.output_dir == "runs/theirs"


def sharegpt(speaker):
    return {"conversations": [{"from": speaker, "value": "a"}, {"from": "gpt", "value": "b"}]}


def test_a_speaker_that_is_a_list_is_a_bad_row(folder, monkeypatch):
    load_split = _data(folder, monkeypatch)
    rows = [sharegpt(["human"]), sharegpt("human"), sharegpt({"a": 1})]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused(lambda: load_split(DataSplit(path="rows.jsonl"), "sft"), r"rows.jsonl:1: .*the role \['human'\]")
    loaded = load_split(DataSplit(path="rows.jsonl", bad_examples="drop"), "sft")
    assert (len(loaded.dataset), sum(loaded.dropped.values())) == (1, 2)


def test_parquet_texts_that_are_not_utf_8_are_refused(folder, monkeypatch):
    load_split = _data(folder, monkeypatch)
    offsets, texts = pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")
    broken = pa.StringArray.from_buffers(1, offsets, texts)
    pq.write_table(pa.table({"text": broken}), folder / "rows.parquet")
    refused(lambda: load_split(DataSplit(path="rows.parquet"), "sft"), r"not a Parquet file that can be read: .*utf")


def _data(folder, monkeypatch):
    import datasets

    from soren_align.data import load_split

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    return load_split
