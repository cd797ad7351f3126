"""Tiny models, one per architecture of transformers, and the trial of each: planned, trained, saved, loaded again."""

import json

import torch
from soren_align.core.errors import UserError
from soren_align.optim import spectral_share
from soren_align.planning.plan import plan_training
from soren_align.run.weights import load_adapter, load_model
from transformers import AutoConfig, AutoTokenizer

from tests.support.tiny_models import BASE
from tests.support.tiny_run import TinyRun

SIZE = {"vocab_size": 121, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 2,
        "pad_token_id": 0}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 121, "bos_token_id": None}
GPT2 |= {"eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
TEXT_ONLY = {"image_token_id": 120, "vision_start_token_id": 119, "vision_end_token_id": 118, "video_token_id": 117}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}

ARCHITECTURES = {
    "llama": SIZE,
    "smollm3": SIZE,
    "mistral": SIZE,
    "phi3": SIZE,
    "phi": SIZE,
    "opt": {**SIZE, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": SIZE,
    "falcon": {**SIZE, "new_decoder_architecture": True},
    "olmo2": SIZE,
    "stablelm": SIZE,
    "bloom": {**SIZE, "n_layer": 2, "n_head": 4},
    "granite": SIZE,
    "qwen2": SIZE,
    "qwen3": {**SIZE, "head_dim": 8},
    "gemma2": {**SIZE, "head_dim": 8},
    "gemma3_text": {**SIZE, "head_dim": 8},
    "gpt_neo": {**SIZE, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "lfm2": {**SIZE, "layer_types": ["conv", "full_attention"]},
    "mixtral": {**SIZE, **EXPERTS},
    "qwen3_moe": {**SIZE, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gpt_oss": {**SIZE, **EXPERTS, "head_dim": 8, "intermediate_size": 24},
    "deepseek_v3": {**SIZE, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
                    "topk_group": 1, "moe_intermediate_size": 24, "q_lora_rank": 16, "kv_lora_rank": 16,
                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1},
    "qwen3_next": {
        **SIZE, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "llama4_text": {**SIZE, **EXPERTS, "head_dim": 8, "intermediate_size_mlp": 48, "intermediate_size": 24,
                    "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    "granitemoe": {**SIZE, **EXPERTS},
    "jetmoe": {**SIZE, **EXPERTS, "kv_channels": 8},
    "gpt2": GPT2,
    "mamba": {**SIZE, "state_size": 8, "time_step_rank": 4},
    "gemma3": {"text_config": {**SIZE, "head_dim": 8}, "vision_config": {**VISION, "image_size": 28, "patch_size": 14},
               "mm_tokens_per_image": 4},
    "qwen2_vl": {**TEXT_ONLY, "text_config": SIZE,
                 "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2}},
    "t5": {"vocab_size": 121, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
}  # fmt: skip

NAMES = {
    "llama": "Llama 3, SmolLM2", "smollm3": "SmolLM3", "mistral": "Mistral", "phi3": "Phi-3", "phi": "Phi-2",
    "opt": "OPT", "gpt_neox": "GPT-NeoX, Pythia", "falcon": "Falcon", "olmo2": "OLMo 2", "stablelm": "StableLM",
    "bloom": "Bloom", "granite": "Granite", "qwen2": "Qwen2.5", "qwen3": "Qwen3", "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3, text", "gpt_neo": "GPT-Neo", "lfm2": "LFM2", "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE", "gpt_oss": "gpt-oss", "deepseek_v3": "DeepSeek-V3", "qwen3_next": "Qwen3-Next",
    "llama4_text": "Llama 4, text", "granitemoe": "GraniteMoE", "jetmoe": "JetMoE", "gpt2": "GPT-2", "mamba": "Mamba",
    "gemma3": "Gemma 3, images and text", "qwen2_vl": "Qwen2-VL", "t5": "T5",
}  # fmt: skip
FROZEN = {"gemma3": ["model.vision_tower.*", "model.multi_modal_projector.*"]}
USUAL = ("embedding", "1-dimensional", "outside the blocks")  # reasons for AdamW in most models

SETTINGS = (*("trainer.max_steps=3", "trainer.warmup_steps=0", "trainer.save_strategy=no", "trainer.max_length=24"),
            *("trainer.per_device_train_batch_size=4", "trainer.assistant_only_loss=false"),
            *("data.train.limit=12", "data.eval=null", "model.init_seed=0"))  # fmt: skip


def config_of(name, **changes):
    """The tiny config of an architecture."""
    return AutoConfig.for_model(name, **{**ARCHITECTURES[name], **changes})


def trial(name, folder):
    """The row of docs/models.md of one architecture.

    It is planned, trained for three steps, saved and loaded again: all its weights, and by LoRA.
    """
    start = folder / "config"
    config_of(name).save_pretrained(start)
    AutoTokenizer.from_pretrained(BASE).save_pretrained(start)
    overrides = [*SETTINGS, f"model.name_or_path={start}", f"model.freeze={json.dumps(FROZEN.get(name, []))}"]
    full = TinyRun(folder / "full", "sft", *overrides)
    try:
        plan, _ = plan_training(full.recipe)
    except UserError as error:
        message = str(error).removeprefix(f"model {start}: ")
        return f"| {NAMES[name]} | refused: {message} | | | |"
    results = [_trained(full), _trained(TinyRun(folder / "lora", "sft", *overrides, "model.lora={r: 4}"))]
    planned = "ok" if plan["compute"]["training_flops"] else "activations and FLOPs not known"
    return f"| {NAMES[name]} | {_routing(plan)} | {planned} | {' | '.join(results)} |"


def _routing(plan):
    """The mapped matrices of a plan, and the less usual ones of AdamW."""
    mapped = [f"{r['matrices']} of {r['reason'].rstrip('s')}s" for r in plan["routing"] if r["rule"] == "spectral"]
    others = [row["reason"] for row in plan["routing"] if not any(word in row["reason"] for word in USUAL)]
    others = [reason for reason in others if reason not in ("linear layer", "experts")]
    share = f" ({spectral_share(plan['routing']):.0%})"
    return ", ".join(mapped) + share + (f"; AdamW: {', '.join(others)}" if others else "")


def _trained(run):
    """ "ok", after the checks of a run's three steps and of its model folder."""
    assert run.train()
    record = run.folder.read()
    assert record["training"]["relative_change"] > 0
    if run.recipe.model.lora:
        load_adapter(load_model(str(run.folder.start)), str(run.folder.model))
        return "ok"
    before, after = (json.loads((f / "config.json").read_text()) for f in (run.folder.start, run.folder.model))
    assert after == before
    weights, start = (load_model(str(f)).state_dict() for f in (run.folder.model, run.folder.start))
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert any(not torch.equal(weights[key], start[key]) for key in start)
    return "ok"
