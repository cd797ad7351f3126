"""Examples as tokens, as TRL makes them of the same examples.

TRL 1.16's preprocessing without a trainer: SFTTrainer's and DPOTrainer's `_prepare_dataset`, and the preference
collator. tests/data/test_preview.py compares every token with TRL's. TRL has neither weights of turns nor the
assistant's tokens of a template without {% generation %}: tests/data/test_turn_masks.py.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..core.errors import UserError
from ..tasks import TaskName
from .masks import (
    EncodedExample,
    Tokens,
    UnstableRenderingError,
    after_prompt,
    answer_spans,
    from_token_columns,
    inside,
    num_shared,
    stop_tokens_of,
    unstable,
    untrained_spans,
)
from .rendering import template_errors
from .split import LoadedSplit
from .tool_calls import EMPTY_ANSWER, OPTIONS, Turn, for_template, left_out, prints_nothing, template_options

BATCH_SIZE = 64
"""Examples that are tokenized together."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as in transformers and TRL
_SUBJECT = "the chat template renders the first example, but fails on a later one"
Chat = list[Turn]
Options = dict[str, Any]


def encode(
    columns: dict[str, list[Any]],
    task: TaskName,
    tokenizer: PreTrainedTokenizerBase,
    assistant_only_loss: bool,
    completion_only_loss: bool = True,
) -> Iterator[EncodedExample]:
    """The examples of a batch {column: conversations, or texts}, or of one that `token_columns` made.

    Trained are, for DPO, the answers. For SFT all tokens; or the assistant's; or, where there is one, those of the
    completion; or the assistant's of it. Turns of weight 0 are never trained.
    """
    if "left_out" in columns:
        return from_token_columns(columns, task)
    if "chosen" in columns and "prompt" in columns:
        return _encode_plain_pairs(columns["prompt"], columns["chosen"], columns["rejected"], tokenizer)
    if "text" in columns:
        return _encode_texts(columns["text"], tokenizer)
    if {"messages", "prompt"} <= columns.keys():
        return _encode_mixture(columns, tokenizer, assistant_only_loss, completion_only_loss)
    if "prompt" in columns and isinstance(columns["prompt"][0], str):
        return _encode_completions(columns["prompt"], columns["completion"], tokenizer, completion_only_loss)
    columns = {name: [_without_nulls(value) for value in values] for name, values in columns.items()}
    beside = [column for column in OPTIONS if any(columns.get(column, ()))]
    num_examples = len(next(iter(columns.values())))
    options = [template_options({column: columns[column][i] for column in beside}) for i in range(num_examples)]
    encoder = ChatEncoder(tokenizer, assistant_only_loss and "chosen" not in columns)
    if "chosen" in columns:
        return encoder.pairs(columns["chosen"], columns["rejected"], options)
    if "messages" in columns:
        return encoder.conversations(columns["messages"], options)
    return encoder.completions(columns["prompt"], columns["completion"], options, completion_only_loss)


def _encode_mixture(
    columns: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, *settings: bool
) -> Iterator[EncodedExample]:
    """The examples of a batch of conversations, and of prompts and completions: each as in a batch of its kind."""
    is_chat = [bool(turns) for turns in columns["messages"]]
    encoded = {}
    for kind, names in {True: ("messages",), False: ("prompt", "completion")}.items():
        own = {
            name: [value for value, is_one in zip(columns[name], is_chat, strict=True) if is_one is kind]
            for name in (*names, *OPTIONS)
            if name in columns
        }
        encoded[kind] = encode(own, "sft", tokenizer, *settings) if kind in is_chat else iter(())
    return (next(encoded[kind]) for kind in is_chat)


def has_marks(template: str) -> bool:
    """Whether a chat template marks the assistant's text, by {% generation %}."""
    return _GENERATION.search(template) is not None


class ChatEncoder:
    """Conversations as tokens by the tokenizer's chat template. Options: keywords of apply_chat_template, of each."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, assistant_only: bool):
        """assistant_only: of whole conversations, only the assistant's tokens are trained."""
        self.tokenizer, self.assistant_only = tokenizer, assistant_only
        self.stop_tokens = stop_tokens_of(tokenizer)

    def conversations(self, chats: list[Chat], options: list[Options]) -> Iterator[EncodedExample]:
        """The examples of whole conversations."""
        marks = self.assistant_only and all(map(self._has_marks, options))
        how: Options = {"return_assistant_tokens_mask": True} if marks else {}
        if (self.assistant_only and not marks) or any("weight" in turn for chat in chats for turn in chat):
            if not self.tokenizer.is_fast:
                raise UserError(
                    "assistant_only_loss and weights need a tokenizer with tokenizer.json, and this has none"
                )
            how["tokenizer_kwargs"] = {"return_offsets_mapping": True}
        encoded = self._tokens(chats, options, **how)
        for chat, own, tokens in zip(chats, options, encoded, strict=True):
            with template_errors(_SUBJECT):
                example = self._conversation(chat, own, tokens)
            yield example

    def pairs(self, chosen: list[Chat], rejected: list[Chat], options: list[Options]) -> Iterator[EncodedExample]:
        """The examples of pairs of conversations that differ in their last turn."""
        prompts = self._tokens([chat[:-1] for chat in chosen], options, add_generation_prompt=True)
        sides = (self._tokens(chosen, options), self._tokens(rejected, options))
        for i, (prompt, *both) in enumerate(zip(prompts, *sides, strict=True)):
            with template_errors(_SUBJECT):
                lost = [kind for c in (chosen[i], rejected[i]) for kind in self._left_out(c, options[i], c[-1:])]
            example = after_prompt(prompt["input_ids"], [tokens["input_ids"] for tokens in both])
            yield example._replace(left_out=tuple(dict.fromkeys(lost)))

    def completions(
        self, prompts: list[Chat], completions: list[Chat], options: list[Options], completion_only: bool
    ) -> Iterator[EncodedExample]:
        """The examples of prompts and completions; completion_only: the prompts are not trained."""
        chats = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        prompt_tokens = self._tokens(prompts, options, add_generation_prompt=True)
        examples = zip(prompt_tokens, completions, self.conversations(chats, options), strict=True)
        for prompt, completion, example in examples:
            (ids, trained), *_ = example.sides
            start = num_shared(prompt["input_ids"], ids) if completion_only else 0
            tokens = Tokens(ids, [mark and i >= start for i, mark in enumerate(trained)])
            kinds = list(example.left_out)
            if completion_only and EMPTY_ANSWER in kinds and not prints_nothing(completion, kinds):
                kinds.remove(EMPTY_ANSWER)
            yield example._replace(sides=(tokens,), left_out=tuple(kinds))

    def _tokens(self, chats: list[Chat], options: list[Options], **how: Any) -> list[Options]:
        """The tokenizer's output for each conversation. Raises UserError if the template fails on one."""
        plain = [for_template(chat) for chat in chats]
        apply: Any = self.tokenizer.apply_chat_template
        with template_errors(_SUBJECT):
            if any(options):  # transformers takes the same tools for a whole batch
                return [apply(c, return_dict=True, **own, **how) for c, own in zip(plain, options, strict=True)]
            encoded = apply(plain, return_dict=True, **how)
        return [{key: values[i] for key, values in encoded.items()} for i in range(len(chats))]

    def _conversation(self, chat: Chat, options: Options, tokens: Options) -> EncodedExample:
        ids = tokens["input_ids"]
        trained = [bool(mark) for mark in tokens.get("assistant_masks", [True] * len(ids))]
        if not any(trained):  # TRL also raises, later and without the example
            raise UserError(
                f"the chat template marks no token as the assistant's in {chat[-1]['content'][:60]!r}; "
                "put {% generation %}...{% endgeneration %} around every assistant turn"
            )
        derives = self.assistant_only and "assistant_masks" not in tokens
        if derives or any("weight" in turn for turn in chat):
            trained = self._weighted(chat, options, trained, tokens["offset_mapping"], derives)
        return EncodedExample((Tokens(ids, trained),), 0, tuple(self._left_out(chat, options, chat)))

    def _weighted(
        self, chat: Chat, options: Options, trained: list[bool], offsets: list[tuple[int, int]], derives: bool
    ) -> list[bool]:
        """`trained` without turns of weight 0; derives: and without all but the assistant's text."""

        def render(turns: Chat, prompts: bool) -> str:
            return self._text(turns, options, prompts)

        text = render(chat, False)
        try:
            if derives:
                return inside(answer_spans(chat, text, render, self.stop_tokens), offsets)
            untrained = inside(untrained_spans(chat, text, render), offsets)
        except UnstableRenderingError:
            raise unstable(str(chat[-1]["content"])) from None
        return [mark and not skipped for mark, skipped in zip(trained, untrained, strict=True)]

    def _left_out(self, chat: Chat, options: Options, trained: Chat) -> list[str]:
        """The kinds of parts that the template does not print. trained: turns that are, unless their weight is 0."""
        tools = options.get("tools", [])
        if not tools and not any(
            turn["role"] == "tool" or turn.keys() - {"role", "content", "weight"} for turn in chat
        ):
            return []
        kinds = left_out(
            chat, tools, lambda turns, tools: self._text(turns, {**options, "tools": tools or None}, False)
        )
        is_silent = prints_nothing([turn for turn in trained if turn.get("weight", 1)], kinds)
        return [*kinds, EMPTY_ANSWER] if is_silent else kinds

    def _text(self, turns: Chat, options: Options, prompts: bool) -> str:
        how: Options = {"tokenize": False, "add_generation_prompt": prompts}
        return str(self.tokenizer.apply_chat_template(for_template(turns), **how, **options))

    def _has_marks(self, options: Options) -> bool:
        return has_marks(self.tokenizer.get_chat_template(tools=options.get("tools")))


def _without_nulls(turns: Any) -> Any:
    """Turns without the keys that Arrow has filled with null; texts unchanged."""
    if not isinstance(turns, list):
        return turns
    return [{key: value for key, value in turn.items() if value is not None} for turn in turns]


def _encode_plain_pairs(
    prompts: list[str], chosen: list[str], rejected: list[str], tokenizer: PreTrainedTokenizerBase
) -> Iterator[EncodedExample]:
    sides = zip(_with_eos(chosen, tokenizer), _with_eos(rejected, tokenizer), strict=True)
    for prompt, answers in zip(prompts, sides, strict=True):
        yield after_prompt(_ids(prompt, tokenizer), [_ids(prompt + answer, tokenizer) for answer in answers])


def _encode_completions(
    prompts: list[str], completions: list[str], tokenizer: PreTrainedTokenizerBase, completion_only: bool
) -> Iterator[EncodedExample]:
    for prompt, completion in zip(prompts, _with_eos(completions, tokenizer), strict=True):
        ids = _ids(prompt + completion, tokenizer)
        tokens = after_prompt(_ids(prompt, tokenizer), [ids]).sides[0]
        yield EncodedExample((tokens if completion_only else Tokens(ids, [True] * len(ids)),), 0)


def _encode_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[EncodedExample]:
    for text in _with_eos(texts, tokenizer):
        ids = _ids(text, tokenizer)
        yield EncodedExample((Tokens(ids, [True] * len(ids)),), 0)


def _with_eos(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts as `_ids` gives each one end token: T5's tokenizer adds its own, and TRL's would be a second one."""
    eos = str(tokenizer.eos_token)
    plain = [text.removesuffix(eos) for text in texts]
    return plain if _ids("a", tokenizer)[-1] == tokenizer.eos_token_id else [text + eos for text in plain]


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids: Any = tokenizer(text)["input_ids"]
    return ids


# ---
# Drop the examples with an answer of which the chat template prints nothing: training on them would teach silence.
#
# Such an answer is tool calls alone, under a template without tool calls. The example is dropped, not only its answer:
# what follows would be trained as an answer without the call and its result.

_REASON = "an answer is tool calls alone, which the chat template does not print"


def drop_reason_of(example: EncodedExample) -> str | None:
    """The reason to drop an example with such an answer; None for others."""
    return _REASON if EMPTY_ANSWER in example.left_out else None


def without_empty_answers(split: LoadedSplit, tokens: Dataset) -> tuple[LoadedSplit, Dataset]:
    """(the split, its tokens) without such examples, which are counted under `dropped`; unchanged if there are none.

    tokens: of `tokenize`, of the split's examples. Raises UserError if no example of a source is left.
    """
    rows = tokens["left_out"][:]
    indices = [i for i, kinds in enumerate(rows) if EMPTY_ANSWER not in kinds]
    if len(indices) == len(rows):
        return split, tokens
    sources = tuple(split.source_indices[i] for i in indices) if split.source_indices else ()
    if not indices or set(sources) != set(split.source_indices):
        lost = set(split.source_indices) - set(sources)
        name = split.source["sources"][min(lost)]["path"] if lost else split.name
        raise UserError(f"{name}: of each example {_REASON}; name a model.chat_template that does, or leave it out")
    dropped = {**split.dropped, _REASON: len(rows) - len(indices)}
    rest = replace(split, dataset=split.dataset.select(indices), dropped=dropped, source_indices=sources)
    return rest, tokens.select(indices)
