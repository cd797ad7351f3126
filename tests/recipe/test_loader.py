"""What a recipe says is what is meant, and what it gets wrong is said at once."""

import json

import pytest

from soren_align import recipe, shipped
from soren_align.errors import UserError

GOOD = """\
task: sft
model: {name_or_path: org/model}
data:
  train: {path: org/data}
optimizer:
  name: soren
  lr: 1e-6
  aux_lr: 3e-5
trainer:
  max_steps: 3
run:
  output_dir: runs/x
"""


@pytest.fixture
def write(tmp_path):
    def _write(text, name="my.yaml"):
        file = tmp_path / name
        file.write_text(text)
        return str(file)

    return _write


@pytest.mark.parametrize("name", shipped.recipes())
def test_every_shipped_recipe_loads(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    overrides = []
    if name.startswith("quickstart/dpo"):  # it starts from what the SFT recipe makes
        overrides = ["model.name_or_path=org/model", "model.init_seed=null", "optimizer.aux_lr=1e-4"]
    loaded = recipe.load(name, overrides)
    assert loaded.task == ("dpo" if name.startswith(("quickstart/dpo", "mistral")) else "sft")


def test_yaml_1_2_numbers_and_words(write):
    loaded = recipe.load(write(GOOD.replace("max_steps: 3", "eval_strategy: no\n  max_grad_norm: 1e1")))
    assert loaded.optimizer.lr == 1e-6
    assert loaded.trainer == {"eval_strategy": "no", "max_grad_norm": 10.0}


def test_a_recipe_says_only_what_differs_from_the_one_it_extends(write):
    write(GOOD.replace("lr: 1e-6", "lr: 1e-6\n  spectral_map: sns\n  ns_steps: 12"), "base.yaml")
    write("extends: base.yaml\noptimizer: {lr: 2e-6}\ntrainer: {max_grad_norm: 2.0}\n", "middle.yaml")
    muon = "extends: middle.yaml\noptimizer: {name: muon, spectral_map: null, ns_steps: null}\n"
    loaded = recipe.load(write(muon, "muon.yaml"), ["run.output_dir=runs/y"])
    o = loaded.optimizer
    assert (o.name, o.lr, o.aux_lr, o.ns_steps) == ("muon", 2e-6, 3e-5, None)
    assert loaded.trainer == {"max_steps": 3, "max_grad_norm": 2.0}
    assert loaded.run.output_dir == "runs/y"
    assert recipe.load(write("extends: quickstart/sft\nrun: {output_dir: runs/z}\n")).trainer["max_steps"] == 600


def test_a_mistake_is_named_in_the_file_where_it_stands(write):
    write(GOOD.replace("max_steps", "max_stepz"), "base.yaml")
    with pytest.raises(UserError) as error:
        recipe.load(write("extends: base.yaml\n\noptimizer: {ls: 2e-6}\n"))
    assert any(p.startswith("base.yaml:10 trainer.max_stepz") for p in error.value.problems)
    assert any(p.startswith("my.yaml:3 optimizer.ls: unknown key") for p in error.value.problems)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: nothing\n", "my.yaml:1 extends: nothing: no such file, nor a shipped recipe"),
        ("task: sft\nextends: [a]\n", "my.yaml:2 extends: found ['a']"),
        ("extends: other.yaml\n", "other.yaml:1 extends: my.yaml extends this one in turn"),
    ],
)
def test_what_cannot_be_extended_is_said(write, text, message):
    write("extends: my.yaml\n", "other.yaml")
    with pytest.raises(UserError) as error:
        recipe.load(write(text))
    assert message in str(error.value)


def test_every_mistake_is_reported_at_once_with_its_line(write):
    text = GOOD.replace("name: soren", "nme: soren").replace("lr: 1e-6", "lr: fast").replace("max_steps", "max_stepz")
    with pytest.raises(UserError) as error:
        recipe.load(write(text))
    problems = error.value.problems
    assert any(p.startswith("my.yaml:6 optimizer.nme: unknown key; did you mean 'name'?") for p in problems)
    assert any(p.startswith("my.yaml:7 optimizer.lr: found 'fast'; write a number") for p in problems)
    assert any(p.startswith("my.yaml:10 trainer.max_stepz: unknown to TRL's SFTConfig; did you mean") for p in problems)
    assert not any("is required" in p for p in problems)  # `name` is there, misspelt: one mistake, one message
    assert len(problems) == 3
    assert [p.split()[0] for p in problems] == sorted((p.split()[0] for p in problems), key=lambda s: int(s[8:]))


def test_overrides_are_typed_and_named_in_errors(write):
    loaded = recipe.load(write(GOOD), ["optimizer.lr=5e-7", "trainer.packing=true", "eval={suite: quickstart}"])
    assert loaded.optimizer.lr == 5e-7
    assert loaded.trainer["packing"] is True
    assert loaded.eval.suite == "quickstart"
    with pytest.raises(UserError, match=r"--set optimizer.lr=x optimizer.lr: found 'x'"):
        recipe.load(write(GOOD), ["optimizer.lr=x"])
    with pytest.raises(UserError, match=r"write --set section.key=value"):
        recipe.load(write(GOOD), ["optimizer.lr"])


def test_the_resolved_recipe_says_everything_and_loads_again(write):
    first = recipe.load(write(GOOD))
    said = first.optimizer
    assert (said.spectral_map, said.resolution, said.ns_steps, said.adjust_lr_fn) == ("minimax", 0.01, None, "none")
    sns = recipe.load(write(GOOD), ["optimizer.spectral_map=sns"]).optimizer
    assert (sns.spectral_map, sns.resolution, sns.ns_steps) == ("sns", None, 15)
    assert recipe.load(write(recipe.to_yaml(first), "resolved.yaml")) == first
    assert recipe.load_text(recipe.to_yaml(first)) == first


@pytest.mark.parametrize(
    ("name", "scale", "aux_lr"), [("muon", "original", 3e-5), ("htmuon", "original", 3e-5), ("adamw", None, 3e-5)]
)
def test_one_word_swaps_the_optimizer(write, name, scale, aux_lr):
    loaded = recipe.load(write(GOOD), [f"optimizer.name={name}"]).optimizer
    assert (loaded.spectral_map, loaded.ns_steps, loaded.adjust_lr_fn, loaded.aux_lr) == (None, None, scale, aux_lr)
    assert (loaded.p == 0.125) == (name == "htmuon")


def test_a_matrix_optimizer_needs_a_rate_for_the_rest(write):
    with pytest.raises(UserError, match=r"optimizer.aux_lr: is required"):
        recipe.load(write(GOOD.replace("  aux_lr: 3e-5\n", "")))
    adamw = recipe.load(write(GOOD.replace("  aux_lr: 3e-5\n", "")), ["optimizer.name=adamw"])
    assert adamw.optimizer.aux_lr == adamw.optimizer.lr


def test_a_recipe_of_the_other_task_is_refused(write):
    with pytest.raises(UserError, match=r"my.yaml:1 task: this is a recipe for `soren-align sft`, not dpo"):
        recipe.load(write(GOOD), task="dpo")


def test_what_may_change_between_two_halves_of_a_run_and_what_may_not(write):
    a = recipe.training_part(recipe.load(write(GOOD)))
    same = recipe.training_part(recipe.load(write(GOOD), ["trainer.logging_steps=7", "run.output_dir=elsewhere"]))
    other = recipe.training_part(recipe.load(write(GOOD), ["optimizer.lr=2e-6"]))
    assert recipe.differences(a, same) == []
    assert recipe.differences(a, other) == ["optimizer.lr: 1e-06 there, 2e-06 here"]


def test_the_schema_knows_every_key_of_a_shipped_recipe():
    schema = recipe.json_schema()
    text = json.dumps(schema)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["trainer"]["properties"]["lr_scheduler_type"]["enum"]
    assert "learning_rate" not in schema["properties"]["trainer"]["properties"]
    assert "match_rms_adamw" in text
    assert "Peak learning rate of the matrices" in text


@pytest.mark.parametrize(
    "settings",
    [
        "name: muon\n  spectral_map: exact",
        "name: adamw\n  ns_steps: 15",
        "name: soren\n  p: 0.1",
        "name: soren\n  spectral_map: exact\n  ns_steps: 15",
        "name: soren\n  spectral_map: sns\n  resolution: 0.01",
        "name: soren\n  ns_steps: 15",
        "name: muon\n  workspace_mb: 16",
    ],
)
def test_a_setting_that_would_not_be_read_is_refused(write, settings):
    with pytest.raises(UserError, match=r"my.yaml:7 .*only .* reads it; leave it out|my.yaml:[89] .*only .* reads it"):
        recipe.load(write(GOOD.replace("name: soren", settings)))


def test_a_runs_own_recipe_can_be_read_from_anywhere(write, tmp_path, monkeypatch):
    (tmp_path / "chat.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    loaded = recipe.load(write(GOOD.replace("org/data", "chat.jsonl")))
    (tmp_path / "resolved.yaml").write_text(recipe.to_yaml(loaded))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UserError):
        recipe.load(str(tmp_path / "resolved.yaml"))
    assert recipe.load_resolved(tmp_path / "resolved.yaml") == loaded


MIXED = GOOD.replace("{path: org/data}", "[{path: org/data}, {path: org/more, weight: 0.25, split: train_sft}]")


def test_a_mixture_is_a_list_and_comes_back_from_its_own_yaml(write):
    loaded = recipe.load(write(MIXED))
    assert [(s.path, s.weight, s.split) for s in loaded.data.sources] == [
        ("org/data", 1.0, "train"),
        ("org/more", 0.25, "train_sft"),
    ]
    assert recipe.load_text(recipe.to_yaml(loaded)) == loaded
    assert [s.path for s in recipe.load(write(GOOD)).data.sources] == ["org/data"]
    json.dumps(recipe.json_schema())


def test_set_reaches_into_a_mixture(write):
    loaded = recipe.load(write(MIXED), ["data.train.1.limit=7", "data.train.0.weight=2.0"])
    assert [(s.limit, s.weight) for s in loaded.data.sources] == [(None, 2.0), (7, 0.25)]
    for key in ("data.train.limit", "data.train.2.limit"):
        with pytest.raises(UserError, match=rf"--set {key}=7: data.train is a list of 2; write data.train.0 for the"):
            recipe.load(write(MIXED), [f"{key}=7"])
    assert recipe.load(write(MIXED), ["data.train={path: org/other}"]).data.sources[0].path == "org/other"
    with pytest.raises(UserError, match=r"--set data.train.1.limit=0 data.train.1.limit: found 0; it must be at least"):
        recipe.load(write(MIXED), ["data.train.1.limit=0"])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            "\n  - {path: org/data}\n  - {pth: org/more}",
            r"my.yaml:6 data.train.1.pth: unknown key; did you mean 'path'",
        ),
        ("\n  - {path: org/data}\n  - {split: train}", r"my.yaml:6 data.train.1.path: is required"),
        ("\n  - {path: org/data}\n  - {path: no.jsonl}", r"my.yaml:6 data.train.1.path: no file no.jsonl"),
        ("\n  - {path: org/data, weight: 0}", r"my.yaml:5 data.train.0.weight: found 0; it must be more than 0"),
        ("\n  - {path: org/data}\n  - org/more", r"my.yaml:6 data.train.1: found 'org/more'; write a section"),
        ("[]", r"my.yaml:4 data.train: found \[\]; it is empty"),
        ("org/data", r"my.yaml:4 data.train: found 'org/data'; write a section"),
        ("{pth: org/data}", r"my.yaml:4 data.train.pth: unknown key; did you mean 'path'"),
        ("{path: org/data, split: test_sft}", r"my.yaml:4 data.train.split: 'test_sft' is a test split.*train_on_test"),
        ("[{path: org/data, split: 'validation[:50%]'}]", r"data.train.0.split: 'validation\[:50%\]' is a test split"),
        ("{path: my.jsonl, split: 'train[:10%]'}", r"data.train.split: .*a file is always taken whole; write limit"),
    ],
)
def test_what_is_wrong_with_training_rows_is_said_with_its_line(write, tmp_path, monkeypatch, train, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=message) as error:
        recipe.load(write(GOOD.replace("train: {path: org/data}", f"train: {train}")))
    assert len(error.value.problems) == 1


def test_a_test_split_is_trained_on_only_in_so_many_words(write):
    for split in ("train", "train_sft", "train_sft[:10%]", "latest", "attest", "devices", "default", "evaluate_me_not"):
        recipe.load(write(GOOD.replace("org/data}", f"org/data, split: '{split}'}}")))
    for split in ("test", "test_prefs", "prefs_test", "val", "validation", "eval", "dev", "Test", "train+test"):
        text = GOOD.replace("org/data}", f"org/data, split: '{split}'}}")
        with pytest.raises(UserError, match="is a test split"):
            recipe.load(write(text))
        assert recipe.load(write(text.replace("split:", "train_on_test: true, split:"))).data.train.split == split


def test_held_out_rows_are_one_split(write):
    text = GOOD.replace("  train:", "  eval: [{path: org/a}]\n  train:")
    with pytest.raises(UserError, match=r"my.yaml:4 data.eval: found a list; held-out rows are one split"):
        recipe.load(write(text))
    assert recipe.load(write(text.replace("[{path: org/a}]", "{path: org/a, split: test_sft}"))).data.eval.split
