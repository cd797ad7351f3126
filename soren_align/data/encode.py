"""Examples as tokens, as TRL makes them of the same examples.

TRL 1.16's preprocessing without a trainer: SFTTrainer's and DPOTrainer's `_prepare_dataset`, and
the preference collator. tests/data/test_preview.py compares every token with TRL's. TRL has neither
weights of turns nor the assistant's tokens of a template without {% generation %}:
tests/data/test_turn_masks.py.
"""

import re
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..core.errors import UserError
from ..tasks import OPTIONS, TaskName
from .masks import EncodedExample, Tokens, after_prompt, from_token_columns, num_shared
from .rendering import Rendering, inside, template_errors
from .turns import Turn, for_template, template_options, without_nulls

BATCH_SIZE = 64
"""Examples that are tokenized together."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as in transformers and TRL
_SUBJECT = "the chat template renders the first example, but fails on a later one"
_UNMARKED = (
    "the chat template marks no token of an answer as the assistant's; put {% generation %}...{%"
    " endgeneration %} around message['content'] of every assistant turn"
)
Columns = dict[str, list[Any]]


def encode(
    columns: Columns,
    task: TaskName,
    tokenizer: PreTrainedTokenizerBase,
    assistant_only_loss: bool,
    completion_only_loss: bool = True,
) -> Iterator[EncodedExample]:
    """The examples of a batch {column: conversations, or texts}, or of one that `token_columns`
    made.

    Trained are, for DPO, the answers. For SFT all tokens; or the assistant's; or, where there is
    one, those of the completion; or the assistant's of it. Turns of weight 0 are never trained.
    """
    if "left_out" in columns:
        yield from from_token_columns(columns, task)
        return
    if "text" in columns or isinstance(columns.get("prompt", [None])[0], str):
        yield from _encode_texts(columns, tokenizer, completion_only_loss)
        return
    # A template may ask whether a turn has a key. In a mixture of conversations with prompts and
    # completions a column is null for the others.
    chats = {
        name: [without_nulls(value or []) for value in values]
        for name, values in columns.items()
        if name not in OPTIONS
    }
    beside = [column for column in OPTIONS if any(columns.get(column, ()))]
    num_examples = len(next(iter(chats.values())))
    options = [
        template_options({column: columns[column][i] for column in beside})
        for i in range(num_examples)
    ]
    if "chosen" in chats:
        yield from _encode_pairs(chats["chosen"], chats["rejected"], options, tokenizer)
    else:
        yield from _encode_chats(
            chats, options, tokenizer, assistant_only_loss, completion_only_loss
        )


def has_marks(template: str) -> bool:
    """Whether a chat template marks the assistant's text, by {% generation %}."""
    return _GENERATION.search(template) is not None


def _encode_texts(
    columns: Columns, tokenizer: PreTrainedTokenizerBase, completion_only: bool
) -> Iterator[EncodedExample]:
    """The examples of texts, of prompts and completions, or of prompts and two answers, without a
    template.
    """
    names = [name for name in ("text", "completion", "chosen", "rejected") if name in columns]
    prompts = columns.get("prompt", [""] * len(columns[names[0]]))
    # One end token each: T5's tokenizer adds its own, and TRL's would be a second one.
    eos = str(tokenizer.eos_token)
    end = "" if text_ids("a", tokenizer)[-1] == tokenizer.eos_token_id else eos
    answers = zip(*(columns[name] for name in names), strict=True)
    for prompt, texts in zip(prompts, answers, strict=True):
        # A text that ends with the end token already gets no second one.
        sides = [text_ids(prompt + text.removesuffix(eos) + end, tokenizer) for text in texts]
        if len(sides) == 1 and not ("prompt" in columns and completion_only):
            yield EncodedExample((Tokens(sides[0], [True] * len(sides[0])),), 0)
            continue
        example = after_prompt(text_ids(prompt, tokenizer), sides)
        yield example if len(sides) > 1 else example._replace(num_prompt=0)


def _encode_pairs(
    chosen: list[list[Turn]],
    rejected: list[list[Turn]],
    options: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[EncodedExample]:
    """The examples of pairs of conversations, which differ in their last turn.
    options: keywords of apply_chat_template.
    """
    # Prompt and both sides are rendered each by itself, as TRL does: what the sides share with the
    # prompt's rendering is the prompt, wherever the template puts its generation prompt.
    prompts = _tokens([chat[:-1] for chat in chosen], options, tokenizer, prompts=True)
    sides = [_tokens(chats, options, tokenizer) for chats in (chosen, rejected)]
    for i, (prompt, *both) in enumerate(zip(prompts, *sides, strict=True)):
        with template_errors(_SUBJECT):
            renderings = [
                Rendering(tokenizer, chats[i], options[i], tokens["text"])
                for chats, tokens in zip((chosen, rejected), both, strict=True)
            ]
            kinds = [kind for one in renderings for kind in one.left_out(one.turns[-1:])]
        example = after_prompt(prompt["input_ids"], [tokens["input_ids"] for tokens in both])
        yield example._replace(left_out=tuple(dict.fromkeys(kinds)))


def _encode_chats(
    columns: dict[str, list[list[Turn]]],
    options: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    assistant_only: bool,
    completion_only: bool,
) -> Iterator[EncodedExample]:
    """The examples of conversations, of prompts and completions, or of both kinds.
    options: keywords of apply_chat_template.
    """
    # Whole conversations are rendered, also those of a prompt and its completion: rendered apart,
    # a template would begin the completion with its system text.
    empty: list[list[Turn]] = [[]] * len(options)
    prompts, completions = columns.get("prompt", empty), columns.get("completion", empty)
    parts = zip(columns.get("messages", empty), prompts, completions, strict=True)
    chats = [messages or prompt + completion for messages, prompt, completion in parts]
    with_prompt = [i for i, prompt in enumerate(prompts) if prompt and completion_only]
    own, keywords = [prompts[i] for i in with_prompt], [options[i] for i in with_prompt]
    encoded = _tokens(own, keywords, tokenizer, prompts=True) if own else []
    prompt_tokens = dict(zip(with_prompt, encoded, strict=True))

    # The assistant's tokens are the template's own marks; without any, they are derived from
    # renderings of the first turns, by each token's characters.
    marks = assistant_only and all(
        has_marks(tokenizer.get_chat_template(tools=o.get("tools"))) for o in options
    )
    derives = assistant_only and not marks
    offsets = derives or any("weight" in turn for chat in chats for turn in chat)
    if offsets and not tokenizer.is_fast:
        raise UserError(
            "trainer.assistant_only_loss and weights of turns need a tokenizer.json, which "
            "this model does not have; train all tokens, or use a model that has a "
            "tokenizer.json"
        )

    for i, tokens in enumerate(_tokens(chats, options, tokenizer, marks=marks, offsets=offsets)):
        chat, ids = chats[i], tokens["input_ids"]
        rendering = Rendering(tokenizer, chat, options[i], tokens["text"])
        trained = [bool(mark) for mark in tokens.get("assistant_masks", [True] * len(ids))]
        if not any(trained):  # TRL also raises, later and without the example
            raise UserError(f"{_UNMARKED}, such as {chat[-1]['content'][:60]!r}")
        with template_errors(_SUBJECT):
            if derives:
                trained = inside(rendering.answer_spans(), tokens["offset_mapping"])
            elif any("weight" in turn for turn in chat):
                untrained = _of_weight_zero(chat, rendering, tokens["offset_mapping"])
                pairs = zip(trained, untrained, strict=True)
                trained = [mark and not other for mark, other in pairs]
            # What the template does not print matters where it would be learned.
            left_out = rendering.left_out(completions[i] if i in prompt_tokens else chat)
        if i in prompt_tokens:
            # A prompt is never trained. It ends at the first difference between its own rendering
            # and that of the whole.
            start = num_shared(prompt_tokens[i]["input_ids"], ids)
            trained = [mark and position >= start for position, mark in enumerate(trained)]
        yield EncodedExample((Tokens(ids, trained),), 0, tuple(left_out))


def _of_weight_zero(chat: list[Turn], rendering: Rendering, offsets: Any) -> list[bool]:
    """Return for each token whether it is in a turn of weight 0, whose header is left out too."""
    skipped = [number for number, turn in enumerate(chat) if not turn.get("weight", 1)]
    spans = [(rendering.end(number), rendering.end(number + 1)) for number in skipped]
    return inside(spans, offsets)


def _tokens(
    chats: list[list[Turn]],
    options: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    prompts: bool = False,
    marks: bool = False,
    offsets: bool = False,
) -> list[dict[str, Any]]:
    """The tokenizer's output for each conversation, and its text.
    Raises UserError if the template fails on one.

    prompts: whether the generation prompt follows. marks, offsets: whether the template's marks of
    the assistant's tokens, and the tokens' characters, are returned.
    """
    plain = [for_template(chat) for chat in chats]
    whole: Any = tokenizer  # whose types have no such keywords
    apply, keywords = whole.apply_chat_template, {"return_offsets_mapping": offsets}
    with template_errors(_SUBJECT):
        texts: list[Any] = [
            apply(chat, tokenize=False, add_generation_prompt=prompts, **own)
            for chat, own in zip(plain, options, strict=True)
        ]
        if not marks:  # as apply_chat_template does, which would render each text once more
            encoded: Any = whole(texts, add_special_tokens=False, **keywords)
            columns = [{key: encoded[key][i] for key in encoded} for i in range(len(chats))]
        else:
            how: Any = {"return_dict": True, "return_assistant_tokens_mask": True}
            how["tokenizer_kwargs"] = keywords
            try:
                columns = [
                    dict(apply(chat, **how, **own))
                    for chat, own in zip(plain, options, strict=True)
                ]
            except OverflowError:  # of transformers, where the marks enclose nothing
                raise UserError(_UNMARKED) from None
    return [{"text": text, **own} for text, own in zip(texts, columns, strict=True)]


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a text, with one bos at most: a text that a chat template has rendered begins
    with Llama's, and the tokenizer adds another.
    """
    ids: Any = tokenizer(text)["input_ids"]
    bos = tokenizer.bos_token_id
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
