"""The tokenizer trained on the examples, and the end of texts with tokenizers that add one of their own."""

import pytest
from datasets import Dataset
from soren_align.core.errors import UserError
from soren_align.data import encode, load_split, trained_tokenizer
from soren_align.data.tokenizer import train_tokenizer
from tests.support.conversations import animal_text, split
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEXTS = [animal_text(i) for i in range(40)]


def test_every_text_is_read_back_from_exactly_as_many_tokens():
    tokenizer = train_tokenizer(iter([[text] for text in TEXTS]), 300)
    assert len(tokenizer) == 300
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    for text in (*TEXTS, "ünknown\t🦓\r\n", "<|im_end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(TEXTS[0])["input_ids"]) < len(TEXTS[0]) / 2
    with pytest.raises(UserError, match=r"vocabulary of only (\d+) tokens, not 4000; write \1 or less"):
        train_tokenizer(iter([[text] for text in TEXTS]), 4000)


def test_equal_examples_have_equal_tokenizers_wherever_they_are_trained(write, tmp_path):
    dataset = load_split(split(write("rows.jsonl", [{"text": text} for text in TEXTS])), "sft").dataset
    here, there = (trained_tokenizer(dataset, 300, tmp_path / name) for name in ("here", "there"))
    assert here.name == there.name
    assert (here / "tokenizer.json").read_bytes() == (there / "tokenizer.json").read_bytes()
    assert trained_tokenizer(dataset, 310, tmp_path / "here").name != here.name
    assert trained_tokenizer(dataset.select(range(30)), 300, tmp_path / "here").name != here.name
    inode = (here / "tokenizer.json").stat().st_ino
    assert trained_tokenizer(dataset, 300, tmp_path / "here") == here
    assert (here / "tokenizer.json").stat().st_ino == inode  # read, not written again
    (here / "tokenizer.json").write_text("damaged")
    assert trained_tokenizer(dataset, 300, tmp_path / "here") == here
    assert (here / "tokenizer.json").read_bytes() == (there / "tokenizer.json").read_bytes()
    assert not [entry for entry in here.parent.iterdir() if entry.name.startswith("part-")]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    dataset = Dataset.from_dict({"text": TEXTS})
    with pytest.raises(UserError, match="SOREN_ALIGN_CACHE"):
        trained_tokenizer(dataset, 300, tmp_path / "file")


@pytest.fixture
def t5():
    """A tokenizer of pieces of words that adds </s>, as T5's does; and the same without that."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -1.0), ("▁b", -1.0), ("▁", -2.0), ("a", -3.0)]
    tokenizers = []
    for adds_end in (True, False):
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        if adds_end:
            tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
        made = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
        )
        tokenizers.append(made)
    return tokenizers


TEXTS_OF = pytest.mark.parametrize(("task", "columns"), [
    ("sft", {"text": ["a b", "b a a</s>"]}), ("sft", {"prompt": ["a b", "b"], "completion": [" a", " b b</s>"]}),
    ("dpo", {"prompt": ["a b"], "chosen": [" a"], "rejected": [" b</s>"]}),
])  # fmt: skip


@TEXTS_OF
def test_a_text_has_one_end_token_with_a_tokenizer_that_adds_its_own(t5, task, columns):
    adding, plain = (list(encode(columns, task, tokenizer, False)) for tokenizer in t5)
    assert adding == plain
    assert all(side.ids.count(1) == 1 and side.ids[-1] == 1 for example in adding for side in example.sides)


@TEXTS_OF
def test_a_rendered_text_has_one_start_token_with_a_tokenizer_that_adds_its_own(t5, task, columns):
    _, tokenizer = t5
    tokenizer.bos_token = "<pad>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<pad> $A", special_tokens=[("<pad>", 0)]
    )
    first = next(iter(columns))
    rendered = {**columns, first: [f"<pad>{text}" for text in columns[first]]}
    examples, expected = (list(encode(batch, task, tokenizer, False)) for batch in (rendered, columns))
    assert examples == expected
    assert {side.ids.count(0) for example in examples for side in example.sides} == {1}


def test_a_start_token_that_is_also_the_end_token_is_no_end(t5):
    _, tokenizer = t5
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("</s> $A", special_tokens=[("</s>", 1)])
    (example,) = encode({"text": ["a b"]}, "sft", tokenizer, False)
    assert example.sides[0].ids == [1, 3, 4, 1]
