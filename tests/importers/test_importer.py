"""Others' files become recipes that load, and no key of theirs is lost on the way.

tests/importers/foreign/ has the key patterns of the alignment handbook's recipes, of TRL's configs and of Axolotl's,
with values of our own.
"""

import math
import re
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.importers import import_file, keys
from soren_align.importers.engine import convert, flattened
from soren_align.importers.importer import to_table, to_text
from soren_align.importers.keys import Note
from soren_align.recipe import schema, trl
from soren_align.recipe.loader import load_text, parse
from soren_align.recipe.optimizer import AdamWSettings
from tests.support import command
from transformers import TrainerState, TrainingArguments

FOLDER = Path(__file__).parent / "foreign"
FILES = {file.stem: file for file in sorted(FOLDER.glob("*.yaml")) if "orpo" not in file.stem}
SFT = {"model_name_or_path": "lab/base", "dataset_name": "lab/chat", "max_seq_length": 512}
DPO = {"model_name_or_path": "lab/sft", "dataset_name": "lab/pairs", "beta": 0.1}
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**6) | st.floats(0, 1) | st.text("aé01 :#'-\n", max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)


def source(name):
    return parse(FILES[name].read_text(), name).content


def translated(name):
    return convert(source(name), name)


def note_on(notes, key):
    (note,) = [n for n in notes if n.key == key]
    return note


def problems(text):
    try:
        load_text(text)
    except UserError as error:
        return error.problems
    return ()


def known_names():
    tables = (keys.RENAMED, *(row[0] for row in keys.LEFT_OUT))
    words = " ".join(t if isinstance(t, str) else " ".join(t) for t in tables).split()
    return sorted({w.replace("*", "x") for w in words} | set(trl.fields("sft")) | set(trl.fields("dpo")))


def test_the_handbook_has_21_recipes_for_sft_and_dpo():
    assert sum(name.startswith("handbook") for name in FILES) == 21


@pytest.mark.parametrize("name", FILES)
def test_every_file_becomes_a_recipe_that_loads(name, tmp_path):
    text, _ = import_file(FILES[name])
    (tmp_path / "mine.yaml").write_text(text)
    loaded = recipe.load(str(tmp_path / "mine.yaml"), task="dpo" if "dpo" in name else "sft")
    assert loaded.optimizer.aux_lr == loaded.optimizer.lr
    assert not any(source.split.startswith("test") for source in loaded.data.sources)
    swapped = recipe.load(str(tmp_path / "mine.yaml"), ["optimizer.name=soren"])
    assert swapped.trainer == loaded.trainer
    assert swapped.optimizer.adjust_lr_fn == "match_rms_measured"


@pytest.mark.parametrize("name", FILES)
def test_no_key_is_lost(name):
    given, notes = flattened(source(name)), translated(name).notes
    told = [n.key for n in notes if n.key in given]
    assert sorted(told) == sorted(given)  # each once: unchanged, renamed, dropped or unknown
    assert all(n.explanation for n in notes if n.outcome in ("renamed", "dropped"))
    assert [n.key for n in notes if n.outcome == "unknown"] == []


@pytest.mark.parametrize("name", FILES)
def test_the_table_names_every_key_in_80_columns(name):
    made = translated(name)
    table = to_table(made, name)
    assert max(map(len, table.splitlines())) <= 80
    words = table.replace(",", " ").split()
    assert set(flattened(source(name))) <= set(words)


@pytest.mark.parametrize("name", FILES)
def test_what_the_source_does_not_say_is_marked_as_ours(name):
    made = translated(name)
    marked = [line.split(":")[0].strip() for line in to_text(made, name).splitlines() if "# ours: " in line]
    assert sorted(marked) == sorted(key.rpartition(".")[2] for key in made.ours)
    said = " ".join(n.explanation for n in made.notes if n.outcome == "renamed")
    for key in (f"{section}.{k}" for section in ("optimizer", "run") for k in made.recipe[section]):
        assert (key in made.ours) != (key in said), key


@pytest.mark.parametrize(("name", "key", "value"), [
    ("handbook-zephyr-7b-beta-sft-full", "optimizer.lr", 3e-5),
    ("handbook-zephyr-7b-beta-sft-full", "optimizer.weight_decay", 0.0),  # our own default is 0.1
    ("handbook-zephyr-7b-beta-sft-full", "trainer.warmup_steps", 0.05),
    ("handbook-zephyr-7b-beta-sft-full", "trainer.max_length", 2048),
    ("handbook-zephyr-7b-beta-sft-full", "model.revision", "main"),
    ("handbook-zephyr-7b-beta-sft-full", "data.train.split", "train_sft"),
    ("handbook-zephyr-7b-beta-sft-full", "data.eval.split", "test_sft"),
    ("handbook-zephyr-7b-beta-sft-full", "data.eval.limit", 700),
    ("handbook-zephyr-7b-beta-dpo-qlora", "data.train.split", "train_prefs"),  # the older dataset_mixer
    ("handbook-zephyr-7b-beta-dpo-qlora", "data.eval.split", "test_prefs"),
    ("handbook-zephyr-7b-beta-sft-qlora", "model.lora.r", 24),
    ("handbook-zephyr-7b-beta-sft-qlora", "model.lora.alpha", 24.0),
    ("handbook-zephyr-7b-beta-sft-qlora", "model.quantize", "4bit"),
    ("handbook-zephyr-7b-beta-dpo-qlora", "model.lora.dropout", 0.05),
    ("trl-dpo-lora", "model.lora.target_modules", "all-linear"),
    ("trl-dpo-lora", "model.lora.dropout", 0.05),  # TRL's default
    ("axolotl-dpo-qlora", "model.lora.target_modules", "all-linear"),
    ("axolotl-dpo-qlora", "model.quantize", "4bit"),
    ("axolotl-dpo-qlora", "model.lora.dropout", 0.1),
    ("handbook-smollm2-sft-base", "data.eval.split", "test"),
    ("handbook-smollm3-dpo-apo", "trainer.loss_type", ["apo_zero"]),
    ("handbook-smollm3-sft-full", "trainer.packing_strategy", "bfd"),
    ("handbook-smollm3-sft-full", "model.eos_token", "<|im_end|>"),
    ("handbook-smollm3-sft-full", "trainer.assistant_only_loss", True),
    ("axolotl-sft", "data.eval.fraction", 0.02),
    ("axolotl-sft", "trainer.eval_steps", 0.083333),  # 4 in each of 3 epochs
    ("axolotl-sft", "trainer.eval_strategy", "steps"),
    ("axolotl-sft", "trainer.save_strategy", "epoch"),
    ("trl-dpo-mixture", "trainer.load_best_model_at_end", True),
    ("trl-sft", "data.train.name", "short"),
    ("trl-sft", "data.eval.name", "short"),
    ("trl-sft", "optimizer.lr", 3e-5),
    ("trl-sft", "optimizer.betas", [0.9, 0.95]),
    ("trl-sft", "data.train.limit", 2000),
    ("trl-sft", "trainer.num_train_epochs", 2),
    ("trl-sft", "trainer.packing", True),
    ("trl-sft", "trainer.packing_strategy", "wrapped"),
    ("trl-sft", "model.attn_implementation", "kernels-community/flash-attn2"),  # not model_init_kwargs'
    ("handbook-smollm3-sft-mid", "trainer.packing_strategy", "bfd"),  # TRL's default
    ("handbook-zephyr-7b-beta-dpo-qlora", "model.attn_implementation", "flash_attention_2"),
    ("trl-sft", "trainer.gradient_checkpointing", False),
    ("trl-sft", "trainer.use_cache", False),
    ("trl-dpo-lora", "trainer.warmup_steps", 0.1),  # where both are said, the ratio counts unless steps are
    ("trl-dpo-lora", "trainer.eval_strategy", "no"),
    ("trl-dpo-mixture", "run.output_dir", "runs/trl-dpo-mixture"),
    ("trl-dpo-mixture", "optimizer.lr", 1e-6),  # TRL's default for DPO
    ("axolotl-sft", "trainer.assistant_only_loss", True),
    ("axolotl-sft", "optimizer.states", "8bit"),
    ("axolotl-sft", "trainer.lr_scheduler_kwargs", {"min_lr_rate": 0.1}),
    ("axolotl-sft", "trainer.pad_token", "<|end_of_text|>"),
    ("axolotl-sft-bare", "trainer.num_train_epochs", 1),  # Axolotl's defaults are not TRL's
    ("axolotl-sft-bare", "trainer.lr_scheduler_type", "cosine"),
    ("axolotl-sft-bare", "trainer.assistant_only_loss", True),
    ("axolotl-dpo-qlora", "trainer.beta", 0.3),
    ("axolotl-dpo-qlora", "data.eval.split", "test_prefs"),
    ("axolotl-dpo-qlora", "trainer.eval_strategy", "steps"),
    ("axolotl-dpo-qlora", "run.early_stopping", {"patience": 2}),
])  # fmt: skip
def test_values_arrive_where_a_recipe_has_them(name, key, value):
    found = translated(name).recipe
    for part in key.split("."):
        found = found[part]
    assert found == value


@pytest.mark.parametrize(("name", "key", "words"), [
    ("handbook-zephyr-7b-beta-dpo-full", "dataset_mixture[test]", "the source trains on test splits"),
    ("handbook-constitutional-ai-sft-grok", "dataset_mixture[test]", "the source trains on test splits"),
    ("handbook-zephyr-7b-beta-sft-full", "chat_template", "the tokenizer's own chat template"),
    ("handbook-zephyr-7b-beta-sft-full", "torch_dtype", "float32"),
    ("handbook-zephyr-7b-beta-dpo-full", "max_prompt_length", "no longer limits prompts"),
    ("handbook-constitutional-ai-dpo-anthropic", "optim", "soren-align does not have rmsprop"),
    ("handbook-smollm3-sft-full", "packing_strategy", "no longer has ffd"),
    ("handbook-smollm3-sft-full", "dataset_mixture[0].columns", "chat_template_kwargs"),
    ("trl-dpo-mixture", "datasets[0].fraction", "0.7: this share of the mixture"),
    ("trl-sft", "weight_decay", "embeddings and output head"),
    ("trl-dpo-lora", "truncation_mode", "keep_end"),
    ("axolotl-sft", "sample_packing", "drops"),
    ("axolotl-dpo-qlora", "datasets[0].type", "whole conversations"),
])  # fmt: skip
def test_what_changes_the_training_is_said_first_and_in_the_file(name, key, words):
    made = translated(name)
    note = note_on(made.notes, key)
    assert note.changes_training
    assert words in note.explanation
    first = to_table(made, name).split("\n\n")[1]
    assert first.startswith("changes to the training\n")
    assert key in first
    assert f"{key}" in to_text(made, name).split("task:")[0]


def sources(name):
    found = translated(name).recipe["data"]["train"]
    return [(s["path"], s["split"], s.get("weight", 1)) for s in found]


def test_a_mixture_is_trained_on_whole_with_its_weights():
    assert sources("handbook-smollm-sft-base") == [
        ("lab/ibex-5", "train_sft", 1), ("lab/stoat-6", "train_sft", 1), ("lab/viper-7", "train_sft", 0.001),
    ]  # fmt: skip
    assert [weight for *_, weight in sources("handbook-smollm3-sft-full")] == [1, 1, 1, 1, 0.5, 1]
    smollm3 = translated("handbook-smollm3-sft-full").recipe["data"]["train"]
    assert [source["name"] for source in smollm3] == ["SFT"] * 6
    assert sources("trl-dpo-mixture") == [("lab/otter-1", "train_prefs", 1), ("lab/raven-3", "train", 1)]
    older = convert(DPO | {"dataset_name": None, "dataset_mixer": {"a/b": 0.25, "a/c": 1.0}}, "x")
    assert older.recipe["data"]["train"] == [
        {"path": "a/b", "split": "train", "weight": 0.25, "bad_examples": "drop"},
        {"path": "a/c", "split": "train", "bad_examples": "drop"},
    ]
    assert not any(note.changes_training for note in older.notes)
    text, _ = import_file(FILES["handbook-smollm-sft-base"])
    assert [s.weight for s in load_text(text).data.sources] == [1, 1, 0.001]
    assert text.count("# ours: bad examples are dropped and counted") == 4  # three sources and data.eval


def test_a_part_of_a_split_stays_where_a_recipe_can_say_it():
    def part(split, path="lab/chat"):
        made = convert(SFT | {"dataset_name": path, "dataset_train_split": split}, "x")
        return made.recipe["data"]["train"], [n.explanation for n in made.notes if n.key == "dataset_name[0].split"]

    assert part("train_sft[:10%]") == ({"path": "lab/chat", "split": "train_sft[:10%]", "bad_examples": "drop"}, [])
    assert part("train[:50]") == ({"path": "lab/chat", "split": "train", "limit": 50, "bad_examples": "drop"}, [])
    assert part("train[:50]", "./a.jsonl") == ({"path": "./a.jsonl", "split": "train", "limit": 50}, [])
    assert part("train[5:]", "./a.jsonl") == (
        {"path": "./a.jsonl", "split": "train"},
        ["found train[5:], but a file is always read whole; write limit"],
    )


@pytest.mark.parametrize(("said", "names"), [
    ({"columns": ["prompt", "completion"]}, {}),
    ({"columns": ["instruction", "output"]}, {}),
    ({"type": "sharegpt"}, {}),
    ({"field_messages": "messages", "message_field_role": "role"}, {}),
    ({"field_messages": "conversations", "message_field_role": "from", "message_field_content": "value"}, {}),
    ({"field_messages": "conversations"}, {}),
    ({"message_property_mappings": {"role": "from", "content": "value"}}, {}),
    ({"field_messages": "dialog", "message_property_mappings": {"role": "who", "content": "line"}},
     {"columns": {"messages": "dialog", "role": "who", "content": "line"}}),
    ({"roles": {"user": ["human", "student"], "assistant": ["gpt", "teacher"]}},
     {"roles": {"student": "user", "teacher": "assistant"}}),
    ({"field_messages": "body", "roles_to_train": ["assistant"]}, {"columns": {"messages": "body"}}),
])  # fmt: skip
def test_columns_and_roles_become_the_recipes_where_they_are_not_known(said, names):
    made = convert({"base_model": "a/c", "datasets": [{"path": "a/b", "type": "chat_template", **said}]}, "x")
    train = made.recipe["data"]["train"]
    assert {key: train[key] for key in ("columns", "roles") if key in train} == names
    assert not [n for n in made.notes if n.key.startswith("datasets[0].") and n.changes_training]
    assert load_text(to_text(made, "x")).data.sources[0].columns == names.get("columns", {})


@pytest.mark.parametrize(("said", "columns", "words"), [
    ({"type": "alpaca"}, None, "in the source a part of Alpaca's prompt"),
    ({"type": "alpaca_chat.load_qa"}, {"instruction": "question", "output": "answer"}, "a part of Alpaca's prompt"),
    ({"type": {"field_instruction": "q", "field_output": "a", "format": "[INST] {instruction}"}},
     {"instruction": "q", "output": "a"}, "has a format of its own. soren-align does not read format"),
    ({"type": {"field_instruction": "q", "field_output": "a", "system_prompt": "Be brief."}},
     {"instruction": "q", "output": "a"}, "does not read system_prompt"),
    ({"type": "completion", "field": "text"}, None, "where the source divides"),
    ({"type": "completion", "field": "body"}, {"text": "body"}, "where the source divides"),
    ({"message_property_mappings": {"role": "role", "content": "content", "tools": "x"}}, None,
     "has only role and content"),
    ({"roles": {"user": ["human"], "narrator": ["book"]}}, None, "a recipe does not have the role narrator"),
    ({"train_on_eos": "all"}, None, "all: the recipe trains the stop token of every trained answer, and no other"),
    ({"shards": 4}, None, "4: the source trains on one of these parts"),
    ({"columns": ["question", "solution"]}, None, "examples are recognised by their columns"),
])  # fmt: skip
def test_formats_that_change_the_training_are_told_and_read(said, columns, words):
    made = convert({"base_model": "a/c", "datasets": [{"path": "a/b", **said}]}, "x")
    assert made.recipe["data"]["train"].get("columns") == columns
    (told,) = [n for n in made.notes if n.key.startswith("datasets[0].") and n.changes_training]
    assert words in told.explanation
    is_alpaca = "Alpaca" in words or isinstance(said.get("type"), dict)
    assert ("assistant_only_loss" in made.recipe["trainer"]) != is_alpaca  # the completion is trained anyway


@pytest.mark.parametrize(("said", "columns"), [
    ({"type": "chat_template.default", "field_messages": "turns", "field_chosen": "good", "field_rejected": "bad"},
     {"chosen": "good", "rejected": "bad", "conversations": "turns"}),
    ({"type": "user_defined.default", "field_prompt": "q", "field_chosen": "good", "field_rejected": "bad"},
     {"chosen": "good", "rejected": "bad", "prompt": "q"}),
    ({"type": "chat_template.argilla_chat", "field_chosen": "chosen", "field_rejected": "rejected"}, None),
    ({"type": {"field_prompt": "frage", "field_chosen": "gut", "field_rejected": "schlecht"}},
     {"prompt": "frage", "chosen": "gut", "rejected": "schlecht"}),
])  # fmt: skip
def test_columns_of_preferences_become_the_recipes(said, columns):
    made = convert({"base_model": "a/c", "rl": "dpo", "datasets": [{"path": "a/b", **said}]}, "x")
    assert made.recipe["data"]["train"].get("columns") == columns
    if isinstance(said["type"], dict):
        assert note_on(made.notes, "datasets[0].type").explanation == "data.train.columns"
        assert not note_on(made.notes, "datasets[0].type").changes_training


def test_formats_of_axolotls_own_pairs_change_the_training_unless_they_are_plain():
    formats = {"prompt_format": "[INST] {prompt} [/INST]", "chosen_format": "{chosen}"}
    made = convert({"base_model": "a/c", "rl": "dpo", "datasets": [{"path": "a/b", "type": formats}]}, "x")
    note = note_on(made.notes, "datasets[0].type")
    assert note.changes_training
    assert note.explanation.endswith(". soren-align does not read prompt_format")


@pytest.mark.parametrize("path", [{}, {"path": "json"}])
def test_the_files_of_a_dataset_without_a_name_are_paths(path):
    entry = {"ds_type": "json", "data_files": ["a.jsonl", "more/b.jsonl"], "type": "chat_template", **path}
    made = convert({"base_model": "a/c", "datasets": [entry]}, "x")
    assert [source["path"] for source in made.recipe["data"]["train"]] == ["a.jsonl", "more/b.jsonl"]
    assert not [n for n in made.notes if n.key.startswith("datasets") and n.changes_training]
    one = convert({"base_model": "a/c", "datasets": [{"path": "./data", "data_files": "a.jsonl"}]}, "x")
    assert one.recipe["data"]["train"]["path"] == "./data/a.jsonl"
    of_hub = convert({"base_model": "a/c", "datasets": [{"path": "a/b", "data_files": "a.jsonl"}]}, "x")
    assert note_on(of_hub.notes, "datasets[0].data_files").changes_training
    with pytest.raises(UserError, match=r"datasets\[0\]: names no data; add path or data_files"):
        convert({"base_model": "a/c", "datasets": [{"type": "alpaca"}]}, "x")


@pytest.mark.parametrize("loss", ["simpo", "kto_pair"])
def test_a_loss_that_trl_has_not_is_named_without_a_guess(loss):
    note = note_on(convert(DPO | {"pref_loss": loss}, "x", task="dpo").notes, "pref_loss")
    assert note.changes_training
    assert note.explanation == f"TRL's DPOConfig does not have the loss {loss}; the recipe uses TRL's default loss"


def test_keys_that_are_as_here_change_nothing():
    entry = {"path": "a/b", "type": "chat_template", "train_on_eos": "turn", "roles_to_train": ["assistant"]}
    made = convert({"base_model": "a/c", "datasets": [entry]}, "x")
    assert note_on(made.notes, "datasets[0].train_on_eos") == Note(
        "datasets[0].train_on_eos", "dropped", "is the default of soren-align too"
    )
    made = convert(SFT | {"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "x")
    assert note_on(made.notes, "env").explanation == "a recipe sets no environment variables; set them in the shell"


def test_another_column_of_text_becomes_the_recipes():
    made = convert(SFT | {"dataset_text_field": "body"}, "x")
    assert made.recipe["data"]["train"]["columns"] == {"text": "body"}
    assert note_on(made.notes, "dataset_text_field").explanation == "data.train.columns"
    assert "columns" not in convert(SFT | {"dataset_text_field": "text"}, "x").recipe["data"]["train"]


def test_the_handbooks_zephyr_template_is_known_by_its_text():
    text = (Path(__file__).parents[1] / "data" / "originals" / "zephyr.jinja").read_text()
    made = convert({**SFT, "chat_template": text.replace("'  +", "' +")}, "x")
    assert made.recipe["model"]["chat_template"] == "zephyr"
    assert not note_on(made.notes, "chat_template").changes_training
    assert note_on(convert({**SFT, "chat_template": text + "."}, "x").notes, "chat_template").changes_training


TEMPLATE = "{% for m in messages %}{{ m['content'] + eos_token }}\\n{% endfor %}"


@pytest.mark.parametrize("key", ["chat_template", "chat_template_jinja"])
def test_an_inline_template_is_written_beside_the_recipe(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    more = "chat_template: jinja\n" if key == "chat_template_jinja" else ""
    (tmp_path / "sft.yaml").write_text(f"model_name_or_path: a/b\ndataset_name: a/c\n{more}{key}: {TEMPLATE!r}\n")
    text, table = import_file(tmp_path / "sft.yaml", template_file=Path("mine.jinja"))
    assert load_text(text).model.chat_template == "mine.jinja"
    assert parse((tmp_path / "sft.yaml").read_text(), "x").content[key] == (tmp_path / "mine.jinja").read_text()
    assert "changes to the training\n" not in table.split("chat_template")[0]
    text, table = import_file(tmp_path / "sft.yaml")
    assert load_text(text).model.chat_template is None
    assert "add a DEST, beside which the import writes this template" in " ".join(table.split())


def test_a_template_of_a_recipe_that_would_not_load_is_not_left(tmp_path):
    (tmp_path / "sft.yaml").write_text(
        f"model_name_or_path: ./no\ndataset_name: a/c\nchat_template: {TEMPLATE!r}\nlearning_rate: fast\n"
    )
    with pytest.raises(UserError, match="nothing was written"):
        import_file(tmp_path / "sft.yaml", template_file=tmp_path / "mine.jinja")
    assert not (tmp_path / "mine.jinja").exists()


def test_a_template_and_a_stop_token_go_to_the_model():
    for source in (SFT, DPO):
        made = convert({**source, "chat_template_path": "my.jinja", "eos_token": "<|im_end|>"}, "x", task="dpo")
        assert made.recipe["model"] | {"chat_template": "my.jinja", "eos_token": "<|im_end|>"} == made.recipe["model"]
    note = note_on(convert({**SFT, "chat_template_path": "lab/chat"}, "x").notes, "chat_template_path")
    assert note.changes_training
    assert "lab/chat is no .jinja file; save its chat template" in note.explanation


@pytest.mark.parametrize("per_epoch", [1, 2, 3, 4, 6, 7, 10])
@pytest.mark.parametrize("epochs", [1, 3, 1.5, None])
def test_evaluations_per_epoch_are_as_many_as_in_the_source(per_epoch, epochs, tmp_path):
    keys = {"evals_per_epoch": per_epoch, "saves_per_epoch": per_epoch, "val_set_size": 0.1, "num_epochs": epochs}
    foreign = {"base_model": "lab/base", "datasets": [{"path": "lab/chat"}], **keys}
    trainer = convert({key: value for key, value in foreign.items() if value is not None}, "x").recipe["trainer"]
    if per_epoch == 1:
        assert (trainer["eval_strategy"], trainer["save_strategy"]) == ("epoch", "epoch")
        return
    args = TrainingArguments(str(tmp_path), **{key: trainer[key] for key in ("eval_steps", "save_steps")})
    num_evaluations = per_epoch * (epochs or 1)
    for num_steps in (2520, 25200):  # which all these numbers divide
        state = TrainerState(max_steps=num_steps)
        state.compute_steps(args, num_steps)
        assert state.eval_steps == state.save_steps == num_steps / num_evaluations


def test_a_file_that_loses_nothing_says_no_change():
    made = translated("axolotl-sft-bare")
    assert not any(n.changes_training for n in made.notes)
    assert "changes to the training" not in to_table(made, "x") + to_text(made, "x")
    assert note_on(made.notes, "lora_r").explanation == "has no effect without use_peft or adapter"


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(FILES)),
       key=st.text("abcdefghijklmnopqrstuvwxyz_0", min_size=1).map(lambda k: f"zq_{k}"), value=values,
       inside=st.booleans())  # fmt: skip
def test_an_unknown_key_is_always_listed(name, key, value, inside):
    given = source(name)
    if inside and "dataset_mixture" in given:
        given["dataset_mixture"]["datasets"][-1] |= {key: 1}
        key_told = f"dataset_mixture[{len(given['dataset_mixture']['datasets']) - 1}].{key}"
    else:
        given[key], key_told = value, key
    made = convert(given, name)
    assert note_on(made.notes, key_told).outcome == "unknown"
    text, table = to_text(made, name), to_table(made, name)
    assert key in "".join(table.replace("\n", " ").split())
    assert key_told in text.replace("\n# ", " ")
    assert load_text(text).task == made.task  # and the recipe is as good as without it


@settings(max_examples=150, deadline=None)
@given(base=st.sampled_from([SFT, DPO]), more=st.dictionaries(st.sampled_from(known_names()), values, max_size=4))
def test_whatever_stands_there_every_key_is_told_or_the_file_refused(base, more):
    given = base | more
    try:
        made = convert(given, "some", task="sft" if base is SFT else "dpo")
    except UserError:
        return
    flat = flattened(given)
    assert sorted(n.key for n in made.notes if n.key in flat) == sorted(flat)
    to_table(made, "some")
    assert [p for p in problems(to_text(made, "some")) if "trainer." in p] == []


@pytest.mark.parametrize(("given", "name", "folder", "task"), [
    (SFT, "config_full", "", "sft"),
    (DPO, "config_full", "sft", "dpo"),
    (SFT | {"loss_type": "nll"}, "x", "", "sft"),
    ({"dataset_name": "a/b", "loss_type": ["ipo"]}, "x", "", "dpo"),
    ({"dataset_name": "a/b", "dataset_train_split": "train_prefs"}, "x", "", "dpo"),
    ({"datasets": [{"path": "a/b", "columns": ["messages"]}]}, "x", "", "sft"),
    ({"dataset_name": "a/b"}, "my-dpo", "sft", "dpo"),
    ({"dataset_name": "a/b"}, "config_full", "sft", "sft"),
    ({"base_model": "a/c", "datasets": [{"path": "a/b"}]}, "x", "dpo", "sft"),
    ({"base_model": "a/c", "datasets": [{"path": "a/b"}], "rl": "ipo"}, "x", "", "dpo"),
    ({"dataset_name": "a/b"}, "x", "", "sft"),
])  # fmt: skip
def test_the_task_is_read_from_keys_then_from_names(given, name, folder, task):
    assert convert(given, name, folder).task == task


@pytest.mark.parametrize(("given", "folder", "message"), [
    (SFT | DPO, "", "the file has keys of SFT (max_seq_length) and keys of DPO (beta); add --task"),
    (DPO, "orpo", "this file trains with ORPO"),
    (DPO | {"output_dir": "out/mine-kto"}, "", "this file trains with KTO"),
    ({"base_model": "a/b", "rl": "grpo"}, "", "this file trains with GRPO"),
    ({"base_model": "a/b", "reward_model": True}, "", "this file trains with REWARD"),
    ({"beta": 0.1}, "", "the file names no dataset"),
    (DPO | {"dataset_train_split": "test"}, "", "all splits are test splits"),
    (DPO | {"dataset_mixture": [1]}, "", "write a list of datasets"),
    ({"task": "sft", "optimizer": {"name": "soren"}}, "", "this file is already a recipe"),
])  # fmt: skip
def test_what_cannot_be_imported_is_refused_in_a_sentence(given, folder, message):
    with pytest.raises(UserError, match=re.escape(message)):
        convert(given, "config_full", folder)


def test_orpo_is_refused_and_can_be_taken_as_dpo():
    (file,) = FOLDER.glob("*orpo*.yaml")
    with pytest.raises(UserError, match="this file trains with ORPO"):
        import_file(file)
    assert "task: dpo" in import_file(file, "dpo")[0]


def test_a_test_split_is_not_trained_on_however_it_is_spelt():
    made = convert(SFT | {"dataset_train_split": "train+test[:50%]"}, "x")
    assert made.recipe["data"]["train"]["split"] == "train"
    assert "test[:50%]" in note_on(made.notes, "dataset_name[test]").explanation


def test_the_newer_of_two_names_for_one_key_counts():
    made = convert(SFT | {"max_length": 700}, "x")
    assert made.recipe["trainer"]["max_length"] == 700
    assert note_on(made.notes, "max_seq_length").explanation == "another key sets trainer.max_length"


def test_a_recipe_that_would_not_load_is_not_written(tmp_path):
    file = tmp_path / "sft.yaml"
    file.write_text("model_name_or_path: ./nowhere\ndataset_name: a/b\nlearning_rate: fast\n")
    with pytest.raises(UserError) as error:
        import_file(file)
    assert "model.name_or_path: no folder ./nowhere" in str(error.value)
    assert "optimizer.lr: found 'fast'; write a number" in str(error.value)
    assert "nothing was written" in str(error.value)


def test_the_tables_name_keys_that_there_are():
    for source_name, target in keys.RENAMED.items():
        section, key = target.split(".")
        if section == "trainer":
            assert key in trl.fields("sft").keys() | trl.fields("dpo").keys(), source_name
        else:
            model = AdamWSettings if section == "optimizer" else schema.Recipe.model_fields[section].annotation
            assert key in model.model_fields, source_name
    patterns = [p for row in keys.LEFT_OUT for p in row[0].split()]
    assert len(patterns) == len(set(patterns))
    assert not set(patterns) & keys.RENAMED.keys()


@pytest.mark.parametrize(
    ("path", "name"), [("trainer/model_config.py", "ModelConfig"), ("scripts/utils.py", "ScriptArguments")]
)
def test_every_key_of_trls_command_is_known(path, name):
    fields = trl._class_fields(trl._source("trl") / path, name, {})
    made = convert(SFT | dict.fromkeys(fields.keys() - {"datasets"}, "x"), "x", task="sft")
    assert [n.key for n in made.notes if n.outcome == "unknown"] == []
    assert len(fields) > 5


def test_the_command_prints_the_recipe_or_writes_it_and_tells_the_rest(tmp_path):
    run = partial(command.run, "import", cwd=tmp_path)
    file = FILES["handbook-zephyr-7b-beta-dpo-full"]
    printed = run(file, code=0)
    assert load_text(printed.stdout).task == "dpo"
    assert "changes to the training" in printed.stderr
    written = run(file, "mine.yaml", code=0)
    assert written.stdout == ""
    modeline = "# yaml-language-server: $schema=recipe.schema.json\n"  # in a file only, and the schema beside it
    assert (tmp_path / "mine.yaml").read_text() == modeline + printed.stdout
    assert (tmp_path / "recipe.schema.json").is_file()
    assert "soren-align plan mine.yaml" in written.stderr
    for arguments, message in (
        ((file, "mine.yaml"), "exists already"),
        (("nothing.yaml",), "no such file"),
        ((file, "--task", "orpo"), "write sft or dpo"),
    ):
        assert message in run(*arguments, code=2).stderr


@pytest.mark.process
def test_importing_a_file_imports_no_torch():
    code = f"from soren_align.cli.app import main; assert main(['import', {str(FILES['trl-sft'])!r}]) == 0"
    assert not command.imported(code, ["torch", "transformers", "trl", "datasets"])


def test_lora_that_nobody_asked_for_is_not_trained():
    made = convert(SFT | {"lora_r": 8, "load_in_4bit": True}, "x", task="sft")
    assert "lora" not in made.recipe["model"]
    assert note_on(made.notes, "lora_r").explanation == "has no effect without use_peft or adapter"
    assert note_on(made.notes, "load_in_4bit").changes_training


@pytest.mark.parametrize("asked", [{"use_dora": True}, {"lora_target_modules": ".*_proj"}, {"gptq": True}])
def test_what_recipes_do_not_know_of_lora_changes_the_training(asked):
    made = convert(SFT | {"use_peft": True} | asked, "x", task="sft")
    note = note_on(made.notes, next(iter(asked)))
    assert note.changes_training
    assert "of all adapters, only plain LoRA is supported" not in note.explanation


@pytest.mark.parametrize(("keys", "alpha"), [
    ({"use_peft": True, "use_rslora": True, "lora_r": 16, "lora_alpha": 32}, 128.0),
    ({"use_peft": True, "use_rslora": True}, 128.0),  # TRL's defaults
    ({"base_model": "m", "adapter": "lora", "peft_use_rslora": True, "lora_r": 4, "lora_alpha": 8}, 16.0),
    ({"finetuning_type": "lora", "use_rslora": True, "lora_rank": 32}, 362.0387),  # alpha is twice r
    ({"use_peft": True, "use_rslora": False, "lora_r": 16, "lora_alpha": 32}, 32.0),
])  # fmt: skip
def test_rslora_is_lora_with_a_larger_alpha(keys, alpha):
    data = {"datasets": [{"path": "d", "type": "chat_template"}]} if "base_model" in keys else {"dataset_name": "d"}
    made = convert({"model_name_or_path": "m"} | data | keys, "x", task="sft")
    assert made.recipe["model"]["lora"]["alpha"] == alpha
    assert not any(n.changes_training for n in made.notes if "rslora" in n.key)


@pytest.mark.parametrize("value", [math.nan, math.inf, -3, True, "many", "1e400", [1], {"a": 1}])
@pytest.mark.parametrize(
    "key", ["max_samples", "val_size", "test_split_size", "lora_alpha", "lora_r", "evals_per_epoch"]
)
def test_a_number_that_is_none_is_left_to_the_recipes_check(key, value):
    convert(SFT | {"use_peft": True, "use_rslora": True, "lora_r": 8, "lora_alpha": 16} | {key: value}, "x", task="sft")
    convert(SFT | {"finetuning_type": "lora", "lora_rank" if key == "lora_r" else key: value}, "x", task="sft")


@pytest.mark.parametrize(("keys", "quantize"), [
    # TRL, Axolotl, LLaMA-Factory
    ({"use_peft": True, "load_in_4bit": True, "use_bnb_nested_quant": True}, "4bit"),
    ({"use_peft": True, "load_in_8bit": True}, "8bit"),
    ({"use_peft": True, "load_in_4bit": False}, None),
    ({"base_model": "m", "adapter": "qlora", "load_in_4bit": True}, "4bit"),
    ({"base_model": "m", "adapter": "lora", "load_in_8bit": True, "load_in_4bit": False}, "8bit"),
    ({"finetuning_type": "lora", "quantization_bit": 4, "quantization_method": "bnb"}, "4bit"),
    ({"finetuning_type": "lora", "quantization_bit": 8}, "8bit"),
])  # fmt: skip
def test_quantized_weights_under_an_adapter_are_quantized_here_too(keys, quantize):
    data = {"datasets": [{"path": "d", "type": "chat_template"}]} if "base_model" in keys else {"dataset_name": "d"}
    made = convert({"model_name_or_path": "m"} | data | keys, "x", task="sft")
    assert made.recipe["model"].get("quantize") == quantize
    assert not any(note_on(made.notes, key).changes_training for key in keys)


def test_another_format_of_4_bits_changes_the_training():
    made = convert(SFT | {"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "x", task="sft")
    assert note_on(made.notes, "bnb_4bit_quant_type").changes_training
    made = convert(SFT | {"finetuning_type": "lora", "quantization_bit": 4, "quantization_method": "hqq"}, "x")
    assert note_on(made.notes, "quantization_method").changes_training


@pytest.mark.parametrize("patience", ["early_stopping_patience", "early_stopping_steps"])
def test_early_stopping_is_imported_where_the_source_evaluates(patience):
    stopping = {patience: 2, "early_stopping_threshold": "1e-3"}
    evaluated = SFT | {"dataset_test_split": "test", "eval_strategy": "steps", "eval_steps": 5}
    made = convert(evaluated | stopping, "x", task="sft")
    assert made.recipe["run"]["early_stopping"] == {"patience": 2, "threshold": 1e-3}
    assert not any(note_on(made.notes, key).changes_training for key in stopping)
    assert problems(to_text(made, "x")) == ()
    for source in (SFT, evaluated | {"eval_strategy": "no"}):
        made = convert(source | stopping, "x", task="sft")
        assert "early_stopping" not in made.recipe["run"]
        assert note_on(made.notes, patience).changes_training
    alone = convert(evaluated | {"early_stopping_threshold": 1e-3}, "x", task="sft")
    assert "early_stopping" not in alone.recipe["run"]
    assert "has no effect" in note_on(alone.notes, "early_stopping_threshold").explanation


def test_a_model_and_data_of_another_machine_are_listed_and_the_recipe_is_written(tmp_path):
    (tmp_path / "sft.yaml").write_text("model_name_or_path: ./no\ndataset_name: no/way.jsonl\nlearning_rate: 1e-5\n")
    text, table = import_file(tmp_path / "sft.yaml")
    assert parse(text, "x").content["model"]["name_or_path"] == "./no"
    shown = "not on this machine:\n  model.name_or_path: no folder ./no; correct the path\n  data.train.path: no file"
    assert shown in table
    with pytest.raises(UserError, match=r"no folder \./no"):
        load_text(text)
