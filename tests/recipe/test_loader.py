"""What a recipe says is what is meant, and what it gets wrong is said at once."""

import json
import re
from pathlib import Path

import pytest
from soren_align import recipe
from soren_align.core import shipped
from soren_align.core.errors import UserError

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


CHAT = "shipped:recipes/quickstart/data/chat_train.jsonl"
USERS_FILES = ("smollm2", "boolq", "quickstart/docstrings")
"""Recipes whose model and data are files that the user, a script or another recipe makes."""
USERS_OWN = ["model.name_or_path=org/model", f"data={{train: {{path: '{CHAT}'}}, eval: {{path: '{CHAT}'}}}}"]


@pytest.mark.parametrize("name", shipped.recipes())
def test_every_shipped_recipe_loads(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    overrides = []
    if name.startswith(("quickstart/dpo", "quickstart/kto")):  # it starts from what the SFT recipe makes
        overrides = ["model.name_or_path=org/model", "model.init_seed=null", "optimizer.aux_lr=1e-4"]
    if name.startswith(USERS_FILES):
        overrides = USERS_OWN
        (tmp_path / "data/boolq").mkdir(parents=True)  # boolq/lora's eval.data_root
    loaded = recipe.load(name, overrides)
    pretrains = name.startswith(("llama-c4", "qwen3-0.6b", "paper-figures", "quickstart/stdlib"))
    is_dpo = name.startswith(("quickstart/dpo", "mistral"))
    other = "kto" if name == "quickstart/kto" else "dpo" if is_dpo else "sft"
    assert loaded.task == ("pretrain" if pretrains else other)


def test_yaml_1_2_numbers_and_words(write):
    loaded = recipe.load(write(GOOD.replace("max_steps: 3", "eval_strategy: no\n  max_grad_norm: 1e1")))
    assert loaded.optimizer.lr == 1e-6
    assert loaded.trainer == {"eval_strategy": "no", "max_grad_norm": 10.0}


def test_a_recipe_says_only_what_differs_from_the_one_it_extends(write):
    write(GOOD.replace("lr: 1e-6", "lr: 1e-6\n  map: {name: sns, steps: 12}"), "base.yaml")
    write("extends: base.yaml\noptimizer: {lr: 2e-6}\ntrainer: {max_grad_norm: 2.0}\n", "middle.yaml")
    muon = "extends: middle.yaml\noptimizer: {name: muon}\n"
    loaded = recipe.load(write(muon, "muon.yaml"), ["run.output_dir=runs/y"])
    o = loaded.optimizer
    assert (o.name, o.lr, o.aux_lr, o.ns_steps) == ("muon", 2e-6, 3e-5, 5)
    assert loaded.extends == ["middle.yaml", "base.yaml"]
    assert loaded.trainer == {"max_steps": 3, "max_grad_norm": 2.0}
    assert loaded.run.output_dir == "runs/y"
    assert recipe.load(write("extends: quickstart/sft\nrun: {output_dir: runs/z}\n")).trainer["max_steps"] == 600


def test_a_mistake_is_named_by_the_path_of_the_file_where_it_stands(write, tmp_path):
    write(GOOD.replace("max_steps", "max_stepz"), "base.yaml")
    with pytest.raises(UserError) as error:
        recipe.load(write("extends: base.yaml\n\noptimizer: {ls: 2e-6}\n"))
    assert any(p.startswith(f"{tmp_path}/base.yaml:10 trainer.max_stepz") for p in error.value.problems)
    assert any(p.startswith(f"{tmp_path}/my.yaml:3 optimizer.ls: unknown key") for p in error.value.problems)


@pytest.mark.parametrize(("text", "message"), [
    ("extends: nothing\n", "my.yaml:1 extends: nothing: no such file, nor a shipped recipe"),
    ("task: sft\nextends: [a]\n", "my.yaml:2 extends: found ['a']"),
    ("extends: other.yaml\n", "other.yaml:1 extends: this recipe and my.yaml extend each other"),
])  # fmt: skip
def test_what_cannot_be_extended_is_said(write, text, message):
    write("extends: my.yaml\n", "other.yaml")
    with pytest.raises(UserError, match=re.escape(message)):
        recipe.load(write(text))


def test_every_mistake_is_reported_at_once_with_its_line(write):
    text = GOOD.replace("name: soren", "nme: soren").replace("lr: 1e-6", "lr: fast").replace("max_steps", "max_stepz")
    with pytest.raises(UserError) as error:
        recipe.load(write(text))
    problems = error.value.problems
    assert any("my.yaml:6 optimizer.nme: unknown key; did you mean 'name'?" in p for p in problems)
    assert any("my.yaml:7 optimizer.lr: found 'fast'; write a number" in p for p in problems)
    assert any("my.yaml:10 trainer.max_stepz: is no key of TRL's SFTConfig; did you mean" in p for p in problems)
    assert not any("is required" in p for p in problems)  # `name` is there, misspelt: one mistake, one message
    assert len(problems) == 3
    assert [p.split()[0] for p in problems] == sorted(
        (p.split()[0] for p in problems), key=lambda s: int(s.rpartition(":")[2])
    )


def test_overrides_are_typed_and_named_in_errors(write):
    loaded = recipe.load(write(GOOD), ["optimizer.lr=5e-7", "trainer.packing=true", "eval={suite: quickstart}"])
    assert loaded.optimizer.lr == 5e-7
    assert loaded.trainer["packing"] is True
    assert loaded.eval.suite == "quickstart"
    with pytest.raises(UserError, match=r"--set optimizer.lr=x optimizer.lr: found 'x'"):
        recipe.load(write(GOOD), ["optimizer.lr=x"])
    with pytest.raises(UserError, match=r"optimizer.lr: found 10+; write a number"):  # an integer that is no float
        recipe.load(write(GOOD), ["optimizer.lr=1" + 400 * "0"])
    with pytest.raises(UserError, match=r"trainer.max_steps: found 10+; write a finite number"):
        recipe.load(write(GOOD), ["trainer.max_steps=1" + 400 * "0"])
    with pytest.raises(UserError, match=r"write --set section.key=value"):
        recipe.load(write(GOOD), ["optimizer.lr"])
    for value, message in (("a\nb", "the text has a line break"), ('"a\\nb"', r"found 'a\\nb', which has a line")):
        with pytest.raises(UserError, match=f"run.output_dir.*: {message}"):
            recipe.load(write(GOOD), [f"run.output_dir={value}"])


def test_the_resolved_recipe_says_everything_and_loads_again(write):
    first = recipe.load(write(GOOD))
    optimizer = first.optimizer
    assert optimizer.map.model_dump() == {"name": "minimax", "resolution": 0.0004}
    assert optimizer.adjust_lr_fn == "match_rms_measured"
    for spelling in ("optimizer.map=sns", "optimizer.map={name: sns}", "optimizer.map.name=sns"):
        sns = recipe.load(write(GOOD), [spelling]).optimizer
        assert sns.map.model_dump() == {"name": "sns", "steps": 15}
    assert recipe.load(write(GOOD), ["optimizer.map=null"]) == first
    assert recipe.load(write(recipe.to_yaml(first), "resolved.yaml")) == first
    assert recipe.load_text(recipe.to_yaml(first)) == first


@pytest.mark.parametrize(("name", "own"), [
    ("muon", {"adjust_lr_fn": "match_rms_measured", "ns_steps": 5}),
    ("htmuon", {"adjust_lr_fn": "match_rms_measured", "p": 0.125}), ("adamw", {}),
])  # fmt: skip
def test_one_word_swaps_the_optimizer(write, name, own):
    loaded = recipe.load(write(GOOD), [f"optimizer.name={name}"]).optimizer.model_dump()
    assert (loaded["lr"], loaded["aux_lr"]) == (1e-6, 3e-5)
    assert {key: value for key, value in loaded.items() if key in ("adjust_lr_fn", "map", "ns_steps", "p")} == own


@pytest.mark.parametrize("name", ["soren", "muon", "htmuon", "adamw"])
def test_aux_lr_follows_lr_unless_it_is_stated(write, name):
    file = write(GOOD.replace("  aux_lr: 3e-5\n", ""))
    for lr in (1e-6, 2e-3):
        optimizer = recipe.load(file, [f"optimizer.name={name}", f"optimizer.lr={lr}"]).optimizer
        assert (optimizer.lr, optimizer.aux_lr) == (lr, lr)
    assert recipe.load(file, [f"optimizer.name={name}", "optimizer.aux_lr=3e-5"]).optimizer.aux_lr == 3e-5
    assert recipe.load(write(GOOD), [f"optimizer.name={name}", "optimizer.lr=2e-3"]).optimizer.aux_lr == 3e-5


PAPERS = [name for name in shipped.recipes() if re.search("llama-c4/|paper-figures/|/paper-|/released-", name)]
"""Recipes whose learning rates are the paper's, or those of its code."""


@pytest.mark.parametrize("name", PAPERS)
def test_recipes_of_the_paper_and_of_its_code_state_their_scale_and_rates(name):
    """No default of ours reaches them."""
    stated = recipe.loader.merged_text(shipped.recipes()[name])
    assert re.search(r"^  aux_lr: \d", stated, re.MULTILINE)
    assert re.search(r"^  adjust_lr_fn: (none|original) ", stated, re.MULTILINE) or "  name: adamw" in stated


def test_a_recipe_of_the_other_task_is_refused(write):
    with pytest.raises(UserError, match=r"my.yaml:1 task: found sft, but the command is dpo; run `soren-align sft`"):
        recipe.load(write(GOOD), task="dpo")


def test_what_may_change_between_two_halves_of_a_run_and_what_may_not(write):
    a = recipe.training_part(recipe.load(write(GOOD)))
    same = recipe.training_part(recipe.load(write(GOOD), ["trainer.logging_steps=7", "run.output_dir=elsewhere"]))
    other = recipe.training_part(recipe.load(write(GOOD), ["optimizer.lr=2e-6"]))
    assert recipe.differences(a, same) == []
    assert recipe.differences(a, other) == ["optimizer.lr: 2e-06 instead of 1e-06"]


def test_the_schema_knows_every_key_of_a_shipped_recipe():
    schema = recipe.loader.json_schema()
    text = json.dumps(schema)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["trainer"]["properties"]["lr_scheduler_type"]["enum"]
    assert "learning_rate" not in schema["properties"]["trainer"]["properties"]
    assert "match_rms_adamw" in text
    assert "Peak learning rate of the matrices" in text


@pytest.mark.parametrize(("settings", "message"), [
    ("name: muon\n  map: exact", "optimizer.map: .* for muon; remove this key, or write name: soren"),
    ("name: adamw\n  ns_steps: 15", "optimizer.ns_steps: unknown key for adamw; remove this key, or write name: muon"),
    ("name: adamw\n  momentum: 0.9", "momentum: .* for adamw; remove this key, or write name: soren, muon or"),
    ("name: soren\n  p: 0.1", "optimizer.p: unknown key for soren; remove this key, or write name: htmuon"),
    ("name: soren\n  map: {name: exact, steps: 15}",
     "optimizer.map.steps: .* for exact; .*, or write name: sns or released"),
    ("name: soren\n  map: {name: sns, stes: 15}", "optimizer.map.stes: unknown key; did you mean 'steps'"),
    ("name: soren\n  map: {resolution: 0.1}", "optimizer.map.resolution: found 0.1; write 0.0004 or 0.001 or 0.01"),
    ("name: soren\n  map: snss",
     "optimizer.map.name: found 'snss'; write minimax, sns, .* or file; did you mean 'sns'"),
    ("name: soren\n  precision: float16\n  map: sns", "precision: found 'float16'; for the map 'sns' write auto or float32"),
    ("name: muon\n  momentun: 0.9", "optimizer.momentun: unknown key; did you mean 'momentum'"),
    ("name: htmoun\n  p: 0.5", "optimizer.name: found 'htmoun'; write soren, muon, htmuon or adamw; did you mean 'ht"),
])  # fmt: skip
def test_a_key_that_does_not_apply_is_one_clear_error(write, settings, message):
    with pytest.raises(UserError) as error:
        recipe.load(write(GOOD.replace("name: soren", settings)))
    (problem,) = error.value.problems
    assert "/my.yaml:6 " in problem or "/my.yaml:7 " in problem
    assert re.search(message, problem)


@pytest.mark.parametrize(("settings", "message"), [
    ({"model.attn_implementation": "flash_attn_2"}, "did you mean 'flash_attention_2'"),
    ({"model.attn_implementation": "someone/kernel"}, "write one of eager, sdpa, .*or kernels-community/NAME"),
    ({"model.attn_implementation": "flash_attention_2", "trainer.use_cpu": "true"},
     "model.attn_implementation: flash_attention_2 runs on GPUs only; write sdpa or eager"),
    ({"trainer.eval_packing": "true"}, "trainer.eval_packing: .*would attend to each other"),
    ({"task": "dpo", "trainer.train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy: needs one length"),
    ({"trainer.packing": "true", "trainer.max_length": "null"}, "trainer.max_length: .* packing needs a length"),
])  # fmt: skip
def test_attention_and_packing_that_cannot_work_are_one_clear_error(write, settings, message):
    with pytest.raises(UserError, match=message) as error:
        recipe.load(write(GOOD), [f"{key}={value}" for key, value in settings.items()])
    assert len(error.value.problems) == 1


def test_packing_keeps_every_token_unless_a_strategy_is_named(write):
    packed = "trainer.packing=true"
    assert recipe.load(write(GOOD), [packed]).trainer["packing_strategy"] == "bfd_split"
    assert recipe.load(write(GOOD), [packed, "trainer.packing_strategy=bfd"]).trainer["packing_strategy"] == "bfd"
    assert "packing_strategy" not in recipe.load(write(GOOD), ["trainer.packing=false"]).trainer


def test_keys_of_another_optimizer_are_inherited_by_none_and_reported(write):
    base = "lr: 1e-6\n  map: {name: sns, steps: 12}\n  workspace_mb: 16\n  adjust_lr_fn: match_rms_adamw"
    write(GOOD.replace("lr: 1e-6", base), "base.yaml")
    notices = []
    muon = recipe.load(write("extends: base.yaml\noptimizer: {name: muon}"), notify=notices.append).optimizer
    assert notices == ["optimizer.name=muon: ignored map, workspace_mb of soren, which muon does not have"]
    assert (muon.name, muon.adjust_lr_fn, muon.aux_lr) == ("muon", "match_rms_adamw", 3e-5)
    notices.clear()
    for overrides in (["optimizer.name=htmuon", "optimizer.p=0.5"], ["optimizer.p=0.5", "optimizer.name=htmuon"]):
        assert recipe.load(write("extends: base.yaml"), overrides, notify=notices.append).optimizer.p == 0.5
    assert notices == ["optimizer.name=htmuon: ignored map, workspace_mb of soren, which htmuon does not have"] * 2
    notices.clear()
    exact = recipe.load(write("extends: base.yaml"), ["optimizer.map.name=exact"], notify=notices.append).optimizer
    assert notices == ["optimizer.map.name=exact: ignored steps of sns, which exact does not have"]
    assert (exact.map.model_dump(), exact.workspace_mb) == ({"name": "exact"}, 16)
    notices.clear()
    for file in ("optimizer: {map: exact}", "optimizer: {map: {steps: 3}}", "optimizer: {map: {name: sns}}"):
        recipe.load(write(f"extends: base.yaml\n{file}"), notify=notices.append)
    assert notices == []


def test_a_bare_map_name_can_be_extended_and_overridden(write):
    write(GOOD.replace("lr: 1e-6", "lr: 1e-6\n  map: sns"), "base.yaml")
    extending = write("extends: base.yaml\noptimizer: {map: {steps: 9}}")
    assert recipe.load(extending).optimizer.map.steps == 9
    assert recipe.load(extending, ["optimizer.map.steps=7"]).optimizer.map.steps == 7
    assert recipe.load(write("extends: base.yaml"), ["optimizer.map.steps=7"]).optimizer.map.steps == 7


@pytest.mark.parametrize(("text", "overrides"), [
    ("optimizer: {name: muon, map: sns}", []), ("optimizer: {name: muon}", ["optimizer.map=sns"]),
    ("", ["optimizer.name=muon", "optimizer.map=sns"]), ("", ["optimizer.map=sns", "optimizer.name=muon"]),
])  # fmt: skip
def test_a_key_beside_the_new_name_that_does_not_apply_stays_an_error(write, text, overrides):
    write(GOOD, "base.yaml")
    with pytest.raises(UserError, match=r"optimizer.map: .* for muon; remove this key, or write name: soren"):
        recipe.load(write(f"extends: base.yaml\n{text}\n"), overrides)


def test_a_misspelt_key_of_the_base_is_not_left_out_silently(write):
    write(GOOD.replace("lr: 1e-6", "lr: 1e-6\n  work_mb: 16"), "base.yaml")
    with pytest.raises(UserError, match=r"base.yaml:8 optimizer.work_mb: unknown key"):
        recipe.load(write("extends: base.yaml"), ["optimizer.name=muon"])


@pytest.mark.parametrize("name", shipped.recipes())
@pytest.mark.parametrize("optimizer", recipe.OPTIMIZER_SECTIONS)
def test_any_optimizer_runs_any_shipped_recipe(name, optimizer, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/boolq").mkdir(parents=True)  # boolq/lora's eval.data_root
    overrides = ["model={name_or_path: org/model}", "optimizer.aux_lr=1e-4"]
    overrides *= name.startswith(("quickstart/dpo", "quickstart/kto"))
    overrides += USERS_OWN * name.startswith(USERS_FILES)
    loaded = recipe.load(name, [*overrides, f"optimizer.name={optimizer}"])
    assert loaded.optimizer.name == optimizer
    assert recipe.load_text(recipe.to_yaml(loaded)) == loaded
    if optimizer == "soren":
        overrides += ["optimizer.name=soren", "optimizer.precision=auto"]  # released and exact have no bfloat16
        for map_name in ("minimax", "sns", "released", "exact"):
            for spelling in (f"optimizer.map.name={map_name}", f"optimizer.map={map_name}"):
                assert recipe.load(name, [*overrides, spelling]).optimizer.map.name == map_name


def test_the_recipes_that_were_extended_are_listed_and_no_difference_at_resume(write):
    write("extends: quickstart/sft\nrun: {output_dir: runs/z}\n", "base.yaml")
    first = recipe.load(write("extends: base.yaml\n"))
    assert first.extends == ["base.yaml", "quickstart/sft"]
    copy = recipe.load(write(recipe.to_yaml(first), "resolved.yaml"))
    assert copy == first
    alone = first.model_copy(update={"extends": []})
    assert recipe.differences(recipe.training_part(alone), recipe.training_part(first)) == []
    with pytest.raises(UserError, match="extends cannot be set here"):
        recipe.load("quickstart/sft", ["extends=base.yaml"])


def test_a_runs_own_recipe_can_be_read_from_anywhere(write, tmp_path, monkeypatch):
    (tmp_path / "chat.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    loaded = recipe.load(write(GOOD.replace("org/data", "chat.jsonl")))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("resolved.yaml").write_text(recipe.to_yaml(loaded))
    with pytest.raises(UserError):
        recipe.load("resolved.yaml")
    assert recipe.load_resolved("resolved.yaml") == loaded


def test_a_setting_that_leaves_the_evaluation_out_keeps_its_suites_name(write):
    path = write(GOOD + "eval: {suite: quickstart}\n")
    assert recipe.load(path)._skipped_suite is None
    assert recipe.load(path, ["eval=null"])._skipped_suite == recipe.load(path).eval.suite


def test_a_path_is_looked_for_in_the_working_directory_and_then_beside_the_recipe(write, tmp_path, monkeypatch):
    (tmp_path / "chat.jsonl").write_text("{}\n")
    path, notices = write(GOOD.replace("org/data", "chat.jsonl")), []
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    loaded = recipe.load(path, notify=notices.append)
    assert loaded.data.train.path == str(tmp_path / "chat.jsonl")
    assert loaded.run.output_dir == str(tmp_path / "runs/x")  # and not a run of this folder
    assert loaded.model.name_or_path == "org/model"
    assert notices == [f"{path}: its paths are those of its folder, {tmp_path}"]
    notices.clear()
    Path("chat.jsonl").write_text("{}\n")
    assert recipe.load(path, notify=notices.append).data.train.path == "chat.jsonl"
    (notice,) = notices
    assert notice.endswith(f"chat.jsonl is read; {tmp_path}/chat.jsonl exists too, beside the recipe")


MIXED = GOOD.replace("{path: org/data}", "[{path: org/data}, {path: org/more, weight: 0.25, split: train_sft}]")


def test_a_mixture_is_a_list_and_comes_back_from_its_own_yaml(write):
    loaded = recipe.load(write(MIXED))
    assert [(s.path, s.weight, s.split) for s in loaded.data.sources] == [
        ("org/data", 1.0, "train"),
        ("org/more", 0.25, "train_sft"),
    ]
    assert recipe.load_text(recipe.to_yaml(loaded)) == loaded
    assert [s.path for s in recipe.load(write(GOOD)).data.sources] == ["org/data"]
    json.dumps(recipe.loader.json_schema())


def test_set_reaches_into_a_mixture(write):
    loaded = recipe.load(write(MIXED), ["data.train.1.limit=7", "data.train.0.weight=2.0"])
    assert [(s.limit, s.weight) for s in loaded.data.sources] == [(None, 2.0), (7, 0.25)]
    for key in ("data.train.limit", "data.train.2.limit"):
        message = rf"--set {key}=7: data.train is a list of length 2; write data.train.0 for"
        with pytest.raises(UserError, match=message):
            recipe.load(write(MIXED), [f"{key}=7"])
    assert recipe.load(write(MIXED), ["data.train={path: org/other}"]).data.sources[0].path == "org/other"
    message = r"--set data.train.1.limit=0 data.train.1.limit: found 0; write a number of at least"
    with pytest.raises(UserError, match=message):
        recipe.load(write(MIXED), ["data.train.1.limit=0"])


@pytest.mark.parametrize(("train", "message"), [
    ("\n  - {path: org/data}\n  - {pth: org/more}", r"my.yaml:6 data.train.1.pth: unknown key; did you mean 'path'"),
    ("\n  - {path: org/data}\n  - {split: train}", r"my.yaml:6 data.train.1.path: is required"),
    ("\n  - {path: org/data, weight: 0}", r"my.yaml:5 data.train.0.weight: found 0; write a number above 0"),
    ("\n  - {path: org/data}\n  - org/more", r"my.yaml:6 data.train.1: found 'org/more'; write {path: org/more}"),
    ("[]", r"my.yaml:4 data.train: found \[\]; write a list"),
    ("org/data", r"my.yaml:4 data.train: found 'org/data'; write train: {path: org/data}"),
    ("{path: org/data, columns: {prompts: a}}", r"columns.prompts: found 'prompts'; write .*mean 'prompt'"),
    ("{path: org/data, roles: {a: b}}",
     r"my.yaml:4 data.train.roles.a: found 'b'; write system, user, assistant, tool or tool_call"),
    ("{path: org/data, split: test_sft}", r"my.yaml:4 data.train.split: 'test_sft' is a test split.*train_on_test"),
    ("[{path: org/data, split: 'validation[:50%]'}]", r"data.train.0.split: 'validation\[:50%\]' is a test split"),
    ("{path: my.jsonl, split: 'train[:10%]'}", r"data.train.split: .*a file is always read whole; use the key limit"),
])  # fmt: skip
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
    with pytest.raises(UserError, match=r"my.yaml:4 data.eval: found a list; write one section"):
        recipe.load(write(text))
    assert recipe.load(write(text.replace("[{path: org/a}]", "{path: org/a, split: test_sft}"))).data.eval.split


def test_a_run_of_an_earlier_version_is_read_without_the_keys_that_left(write, tmp_path):
    text, file = recipe.to_yaml(recipe.load(write(GOOD))), tmp_path / "recipe.yaml"
    left = "run:\n  perturb: null\n  published: {table: paper/pretraining, model: LLaMA-60M}\n"
    file.write_text(text.replace("run:\n", left))
    now = recipe.load_resolved(file)
    assert now == recipe.load(write(GOOD))
    file.write_text(file.read_text().replace("perturb: null", "perturb: {seed: 1}"))
    with pytest.raises(UserError, match=r"run\.perturb: unknown key"):  # its weights were others
        recipe.load_resolved(file)


def test_an_unreadable_recipe_of_a_run_folder_is_named(tmp_path):
    (tmp_path / "recipe.yaml").write_text(GOOD.replace("max_steps: 3", "{}").replace("  lr:", "  rate:"))
    with pytest.raises(UserError, match=r"recipe.yaml: not a recipe that this version .*\n  [a-z._]+: .*"):
        recipe.load_resolved(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(("setting", "remedy"), [
    ("model=org/model", "model: {name_or_path: org/model}"), ("data=chat.jsonl", "data: {train: {path: chat.jsonl}}"),
    ("data.train=chat.jsonl", "train: {path: chat.jsonl}"), ("data.train=[chat.jsonl]", "{path: chat.jsonl}"),
    ("data.eval=0.05", "eval: {fraction: 0.05}"), ("data.eval=500", "eval: {examples: 500}"),
    ("data.eval=false", "eval: null"), ("optimizer=soren", "optimizer: {name: soren}"),
    ("run=runs/mine", "run: {output_dir: runs/mine}"),
    ("run.samples=Who are you?", "samples: {prompts: [Who are you?]}"),
    ("run.early_stopping=true", "early_stopping: {patience: 3}"), ("model.lora=true", "lora: {r: 16}"),
    ("eval='a: b'", "eval: {suite: 'a: b'}"), ("trainer=3", "a section: indented keys below this key, or trainer.KEY=VALUE"),
])  # fmt: skip
def test_a_value_in_place_of_a_section_is_answered_with_the_section(write, setting, remedy):
    with pytest.raises(UserError) as error:
        recipe.load(write(GOOD), [setting])
    assert any(problem.endswith(f"write {remedy}") for problem in error.value.problems), error.value.problems


@pytest.mark.parametrize(("settings", "key", "found"), [
    (["lr=1000"], "lr", "1000 times weight_decay 0.1 is 100"),
    (["lr=20", "weight_decay=0.05"], "lr", "20 times weight_decay 0.05 is 1, so"),
    (["aux_lr=20", "aux_weight_decay=0.2"], "aux_lr", "20 times aux_weight_decay 0.2 is 4"),
    (["name=adamw", "aux_lr=null", "lr=5", "weight_decay=0", "aux_weight_decay=1"], "lr",
     "5 times aux_weight_decay 1 is 5"),
    (["lr=1000", "weight_decay=0"], None, None),
    (["lr=9.9"], None, None),
])  # fmt: skip
def test_a_decay_that_turns_the_signs_of_weights_is_refused(write, settings, key, found):
    """In any group: 1 - lr * weight_decay, with the rate as it is written, whatever adjust_lr_fn is."""
    overrides = [f"optimizer.{setting}" for setting in (*settings, "adjust_lr_fn=original")]
    if any("adamw" in setting for setting in settings):
        overrides.pop()
    if found is None:
        recipe.load(write(GOOD), overrides)
        return
    with pytest.raises(UserError) as error:
        recipe.load(write(GOOD), overrides)
    (problem,) = error.value.problems
    assert f"optimizer.{key}=" in problem or f" optimizer.{key}: " in problem
    assert found in problem
    assert "write a smaller learning rate or" in problem


def test_a_runs_folder_is_answered_with_its_model(tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(UserError, match=r"write .*run/model, the model of this run"):
        recipe.load("quickstart/sft", [f"model.name_or_path={tmp_path / 'run'}"])


@pytest.mark.parametrize(("lines", "keys", "message"), [
    (['{"messages": []}', "", '{"messages": }'], "", ":3: not JSON: Expecting value at column 14"),
    (['{"q": "x", "a": "y"}'], "",
     "has the columns q, a, but sft needs 'messages'.* such as {instruction: q, output: a}"),
    (['{"q": "x", "a": "y"}'], "columns: {prompt: qs, completion: a}", "columns.prompt is 'qs', but .* q, a; did you"),
    (["{}"], "", None),
    (['{"messages": }'], "bad_examples: drop", None),
    (['{"messages": []}', '{"messages": }'], "limit: 1", None),
    (['{"q": "x", "a": "y"}'], "columns: {prompt: q, completion: a, role: r}", None),
    (['{"messages": []}'] * 60 + ["{"], "", None),  # that of a later line is found when all examples are read
])  # fmt: skip
def test_the_first_lines_of_a_file_are_checked_without_torch(write, lines, keys, message):
    data = write("\n".join(lines) + "\n", "data.jsonl")
    file = write(GOOD.replace("{path: org/data}", f"{{path: {data}, {keys}}}"))
    if message is None:
        recipe.load(file)
        return
    with pytest.raises(UserError, match=rf"my.yaml:4 data.train.path: .*data.jsonl.*{message}"):
        recipe.load(file)


@pytest.mark.parametrize(("num_steps", "settings", "key"), [
    (10, [], None), (1, ["trainer.max_steps=1"], None),
    (1, ["trainer.gradient_accumulation_steps=32"], "trainer.gradient_accumulation_steps"),
    (9, [], "trainer.per_device_train_batch_size"), (3, ["run.global_batch_size=64"], "run.global_batch_size"),
])  # fmt: skip
def test_few_steps_are_a_notice_with_the_key_to_change(write, num_steps, settings, key):
    loaded = recipe.load(write(GOOD.replace("  max_steps: 3", "  num_train_epochs: 1")), settings)
    notice = recipe.few_steps(loaded, num_steps, 1)
    assert (notice is None) == (key is None)
    if key:
        assert f"{num_steps} optimizer step" in notice
        assert f"lower {key} or raise trainer.num_train_epochs" in notice
