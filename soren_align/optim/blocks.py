"""Fused weights: several projections that an architecture stores in one matrix, and their division
into blocks.

By default a fused weight is one matrix. With `split` each block of its rows is a matrix: a
projection, of the size that the model's config states, the rows of one head, or as many rows as the
user states. In a transposed weight (GPT-2's Conv1D) blocks are of columns, and of equal size.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from .layout import LINEAR, WeightLayout

Split = Mapping[str, Sequence[str | int]]
"""Glob of a parameter's name, with or without ".weight" -> projections in the order of the rows,
row counts, or ["heads"]."""
QKV, GATE_UP = ("q", "k", "v"), ("gate", "up")
FUSED = {
    **dict.fromkeys(("qkv_proj", "query_key_value", "c_attn", "Wqkv"), QKV),
    "gate_up_proj": GATE_UP,
    "in_proj_qkvz": ("q", "k", "v", "z"),
    "kv_b_proj": ("k", "v"),
}
"""The projections in the weight of a layer with this name, in transformers' models."""
OF_HEADS = {layer for layer, projections in FUSED.items() if projections == QKV} | {
    "q_proj",
    "k_proj",
    "v_proj",
}
"""Layers whose rows are those of one head after another, head_dim each."""
CONTIGUOUS = {
    *(("qkv_proj", model_type) for model_type in ("phi3", "phi4_multimodal")),
    *(("c_attn", model_type) for model_type in ("gpt2", "imagegpt", "openai-gpt")),
    *(("Wqkv", model_type) for model_type in ("mpt", "dbrx")),
}
"""Layers, with the model_type of their config, that store all of q, then k, then v;
`_is_contiguous` has the others."""
INTERLEAVED = {
    *(
        ("query_key_value", model_type)
        for model_type in ("gpt_neox", "gpt_neox_japanese", "bloom", "persimmon")
    ),
    *(("query_key_value", "falcon"), ("c_attn", "gpt_bigcode"), ("qkv_proj", "codegen")),
}
"""Layers in which q, k and v alternate by head, or by group of heads."""


def layer_of(name: str) -> str:
    """The last name of the module that has a parameter."""
    return name.removesuffix(".weight").rpartition(".")[2]


def fused_projections(name: str) -> tuple[str, ...]:
    """The projections in a fused weight, by the name of its parameter; none for another one."""
    return FUSED.get(layer_of(name), ())


def blocks_of(name: str, split: Split) -> Sequence[str | int]:
    """The blocks of the first glob of `split` that matches a parameter's name; none without one."""
    return next((blocks for glob, blocks in split.items() if matches(name, glob)), ())


def matches(name: str, glob: str) -> bool:
    """Whether a glob of `split` matches a parameter's name."""
    return fnmatchcase(name, glob) or fnmatchcase(name.removesuffix(".weight"), glob)


def split_layout(
    name: str, shape: Sequence[int], layout: WeightLayout, blocks: Sequence[str | int], config: Any
) -> WeightLayout:
    """The layout of a weight that is divided into blocks. config: the model's, or None.

    Raises ValueError, in one sentence, if the weight cannot be divided so.
    """
    # Experts' weights and torch's attention are several matrices without being asked (see
    # `layout`).
    place, is_transposed = f"split: {name}", layout.transposed
    if len(shape) != 2 or layout not in (LINEAR, WeightLayout(transposed=True)):
        raise ValueError(
            f"{place}: its projections are separate matrices already, so there is nothing to "
            "split; remove this name"
        )
    num_rows = shape[1] if is_transposed else shape[0]
    row = "column" if is_transposed else "row"
    # Heads are equal blocks, whatever the order of the projections: each row belongs to one head.
    if [*blocks] == ["heads"]:
        size = _head_dim(name, place, config)
        if num_rows % size:
            raise ValueError(
                f"{place}: has {num_rows} {row}s, not a multiple of head_dim {size}; write the "
                "sizes of the blocks"
            )
        num_heads = num_rows // size
        heads = tuple(str(number) for number in range(num_heads))
        return WeightLayout(is_transposed, heads, sizes=(size,) * num_heads)
    # Projections are blocks only where all rows of one lie together: the architecture decides.
    if layer_of(name) in FUSED and not _is_contiguous(name, config):
        projections, model_type = (
            ", ".join(fused_projections(name)),
            getattr(config, "model_type", "this model"),
        )
        remedy = "write [heads] to make a block of each head, or remove this name"
        remedy = remedy if layer_of(name) in OF_HEADS else "remove this name"
        if (layer_of(name), model_type) in INTERLEAVED or layer_of(name) not in OF_HEADS:
            raise ValueError(
                f"{place}: in {model_type} the {row}s of {projections} are interleaved, so they "
                f"are no blocks; {remedy}"
            )
        if not all(isinstance(block, int) for block in blocks):
            raise ValueError(
                f"{place}: the order of {projections} in {model_type} is not known; write {row} "
                f"counts if each projection's {row}s are adjacent, or [heads]"
            )
    # Row counts need no knowledge of the architecture, so that they work for any weight; names are
    # translated by the model's config.
    if all(isinstance(block, int) for block in blocks):
        named = [(str(number), int(block)) for number, block in enumerate(blocks)]
    else:
        named = [
            *zip(
                map(str, blocks),
                _projection_sizes(name, place, num_rows, blocks, config),
                strict=True,
            )
        ]
    text = " + ".join(f"{size}" if block.isdigit() else f"{block} {size}" for block, size in named)
    if sum(size for _, size in named) != num_rows:
        total = sum(size for _, size in named)
        raise ValueError(
            f"{place}: has {num_rows} {row}s, but {text} = {total}; write {row} counts with the "
            f"sum {num_rows}"
        )
    # Blocks of columns are no intervals of the parameter: they stay one weight, which
    # `WeightLayout.split` can view as equal parts only.
    if is_transposed and len({size for _, size in named}) > 1:
        raise ValueError(
            f"{place}: stores its projections in columns, and blocks of columns need equal "
            f"sizes, not {text}; remove this name"
        )
    names, sizes = zip(*named, strict=True)
    return WeightLayout(is_transposed, names, sizes=sizes)


def _is_contiguous(name: str, config: Any) -> bool:
    """Whether a fused weight stores its projections one after another."""
    layer, model_type = layer_of(name), getattr(config, "model_type", None)
    # Only with one head of keys and values, and in the older architecture, does Falcon append k and
    # v to all of q (test_falcon_is_contiguous_only_with_one_key_and_value).
    if model_type == "falcon":
        return config.multi_query and not config.new_decoder_architecture
    if model_type == "gpt_bigcode":
        return config.multi_query
    return layer == "gate_up_proj" or (layer, model_type) in CONTIGUOUS


def _head_dim(name: str, place: str, config: Any) -> int:
    if layer_of(name) not in OF_HEADS:
        raise ValueError(
            f"{place}: its rows do not belong to attention heads; write [heads] only for "
            f"{', '.join(sorted(OF_HEADS))}, or row counts"
        )
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    num_heads, width = (
        getattr(text_config, key, None) for key in ("num_attention_heads", "hidden_size")
    )
    # head_dim first: in some architectures heads times head_dim is not the hidden size.
    if size := getattr(text_config, "head_dim", None) or (
        num_heads and width and width // num_heads
    ):
        return size
    raise ValueError(
        f"{place}: the model's config does not state the number of attention heads "
        "(num_attention_heads); write row counts"
    )


def _projection_sizes(
    name: str, place: str, num_rows: int, blocks: Sequence[str | int], config: Any
) -> Sequence[int]:
    """The rows of each projection, by the config."""
    projections = fused_projections(name)
    if not projections:
        raise ValueError(
            f"{place}: the projections in {layer_of(name)} are not known; write row counts"
        )
    if tuple(blocks) != projections:
        names = ", ".join(map(str, blocks))
        raise ValueError(
            f"{place}: found [{names}], but it stores [{', '.join(projections)}]; write these"
        )
    if projections == GATE_UP:
        return [num_rows // 2] * 2
    size, text_config = _head_dim(name, place, config), config.get_text_config()
    num_heads = text_config.num_attention_heads
    attention = getattr(text_config, "attn_config", None)  # MPT's and DBRX's
    # Grouped-query attention: keys and values have fewer heads than queries.
    num_kv_heads = getattr(attention, "kv_n_heads", None) or getattr(
        text_config, "num_key_value_heads", None
    )
    num_kv_heads = 1 if getattr(text_config, "multi_query", False) else num_kv_heads or num_heads
    return [num_heads * size, num_kv_heads * size, num_kv_heads * size]
