"""A small C4 in the layout of allenai/c4, and small models with the tokenizers of T5 and Qwen3: for the recipes and
studies of llama-c4, qwen3-0.6b and paper-figures."""

import gzip
import json
import random

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from .published_tokenizers import TEXTS, qwen, t5

NUM_TRAINED = 60  # documents of each of two files
NUM_HELD_OUT = 24
RECIPE = "llama-c4/60m-soren"
LLAMA = {"hidden_size": 32, "intermediate_size": 86, "num_attention_heads": 4, "num_hidden_layers": 2,
         "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip


def c4(folder):
    """Write en/c4-{train,validation}.*.json.gz, a model's and a tokenizer's folder, and return --set overrides.

    The overrides are for six steps of 8 documents of up to 24 tokens on CPUs. An existing folder is left as it is.
    """
    files, model, tokenizer = folder / "en", folder / "llama", folder / "t5"
    if not folder.exists():
        for directory in (files, model, tokenizer):
            directory.mkdir(parents=True)
        rng = random.Random(0)
        for number in range(2):
            _write(files / f"c4-train.0000{number}-of-00002.json.gz", [_document(rng) for _ in range(NUM_TRAINED)])
        _write(files / "c4-validation.00000-of-00001.json.gz", [_document(rng) for _ in range(NUM_HELD_OUT)])
        t5().save_pretrained(tokenizer)
        write_llama(model)
    return (
        f"model.name_or_path={model}",
        f"model.tokenizer={tokenizer}",
        "run.save_dtype=float32",
        "model.dtype=float32",  # CPUs sum bfloat16 in other orders on two ranks
        "optimizer.compensation=null",
        "optimizer.precision=auto",
        f"data.train.path={files}/c4-train.*.json.gz",
        f"data.eval.path={files}/c4-validation.*.json.gz",
        *("data.train.name=null", "data.eval.name=null", "data.eval.limit=20", "data.eval_tokens=200"),
        "data.streaming.shuffle_buffer=20",
        *("trainer.max_length=24", "trainer.max_steps=6", "trainer.save_steps=2", "trainer.eval_steps=3"),
        *("trainer.logging_steps=1", "trainer.per_device_train_batch_size=2", "trainer.per_device_eval_batch_size=2"),
        *("run.global_batch_size=8", "trainer.use_cpu=true", "trainer.bf16=false", "run.num_threads=1"),
    )


def replica(name, folder):
    """--set overrides for a small replica of a recipe, whose model and data are written to `folder` once."""
    family, _, recipe = name.partition("/")
    overrides = list(c4(folder / "data"))
    if family == "qwen3-0.6b":
        model = folder / "qwen3"
        if not model.exists():
            write_qwen3(model)
        overrides = [override for override in overrides if not override.startswith("model.name_or_path=")]
        overrides = [override for override in overrides if not override.startswith("model.tokenizer=")]
        overrides += [f"model.name_or_path={model}"]
        overrides += [f"model.tokenizer={model}"] * recipe.startswith("scratch")
    if family == "paper-figures":  # their patterns name layers 0, 7 and 11
        model = folder / "llama-12"
        write_llama(model, num_hidden_layers=12)
        overrides += [f"model.name_or_path={model}", "run.log_spectra.steps=[1, 3, 6]"]
    unused = ("optimizer.compensation", "optimizer.precision") if recipe.endswith(("adamw", "muon")) else ()
    return [override for override in overrides if override.partition("=")[0] not in unused]


def write_llama(folder, **settings):
    """The config of a LLaMA with so many embeddings as 32,000 for T5's 32,100 tokens."""
    LlamaConfig(**LLAMA | settings, vocab_size=len(t5()) - 100).save_pretrained(folder)


def write_qwen3(folder):
    """A Qwen3 with random weights, a tied head and its tokenizer."""
    tokenizer = qwen()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _document(rng):
    """The three fields of C4; one document in twenty is blank."""
    texts = rng.sample(TEXTS, rng.randrange(1, 6))
    text = "" if rng.random() < 0.05 else "\n".join(texts)
    return {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": f"https://example.org/{rng.random()}"}


def _write(file, documents):
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(document) + "\n" for document in documents)
