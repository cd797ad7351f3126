"""The memory and FLOPs of a pass on fake tensors are those on real tensors."""

import pytest
import torch
from soren_align.planning.flops import Meter, Passes, build_model, kinds_of_blocks
from soren_align.training.build import trl_forward
from tests.support.architectures import config_of
from transformers import MistralConfig, Qwen2Config

pytestmark = pytest.mark.model

SHAPE = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "qwen2": Qwen2Config(**SHAPE, num_hidden_layers=6, vocab_size=512, tie_word_embeddings=True),
    "mistral": MistralConfig(**SHAPE, num_hidden_layers=6, vocab_size=512, tie_word_embeddings=False),
}
# Of DeepSeek-V3's blocks the first one has no experts: two kinds.
CONFIGS |= {name: config_of(name, num_hidden_layers=5) for name in ("mixtral", "gpt_oss", "deepseek_v3", "mamba")}


def on_real_tensors(config, batch_size, length, checkpointing, arithmetic):
    """Peak bytes of the second of two batches, whose gradients are summed, beside weights and gradients."""
    model = build_model(config, None, torch.float32)
    call = trl_forward(model, checkpointing)
    tokens = torch.randint(0, config.vocab_size, (batch_size, length))

    def one_pass():
        with torch.autocast("cpu", dtype=arithmetic or torch.bfloat16, enabled=arithmetic is not None):
            loss = call(tokens).loss
        loss.backward()

    one_pass()
    with Meter() as meter:
        one_pass()
    return meter.peak


def passes(config, checkpointing, arithmetic=None):
    def build(blocks):
        model = build_model(config, blocks, torch.float32)
        return model, trl_forward(model, checkpointing)

    with torch.device("meta"):
        kinds = kinds_of_blocks(build_model(config, None, torch.float32))
    return Passes(build, kinds, arithmetic)


@pytest.mark.rest
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("arithmetic", [None, torch.bfloat16], ids=str)
def test_activations_are_those_of_a_real_pass(arithmetic, checkpointing):
    real = on_real_tensors(CONFIGS["qwen2"], 4, 128, checkpointing, arithmetic)
    assert passes(CONFIGS["qwen2"], checkpointing, arithmetic).num_bytes(4, 128) == pytest.approx(real, rel=0.05)


@pytest.mark.rest
@pytest.mark.parametrize(
    "kind", ["gpt_oss", *(pytest.param(k, marks=pytest.mark.slow) for k in ("mixtral", "deepseek_v3", "mamba"))]
)
def test_activations_of_experts_and_recurrences_are_those_of_a_real_pass(kind):
    """Their operations on fake tensors are others than on real ones."""
    real = on_real_tensors(CONFIGS[kind], 4, 24, False, None)
    assert passes(CONFIGS[kind], False).num_bytes(4, 24) == pytest.approx(real, rel=0.05)


def test_operations_are_six_per_weight_and_token_and_those_of_attention():
    blocks = 6 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176)
    attention = 6 * 2 * 64 * 64 * 64  # of one row: two products of 64 x 64 x 64 in each block, all heads together
    # Head: of 63 of 64 positions, with the logits computed once more backward.
    wanted = 6 * 128 * blocks + 8 * 126 * 64 * 512 + 3 * 2 * 2 * attention
    assert passes(CONFIGS["mistral"], False).num_flops(2, 64) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.rest
def test_a_model_of_two_blocks_whose_kinds_are_listed_is_measured_on_three():
    """Its config names two kinds of attention; a third block repeats the first."""
    config = Qwen2Config(**SHAPE, num_hidden_layers=2, vocab_size=512)
    assert len(config.layer_types) == 2
    assert passes(config, False).num_flops(1, 16) > 0
