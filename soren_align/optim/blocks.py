"""Fused weights: several projections that an architecture stores in one matrix."""

FUSED = {
    **dict.fromkeys(("qkv_proj", "query_key_value", "c_attn", "Wqkv"), ("q", "k", "v")),
    "gate_up_proj": ("gate", "up"),
    "in_proj_qkvz": ("q", "k", "v", "z"),
    "kv_b_proj": ("k", "v"),
}
"""The projections in the weight of a layer with this name, in transformers' models."""


def fused_projections(name: str) -> tuple[str, ...]:
    """The projections in a fused weight, by the name of its parameter; none for another one."""
    module = name.removesuffix(".weight").rpartition(".")[2]
    return FUSED.get(module, ())
