import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before any library reads it

import datasets
import pytest
from tests.support.conversations import CHATML, animal_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(autouse=True)
def cache(tmp_path, environment, monkeypatch):
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
