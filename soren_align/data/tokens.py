"""The tokens that TRL makes of an example, which of them are trained, and its truncation.

TRL 1.16's preprocessing without a trainer: SFTTrainer's and DPOTrainer's `_prepare_dataset`, and the preference
collator. tests/data/test_preview.py compares every token with TRL's.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from .columns import Task
from .rendering import cpu_time_limit, template_errors

BATCH_SIZE = 64
"""Examples that are tokenized together."""


class Tokens(NamedTuple):
    """A conversation's token ids, and for each whether the loss includes it."""

    ids: list[int]
    trained: list[bool]

    def truncated(self, max_length: int | None) -> "Tokens":
        """The first max_length tokens (TRL's truncation_mode keep_start)."""
        return Tokens(self.ids[:max_length], self.trained[:max_length])


class EncodedExample(NamedTuple):
    """The tokens of an example before truncation."""

    sides: tuple[Tokens, ...]
    """One for SFT; for DPO chosen and rejected, each with the prompt before it."""
    num_prompt: int
    """Leading tokens that both sides share and that are not trained; 0 for SFT."""

    @property
    def length(self) -> int:
        """Tokens of the longest side."""
        return max(len(side.ids) for side in self.sides)

    def drop_reason(self, task: Task, max_length: int | None) -> str | None:
        """Why TRL leaves the example out; None if it does not."""
        if max_length is None:
            return None
        if task == "sft" and not any(self.sides[0].truncated(max_length).trained):
            return f"no token to train on within max_length {max_length}"
        if task == "dpo" and self.num_prompt >= max_length:
            return f"the prompt alone fills max_length {max_length}"
        return None


def encode(
    columns: dict[str, list[Any]],
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    assistant_only_loss: bool,
    completion_only_loss: bool = True,
) -> Iterator[EncodedExample]:
    """The examples of a batch {column: conversations, or texts}.

    Trained are, for DPO, the answers. For SFT all tokens; or those marked by the template; or, where there is one,
    those of the completion; or its marked ones.
    """
    if task == "dpo":
        if "prompt" in columns:
            return _encode_plain_pairs(columns["prompt"], columns["chosen"], columns["rejected"], tokenizer)
        return _encode_pairs(columns["chosen"], columns["rejected"], tokenizer)
    if "messages" in columns:
        return _encode_chats(columns["messages"], tokenizer, assistant_only_loss)
    if "text" in columns:
        return _encode_texts(columns["text"], tokenizer)
    prompts, completions = columns["prompt"], columns["completion"]
    if isinstance(prompts[0], list):
        return _encode_turns(prompts, completions, tokenizer, assistant_only_loss, completion_only_loss)
    return _encode_completions(prompts, completions, tokenizer, completion_only_loss)


def _templated(tokenizer: PreTrainedTokenizerBase, chats: list[Any], **options: Any) -> Any:
    """The tokens of conversations in the chat template. Raises UserError if it fails on one."""
    subject = "the chat template renders the first example, but fails on a later one"
    limit = cpu_time_limit(10 + 0.2 * len(chats), f"{subject}: it")
    with template_errors(subject), limit:
        return tokenizer.apply_chat_template(chats, return_dict=True, **options)


def _encode_chats(
    chats: list[Any], tokenizer: PreTrainedTokenizerBase, assistant_only: bool
) -> Iterator[EncodedExample]:
    encoded = _templated(tokenizer, chats, return_assistant_tokens_mask=assistant_only)
    for i, ids in enumerate(encoded["input_ids"]):
        trained = [bool(marked) for marked in encoded["assistant_masks"][i]] if assistant_only else [True] * len(ids)
        if not any(trained):  # TRL also raises, later and without the example
            raise UserError(
                f"the chat template marks no token as the assistant's in {chats[i][-1]['content'][:60]!r}; "
                "put {% generation %}...{% endgeneration %} around every assistant turn"
            )
        yield EncodedExample((Tokens(ids, trained),), 0)


def _encode_pairs(
    chosen: list[Any], rejected: list[Any], tokenizer: PreTrainedTokenizerBase
) -> Iterator[EncodedExample]:
    prompts = [chat[:-1] for chat in chosen]
    encoded = [
        _templated(tokenizer, prompts, add_generation_prompt=True),
        _templated(tokenizer, chosen),
        _templated(tokenizer, rejected),
    ]
    for prompt, *sides in zip(*(e["input_ids"] for e in encoded), strict=True):
        yield _after_prompt(prompt, sides)


def _encode_plain_pairs(
    prompts: list[str], chosen: list[str], rejected: list[str], tokenizer: PreTrainedTokenizerBase
) -> Iterator[EncodedExample]:
    for prompt, *answers in zip(prompts, chosen, rejected, strict=True):
        sides = [_ids(prompt + _with_eos(answer, tokenizer), tokenizer) for answer in answers]
        yield _after_prompt(_ids(prompt, tokenizer), sides)


def _encode_turns(
    prompts: list[Any],
    completions: list[Any],
    tokenizer: PreTrainedTokenizerBase,
    assistant_only: bool,
    completion_only: bool,
) -> Iterator[EncodedExample]:
    chats = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    prompt_tokens = _templated(tokenizer, prompts, add_generation_prompt=True)
    encoded = _encode_chats(chats, tokenizer, assistant_only)
    for prompt, example in zip(prompt_tokens["input_ids"], encoded, strict=True):
        (ids, trained), *_ = example.sides
        start = _num_shared(prompt, ids) if completion_only else 0
        yield EncodedExample((Tokens(ids, [mark and i >= start for i, mark in enumerate(trained)]),), 0)


def _encode_completions(
    prompts: list[str], completions: list[str], tokenizer: PreTrainedTokenizerBase, completion_only: bool
) -> Iterator[EncodedExample]:
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = _ids(prompt + _with_eos(completion, tokenizer), tokenizer)
        (tokens,), _ = _after_prompt(_ids(prompt, tokenizer), [ids])
        yield EncodedExample((tokens if completion_only else Tokens(ids, [True] * len(ids)),), 0)


def _encode_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[EncodedExample]:
    for text in texts:
        ids = _ids(_with_eos(text, tokenizer), tokenizer)
        yield EncodedExample((Tokens(ids, [True] * len(ids)),), 0)


def _with_eos(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    eos = str(tokenizer.eos_token)
    return text if text.endswith(eos) else text + eos


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids: Any = tokenizer(text)["input_ids"]
    return ids


def _after_prompt(prompt: list[int], sides: list[list[int]]) -> EncodedExample:
    # A template may render the prompt alone differently, and tokens may merge across its end: the completion starts
    # at the first difference.
    num_prompt = min(_num_shared(prompt, ids) for ids in sides)
    return EncodedExample(tuple(Tokens(ids, [i >= num_prompt for i in range(len(ids))]) for ids in sides), num_prompt)


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def ends_in_trained_stop(tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the last token, blank ones aside, is the tokenizer's eos and trained."""
    for token, trained in zip(reversed(tokens.ids), reversed(tokens.trained), strict=True):
        if token == tokenizer.eos_token_id:
            return trained
        if str(tokenizer.decode([token])).strip():
            return False
    return False


def text_spans(sides: Sequence[Tokens], num_prompt: int, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """(text, trained) spans of an example: a chat is split where `trained` changes, a pair has three spans."""
    if len(sides) == 1:
        (ids, trained), *_ = sides
        starts = [0, *(i for i in range(1, len(ids)) if trained[i] != trained[i - 1])]
        texts = _split(ids, starts[1:], tokenizer)
        return [(text, trained[start]) for text, start in zip(texts, starts, strict=True)]
    (prompt, chosen), (_, rejected) = (_split(side.ids, [num_prompt], tokenizer) for side in sides)
    return [(prompt, False), (chosen, True), (rejected, True)]


def _split(ids: list[int], positions: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text between positions; decoded with all earlier tokens, as alone many would lose their leading space."""
    texts = [str(tokenizer.decode(ids[:end])) for end in [*positions, len(ids)]]
    return [text[len(before) :] for before, text in zip(["", *texts], texts, strict=False)]
