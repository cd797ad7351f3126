"""The keys of TRL's YAML files, the alignment handbook's and Axolotl's, and their counterparts in a recipe.

`convert` reads these tables. A key in none of them that the installed TRL does not have either is unknown. `*` matches
anything. Sources: TRL 1.16 (scripts/utils.py, trainer/model_config.py), the handbook at 925acdf
(src/alignment/configs.py), Axolotl at 067b021 (utils/schemas).
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal


@dataclass(frozen=True)
class Note:
    """The outcome of a key's conversion."""

    key: str
    """As in the source; dotted, or with [an index], if it is inside another."""
    outcome: Literal["unchanged", "renamed", "dropped", "unknown"]
    explanation: str = ""
    """The recipe's key, or the reason for dropping it."""
    changes_training: bool = False
    """Whether the trained weights differ from the source's."""


def matches(name: str, names: str) -> bool:
    """Whether `name` is one of the space-separated `names`, in which `*` matches anything."""
    return any(fnmatchcase(name, pattern) for pattern in names.split())


def number(value: Any) -> Any:
    """The number in a text, such as 1e-6, which YAML 1.1 reads as text; any other value unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


# Other names of the same setting: name -> the recipe's key.
RENAMED = {
    "model_name_or_path": "model.name_or_path",
    "base_model": "model.name_or_path",
    "model_revision": "model.revision",
    "revision": "model.revision",
    "revision_of_model": "model.revision",
    "chat_template_path": "model.chat_template",
    "eos_token": "model.eos_token",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_epsilon": "optimizer.eps",
    "adam_eps": "optimizer.eps",
    "bfloat16": "trainer.bf16",
    "float16": "trainer.fp16",
    "output_dir": "run.output_dir",
    "warmup_ratio": "trainer.warmup_steps",
    "max_seq_length": "trainer.max_length",
    "sequence_len": "trainer.max_length",
    "micro_batch_size": "trainer.per_device_train_batch_size",
    "eval_batch_size": "trainer.per_device_eval_batch_size",
    "num_epochs": "trainer.num_train_epochs",
    "lr_scheduler": "trainer.lr_scheduler_type",
    "evaluation_strategy": "trainer.eval_strategy",
    "group_by_length": "trainer.train_sampling_strategy",
    "noisy_embedding_alpha": "trainer.neftune_noise_alpha",
    "sample_packing": "trainer.packing",
    "eval_sample_packing": "trainer.eval_packing",
    "train_on_inputs": "trainer.assistant_only_loss",
    "dataset_processes": "trainer.dataset_num_proc",
    "wandb_name": "trainer.run_name",
    "saves_per_epoch": "trainer.save_strategy",
    "evals_per_epoch": "trainer.eval_strategy",
    "cutoff_len": "trainer.max_length",
    "train_on_prompt": "trainer.assistant_only_loss",
    "disable_gradient_checkpointing": "trainer.gradient_checkpointing",
    "neat_packing": "trainer.packing",
    "pref_beta": "trainer.beta",
    "pref_loss": "trainer.loss_type",
    "rl_beta": "trainer.beta",
    "dpo_beta": "trainer.beta",
    "dpo_loss_type": "trainer.loss_type",
    "dpo_loss_weights": "trainer.loss_weights",
    "dpo_label_smoothing": "trainer.label_smoothing",
    "dpo_use_weighting": "trainer.use_weighting",
    "use_dft_loss": "trainer.loss_type",
    "disable_shuffling": "trainer.train_sampling_strategy",
}

# Other names of the same value: (the source's key, its value) -> (the recipe's value, its effect on the training).
VALUES: dict[tuple[str, Any], tuple[Any, str]] = {
    ("bf16", "auto"): (True, ""),
    ("group_by_length", True): ("group_by_length", ""),
    ("group_by_length", False): ("random", ""),
    ("train_on_prompt", True): (False, ""),
    ("train_on_prompt", False): (True, ""),
    ("disable_gradient_checkpointing", True): (False, ""),
    ("disable_gradient_checkpointing", False): (True, ""),
    ("train_on_inputs", True): (False, ""),
    ("train_on_inputs", False): (True, ""),
    ("gradient_checkpointing", "offload"): (True, ""),
    ("gradient_checkpointing", "unsloth"): (True, ""),
    ("packing_strategy", "ffd"): ("bfd", "TRL has no ffd any more: bfd packs other examples together"),
    ("sample_packing", True): (True, "Axolotl drops examples longer than max_length; here they are divided and kept"),
    ("eval_strategy", False): ("no", ""),
    ("save_strategy", False): ("no", ""),
    ("saves_per_epoch", 1): ("epoch", ""),
    ("evals_per_epoch", 1): ("epoch", ""),
    ("use_dft_loss", True): ("dft", ""),
    ("use_dft_loss", False): ("nll", ""),
    ("disable_shuffling", True): ("sequential", ""),
    ("disable_shuffling", False): ("random", ""),
    ("lr_scheduler", "rex"): ("cosine", "TRL has no rex"),
    ("lr_scheduler", "one_cycle"): ("cosine", "TRL has no one_cycle"),
}

# The handbook's Zephyr template, which recipes call zephyr: sha256 of it without white space (tests/importers).
ZEPHYR = "8705a1897ece1a1b355e1f4d36687f331d6680f5d897d1ae314b3fc506e136b8"

# Dropped without an effect on the trained weights: (names, reason).
DROPPED = (
    ("push_to_hub hub_* push_dataset_to_hub hf_use_auth_token", "nothing is uploaded"),
    (
        "deepspeed fsdp fsdp_* accelerate_config accelerator_config parallelism_config num_processes num_machines "
        "dp_shard_size dp_replicate_size local_rank world_size ddp device_map max_memory low_cpu_mem_usage "
        "use_ray ray_*",
        "processes are run.parallel's (zero3, fsdp2, ...) and --processes N",
    ),
    (
        "xformers_attention sage_attention flash_attn_* flash_optimum",
        "there is no such attention here; it is transformers' own choice, sdpa",
    ),
    (
        "use_liger_kernel liger_* dpo_use_liger_kernel cut_cross_entropy padding_free dpo_padding_free "
        "lora_*_kernel use_kernels batch_flattening pad_to_sequence_len flex_attn_* gc_steps sample_packing_* "
        "experimental_skip_move_to_device torchdistx_path tiled_mlp* chunked_cross_entropy* use_unsloth use_unsloth_gc "
        "enable_liger_kernel use_v1_kernels",
        "speed and memory only",
    ),
    ("log_level log_level_replica disable_tqdm debug", "progress is shown by soren-align itself"),
    ("strict", "unknown keys are always an error"),
    ("do_train do_eval do_predict stage", "determined by the command"),
    (
        "overwrite_cache plot_loss preprocessing_batch_size tokenized_path data_shared_file_system",
        "no effect on training",
    ),
    ("remove_unused_columns columns", "the recipe's columns are recognised"),
    (
        "dataset_streaming streaming dataset_prepared_path shuffle_merged_datasets total_num_tokens "
        "skip_prepare_dataset dataset_keep_in_memory preprocessing_num_workers",
        "examples are loaded, checked and counted before training",
    ),
    (
        "overwrite_output_dir resume_from_checkpoint auto_resume_from_checkpoints",
        "a run resumes by itself; run.overwrite: true starts afresh",
    ),
    ("trust_remote_code", "remote code is not run"),
    ("save_safetensors", "weights are saved as safetensors"),
    (
        "model_type type_of_model tokenizer_type processor_type is_*_derived_model tokenizer_legacy tokenizer_use_fast",
        "read from the model's own files",
    ),
    (
        "wandb_* use_wandb use_mlflow mlflow_* use_comet comet_* use_tensorboard use_trackio trackio_*_name "
        "use_swanlab swanlab_*",
        "trackers read it from the environment (WANDB_PROJECT, ...); report_to names them",
    ),
    ("save_first_step", "write trainer.save_steps"),
    (
        "eval_table_size eval_max_new_tokens eval_causal_lm_metrics do_causal_lm_eval do_bench_eval bench_dataset",
        "run.samples prints answers during training, and `eval` measures scores after it",
    ),
    ("dataset_kwargs", "the chat template adds the special tokens"),
    ("env", "set environment variables in the shell"),
    (
        "compute_accuracy eval_on_each_dataset eval_num_beams predict_with_generate print_param_status use_kv_cache "
        "include_effective_tokens_per_second infer_* export_* cache_dir hf_hub_token ms_hub_token om_hub_token "
        "offload_folder use_fast_tokenizer use_reentrant_gc ignore_pad_token_for_loss media_dir image_* video_* "
        "audio_* crop_to_patches use_audio_in_video quantization_device_map use_mca",
        "no effect on training with texts",
    ),
    (
        "kto_* ppo_* simpo_gamma reward_model reward_model_*",
        "of other ways of training than SFT and DPO",
    ),
    ("ignore_bias_buffers", "no effect on training"),
    ("loss_watchdog_*", "a NaN loss stops the run anyway"),
    ("save_only_model", "checkpoints include the optimizer"),
    ("full_finetune float32 pure_bf16 use_muon train_from_scratch", "already the default here"),
)

# Dropped with an effect on the trained weights, unless the key was off in the source: (names, reason).
ADAPTERS = (
    "only plain LoRA is supported (model.lora), without variants; instead of another adapter all weights are trained: "
    "then lower optimizer.lr, adapters' rates are usually ten times those of full training"
)
DTYPE = (
    "trainer.bf16 makes the arithmetic bfloat16. bfloat16 weights lose most small updates to rounding (not under ZeRO, "
    "which has float32 masters)"
)
ADAPTER_KEYS = (
    "use_peft adapter lora_* peft peft_* use_dora use_rslora qlora_* relora relora_* loraplus_* loftq_* lisa_* pissa_* "
    "oft_* module_dropout create_new_adapter"
)
VARIANTS = "plain LoRA (model.lora) is trained, without this variant"
CHANGES = (
    (
        ADAPTER_KEYS,
        ADAPTERS,
    ),
    ("finetuning_type", "all weights are trained, unless it is lora"),
    (
        "adapter_name_or_path adapter_folder lora_model_dir",
        "the adapter is not loaded; merge it into its model first, and name the result as model.name_or_path",
    ),
    (
        "ref_model ref_model_adapters ref_model_quantization_bit",
        "the reference model is the one that training starts from",
    ),
    (
        "pref_ftx",
        "no loss of the chosen answers is added; write trainer.loss_type: [sigmoid, sft] and trainer.loss_weights: "
        "[1.0, this number], which adds its mean over tokens",
    ),
    (
        "pref_bco_weight",
        "no BCO loss is added; write trainer.loss_type: [sigmoid, bco_pair] and trainer.loss_weights",
    ),
    (
        "use_galore galore_* use_apollo apollo_* use_badam badam_* use_adam_mini",
        "there is no such optimizer here; AdamW at the same rate",
    ),
    ("use_eaft_loss use_asft_loss asft_*", "TRL's own losses are used"),
    (
        "use_llama_pro mixture_of_depths moe_aux_loss_coef upcast_layernorm upcast_lmhead_output",
        "the model is used as its config.json describes it",
    ),
    ("mix_strategy interleave_probs", "all examples of all datasets are used; write weight in data.train"),
    ("tool_format enable_thinking default_system", "the chat template decides it"),
    (
        "load_in_4bit load_in_8bit use_bnb_nested_quant gptq gptq_* qat quantization quantization_* "
        "double_quantization fp8 fp8_* bnb_* model_quantization_* quantize_moe_experts",
        "only the frozen weights under LoRA are quantized (model.quantize), by bitsandbytes to 4 or 8 bits",
    ),
    (
        "max_prompt_length max_prompt_len max_completion_length max_target_length",
        "TRL has no limit for prompts any more; max_length counts prompt and answer",
    ),
    (
        "chat_template chat_template_jinja chat_template_kwargs template default_system_message eot_tokens",
        "the tokenizer's own chat template is used; for another name model.chat_template (qwen2.5, zephyr, or a "
        ".jinja file)",
    ),
    (
        "tokenizer_name_or_path tokenizer_config tokens added_tokens_overrides bos_token unk_token "
        "additional_special_tokens resize_token_embeddings_to_32x tokenizer_use_mistral_common resize_vocab add_tokens "
        "add_special_tokens new_special_tokens_config init_special_tokens split_special_tokens",
        "the model's own tokenizer is used",
    ),
    (
        "overrides_of_model_config overrides_of_model_kwargs rope_scaling model_config base_model_config "
        "cls_model_config reinit_weights",
        "the model is used as its config.json describes it",
    ),
    (
        "optim_args optim_target_modules embedding_lr embedding_lr_scale lr_groups eta_min adam_beta3 "
        "adam_epsilon2 dion_* qgalore_* lr_quadratic_warmup cosine_constant_lr_ratio",
        "only AdamW's settings are converted",
    ),
    ("unfrozen_parameters freeze_* layers_to_freeze", "all weights are trained"),
    (
        "trainer_cls plugins use_eaft eaft_* use_pose pose_* jagged_restart_* rpo_alpha dpo_norm_loss",
        "TRL's own trainers are used",
    ),
    (
        "tensor_parallel_size context_parallel_size sequence_parallel_degree expert_parallel_*",
        "only data is divided among processes",
    ),
    (
        "dataset_exact_deduplication min_sample_len max_packed_sequence_len excess_length_strategy "
        "curriculum_sampling dataset_shard_*",
        "each example is used whole and once",
    ),
    ("batch_size auto_find_batch_size", "redundant; run.global_batch_size fixes the batch"),
    ("early_stopping_*", "training runs to its end"),
)

# Without effect unless one of these is set: names -> keys.
ONLY_WITH = {
    ADAPTER_KEYS: ("use_peft", "adapter"),
    "bnb_* use_bnb_nested_quant": ("load_in_4bit", "quantization_bit"),
    "double_quantization quantization_method quantization_type": ("quantization_bit",),
    "early_stopping_threshold": ("early_stopping_patience", "early_stopping_steps"),
    "galore_*": ("use_galore",),
    "apollo_*": ("use_apollo",),
    "badam_*": ("use_badam",),
    "pissa_*": ("pissa_init",),
    "init_special_tokens": ("add_special_tokens", "new_special_tokens_config"),
}

# Values without an effect on the training.
OFF = [
    ("finetuning_type", "full"),
    ("mix_strategy", "concat"),
    ("chat_template", "tokenizer_default"),
    ("plugins", ["axolotl.integrations.liger.LigerPlugin"]),
    ("plugins", ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]),
]

# TRL's keys without an effect on the trained weights, if TRL refuses their value.
HARMLESS = "tf32 torch_compile torch_compile_* activation_offloading gradient_checkpointing "
HARMLESS += "gradient_checkpointing_kwargs dataloader_* dataset_num_proc ddp_* use_cache logging_* save_* eval_* "
HARMLESS += "report_to run_name project"

# The keys of run.early_stopping; LLaMA-Factory's, too, is a number of evaluations.
EARLY_STOPPING = {"early_stopping_patience": "patience", "early_stopping_steps": "patience"}
EARLY_STOPPING["early_stopping_threshold"] = "threshold"

# Keys without effect unless there is a data.eval.
NEEDS_EVAL = "eval_strategy evaluation_strategy eval_steps evals_per_epoch eval_on_start eval_delay "
NEEDS_EVAL += "load_best_model_at_end metric_for_best_model greater_is_better"

# Names of plain AdamW.
ADAMW = "adamw adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adamw_hf adamw_apex_fused "
ADAMW += "paged_adamw_32bit adamw_anyprecision"

# Names of AdamW with 8-bit states.
ADAMW_8BIT = "adamw_8bit adamw_bnb_8bit adamw_torch_8bit paged_adamw_8bit"

# Tasks of TRL and Axolotl other than SFT and DPO.
OTHER_TASKS = "pt rm orpo kto grpo gdpo rloo ppo simpo cpo xpo nash ebft prm reward"

# Keys about a dataset's columns, with the values for which the recipe reads the same columns.
AS_READ: dict[str, tuple[Any, ...]] = {
    "columns": (),
    "type": ("chat_template", "sharegpt"),
    "roles_to_train": (["assistant"],),
    "ds_type": ("json", "parquet", "csv", "text"),
    "trust_remote_code": (False,),
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "shards": (1,),
}
AS_HERE = {
    "roles_to_train": "as here",
    "trust_remote_code": "remote code is not run",
    "train_on_eos": "as here",
    "train_on_eot": "as here",
    "shards": "all examples, as here",
}
"""Keys of AS_READ that are not about columns, with their notes."""
COLUMNS = ("messages", "conversations", "instruction", "input", "output", "system", "prompt", "completion", "text")
COLUMNS += ("chosen", "rejected")
# Keys that change the examples for any other value, and why; RECOGNISED for those about columns.
RECOGNISED = (
    "examples are recognised by their columns: whole conversations (messages, ShareGPT's conversations), instruction "
    "and output, prompt and completion, text; chosen and rejected. Others go under `columns`"
)
OTHERWISE_BECAUSE = {
    "shards*": "the source trains on one of these parts, here all examples are trained on; write limit",
    "skip": "so many examples are left out in the source, here none",
    "train_on_eos train_on_eot": "the stop token of every trained answer is trained, and no other",
    "roles_to_train": "the assistant's answers are trained",
    "chat_template chat_template_jinja": "there is one chat template for all data: model.chat_template",
    "drop_system_message": "system messages are read",
    "trust_remote_code": "remote code is not run",
}
OTHERWISE = "chat_template chat_template_jinja conversation drop_system_message field field_* message_field_* "
OTHERWISE += "train_on_eos train_on_eot split_thinking template_thinking_key system_prompt system_format shards* skip "
OTHERWISE += "data_dir format no_input_format input_format input_transform prompt_format chosen_format rejected_format"
