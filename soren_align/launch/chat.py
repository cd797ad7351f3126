"""A conversation with one model or two: questions from a terminal, from options or from a pipe,
answers streamed.

The models are loaded as for an evaluation: an adapter merged with its base, every weight from a
file.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TextStreamer

from ..core.errors import UserError, as_user_error, printable
from ..core.text import Terminal, print_labelled
from ..data.rendering import template_errors
from ..evaluate.run.lineage import lineage
from ..evaluate.run.models import (
    base_folder,
    context_length,
    load_for_inference,
    load_tokenizer,
    model_folder,
)
from ..run.quantized import quantization_of
from ..run.weights import load_config

EMPTY = "(empty answer)"
START = "start"
"""`--compare start`: the checkpoint that the run was trained from."""

_IN_USE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Conversation:
    """The turns of one conversation with a model, kept within its context."""

    def __init__(
        self,
        name: str,
        path: str | Path,
        dtype: str | None = None,
        *,
        system: str | None = None,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
    ):
        """Load the model and its tokenizer.
        name: for messages. path: see `model_folder`. dtype: None: the one in its config.
        """
        self.name, self.max_new_tokens, self.temperature = name, max_new_tokens, temperature
        # As `eval` loads it, so that an answer here is the answer that was scored.
        folder = model_folder(path)
        config = load_config(str(base_folder(folder) or folder))
        dtype = dtype or str(config.dtype or torch.float32).removeprefix("torch.")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = load_tokenizer(folder)
        self.model = load_for_inference(folder, dtype, device)
        self.context = context_length(self.model.config, self.tokenizer)
        quantized = quantization_of(self.model)
        self.precision = f"{quantized['quantize']} ({quantized['type']})" if quantized else dtype
        self.system = [{"role": "system", "content": system}] if system else []
        self.turns: list[dict[str, str]] = []

    def tokens(self, turns: list[dict[str, str]]) -> torch.Tensor:
        """Return the prompt for an answer to the last turn, [1, length].
        Without a template it is that turn's text.
        """
        if not self.tokenizer.chat_template:
            return self.tokenizer(turns[-1]["content"], return_tensors="pt").input_ids
        with template_errors(f"{self.name}: the chat template"):
            text = self.tokenizer.apply_chat_template(
                [*self.system, *turns], add_generation_prompt=True, tokenize=False
            )
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    @torch.inference_mode()
    def ask(self, question: str) -> str:
        """Stream the answer to standard output and return it; it stays in the history.

        The oldest questions are dropped, with a notice, until the prompt leaves a quarter of the
        context for the answer. Raises UserError if the question alone is too long.
        """
        # A prompt without room for an answer would be answered by one token: the oldest turns go
        # first.
        turns = [*self.turns, {"role": "user", "content": question}]
        with as_user_error(f"{self.name}: its tokenizer fails", Exception):
            prompt = self.tokens(turns)
            # A quarter is free: with all of --max-new-tokens reserved, a context of 512 tokens
            # forgot every earlier turn (notes/log.md).
            while prompt.shape[1] > 0.75 * self.context and len(turns) > 1:
                # In pairs: user and assistant must alternate, as in training (data/turns.py).
                turns, notice = turns[2:], "the context is full; the oldest question was dropped"
                print_labelled(Terminal(stderr=True), "notice", f"{self.name}: {notice}")
                prompt = self.tokens(turns)
        if prompt.shape[1] >= self.context:
            finding = f"the question has {prompt.shape[1]:,} tokens in the chat template"
            remedy = f"the model's context is {self.context:,}; shorten the question"
            raise UserError(f"{self.name}: {finding}, but {remedy}")
        # A model may end its turn by another token than a text's end: each of them ends the answer.
        own = self.model.generation_config.eos_token_id
        ends = {self.tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
        prompt = prompt.to(self.model.device)
        # Of values in config.json that are read only now.
        with as_user_error(f"{self.name}: cannot answer", *_IN_USE):
            output = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                streamer=_Printer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
                max_new_tokens=min(self.max_new_tokens, self.context - prompt.shape[1]),
                do_sample=self.temperature > 0,
                temperature=self.temperature or None,
                eos_token_id=sorted(ends) or None,
                pad_token_id=self.tokenizer.pad_token_id or min(ends, default=0),
            )
        answer = self.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
        self.turns = [*turns, {"role": "assistant", "content": answer}]
        return answer


class _Printer(TextStreamer):
    """Prints words as they are complete, without control characters, blank lines at the begin, and
    more than one of them together: an untrained model writes hundreds."""

    _has_begun, _blanks = False, ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        text = self._blanks + printable(text)
        body = text.rstrip()
        blanks = text[len(body) :]
        body = _BLANK_LINES.sub("\n\n", body if self._has_begun else _BEGIN.sub("", body))
        self._has_begun |= bool(body)
        # They are printed only before other text.
        self._blanks = _BLANK_LINES.sub("\n\n", blanks)
        super().on_finalized_text(body, stream_end)


def converse(
    model: str,
    compare: str | None,
    dtype: str | None,
    prompts: Sequence[str],
    console: Console,
    **settings: Any,
) -> None:
    """Load a model, and one beside it, and answer prompts, each in a conversation of its own;
    several are printed before their answers.

    Without prompts, ask for questions until the end of the input (Ctrl-D) or Ctrl-C. compare: a
    second model, or START. settings: of `Conversation`.
    """
    rows = lineage(model)
    if compare == START:
        if len(rows) < 2:
            finding = f"the checkpoint that {model} was trained from is not on this machine"
            remedy = "write --compare MODEL, with the folder or hub name of another model"
            raise UserError(f"--compare {START}: {finding}; {remedy}")
        rows = rows[:-3:-1]
    else:
        rows = [rows[-1], *([lineage(compare)[-1]] if compare else [])]
    if len(rows) == 2 and rows[0][0] == rows[1][0]:
        rows = [(str(path), path) for _, path in rows]
    # torch's own seed is the same in every process: the same "random" answer every time
    torch.seed()
    conversations = []
    for name, path in rows:
        with console.status(f"Loading {name}"):
            conversation = Conversation(name, path, dtype, **settings)
        conversations.append(conversation)
        text = f"{name}: {path}, {conversation.precision}"
        if not conversation.tokenizer.chat_template:
            text += ", no chat template, so the model completes plain text without a history"
        print_labelled(console, "model", printable(text))
    for number, prompt in enumerate(prompts):
        if len(prompts) > 1:
            separator = "\n" if number else ""
            _write(f"{separator}> {prompt}\n")
        for conversation in conversations:
            conversation.turns = []
        _answer(conversations, prompt, console)
    while not prompts:
        try:
            if question := input("\n> ").strip():
                _answer(conversations, question, console)
        except (EOFError, KeyboardInterrupt):
            _write("\n")
            return
        except UserError as error:
            print_labelled(console, "error", str(error))


_BEGIN = re.compile(r"^\s*\n")
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
"""Without the blanks that indent the next line, such as one of code."""


def _answer(conversations: Sequence[Conversation], question: str, console: Console) -> None:
    """Print the answers, one after the other."""
    for conversation in conversations:
        if len(conversations) > 1:
            _write(f"\n{conversation.name}:\n")
        if not conversation.ask(question).strip():
            console.print(EMPTY, highlight=False)


def _write(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()
