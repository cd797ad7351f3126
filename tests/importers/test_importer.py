"""Others' files become recipes that load, and no key of theirs is lost on the way.

tests/importers/foreign/ has the key patterns of the alignment handbook's recipes, of TRL's configs and of Axolotl's,
with values of our own.
"""

import json
import re
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.importers import import_file
from soren_align.importers.engine import convert, flattened
from soren_align.importers.importer import to_table, to_text
from soren_align.recipe import trl
from soren_align.recipe.loader import load_text, parse
from tests.support import command

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
    given, made = flattened(source(name)), translated(name)
    notes, table = made.notes, to_table(made, name)
    assert max(map(len, table.splitlines())) <= 80
    assert set(given) <= set(table.replace(",", " ").replace(":", " ").split())
    told = [n.key for n in notes if n.key in given]
    assert sorted(told) == sorted(given)  # each once: unchanged, renamed, dropped or unknown
    assert all(n.explanation for n in notes if n.outcome in ("renamed", "dropped"))
    assert all(n.changes_training for n in notes if n.outcome == "yours")
    assert [n.key for n in notes if n.outcome == "unknown"] == []


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
    ("handbook-zephyr-7b-beta-sft-full", "data.train.split", "train_sft"),
    ("handbook-zephyr-7b-beta-sft-full", "data.eval.split", "test_sft"),
    ("handbook-zephyr-7b-beta-dpo-qlora", "data.train.split", "train_prefs"),  # the older dataset_mixer
    ("handbook-zephyr-7b-beta-sft-qlora", "model.lora.r", 24),
    ("trl-dpo-lora", "model.lora.target_modules", "all-linear"),
    ("trl-dpo-lora", "model.lora.dropout", 0.05),  # TRL's default
    ("handbook-smollm3-dpo-apo", "trainer.loss_type", ["apo_zero"]),
    ("handbook-smollm3-sft-full", "trainer.packing_strategy", "bfd"),
    ("handbook-smollm3-sft-full", "model.eos_token", "<|im_end|>"),
    ("handbook-smollm3-sft-full", "trainer.assistant_only_loss", True),
    ("axolotl-sft", "trainer.eval_steps", 0.083333),  # 4 in each of 3 epochs
    ("trl-dpo-mixture", "trainer.load_best_model_at_end", True),
    ("trl-sft", "data.train.name", "short"),
    ("trl-sft", "optimizer.betas", [0.9, 0.95]),
    ("trl-sft", "trainer.packing_strategy", "wrapped"),
    ("trl-sft", "model.attn_implementation", "kernels-community/flash-attn2"),  # not model_init_kwargs'
    ("trl-sft", "trainer.gradient_checkpointing", False),
    ("trl-dpo-lora", "trainer.warmup_steps", 0.1),  # where both are said, the ratio counts unless steps are
    ("trl-dpo-lora", "trainer.eval_strategy", "no"),
    ("trl-dpo-mixture", "optimizer.lr", 1e-6),  # TRL's default for DPO
    ("axolotl-sft", "trainer.assistant_only_loss", True),
    ("axolotl-sft", "optimizer.name", "adamw"),  # of 8-bit AdamW
    ("axolotl-sft", "trainer.pad_token", "<|end_of_text|>"),
    ("axolotl-sft-bare", "trainer.num_train_epochs", 1),  # Axolotl's defaults are not TRL's
    ("axolotl-sft-bare", "trainer.lr_scheduler_type", "cosine"),
    ("axolotl-dpo-qlora", "data.eval.split", "test_prefs"),
])  # fmt: skip
def test_values_arrive_where_a_recipe_has_them(name, key, value):
    found = translated(name).recipe
    for part in key.split("."):
        found = found[part]
    assert found == value


@pytest.mark.parametrize(("name", "key", "words"), [
    ("handbook-zephyr-7b-beta-dpo-full", "dataset_mixture[test]", "the source trains on test splits"),
    ("handbook-constitutional-ai-sft-grok", "dataset_mixture[test]", "the source trains on test splits"),
    ("handbook-zephyr-7b-beta-sft-full", "chat_template", "add a DEST"),
    ("axolotl-sft", "cosine_min_lr_ratio", "(0.1): write trainer.lr_scheduler_type: cosine_with_min_lr"),
    ("axolotl-dpo-qlora", "early_stopping_patience", "(2): write run.early_stopping"),
    ("handbook-zephyr-7b-beta-sft-full", "torch_dtype", "float32"),
    ("handbook-zephyr-7b-beta-dpo-full", "max_prompt_length", "no longer limits prompts"),
    ("handbook-constitutional-ai-dpo-anthropic", "optim", "(rmsprop): soren-align does not have it"),
    ("handbook-smollm3-sft-full", "packing_strategy", "no longer has ffd"),
    ("handbook-smollm3-sft-full", "dataset_mixture[0].columns", "chat_template_kwargs"),
    ("trl-dpo-mixture", "datasets[0].fraction", "(0.7): write data.train.weight"),
    ("trl-sft", "weight_decay", "embeddings and output head"),
    ("trl-dpo-lora", "truncation_mode", "keep_end is deprecated"),
    ("axolotl-sft", "sample_packing", "drops"),
    ("axolotl-dpo-qlora", "datasets[0].type", "(chatml.ultra): a recipe has one format"),
])  # fmt: skip
def test_what_changes_the_training_or_is_left_is_said_first_and_in_the_file(name, key, words):
    made = translated(name)
    note = note_on(made.notes, key)
    assert note.changes_training
    assert words in f"{note.label}: {note.explanation}"
    title = "set these yourself" if note.outcome == "yours" else "changes to the training"
    assert key in part(to_table(made, name), title)
    assert key in to_text(made, name).split("task:")[0]


def part(table, title):
    return table.partition(f"\n{title}\n")[2].partition("\n\n")[0]


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


CHAT = {"type": "chat_template"}


@pytest.mark.parametrize(("entry", "left"), [
    ({"type": "sharegpt"}, []),
    ({**CHAT, "field_messages": "conversations", "message_property_mappings": {"role": "from", "content": "value"}}, []),
    ({**CHAT, "roles_to_train": ["assistant"], "train_on_eos": "turn", "shards": 1}, []),
    ({**CHAT, "field_messages": "talk", "message_field_role": "who"}, ["field_messages", "message_field_role"]),
    ({**CHAT, "roles": {"user": ["student"]}, "shards": 4}, ["roles", "shards"]),
    ({"type": "alpaca"}, ["type"]),
    ({"type": {"field_instruction": "q", "format": "[INST] {instruction}"}}, ["type"]),
    ({**CHAT, "data_files": "a.jsonl"}, ["data_files"]),
])  # fmt: skip
def test_other_names_of_columns_and_formats_are_left_to_the_user(entry, left):
    made = convert({"base_model": "a/c", "datasets": [{"path": "a/b", "split": "train_sft", **entry}]}, "x")
    assert [n.key for n in made.notes if n.outcome == "yours"] == [f"datasets[0].{key}" for key in left]
    assert made.recipe["data"]["train"] == {"path": "a/b", "split": "train_sft", "bad_examples": "drop"}
    listed = part(to_table(made, "x"), "set these yourself")
    assert all(f"datasets[0].{key} ({entry[key]})" in " ".join(listed.split()) for key in left)
    load_text(to_text(made, "x"))


def test_the_files_of_a_dataset_without_a_name_are_paths():
    entry = {"ds_type": "json", "data_files": ["a.jsonl", "more/b.jsonl"], "type": "chat_template"}
    made = convert({"base_model": "a/c", "datasets": [entry]}, "x")
    assert [source["path"] for source in made.recipe["data"]["train"]] == ["a.jsonl", "more/b.jsonl"]
    assert not any(n.changes_training for n in made.notes)
    with pytest.raises(UserError, match=r"datasets\[0\]: names no data; add path or data_files"):
        convert({"base_model": "a/c", "datasets": [{"type": "alpaca"}]}, "x")


@pytest.mark.parametrize(
    ("size", "expected"), [(0.05, {"fraction": 0.05}), (500, {"examples": 500}), (500.0, {"examples": 500}), (0, None)]
)
def test_held_out_sizes_of_any_kind_are_kept(size, expected):
    source = {"base_model": "a/c", "datasets": [{"path": "a/b"}], "val_set_size": size, "eval_steps": 10}
    made = convert(source, "x")
    assert made.recipe["data"].get("eval") == expected
    assert not note_on(made.notes, "val_set_size").changes_training


TEMPLATE = "{% for m in messages %}{{ m['content'] + eos_token }}\\n{% endfor %}"


@pytest.mark.parametrize("key", ["chat_template", "chat_template_jinja"])
def test_an_inline_template_is_written_beside_the_recipe(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    more = "chat_template: jinja\n" if key == "chat_template_jinja" else ""
    (tmp_path / "sft.yaml").write_text(f"model_name_or_path: a/b\ndataset_name: a/c\n{more}{key}: {TEMPLATE!r}\n")
    text, table = import_file(tmp_path / "sft.yaml", template_file=Path("mine.jinja"))
    assert load_text(text).model.chat_template == "mine.jinja"
    assert parse((tmp_path / "sft.yaml").read_text(), "x").content[key] == (tmp_path / "mine.jinja").read_text()
    assert "set these yourself" not in table
    text, table = import_file(tmp_path / "sft.yaml")
    assert load_text(text).model.chat_template is None
    assert "add a DEST, beside which the import writes this template" in " ".join(table.split())


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
    assert key_told in text.replace("\n#   ", " ")
    assert load_text(text).task == made.task  # and the recipe is as good as without it


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
    (DPO | {"output_dir": "out/mine-kto"}, "x", "", "kto"),
    ({"dataset_name": "a/b", "loss_type": "apo_zero_unpaired"}, "x", "", "kto"),
    ({"dataset_name": "trl-lib/kto-mix-14k"}, "x", "", "kto"),
    ({"dataset_name": "a/b", "beta": 0.2, "desirable_weight": 1.5}, "x", "", "kto"),
    ({"base_model": "a/c", "datasets": [{"path": "a/b"}], "rl": "kto"}, "x", "", "kto"),
    ({"model_name_or_path": "a/c", "stage": "kto", "dataset_name": "b"}, "x", "", "kto"),
])  # fmt: skip
def test_the_task_is_read_from_keys_then_from_names(given, name, folder, task):
    assert convert(given, name, folder).task == task


@pytest.mark.parametrize(("given", "folder", "message"), [
    (SFT | DPO, "", "the file has keys of SFT (max_seq_length) and keys of DPO (beta); add --task"),
    (DPO, "orpo", "this file trains with ORPO"),
    ({"base_model": "a/b", "rl": "grpo"}, "", "this file trains with GRPO"),
    ({"base_model": "a/b", "reward_model": True}, "", "this file trains with REWARD"),
    ({"beta": 0.1}, "", "the file names no dataset"),
    (DPO | {"dataset_train_split": "test"}, "", "all splits are test splits"),
    (DPO | {"dataset_mixture": [1]}, "", "write a list of datasets"),
    ({"task": "sft", "optimizer": {"name": "soren"}}, "", "this file is already a recipe"),
    ({"optimizer": {"_component_": "torch.optim.AdamW"}}, "", "this is a torchtune config, which is not converted"),
])  # fmt: skip
def test_what_cannot_be_imported_is_refused_in_a_sentence(given, folder, message):
    with pytest.raises(UserError, match=re.escape(message)):
        convert(given, "config_full", folder)


@pytest.mark.parametrize("given", [
    {"base_model": "a/c", "datasets": [{"path": "a/b"}], "rl": "kto", "rl_beta": 0.2, "micro_batch_size": 4,
     "kto_desirable_weight": 1.5, "kto_undesirable_weight": 2.0},
    {"model_name_or_path": "a/c", "stage": "kto", "dataset_name": "b", "pref_beta": 0.2, "per_device_train_batch_size": 4,
     "kto_chosen_weight": 1.5, "kto_rejected_weight": 2.0},
    {"model_name_or_path": "a/c", "dataset_name": "a/b", "beta": 0.2, "per_device_train_batch_size": 4,
     "desirable_weight": 1.5, "undesirable_weight": 2.0, "group_by_length": True},
], ids=["Axolotl", "LLaMA-Factory", "TRL"])  # fmt: skip
def test_kto_has_the_same_weights_from_every_tool(given):
    made = convert(given, "x")
    trainer = made.recipe["trainer"]
    assert (made.task, trainer["beta"]) == ("kto", 0.2)
    assert (trainer["desirable_weight"], trainer["undesirable_weight"]) == (1.5, 2.0)
    assert "train_sampling_strategy" not in trainer
    assert load_text(to_text(made, "x")).task == "kto"


def test_orpo_is_refused_and_can_be_taken_as_dpo():
    (file,) = FOLDER.glob("*orpo*.yaml")
    with pytest.raises(UserError, match="this file trains with ORPO"):
        import_file(file)
    assert "task: dpo" in import_file(file, "dpo")[0]


def test_a_test_split_is_not_trained_on_however_it_is_spelt():
    made = convert(SFT | {"dataset_train_split": "train+test[:50%]"}, "x")
    assert made.recipe["data"]["train"]["split"] == "train"
    assert "test[:50%]" in note_on(made.notes, "dataset_name[test]").explanation


def test_a_recipe_that_would_not_load_is_not_written(tmp_path):
    file = tmp_path / "sft.yaml"
    file.write_text("model_name_or_path: ./nowhere\ndataset_name: a/b\nlearning_rate: fast\n")
    with pytest.raises(UserError) as error:
        import_file(file)
    assert "model.name_or_path: no folder ./nowhere" in str(error.value)
    assert "optimizer.lr: found 'fast'; write a number" in str(error.value)
    assert "nothing was written" in str(error.value)


@pytest.mark.parametrize("name", ["ModelConfig", "ScriptArguments"])
def test_every_key_of_trls_command_is_known(name):
    fields = trl.read_fields(name)
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
        ((file, "--task", "orpo"), "write sft, dpo or kto"),
    ):
        assert message in run(*arguments, code=2).stderr


@pytest.mark.process
def test_importing_a_file_imports_no_torch():
    code = f"from soren_align.cli.app import main; assert main(['import', {str(FILES['trl-sft'])!r}]) == 0"
    assert not command.imported(code, ["torch", "transformers", "trl", "datasets"])


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


TRL, AXOLOTL = (
    {"dataset_name": "a/b", "model_name_or_path": "m"},
    {"base_model": "m", "datasets": [{"path": "d", **CHAT}]},
)
FACTORY = {"model_name_or_path": "m", "finetuning_type": "full", "stage": "sft", "dataset_name": "d"}


@pytest.mark.parametrize(("source", "keys", "attention"), [
    (TRL, {"attn_implementation": "flash_attention_3"}, "flash_attention_3"),
    (TRL, {"attn_implementation": "someone/kernel"}, None),
    (TRL, {"use_cpu": True, "attn_implementation": "flash_attention_2"}, None),
    (AXOLOTL, {"flash_attention": True}, "flash_attention_2"),
    (AXOLOTL, {"flash_attention": False}, None),
    (AXOLOTL, {"attn_implementation": "flex"}, "flex_attention"),
    (FACTORY, {"flash_attn": "fa2"}, "flash_attention_2"),
    (FACTORY, {"flash_attn": "auto"}, None),
])  # fmt: skip
def test_attention_arrives_under_the_recipes_name(source, keys, attention):
    made = convert(source | keys, "sft")
    assert made.recipe["model"].get("attn_implementation") == attention
    assert not any(n.changes_training for n in made.notes)


@pytest.mark.parametrize(("source", "keys", "strategy", "words"), [
    (TRL, {"max_length": 64, "packing": True}, "bfd", ""),
    (TRL, {"packing_strategy": "bfd_split", "packing": True}, "bfd_split", ""),
    (AXOLOTL, {"sample_packing": True}, None, "drops examples longer than max_length, but soren-align divides"),
    (FACTORY, {"packing": True}, "bfd", "in LLaMA-Factory, packed examples attend to each other"),
    (FACTORY, {"packing": True, "neat_packing": True}, "bfd", "trainer.packing"),
])  # fmt: skip
def test_packing_keeps_or_cuts_long_examples_as_the_source(source, keys, strategy, words):
    made = convert(source | keys, "sft")
    assert (made.recipe["trainer"]["packing"], made.recipe["trainer"].get("packing_strategy")) == (True, strategy)
    assert words in note_on(made.notes, [*keys][-1]).explanation


INFO = {
    "faq": {"file_name": "faq.jsonl", "columns": {"prompt": "question", "response": "reply"}},
    "usual": {"hf_hub_url": "lab/usual", "formatting": "sharegpt", "subset": "small", "split": "train_sft"},
    "pairs": {"file_name": "pairs.jsonl", "ranking": True},
}


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """factory(text) -> import_file's results for examples/my.yaml of LLaMA-Factory, beside data/dataset_info.json."""
    monkeypatch.chdir(tmp_path)
    for folder in ("data", "examples"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(INFO))

    def imported(text):
        (tmp_path / "examples" / "my.yaml").write_text("model_name_or_path: lab/tern-1b\n" + text)
        return import_file(tmp_path / "examples" / "my.yaml")

    return imported


def test_llama_factorys_names_become_paths_and_its_mapping_is_left(factory):
    head = "stage: sft\nfinetuning_type: lora\ntemplate: default\nmax_samples: 2\n"
    text, table = factory(head + "dataset: faq, usual\neval_dataset: usual\n")
    first, second = parse(text, "x").content["data"]["train"]
    assert first == {"path": "data/faq.jsonl", "split": "train", "limit": 2}
    assert (second["path"], second["name"], second["split"]) == ("lab/usual", "small", "train_sft")
    assert parse(text, "x").content["data"]["eval"]["path"] == "lab/usual"
    left = " ".join(part(table, "set these yourself").split())
    assert "dataset[0].columns ({'prompt': 'question', 'response': 'reply'}): columns are recognised by" in left
    assert "template (default): the recipe uses the tokenizer's own chat template" in left


DEFAULTS = {
    # LLaMA-Factory's defaults that differ from TRL's: lines without the key -> (the recipe's key, its value)
    "stage: sft\ndataset: faq\n": {
        "model.lora.r": 8, "model.lora.alpha": 16.0, "model.lora.dropout": 0.0,
        "model.lora.target_modules": "all-linear", "trainer.max_length": 2048, "trainer.bf16": False,
        "optimizer.lr": 5e-5},
    "stage: dpo\ndataset: pairs\nfinetuning_type: full\nbf16: true\n": {
        "model.lora": None, "trainer.max_length": 2048, "trainer.bf16": True, "optimizer.lr": 5e-5},
    "stage: sft\ndataset: usual\nfp16: true\nlora_rank: 4\nlora_target: q_proj, v_proj\nadditional_target: a, b\n": {
        "model.lora.r": 4, "model.lora.alpha": 8.0, "trainer.fp16": True, "trainer.assistant_only_loss": True,
        "model.lora.target_modules": ["q_proj", "v_proj"], "model.lora.modules_to_save": ["a", "b"]},
    "stage: sft\ndataset: usual\ntrain_on_prompt: true\ndisable_gradient_checkpointing: true\nuse_muon: true\n": {
        "trainer.assistant_only_loss": False, "trainer.gradient_checkpointing": False, "optimizer.name": "muon"},
    "stage: sft\ndataset: usual\nval_size: 100\nquantization_bit: 4\n": {
        "data.eval.examples": 100, "model.quantize": "4bit"},
}  # fmt: skip


@pytest.mark.parametrize("text", DEFAULTS)
def test_the_defaults_of_llama_factory_are_taken_over(factory, text):
    made = parse(factory(text)[0], "x").content
    for key, value in DEFAULTS[text].items():
        section = made
        for name in key.split("."):
            section = section.get(name)
        assert section == value, key


@pytest.mark.parametrize(("text", "message"), [
    ("stage: sft\ndataset: fag\n", "dataset_info.json has no 'fag'; did you mean 'faq'?"),
    ("stage: sft\ndataset: faq\ndataset_dir: elsewhere\n", "there is no elsewhere/dataset_info.json beside this file"),
    ("stage: pt\nfinetuning_type: full\ndataset: faq\n", "this file trains with PT, but only SFT, DPO and KTO are"),
])  # fmt: skip
def test_what_cannot_be_resolved_is_refused_with_the_remedy(factory, text, message):
    with pytest.raises(UserError) as caught:
        factory(text)
    assert message in str(caught.value)


LEFT = {  # documented keys with a value -> the words of the remedy
    "pref_ftx: 0.1": "write trainer.loss_type: [sigmoid, sft]",
    "ref_model: lab/other": "the reference model is the model that training starts from",
    "use_galore: true": "the recipe uses AdamW at the same learning rate",
    "finetuning_type: freeze": "the recipe trains all weights",
    "mix_strategy: interleave_over": "write weight",
    "adapter_name_or_path: lab/tern-sft": "write its folder as model.name_or_path and remove model.lora",
    "use_rslora: true": "multiply model.lora.alpha by sqrt(r)",
    "use_dora: true": "the recipe trains plain LoRA (model.lora), without this variant",
    "lora_target: .*_proj": "not as a pattern",
    "quantization_type: fp4": "soren-align quantizes only the frozen weights under LoRA",
    "streaming: true": "write data.streaming: true and trainer.max_steps",
    "mask_history: true": "write mask_history in data.train",
}


@pytest.mark.parametrize("line", LEFT)
def test_a_documented_key_that_is_not_converted_is_left_with_the_remedy(factory, line):
    lora = "" if line.startswith("finetuning") else "finetuning_type: lora\nquantization_bit: 4\n"
    text, table = factory(f"stage: dpo\ndataset: pairs\n{lora}{line}\n")
    parse(text, "x")
    left = " ".join(part(table, "set these yourself").split())
    key, _, value = line.partition(": ")
    assert f"{key} ({value.replace('true', 'True')})" in left
    assert LEFT[line] in left
    assert "unknown" not in table


def test_a_model_and_data_of_another_machine_are_listed_and_the_recipe_is_written(tmp_path):
    (tmp_path / "sft.yaml").write_text("model_name_or_path: ./no\ndataset_name: no/way.jsonl\nlearning_rate: 1e-5\n")
    text, table = import_file(tmp_path / "sft.yaml")
    assert parse(text, "x").content["model"]["name_or_path"] == "./no"
    assert "model.name_or_path: no folder ./no; correct the path" in part(table, "not on this machine:")
    assert "data.train.path: no file" in part(table, "not on this machine:")
    with pytest.raises(UserError, match=r"no folder \./no"):
        load_text(text)
