"""LLaMA-Factory's files become recipes: `dataset:` by dataset_info.json, its columns, tags and sizes."""

import json

import pytest
from soren_align.core.errors import UserError
from soren_align.data import load_split
from soren_align.importers import import_file
from soren_align.recipe.loader import load_text

INFO = {
    "plain": {"file_name": "plain.json"},
    "faq": {"file_name": "faq.jsonl", "columns": {"prompt": "question", "query": "about", "response": "reply"}},
    "chats": {"file_name": "chats.jsonl", "formatting": "sharegpt", "columns": {"messages": "dialog"},
              "tags": {"role_tag": "who", "content_tag": "line", "user_tag": "student", "assistant_tag": "teacher"}},
    "usual": {"hf_hub_url": "lab/usual", "formatting": "sharegpt", "subset": "small", "split": "train_sft"},
    "pairs": {"file_name": "pairs.jsonl", "ranking": True,
              "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}},
    "hub_pairs": {"hf_hub_url": "lab/pairs", "ranking": True, "formatting": "sharegpt",
                  "columns": {"messages": "conversations", "chosen": "good", "rejected": "bad"}, "num_samples": 50},
    "calls": {"hf_hub_url": "lab/calls", "formatting": "sharegpt",
              "columns": {"messages": "messages", "tools": "tools"}},
}  # fmt: skip
ROWS = {
    "plain.json": {"instruction": "Add.", "input": "1 + 1", "output": "2"},
    "faq.jsonl": {"question": "Why?", "about": "", "reply": "So."},
    "chats.jsonl": {"dialog": [{"who": "student", "line": "Hi"}, {"who": "teacher", "line": "Ho"}]},
    "pairs.jsonl": {"instruction": "Speak", "input": "now", "chosen": "Meow.", "rejected": "No."},
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """project(text) -> import_file's results for examples/my.yaml with these lines, beside data/."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "examples").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(INFO))
    for name, row in ROWS.items():
        (tmp_path / "data" / name).write_text(json.dumps([row] if name.endswith(".json") else row))

    def imported(text):
        (tmp_path / "examples" / "my.yaml").write_text("model_name_or_path: lab/tern-1b\n" + text)
        return import_file(tmp_path / "examples" / "my.yaml")

    return imported


SFT = "stage: sft\ndo_train: true\nfinetuning_type: lora\ntemplate: default\ncutoff_len: 512\n"


def test_names_become_paths_columns_and_roles_that_read_the_rows(project):
    text, _ = project(SFT + "dataset: plain, faq\noutput_dir: out\n")
    sources = load_text(text).data.sources
    assert [source.path for source in sources] == ["data/plain.json", "data/faq.jsonl"]
    assert sources[1].columns == {"instruction": "question", "input": "about", "output": "reply"}
    assert [load_split(source, "sft").dataset[0] for source in sources] == [
        {"prompt": [{"role": "user", "content": "Add.\n1 + 1"}], "completion": [{"role": "assistant", "content": "2"}]},
        {"prompt": [{"role": "user", "content": "Why?"}], "completion": [{"role": "assistant", "content": "So."}]},
    ]  # fmt: skip
    assert "assistant_only_loss" not in text  # completions are trained anyway
    text, _ = project(SFT + "dataset: [chats]\n")
    (chats,) = load_text(text).data.sources
    assert chats.roles == {"student": "user", "teacher": "assistant"}
    assert load_split(chats, "sft").dataset[0]["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
    ]
    assert load_text(text).trainer["assistant_only_loss"] is True


def test_datasets_of_the_hub_keep_their_configuration_split_and_number(project):
    (usual,) = load_text(project(SFT + "dataset: usual\n")[0]).data.sources
    assert (usual.path, usual.name, usual.split, usual.columns) == ("lab/usual", "small", "train_sft", {})
    (pairs,) = load_text(project("stage: dpo\nfinetuning_type: full\ndataset: hub_pairs\n")[0]).data.sources
    assert (pairs.path, pairs.limit) == ("lab/pairs", 50)
    assert pairs.columns == {"conversations": "conversations", "chosen": "good", "rejected": "bad"}


def test_pairs_train_by_dpo(project):
    text, _ = project("stage: dpo\nfinetuning_type: full\ndataset: pairs\npref_beta: 0.2\npref_loss: sigmoid\n")
    loaded = load_text(text)
    assert (loaded.task, loaded.trainer["beta"], loaded.trainer["loss_type"]) == ("dpo", 0.2, ["sigmoid"])
    asked = [{"role": "user", "content": "Speak\nnow"}]
    assert load_split(loaded.data.sources[0], "dpo").dataset[0] == {
        "chosen": [*asked, {"role": "assistant", "content": "Meow."}],
        "rejected": [*asked, {"role": "assistant", "content": "No."}],
    }


def test_other_keys_are_converted(project):
    lora = "lora_rank: 4\nlora_target: q_proj, v_proj\nval_size: 0.1\nlearning_rate: 1.0e-4\n"
    text, table = project(SFT + "dataset: faq\neval_strategy: steps\noverwrite_cache: true\n" + lora)
    loaded = load_text(text)
    assert (loaded.model.lora.r, loaded.model.lora.alpha) == (4, 8.0)
    assert loaded.model.lora.target_modules == ["q_proj", "v_proj"]
    assert loaded.data.eval.fraction == 0.1
    assert (loaded.trainer["max_length"], loaded.optimizer.lr) == (512, 1e-4)
    assert load_text(project(SFT + "dataset: faq\nlora_target: all\n")[0]).model.lora.target_modules == "all-linear"
    assert load_text(project("stage: sft\nfinetuning_type: full\ndataset: faq\n")[0]).trainer["max_length"] == 2048
    assert "unknown" not in table
    assert "\nchanges to the training\n  template" in table  # the tokenizer's own is used


def test_held_out_files_are_the_recipes(project):
    loaded = load_text(project(SFT + "dataset: chats\neval_dataset: chats\n")[0])
    assert (loaded.data.eval.path, loaded.data.eval.roles["teacher"]) == ("data/chats.jsonl", "assistant")


CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'
TALK = [("user", "Rain?"), ("call", CALL), ("result", "dry"), ("gpt", "No.")]


def test_tools_their_tags_and_a_system_column_are_read(project, tmp_path):
    about = {"file_name": "agents.jsonl", "formatting": "sharegpt",
             "columns": {"messages": "talk", "tools": "functions", "system": "rules"},
             "tags": {"user_tag": "user", "observation_tag": "result", "function_tag": "call"}}  # fmt: skip
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"agents": about}))
    row = {
        "talk": [{"from": who, "value": text} for who, text in TALK],
        "functions": json.dumps([{"name": "weather", "description": "d", "parameters": {}}]),
        "rules": "Be brief.",
    }
    (tmp_path / "data" / "agents.jsonl").write_text(json.dumps(row))
    text, table = project(SFT + "dataset: agents\n")
    (source,) = load_text(text).data.sources
    assert source.roles == {"result": "tool", "call": "tool_call"}
    example = load_split(source, "sft").dataset[0]
    assert [turn["role"] for turn in example["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert example["messages"][2]["tool_calls"][0]["function"]["name"] == "weather"
    assert json.loads(example["tools"])[0]["function"]["name"] == "weather"
    assert "not read" not in table


def test_only_the_last_answer_of_a_masked_history_and_the_first_samples_are_trained(project, tmp_path):
    turns = [{"who": "student", "line": "Hi"}, {"who": "teacher", "line": "Ho"}] * 2
    (tmp_path / "data" / "chats.jsonl").write_text("".join(json.dumps({"dialog": turns}) + "\n" for _ in range(3)))
    text, table = project(SFT + "dataset: chats\nmask_history: true\nmax_samples: 2\n")
    (source,) = load_text(text).data.sources
    assert (source.limit, source.mask_history) == (2, True)
    dataset = load_split(source, "sft").dataset
    assert [turn.get("weight") for turn in dataset[0]["messages"]] == [None, 0, None, None]
    assert len(dataset) == 2
    assert "mask_history" in table.partition("\nrenamed")[2]


DEFAULTS = {
    # LLaMA-Factory's defaults that differ from TRL's: lines without the key -> (the recipe's key, its value)
    "stage: sft\ndataset: faq\n": {
        "model.lora.r": 8, "model.lora.alpha": 16.0, "model.lora.dropout": 0.0,
        "model.lora.target_modules": "all-linear", "trainer.max_length": 2048, "trainer.bf16": False,
        "optimizer.lr": 5e-5},
    "stage: dpo\ndataset: pairs\nfinetuning_type: full\nbf16: true\n": {
        "model.lora": None, "trainer.max_length": 2048, "trainer.bf16": True, "optimizer.lr": 5e-5},
    "stage: sft\ndataset: chats\nfp16: true\nlora_rank: 4\n": {
        "model.lora.r": 4, "model.lora.alpha": 8.0, "trainer.fp16": True, "trainer.assistant_only_loss": True},
    "stage: sft\ndataset: chats\ntrain_on_prompt: true\ndisable_gradient_checkpointing: true\n": {
        "trainer.assistant_only_loss": False, "trainer.gradient_checkpointing": False},
    "stage: sft\ndataset: faq\nval_size: 100\nquantization_bit: 4\n": {
        "data.eval.examples": 100, "model.quantize": "4bit"},
}  # fmt: skip


@pytest.mark.parametrize("text", DEFAULTS)
def test_the_defaults_of_llama_factory_are_taken_over(project, text):
    loaded = load_text(project(text)[0])
    for key, value in DEFAULTS[text].items():
        section: object = loaded
        for part in key.split("."):
            section = section[part] if isinstance(section, dict) else getattr(section, part)
        assert section == value, key


@pytest.mark.parametrize(("text", "message"), [
    (SFT + "dataset: fag\n", "dataset_info.json has no 'fag'; did you mean 'faq'?"),
    (SFT + "dataset: faq\ndataset_dir: elsewhere\n", "there is no elsewhere/dataset_info.json beside this file"),
    ("stage: pt\nfinetuning_type: full\ndataset: faq\n", "this file trains with PT, but only SFT and DPO are"),
    ("stage: kto\nfinetuning_type: full\ndataset: faq\n", "this file trains with KTO"),
])  # fmt: skip
def test_what_cannot_be_resolved_is_refused_with_the_remedy(project, text, message):
    with pytest.raises(UserError) as caught:
        project(text)
    assert message in str(caught.value)


def test_a_damaged_dataset_info_is_refused(project, tmp_path):
    for content in ("[]", "{", '{"faq": 3}', '{"faq": {"columns": 3}}'):
        (tmp_path / "data" / "dataset_info.json").write_text(content)
        with pytest.raises(UserError):
            project(SFT + "dataset: faq\n")


DPO = "stage: dpo\ndataset: pairs\n"


def test_modules_to_save_are_a_list_of_names_in_one_text(project):
    text, _ = project(SFT + "dataset: faq\nadditional_target: embed_tokens, lm_head\n")
    assert load_text(text).model.lora.modules_to_save == ["embed_tokens", "lm_head"]


def test_an_adapter_that_is_trained_further_is_the_start(project):
    text, table = project(DPO + "finetuning_type: lora\nlora_rank: 4\nadapter_name_or_path: lab/tern-sft\n")
    loaded = load_text(text)
    assert (loaded.model.name_or_path, loaded.model.lora) == ("lab/tern-sft", None)
    changes = " ".join(table.partition("changes to the training")[2].partition("renamed")[0].split())
    assert "adapter_name_or_path" in changes
    reference = "the reference model is the model with this adapter, but in the source the model without an adapter"
    assert reference in changes
    new = "adapter_name_or_path: a, b\n"
    text, table = project(SFT + "dataset: faq\n" + new)
    assert load_text(text).model.name_or_path == "lab/tern-1b"
    assert "this adapter is not loaded; merge it" in " ".join(table.partition("\nrenamed")[0].split())


@pytest.mark.parametrize("loss", ["simpo", "orpo", "kto_pair"])
def test_a_loss_of_another_task_is_refused(project, loss):
    message = f"this file trains with {loss.removesuffix('_pair').upper()}, but only SFT and DPO are supported"
    with pytest.raises(UserError, match=message):
        project(DPO + f"finetuning_type: full\npref_loss: {loss}\nsimpo_gamma: 0.5\n")


CHANGES = {  # a documented key of LLaMA-Factory's with a value -> the words of its note
    "pref_ftx: 0.1": "write trainer.loss_type: [sigmoid, sft]",
    "pref_bco_weight: 0.1": "[sigmoid, bco_pair]",
    "ref_model: lab/other": "the reference model is the model that training starts from",
    "pure_bf16: true": "trainer.bf16, model.dtype: float32",
    "use_galore: true": "the recipe uses AdamW at the same learning rate",
    "finetuning_type: freeze": "the recipe trains all weights",
    "use_llama_pro: true": "as its config.json describes the model",
    "mix_strategy: interleave_over": "write weight",
    "add_special_tokens: <a>": "the recipe uses the model's own tokenizer",
    "default_system: Be brief.": "the chat template determines this setting",
    "create_new_adapter: true": "without this variant",
    "pissa_init: true": "without this variant",
}


@pytest.mark.parametrize("line", CHANGES)
def test_a_documented_key_that_changes_the_training_is_named_with_the_change(project, line):
    lora = "" if line.startswith("finetuning") else "finetuning_type: lora\n"
    text, table = project(f"{DPO}{lora}{line}\n")
    load_text(text)
    changes = " ".join(table.partition("changes to the training")[2].partition("\nrenamed")[0].split())
    assert line.partition(":")[0] in changes
    assert CHANGES[line] in changes
    assert "unknown" not in table


def test_documented_keys_without_an_effect_and_those_with_another_name_are_known(project):
    keys = "simpo_gamma: 0.5\nkto_chosen_weight: 1\nuse_galore: false\ngalore_rank: 8\nmix_strategy: concat\n"
    keys += "finetuning_type: full\npure_bf16: false\ncompute_accuracy: true\npref_ftx: 0\nenable_liger_kernel: true\n"
    _, table = project(DPO + keys)
    assert "unknown" not in table
    assert "changes to the training" not in table
    text, _ = project(SFT + "dataset: faq\nuse_dft_loss: true\ndisable_shuffling: true\nuse_muon: true\n")
    loaded = load_text(text)
    assert (loaded.trainer["loss_type"], loaded.trainer["train_sampling_strategy"]) == ("dft", "sequential")
    assert loaded.optimizer.name == "muon"
