"""A conversation with one model or two: questions from a terminal, from options or from a pipe,
answers streamed.

The models are loaded as for an evaluation: an adapter merged with its base, every weight from a
file.
"""

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from transformers import TextStreamer

from ..core.errors import UserError, as_user_error, printable
from ..core.text import Terminal, print_labelled
from ..data.rendering import template_errors
from ..evaluate.run.backends import (
    BackendSettings,
    base_folder,
    load_lm,
    load_tokenizer,
    model_folder,
)
from ..evaluate.run.lineage import lineage
from ..run.quantized import quantization_of
from ..run.weights import load_config

EMPTY = "(empty answer)"
NEW = "/new"
"""In the place of a question: the next question begins a new conversation."""
MIN_COLUMNS_WIDTH = 100
"""Of a terminal on which two answers stand side by side."""
START = "start"
"""`--compare start`: the checkpoint that the run was trained from."""

_IN_USE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_FIRST_BLANK_LINES = re.compile(r"\A\s*\n")
_MANY_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n){3,}")
OnText = Callable[[str], object]


class ChatModel:
    """A model in memory, its tokenizer and its context length."""

    def __init__(self, name: str, path: str | Path, dtype: str | None = None):
        """Load the model.
        name: for messages. path: see `model_folder`. dtype: None: the one in its config.
        """
        self.name = name
        folder = model_folder(path)
        config = load_config(str(base_folder(folder) or folder))
        dtype = dtype or str(config.dtype or torch.float32).removeprefix("torch.")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = load_tokenizer(folder)
        # without one the model completes plain text
        self.has_template = bool(self.tokenizer.chat_template)
        lm = load_lm(folder, self.tokenizer, BackendSettings("hf", dtype, device, 1))
        self.model, self.context = lm.model, lm.max_length
        quantized = quantization_of(self.model)
        self.precision = (
            dtype if quantized is None else f"{quantized['quantize']} ({quantized['type']})"
        )

    def tokens(self, turns: list[dict[str, str]]) -> torch.Tensor:
        """Return the prompt for an answer to the last turn, [1, length].
        Without a template it is that turn's text.
        """
        if not self.has_template:
            return self.tokenizer(turns[-1]["content"], return_tensors="pt").input_ids
        with template_errors(f"{self.name}: the chat template"):
            text = self.tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False
            )
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    @torch.inference_mode()
    def generate(
        self, prompt: torch.Tensor, stream: "_Stream", max_new_tokens: int, temperature: float
    ) -> None:
        """Generate into `stream` until the model ends its answer. temperature 0: greedy."""
        own = self.model.generation_config.eos_token_id
        ends = {self.tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
        prompt = prompt.to(self.model.device)
        self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            streamer=stream,
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            temperature=temperature or None,
            eos_token_id=sorted(ends) or None,
            pad_token_id=self.tokenizer.pad_token_id or min(ends, default=0),
        )


class Conversation:
    """The turns of one conversation with a model, kept within its context."""

    def __init__(
        self, model: ChatModel, system: str | None, max_new_tokens: int, temperature: float
    ):
        self.model, self.max_new_tokens, self.temperature = model, max_new_tokens, temperature
        self.reserved = min(max_new_tokens, model.context // 4)
        self.system = [{"role": "system", "content": system}] if system else []
        self.turns: list[dict[str, str]] = []

    def ask(self, question: str, on_text: OnText, on_notice: OnText) -> str:
        """Stream the answer, word by word, to `on_text` and return it.
        It stays in the history, also if interrupted.

        The oldest questions are dropped until the prompt leaves room for an answer: max_new_tokens,
        or a quarter of the context if it is less. The last question stays in any case, and its
        answer has the remaining room.
        on_notice: called with a sentence if the history is cut. Raises UserError if the question
        alone is too long.
        """
        model, before = self.model, self.turns
        self.turns = [
            *(before if model.has_template else []),
            {"role": "user", "content": question},
        ]
        total = len(self.turns) // 2
        try:
            with as_user_error(f"{model.name}: its tokenizer fails", Exception):
                prompt = model.tokens([*self.system, *self.turns])
                while prompt.shape[1] + self.reserved > model.context and len(self.turns) > 1:
                    self.turns = self.turns[2:]
                    prompt = model.tokens([*self.system, *self.turns])
            if dropped := total - len(self.turns) // 2:
                on_notice(
                    f"{model.name}: the context of {model.context:,} tokens is full, so the oldest {dropped} of "
                    f"{total} questions were dropped from the history, with their answers"
                )
            if prompt.shape[1] >= model.context:
                raise UserError(
                    f"{model.name}: the question has {prompt.shape[1]:,} tokens in the chat template, which leaves no "
                    f"room for an answer in the model's context of {model.context:,} tokens; shorten the question"
                )
        except UserError:
            self.turns = before
            raise
        stream = _Stream(model.tokenizer, on_text)
        try:
            # Of values in config.json that are read only now; not OSError, which the terminal
            # raises.
            with as_user_error(f"{model.name}: cannot answer", *_IN_USE):
                room = model.context - prompt.shape[1]
                model.generate(prompt, stream, min(self.max_new_tokens, room), self.temperature)
        finally:
            answer = model.tokenizer.decode(stream.tokens, skip_special_tokens=True)
            self.turns.append({"role": "assistant", "content": answer})
        return answer


class _Stream(TextStreamer):
    """Passes words to `on_text` as they are complete. tokens: all so far, without the prompt's."""

    def __init__(self, tokenizer: Any, on_text: OnText):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.tokens: list[int] = []

    def put(self, value: Any) -> None:
        if not self.next_tokens_are_prompt:
            self.tokens += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.on_text(text)


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

    Without prompts, ask for questions until Ctrl-D or Ctrl-C; Ctrl-C during an answer only stops
    that answer. compare: a second model, or START. settings: of `Conversation`.
    """
    rows = lineage(model)
    if compare == START:
        if len(rows) < 2:
            raise UserError(
                f"--compare {START}: the checkpoint that {model} was trained from is not on this machine; write "
                "--compare MODEL, with the folder or hub name of another model"
            )
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
            loaded = ChatModel(name, path, dtype)
        conversations.append(Conversation(loaded, **settings))
        template = (
            "its chat template"
            if loaded.has_template
            else "no chat template, so the model completes plain text"
        )
        text = (
            f"{name}: {path}, {loaded.precision}, context of {loaded.context:,} tokens, {template}"
        )
        print_labelled(console, "model", printable(text))
    for number, prompt in enumerate(prompts):
        if len(prompts) > 1:
            _write("\n" * bool(number) + f"> {prompt}\n")
        for conversation in conversations:
            conversation.turns = []
        _answer(conversations, prompt, console)
    if prompts:
        return
    with suppress(ImportError):
        import readline  # noqa: F401 (input() then has a history, and the arrow keys work)
    keys = f"Ctrl-C stops an answer; Ctrl-D, or Ctrl-C at the prompt, ends the chat; {NEW} removes the history"
    print_labelled(console, "keys", keys)
    while True:
        try:
            question = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            _write("\n")
            return
        try:
            if question == NEW:
                for conversation in conversations:
                    conversation.turns = []
            elif question:
                _answer(conversations, question, console)
        except UserError as error:
            print_labelled(console, "error", str(error))
        except KeyboardInterrupt:
            _write("\n")


def _answer(conversations: Sequence[Conversation], question: str, console: Console) -> None:
    """Print the answers: two of them side by side on a wide terminal, else one after the other."""
    terminal = Terminal()
    if len(conversations) > 1 and sys.stdout.isatty() and terminal.width >= MIN_COLUMNS_WIDTH:
        answer_side_by_side(conversations, question, terminal)
        return
    for conversation in conversations:
        if len(conversations) > 1:
            _write(f"\n{conversation.model.name}:\n")
        on_notice = partial(print_labelled, console, "notice")
        answer = conversation.ask(question, without_blank_lines(_write), on_notice)
        _write("\n")
        if not answer.strip():
            console.print(EMPTY, highlight=False)


def answer_side_by_side(
    conversations: Sequence[Conversation], question: str, terminal: Terminal
) -> None:
    """Stream the answers into a column each, one after the other."""
    texts, notices = [""] * len(conversations), list[str]()

    def table() -> Table:
        names = [Column(printable(c.model.name), ratio=1, overflow="fold") for c in conversations]
        columns = Table(*names, box=None, expand=True, padding=(0, 2, 0, 0), header_style="bold")
        columns.add_row(*texts)
        return columns

    try:
        with Live(table(), console=terminal, refresh_per_second=8) as live:
            for i, conversation in enumerate(conversations):

                def add(text: str, i: int = i) -> None:
                    texts[i] += text
                    live.update(table())

                if not conversation.ask(question, without_blank_lines(add), notices.append).strip():
                    add(EMPTY)
    finally:
        for notice in notices:
            print_labelled(terminal, "notice", printable(notice))


def without_blank_lines(write: OnText) -> OnText:
    """Return `write` for an answer without the blank lines around it; of those inside two at most,
    as in code.

    Untrained models make hundreds of them.
    """
    blank, has_begun = "", False

    def write_text(text: str) -> None:
        nonlocal blank, has_begun
        blank += text
        if not (body := blank.rstrip()):  # blank up to now: whether text follows is unknown
            return
        blank = blank[len(body) :]
        write(
            _MANY_BLANK_LINES.sub("\n\n\n", body if has_begun else _FIRST_BLANK_LINES.sub("", body))
        )
        has_begun = True

    return write_text


def _write(text: str) -> None:
    """Write text of any origin to standard output, where it cannot control the terminal."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()
