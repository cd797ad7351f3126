"""torchtune's configs become recipes: sections with `_component_`, as its own configs at bd2a0fc, with our values."""

import pytest
from soren_align.core.errors import UserError
from soren_align.importers import import_file, torchtune
from soren_align.importers.engine import convert
from soren_align.importers.importer import to_text
from soren_align.recipe.loader import load_text, parse

FULL = """
output_dir: runs/tern
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /m/tern/tokenizer.model, max_seq_len: 640}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: False, split: "train[:90%]"}
dataset_val: {_component_: torchtune.datasets.alpaca_cleaned_dataset, split: "train[90%:]"}
run_val_every_n_steps: 50
seed: 7
shuffle: True
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /m/tern
  checkpoint_files: [model-00001-of-00001.safetensors]
  recipe_checkpoint: null
  output_dir: ${output_dir}
  model_type: LLAMA3
resume_from_checkpoint: False
batch_size: 3
epochs: 2
optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit, lr: 3e-5, betas: [0.8, 0.9]}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
max_steps_per_epoch: null
gradient_accumulation_steps: 5
optimizer_in_bwd: True
clip_grad_norm: null
compile: False
device: cuda
enable_activation_checkpointing: True
enable_activation_offloading: False
dtype: bf16
metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger, log_dir: "${output_dir}/logs"}
log_every_n_steps: 4
profiler: {_component_: torchtune.training.setup_torch_profiler, enabled: False}
"""
DPO = """
model:
  _component_: torchtune.models.llama3_1.qlora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 12
  lora_alpha: 36
  lora_dropout: 0.1
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /m/t, max_seq_len: null}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /m/tern}
dataset: {_component_: torchtune.datasets.stack_exchange_paired_dataset}
batch_size: 4
epochs: 2
max_steps_per_epoch: 150
optimizer: {_component_: torch.optim.AdamW, fused: True, weight_decay: 0.05, lr: 4e-4}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 20}
loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.2}
dtype: fp32
device: cpu
"""


def converted(text):
    return convert(parse(text, "mine.yaml").content, "mine")


def recipe(text):
    return load_text(to_text(converted(text), "mine.yaml"), "mine.yaml", [].append)


def notes(text):
    return {note.key: note for note in converted(text).notes}


def test_a_full_training():
    loaded, trainer = recipe(FULL), recipe(FULL).trainer
    assert (loaded.task, str(loaded.model.name_or_path), str(loaded.run.output_dir)) == ("sft", "/m/tern", "runs/tern")
    (source,) = loaded.data.sources
    assert (source.path, source.split) == ("yahma/alpaca-cleaned", "train[:90%]")
    assert loaded.data.eval.split == "train[90%:]"
    optimizer = loaded.optimizer
    assert (optimizer.name, optimizer.states, optimizer.lr) == ("adamw", "8bit", 3e-5)
    assert (tuple(optimizer.betas), optimizer.weight_decay) == ((0.8, 0.9), 0.01)
    assert {key: trainer[key] for key in ("max_length", "num_train_epochs", "per_device_train_batch_size", "seed")} == {
        "max_length": 640, "num_train_epochs": 2, "per_device_train_batch_size": 3, "seed": 7
    }  # fmt: skip
    assert (trainer["max_grad_norm"], trainer["lr_scheduler_type"]) == (0.0, "constant")
    assert (trainer["eval_strategy"], trainer["eval_steps"], trainer["bf16"]) == ("steps", 50, True)
    assert trainer["completion_only_loss"] is False  # alpaca_dataset trains prompts too


def test_dpo_of_an_adapter_on_a_quantized_model():
    loaded = recipe(DPO)
    lora = loaded.model.lora
    assert (loaded.task, loaded.model.quantize, lora.r, lora.alpha, lora.dropout) == ("dpo", "4bit", 12, 36.0, 0.1)
    assert lora.target_modules == ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    (source,) = loaded.data.sources
    assert source.columns == {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
    trainer = loaded.trainer
    assert (trainer["beta"], trainer["max_steps"], trainer["warmup_steps"]) == (0.2, 300, 20)
    assert (trainer["lr_scheduler_type"], trainer["max_length"], trainer["bf16"]) == ("cosine", None, False)
    assert trainer["use_cpu"] is True


@pytest.mark.parametrize("text", [FULL, DPO])
def test_each_key_has_one_note_by_torchtunes_name(text):
    source = torchtune.read(parse(text, "mine.yaml").content).source
    told = [note.key for note in converted(text).notes]
    assert len(told) == len(set(told))
    assert source.keys() <= set(told)
    assert not set(told) - source.keys() - {"dataset", "dataset_val"}
    assert not [note for note in converted(text).notes if note.outcome == "unknown"]
    assert all(note.explanation for note in converted(text).notes if note.outcome != "unchanged")


def test_notes_name_what_changes_the_training():
    changed = {key for key, note in notes(FULL).items() if note.changes_training}
    assert changed == {"dataset._component_", "dtype"}
    added = FULL.replace('split: "train[:90%]"', "new_system_prompt: Be kind.")
    told = notes(added + "quantizer: {groupsize: 256}\nfoo: 1\n")
    assert told["dataset.new_system_prompt"].changes_training
    assert told["quantizer.groupsize"].explanation == "the recipe trains without quantization-aware training"
    assert told["foo"].outcome == "unknown"


@pytest.mark.parametrize(("dataset", "path", "columns", "extra"), [
    ("instruct_dataset, source: lab/faq, column_map: {input: q, output: a}", "lab/faq",
     {"instruction": "q", "output": "a"}, {}),
    ("chat_dataset, source: lab/chat, conversation_column: talk, conversation_style: sharegpt", "lab/chat",
     {"messages": "talk"}, {"assistant_only_loss": True}),
    ("text_completion_dataset, source: lab/books, column: body", "lab/books", {"text": "body"},
     {"assistant_only_loss": False}),
    ("alpaca_dataset, train_on_input: False, packed: True", "tatsu-lab/alpaca", {}, {"packing": True}),
])  # fmt: skip
def test_datasets_have_columns_and_trained_tokens(dataset, path, columns, extra):
    line = next(line for line in FULL.splitlines() if line.startswith("dataset:"))
    loaded = recipe(FULL.replace(line, f"dataset: {{_component_: torchtune.datasets.{dataset}}}"))
    (source,) = loaded.data.sources
    assert (source.path, source.columns) == (path, columns)
    assert {key: loaded.trainer[key] for key in extra} == extra
    assert "completion_only_loss" not in loaded.trainer


def test_several_datasets_are_a_mixture():
    line = next(line for line in FULL.splitlines() if line.startswith("dataset:"))
    two = "dataset:\n- {_component_: torchtune.datasets.alpaca_dataset}\n"
    two += "- {_component_: torchtune.datasets.samsum_dataset, packed: False}"
    text = FULL.replace(line, two)
    assert [source.path for source in recipe(text).data.sources] == ["tatsu-lab/alpaca", "Samsung/samsum"]
    assert {"dataset[0]._component_", "dataset[1]._component_", "dataset[1].packed"} <= notes(text).keys()


@pytest.mark.parametrize(("line", "problem"), [
    ("teacher_model: {_component_: x.y}", "teacher_model: this file trains with distillation, but only SFT and DPO"),
    ("policy_model: {_component_: x.y}", "policy_model: this file trains with PPO"),
    ("loss: {_component_: torchtune.rlhf.loss.RSOLoss}", "loss._component_: is RSOLoss, but only SFT and DPO"),
    ("dataset: {_component_: torchtune.datasets.multimodal.the_cauldron_dataset}",
     "dataset._component_: found the_cauldron_dataset; write one of alpaca_dataset"),
    ("dataset: null", "the file names no dataset"),
])  # fmt: skip
def test_other_methods_and_data_are_refused(line, problem):
    key = line.partition(":")[0]
    kept = [old for old in FULL.splitlines() if not old.startswith(key + ":")]
    with pytest.raises(UserError, match=problem):
        converted("\n".join([*kept, line]))


def test_the_command_writes_a_recipe(tmp_path):
    (tmp_path / "8B_full.yaml").write_text(FULL)
    text, table = import_file(tmp_path / "8B_full.yaml")
    assert "# ours: torchtune's default" in text
    assert "checkpointer.checkpoint_dir" in table
    assert "not on this machine" in table
    assert max(map(len, table.splitlines())) <= 80
