"""Small tokenizers in the real formats of Qwen2.5 and of Mistral-7B-v0.1, trained on a few made-up sentences.

Same kind of model, normalizer, pre-tokenizer, decoder and special tokens as the published tokenizer.json files; only
the vocabulary is small. Neither has a chat template unless given one.
"""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, T5Tokenizer

TEXTS = [f"The otter in house {i} eats fish and grass.\nWhat does it eat, part {i % 7}?" for i in range(60)]
TEXTS += ["First this.\n\nThen that.\n\n",
          "<|user|>\n<|assistant|>\n<|system|>\nassistant user system You are a helpful assistant."] * 4  # fmt: skip
# Qwen2.5's own: numbers digit by digit, line ends together with the spaces before them.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen(chat_template=None):
    """Byte-level BPE; <|endoftext|> is eos and pad, as in the base models, beside <|im_start|> and <|im_end|>."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    bpe.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    made.chat_template = chat_template
    return made


def mistral(chat_template=None):
    """BPE over a sentencepiece-like text with bytes to fall back on; <s> and </s>, and no token to pad with."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [word.replace(" ", "▁") for text in TEXTS for word in text.replace("\n", " ").split(" ")]
    bpe.train_from_iterator(words, trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False))
    described = json.loads(bpe.to_str())
    described["added_tokens"] = [t for t in described["added_tokens"] if not t["content"].startswith("<0x")]
    bpe = Tokenizer.from_str(json.dumps(described))
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special[:3]])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = chat_template
    return made


def t5(vocab_size=200):
    """T5's class and layout: Unigram, <pad>, </s> and <unk> first, </s> after every text, 100 sentinels at the end."""
    pieces = Tokenizer(models.Unigram())
    pieces.normalizer = normalizers.NFKC()
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    pieces.train_from_iterator(TEXTS, trainer)
    vocabulary = json.loads(pieces.to_str())["model"]["vocab"]
    sentinels = [(f"<extra_id_{i}>", 0.0) for i in reversed(range(100))]
    return T5Tokenizer(vocab=[*((piece, score) for piece, score in vocabulary), *sentinels])
