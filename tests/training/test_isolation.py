"""The probe of packed examples, on small models of architectures that keep examples separate and of others."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from soren_align.core.errors import UserError
from soren_align.training.packing import IsolationCheck, cross_talk, probe_examples
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

pytestmark = pytest.mark.model
COLLATOR = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
SIZE = dict(vocab_size=99, hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
LLAMA = SIZE | dict(intermediate_size=48, num_key_value_heads=2)
MIXTRAL = LLAMA | dict(num_local_experts=4)
MODELS = {
    "Llama": LLAMA,
    "Mixtral": MIXTRAL,
    "GPT2": dict(vocab_size=99, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
    "OPT": SIZE | dict(ffn_dim=48, word_embed_proj_dim=32),
    "Falcon": SIZE,
    "Bloom": SIZE,
    "Mamba": dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=8),
    "GptOss": MIXTRAL | dict(head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
}


def small(name, **options):
    """A random model in training mode, with dropout where the architecture has some."""
    config = getattr(transformers, f"{name}Config")(**{"pad_token_id": 0, **MODELS[name]})
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config, **options).train()


def sequences():
    generator = torch.Generator().manual_seed(0)
    for lengths in ([20, 5], [9, 30, 4]):
        tokens = torch.randint(3, 99, (sum(lengths),), generator=generator).tolist()
        yield {"input_ids": tokens, "labels": tokens, "seq_lengths": lengths}


def check(model):
    place = IsolationCheck([*sequences()], COLLATOR, "trainer.packing")
    place.on_train_begin(SimpleNamespace(device="cpu"), None, None, model=model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Llama", "Mixtral", "GPT2"])
def test_examples_that_are_separate_are_packed(name, attention):
    model = small(name, attn_implementation=attention)
    change_and_noise = cross_talk(model, COLLATOR, probe_examples(sequences()), "cpu")
    # Experts multiply other numbers of rows, for which a kernel may round otherwise, by a few ulp.
    assert max(change_and_noise) <= (1e-6 if name == "Mixtral" else 0)
    check(model)


@pytest.mark.parametrize("name", ["OPT", "Bloom", "Mamba", "GptOss"])
def test_examples_that_attend_to_each_other_are_refused(name):
    message = r"trainer.packing: .* mixes the examples of one sequence: .*Write .*packing: false"
    with pytest.raises(UserError, match=message):
        check(small(name))


def test_the_probe_leaves_random_numbers_mode_and_gradients_as_they_are():
    model = small("OPT", dtype=torch.float32).eval()  # with dropout of 0.1 in training mode
    before = torch.get_rng_state()
    change, noise = cross_talk(model, COLLATOR, probe_examples(sequences()), "cpu")
    assert (change > 0, noise) == (True, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
