"""The tokenizer with the recipe's chat template, stop token and vocabulary."""

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..core import shipped
from ..core.errors import UserError, did_you_mean
from ..core.files import read_text, resolve_path
from ..tasks import OPTIONS, TASKS, TaskName
from .arrow import examples_of, has_turns
from .cache import cache_key, folder_errors, is_intact, prune, written_whole
from .encode import encode
from .masks import last_visible
from .rendering import SET_TEMPLATE, TEMPLATE_REMEDY, template_errors
from .turns import CUT_ANSWER, for_template, template_options, without, without_nulls

END, PAD = "<|endoftext|>", "<|pad|>"
"""Two tokens of a trained tokenizer: LLaMA's embedding of the padding token is not trained."""


def set_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, eos_token: str | None
) -> None:
    """Set the recipe's template (a shipped one's name, or a file) and stop token; null leaves the
    tokenizer's own.

    Raises UserError if the file cannot be read, or the stop token is no single token of the
    vocabulary.
    """
    if chat_template is not None:
        file = shipped.templates().get(chat_template) or resolve_path(chat_template)
        try:
            tokenizer.chat_template = read_text(file)
        except UserError as error:
            raise UserError(
                f"model.chat_template: {chat_template} cannot be read: {error}"
            ) from None
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            name = tokenizer.name_or_path or "the tokenizer"
            added: Any = tokenizer.added_tokens_encoder
            hint = did_you_mean(
                eos_token, added, f"remove this key to stop at {tokenizer.eos_token!r}"
            )
            raise UserError(f"model.eos_token: {eos_token!r} is not a single token of {name}{hint}")
        tokenizer.eos_token = eos_token


def check_template(
    tokenizer: PreTrainedTokenizerBase,
    task: TaskName,
    assistant_only_loss: bool,
    dataset: Dataset,
    completion_only_loss: bool | None = None,
    remedy: str = TEMPLATE_REMEDY,
) -> list[str]:
    """Check the first example; returns notices, such as of a stop token that is not the template's.

    Raises UserError if the chat template cannot render the example, if the tokens to train are
    neither marked by it nor can be derived, or leave out the stop token; and for plain texts, if a
    setting needs conversations.
    assistant_only_loss: SFT's; DPO trains on the last turn whatever the template marks.
    remedy: for a template that leaves out answers, or their stop token.
    """
    name = tokenizer.name_or_path or "the tokenizer"
    columns, is_sft = dataset.column_names, not TASKS[task].answers
    only_assistant = assistant_only_loss and is_sft
    if completion_only_loss and is_sft and "completion" not in columns:
        raise UserError(
            "trainer.completion_only_loss needs examples with prompt and completion, but these"
            f" examples have {', '.join(columns)}; remove this key (for conversations,"
            " trainer.assistant_only_loss trains only on the answers)"
        )
    if not has_turns(dataset):
        if only_assistant:
            raise UserError(
                "trainer.assistant_only_loss: true needs conversations, but these examples are"
                f" plain texts (columns {', '.join(columns)}). Write false; TRL then still trains"
                " only on the completions, if the examples have prompts and completions. To make"
                " conversations of such examples, write data.train.columns: {instruction: prompt,"
                " output: completion}"
            )
        if not tokenizer.eos_token:
            raise UserError(
                f"{name}: has no eos_token, which ends plain texts; write model.eos_token"
            )
        return []
    if not tokenizer.chat_template:
        raise UserError(f"{name}: has no chat template; {SET_TEMPLATE}")
    try:
        tokenizer.get_chat_template()
    except ValueError:  # several named templates, none of them "default"
        names = ", ".join(tokenizer.chat_template)
        raise UserError(
            f"{name}: has the chat templates {names}, but none named default; {SET_TEMPLATE}"
        ) from None
    # The first example stands for all: the template is one program. Later ones are rendered when
    # they are tokenized, and are refused there.
    example: Any = dataset[0]
    chats = [example[column] for column in TASKS[task].columns if column in example]
    if example.get("completion"):
        chats = [example["prompt"] + example["completion"]]
    notices: list[str] = []
    for chat in chats:
        # Without weights: the template is checked here, and not what a user leaves out of the loss.
        turns = [without(turn, "weight") for turn in without_nulls(chat)]
        batch = {"messages": [turns]} | {column: [example.get(column)] for column in OPTIONS}
        with template_errors(f"{name}: the chat template fails on the first example"):
            apply: Any = tokenizer.apply_chat_template
            text = apply(for_template(turns), tokenize=False, **template_options(example))
            encoded = next(encode(batch, "sft", tokenizer, only_assistant))
        ids, marked = encoded.sides[0]
        # A template that prints no answers would train on prompts alone, with a loss that falls.
        if CUT_ANSWER in encoded.left_out:
            raise UserError(
                f"{name}: {CUT_ANSWER}: it renders the first example as {text[:120]!r}, without the"
                f" answer {turns[-1]['content'][:60]!r}; {remedy}"
            )
        # A newline may follow the stop token (the shipped templates write one): the last visible
        # token counts.
        last = last_visible(ids, tokenizer)
        end, eos = str(tokenizer.convert_ids_to_tokens(ids[last])), tokenizer.eos_token
        added: Any = tokenizer.added_tokens_encoder
        notices = []
        if ids[last] != tokenizer.eos_token_id and end not in added:
            finding = "the chat template ends answers without a stop token, so the model will not"
            # Of other tokens than the answers' there may be one that ends them: the next header.
            if only_assistant:
                raise UserError(f"{name}: {finding} learn to stop; {remedy}")
            notices = [f"{finding} learn to stop at {eos}; {remedy}"]
        elif only_assistant and not marked[last]:
            raise UserError(
                f"{name}: the chat template leaves {end} out of {{% generation %}}, so that the"
                f" model would never learn to stop; put {end} before {{% endgeneration %}}"
            )
        elif ids[last] != tokenizer.eos_token_id:
            notices = [
                f"answers end with {end}, but the model stops at {eos}: add model.eos_token:"
                f" '{end}'"
            ]
    return notices


def within_vocabulary(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> PreTrainedTokenizerBase:
    """Return the tokenizer with ids below vocab_size only: itself, or one without its last added
    tokens, such as T5's 100 sentinels, which no plain text needs.

    A text that contains the name of such a token is then made of other tokens. Raises UserError if
    a token from vocab_size on is a piece of texts.
    """
    if len(tokenizer) <= vocab_size:
        return tokenizer
    beyond = {token for token, index in tokenizer.get_vocab().items() if index >= vocab_size}
    whole: Any = tokenizer  # whose types have no such names
    backend = getattr(whole, "backend_tokenizer", None)
    if backend is None or beyond - set(whole.get_added_vocab()):
        raise UserError(
            f"model.tokenizer: this tokenizer has {len(tokenizer):,} tokens, but vocab_size in"
            f" config.json is only {vocab_size:,}; write a larger vocab_size into config.json"
        )
    # tokenizers has no function that removes tokens: they are taken out of its description.
    described = json.loads(backend.to_str())
    described["added_tokens"] = [
        token for token in described["added_tokens"] if token["id"] < vocab_size
    ]
    vocabulary = described["model"]["vocab"]  # {token: id}; or Unigram's, a list of (token, score)
    described["model"]["vocab"] = (
        {token: index for token, index in vocabulary.items() if token not in beyond}
        if isinstance(vocabulary, dict)
        else [entry for entry in vocabulary if entry[0] not in beyond]
    )
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: token for name in names if (token := getattr(tokenizer, name)) is not None}
    # Not the tokenizer's own class: T5's adds its sentinels again whenever it is loaded.
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)), **special
    )


def train_tokenizer(texts: Iterator[list[str]], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly `vocab_size` tokens, trained on the texts of examples. Deterministic.

    Raises UserError if the texts have too few words for so many.
    """
    # Byte-level, with all bytes in the first alphabet: every text has tokens, also in languages
    # that the training texts lack.
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (size := tokenizer.get_vocab_size()) < vocab_size:
        raise UserError(
            "model.tokenizer.vocab_size: the training texts are enough for a vocabulary of only"
            f" {size} tokens, not {vocab_size}; write {size} or less"
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def trained_tokenizer(dataset: Dataset, vocab_size: int, cache: Path) -> Path:
    """The folder in the user's cache folder of a tokenizer trained on a dataset from `load_split`:
    byte-level BPE, which has a token for every byte and no unknown text.

    It depends on texts and size alone: plan, run, resume, all ranks and all runs of a study have
    the same tokens.

    Raises UserError if it cannot be written, or if the texts have too few words.
    """
    root = cache / "tokenizers"
    folder = root / cache_key(
        dataset._fingerprint, len(dataset), vocab_size, metadata.version("tokenizers")
    )
    with folder_errors(root, "the tokenizer", "set SOREN_ALIGN_CACHE to another folder"):
        if not is_intact(folder):
            with written_whole(folder) as part:
                train_tokenizer(texts_of(dataset), vocab_size).save_pretrained(part)
            prune(root)
    return folder


def texts_of(dataset: Dataset) -> Iterator[list[str]]:
    """The texts of each example from `load_split`, each once: all turns with their reasoning, or
    plain texts.

    Of a preference pair those of both sides. Tools are left out.
    """
    for example in examples_of(dataset):
        values = [
            value
            for column, value in example.items()
            if column not in OPTIONS and value is not None
        ]
        turns = [turn for value in values if isinstance(value, list) for turn in value]
        texts = [value for value in values if isinstance(value, str)]
        texts += (
            text
            for turn in turns
            for key, text in turn.items()
            if key != "role" and isinstance(text, str)
        )
        yield list(dict.fromkeys(texts))
