"""A conversation with a model, whose answers are streamed.

The model is loaded as for an evaluation: an adapter merged with its base, every weight from a file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from ..core.errors import UserError, as_user_error
from ..data.rendering import template_errors
from ..evaluate.run.backends import BackendSettings, base_folder, load_lm, load_tokenizer, model_folder
from ..run.quantized import quantization_of
from ..run.weights import load_config

_IN_USE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
OnText = Callable[[str], object]


class ChatModel:
    """A model in memory, its tokenizer and its context length."""

    def __init__(self, name: str, path: str | Path, dtype: str | None = None):
        """Load the model. name: for messages. path: see `model_folder`. dtype: None: the one in its config."""
        self.name = name
        folder = model_folder(path)
        config = load_config(str(base_folder(folder) or folder))
        dtype = dtype or str(config.dtype or torch.float32).removeprefix("torch.")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = load_tokenizer(folder)
        lm = load_lm(folder, self.tokenizer, BackendSettings("hf", dtype, device, 1))
        self.model, self.context = lm.model, lm.max_length
        quantized = quantization_of(self.model)
        self.precision = dtype if quantized is None else f"{quantized['quantize']} ({quantized['type']})"

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template; without one the model completes plain text."""
        return bool(self.tokenizer.chat_template)

    def tokens(self, turns: list[dict[str, str]]) -> torch.Tensor:
        """Return the prompt for an answer to the last turn, [1, length]. Without a template it is that turn's text."""
        if not self.has_template:
            return self.tokenizer(turns[-1]["content"], return_tensors="pt").input_ids
        with template_errors(f"{self.name}: the chat template"):
            text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    @torch.inference_mode()
    def generate(self, prompt: torch.Tensor, stream: "_Stream", max_new_tokens: int, temperature: float) -> None:
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

    def __init__(self, model: ChatModel, system: str | None, max_new_tokens: int, temperature: float):
        self.model, self.max_new_tokens, self.temperature = model, max_new_tokens, temperature
        self.reserved = min(max_new_tokens, model.context // 4)
        self.system = [{"role": "system", "content": system}] if system else []
        self.turns: list[dict[str, str]] = []

    def ask(self, question: str, on_text: OnText, on_notice: OnText) -> str:
        """Stream the answer, word by word, to `on_text` and return it. It stays in the history, also if interrupted.

        on_notice: called with a sentence if the history is cut. Raises UserError if the question alone is too long.
        """
        before = self.turns
        self.turns = [*before, {"role": "user", "content": question}]
        try:
            with as_user_error(f"{self.model.name}: its tokenizer fails", Exception):
                prompt = self._fit(on_notice)
        except UserError:
            self.turns = before
            raise
        stream = _Stream(self.model.tokenizer, on_text)
        room = self.model.context - prompt.shape[1]
        try:
            # Of values in config.json that are read only now; not OSError, which the terminal raises.
            with as_user_error(f"{self.model.name}: cannot answer", *_IN_USE):
                self.model.generate(prompt, stream, min(self.max_new_tokens, room), self.temperature)
        finally:
            answer = self.model.tokenizer.decode(stream.tokens, skip_special_tokens=True)
            self.turns.append({"role": "assistant", "content": answer})
        return answer

    def _fit(self, on_notice: OnText) -> torch.Tensor:
        """Return the prompt, after dropping the oldest questions until it leaves room for an answer.

        That is max_new_tokens, or a quarter of the context if it is less. The last question stays in any case, and its
        answer has the remaining room.
        """
        if not self.model.has_template:
            self.turns = self.turns[-1:]
        total = len(self.turns) // 2
        prompt = self.model.tokens([*self.system, *self.turns])
        while prompt.shape[1] + self.reserved > self.model.context and len(self.turns) > 1:
            self.turns = self.turns[2:]
            prompt = self.model.tokens([*self.system, *self.turns])
        if dropped := total - len(self.turns) // 2:
            on_notice(
                f"{self.model.name}: the context of {self.model.context:,} tokens is full; the oldest {dropped} of "
                f"{total} questions and their answers were dropped from the history"
            )
        if prompt.shape[1] >= self.model.context:
            raise UserError(
                f"{self.model.name}: the question has {prompt.shape[1]:,} tokens with its template, and the context "
                f"{self.model.context:,}: there is no room for an answer; shorten it"
            )
        return prompt


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
