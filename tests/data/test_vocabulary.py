"""A tokenizer without the added tokens that a model has no embeddings for."""

import pytest
from soren_align.core.errors import UserError
from soren_align.data.tokenizer import within_vocabulary
from tests.support.published_tokenizers import qwen, t5
from transformers import AutoTokenizer

TEXT = "The otter eats fish. <extra_id_0> What does it eat?"


@pytest.fixture(scope="module")
def tokenizers():
    whole = t5()
    return whole, within_vocabulary(whole, len(whole) - 100)


def test_sentinels_are_left_out_and_all_other_ids_remain(tokenizers):
    whole, trimmed = tokenizers
    assert len(trimmed) == len(whole) - 100 > max(trimmed(TEXT)["input_ids"])
    plain = TEXT.replace("<extra_id_0>", "")
    assert trimmed(plain)["input_ids"] == whole(plain)["input_ids"]
    assert whole(plain)["input_ids"][-1] == whole.eos_token_id
    assert (trimmed.eos_token_id, trimmed.pad_token_id, trimmed.bos_token) == (1, 0, None)
    assert max(whole(TEXT)["input_ids"]) >= len(trimmed)


def test_they_do_not_return_when_the_tokenizer_is_loaded_again(tokenizers, tmp_path):
    _, trimmed = tokenizers
    trimmed.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == trimmed.get_vocab()
    assert again(TEXT)["input_ids"] == trimmed(TEXT)["input_ids"]


def test_pieces_of_texts_cannot_be_left_out():
    message = r"model.tokenizer: this tokenizer has \d+ tokens, but vocab_size in config.json is only 300"
    with pytest.raises(UserError, match=message):
        within_vocabulary(qwen(), 300)
