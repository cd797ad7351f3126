"""A tiny random Llama that reads any text, and variants of it that stand in for trained models."""

import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from soren_align.core import shipped
from soren_align.recipe.schema import Lora, Model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from tests.support import benchmark_questions as questions

BASE = shipped.ROOT / "recipes" / "quickstart" / "base"
SPECIAL = ["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAKERS = (questions.arc, questions.hellaswag, questions.mmlu, questions.winogrande, questions.gsm8k, questions.piqa)


def make_model(folder, seed):
    """Write a random model of the quickstart's size and with its tokenizer, and return the folder."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BASE)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE).save_pretrained(folder)
    return folder


def start_of(folder: Path, lora: Lora | None = None) -> tuple[Model, str, PreTrainedTokenizerBase]:
    """Return the model section of a recipe that trains from a folder, the folder, and its tokenizer."""
    return Model(name_or_path=str(folder), lora=lora), str(folder), AutoTokenizer.from_pretrained(folder)


def tiny_llama(vocab_size: int = 11, **settings) -> LlamaForCausalLM:
    """A random Llama of two blocks, always the same."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes, **settings))


def make_reader(folder: Path, seed: int = 0, chat_template: bool = False) -> Path:
    """Write the model of this seed with its tokenizer, as save_pretrained does, and return the folder.

    117 thousand weights, float32, 8192 positions. The tokenizer is the same for every seed: byte-level BPE of 1024
    tokens, so that no text is unknown and 25 shots are about a thousand tokens; no BOS. chat_template: ChatML.
    """
    tokenizer = _tokenizer()
    tokenizer.chat_template = CHATML if chat_template else None
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.15,  # at the usual 0.02 every token is as likely as any other, and no score moves
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def nudge(model: Path, to: Path, scale: float = 0.1, seed: int = 0) -> Path:
    """Copy a model's folder with every weight moved by noise of `scale` times its tensor's own size; returns `to`."""
    shutil.copytree(model, to)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(to / "model.safetensors")
    for name, weight in sorted(weights.items()):
        size = weight.square().mean().sqrt()
        weights[name] = weight + scale * size * torch.randn(weight.shape, generator=generator)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def _tokenizer() -> PreTrainedTokenizerFast:
    rng = random.Random(0)
    rows = [make(rng) for make in MAKERS for _ in range(50)]
    text = [value for row in rows for value in row.values() if isinstance(value, str)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|endoftext|>")
