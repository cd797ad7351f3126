"""Tiny configs of language models, one per architecture, with the quickstart's vocabulary."""

from transformers import AutoConfig

SIZE = {
    "vocab_size": 121,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
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
    "deepseek_v3": {
        **SIZE,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
    "qwen3_next": {
        **SIZE,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "llama4_text": {
        **SIZE,
        **EXPERTS,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "intermediate_size": 24,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
    },
    "gpt2": GPT2,
    "mamba": {**SIZE, "state_size": 8, "time_step_rank": 4},
    "gemma3": {
        "text_config": {**SIZE, "head_dim": 8},
        "vision_config": {**VISION, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "qwen2_vl": {
        **TEXT_ONLY,
        "text_config": SIZE,
        "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2},
    },
    "t5": {"vocab_size": 121, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
}


def config_of(name, **changes):
    """The tiny config of an architecture."""
    return AutoConfig.for_model(name, **{**ARCHITECTURES[name], **changes})
