import json
import os
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"  # before any library reads it

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A datasets cache of the test's own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def make_tokenizer():
    """A byte-level BPE tokenizer with ChatML whose markers hold the assistant's words and stop token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([animal_text(i) for i in range(50)], trainer)

    def make(chat_template=CHATML, eos="<|im_end|>"):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(bpe.to_str()), eos_token=eos, pad_token="<|endoftext|>"
        )
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture
def write(tmp_path):
    """write(name, rows) -> the path of a JSONL file; a row that is text is written as it is."""

    def write_rows(name, rows):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return str(path)

    return write_rows


def split(path, split="train", limit=None, revision=None, bad_examples="refuse"):
    return SimpleNamespace(path=str(path), split=split, limit=limit, revision=revision, bad_examples=bad_examples)


def animal_text(i):
    return f"Animal number {i} of the zoo eats {'grass and hay ' * (i % 7)}and sleeps in house {i % 5}."


def chat(i=0, turns=1, system=False):
    """A conversation whose length depends on i."""
    told = [{"role": "system", "content": "You keep a zoo."}] if system else []
    for turn in range(turns):
        told += [
            {"role": "user", "content": f"{'Please tell me: ' * (i % 4)}what about animal {i}, part {turn}?"},
            {"role": "assistant", "content": animal_text(i + turn) + " ü🦓"},
        ]
    return told


def chat_row(i=0, turns=1, system=False):
    """A row in ultrachat_200k's columns."""
    messages = chat(i, turns, system)
    return {"prompt": messages[0]["content"], "prompt_id": str(i), "messages": messages}


def pair_row(i=0, turns=1, system=False):
    """A row in ultrafeedback_binarized's columns."""
    chosen = chat(i, turns, system)
    rejected = [*chosen[:-1], {"role": "assistant", "content": "I do not know. " * (1 + i % 5)}]
    prompt = {"prompt": chosen[0]["content"], "prompt_id": str(i), "messages": chosen}
    return {**prompt, "chosen": chosen, "rejected": rejected, "score_chosen": 8.0, "score_rejected": 2.0}
