"""The key patterns of published YAML files about data: each is imported without loss, and the recipe reads its rows.

The patterns are those of the examples of Axolotl, TRL, the alignment handbook and (test_llama_factory) LLaMA-Factory:
names of datasets, columns, roles and templates; values of our own.
"""

import json

import pytest
from soren_align.data import load_split
from soren_align.importers import import_file
from soren_align.recipe.loader import load_text

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
CHAT = [USER, ANSWER]
SPOKEN = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
AXOLOTL = "base_model: lab/tern-1b\ndatasets:\n  - path: rows.jsonl\n    ds_type: json\n"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
MESSAGES, COMPLETION = {"messages": CHAT}, {"prompt": CHAT[:1], "completion": CHAT[1:]}
PAIR = {"chosen": CHAT, "rejected": [USER, {**ANSWER, "content": "No"}]}
PATTERNS = {
    "Axolotl, messages": ("    type: chat_template\n", {"messages": CHAT}, MESSAGES),
    "Axolotl, ShareGPT": ("    type: chat_template\n    field_messages: conversations\n    message_property_mappings:\n"
                          "      role: from\n      content: value\n",
                          {"conversations": SPOKEN}, MESSAGES),
    "Axolotl, the older keys": (
        "    type: chat_template\n    field_messages: talk\n    message_field_role: who\n"
        "    message_field_content: line\n",
        {"talk": [{"who": "user", "line": "Hi"}, {"who": "assistant", "line": "Ho"}]}, MESSAGES),
    "Axolotl, roles": (
        "    type: chat_template\n    roles:\n      user: [student, human]\n"
        "      assistant: [teacher]\n      tool: [tool]\n",
        {"messages": [{"role": "student", "content": "Hi"}, {"role": "teacher", "content": "Ho"}]}, MESSAGES),
    "Axolotl, trained turns": (
        "    type: chat_template\n    message_field_training: learn\n    roles_to_train: [assistant]\n",
        {"messages": [USER, {**ANSWER, "learn": False}, USER, {**ANSWER, "learn": True}]},
        {"messages": [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}]}),
    "Axolotl, tools": ("    type: chat_template\n    field_tools: functions\n", {"messages": CHAT, "functions": TOOLS},
                       {"messages": CHAT, "tools": json.dumps(TOOLS)}),
    "Axolotl, reasoning": ("    type: chat_template\n    field_thinking: reasoning_content\n"
                           "    template_thinking_key: reasoning_content\n",
                           {"messages": [USER, {**ANSWER, "reasoning_content": "Hm"}]},
                           {"messages": [USER, {**ANSWER, "reasoning_content": "Hm"}]}),
    "Axolotl, the tokenizer's template": (
        "    type: chat_template\nchat_template: tokenizer_default\n", {"messages": CHAT}, MESSAGES),
    "Axolotl, DPO": ("    type: chat_template.default\n    field_messages: asked\n"
                     "    field_chosen: good\n    field_rejected: bad\nrl: dpo\n",
                     {"asked": CHAT[:1], "good": ANSWER, "bad": PAIR["rejected"][-1]}, PAIR),
    "TRL, messages": ("dataset_name: rows.jsonl\nmax_length: 64\npacking: false\n", {"messages": CHAT}, MESSAGES),
    "TRL, text": ("dataset_name: rows.jsonl\npacking: false\ndataset_text_field: body\n", {"body": "x"}, {"text": "x"}),
    "TRL, prompts": ("dataset_name: rows.jsonl\ncompletion_only_loss: true\n", COMPLETION, COMPLETION),
    "TRL, pairs": ("dataset_name: rows.jsonl\nbeta: 0.1\n", PAIR, PAIR),
    "the handbook's mixture": (
        "dataset_mixture:\n  datasets:\n    - id: rows.jsonl\n      split: train\n"
        "      columns: [messages]\n      weight: 1.0\n"
        "  seed: 0\n  test_split_size: 1000\nassistant_only_loss: true\n",
        {"messages": CHAT}, MESSAGES),
    "the handbook's first form": (
        "dataset_mixer:\n  rows.jsonl: 1.0\ndataset_splits: [train]\nmax_seq_length: 64\n", {"messages": CHAT},
        MESSAGES),
}  # fmt: skip
EXPECTED_CHANGES = {"Axolotl, DPO": "type"}
"""Patterns with a change that is noted."""


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_imported_without_loss(tmp_path, monkeypatch, name):
    text, row, expected = PATTERNS[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    head = AXOLOTL if name.startswith("Axolotl") else "model_name_or_path: lab/tern-1b\n"
    (tmp_path / "my.yaml").write_text(head + text)
    made, table = import_file(tmp_path / "my.yaml")
    changes = table.partition("changes to the training")[2].partition("\n\n")[0]
    assert ("datasets[0]" in changes) == (name in EXPECTED_CHANGES)
    assert EXPECTED_CHANGES.get(name, "") in changes
    assert "unknown" not in table
    (source,) = load_text(made).data.sources
    assert load_split(source, load_text(made).task).dataset[0] == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [("0.05", {"fraction": 0.05}), ("500", {"examples": 500}), ("500.0", {"examples": 500}), ("0", None)],
)
def test_held_out_sizes_of_any_kind_are_kept(tmp_path, monkeypatch, size, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CHAT}))
    (tmp_path / "my.yaml").write_text(AXOLOTL + f"    type: chat_template\nval_set_size: {size}\neval_steps: 10\n")
    made, table = import_file(tmp_path / "my.yaml")
    evaluation = load_text(made).data.eval
    assert (evaluation and evaluation.model_dump()) == expected
    assert "val_set_size" not in table.partition("changes to the training")[2].partition("\nrenamed")[0]
