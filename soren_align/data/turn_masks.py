"""The trained tokens of a conversation whose chat template does not mark them, or some of whose turns have weight 0.

A conversation is rendered turn by turn: the text up to a turn, with the template's generation prompt, is the prompt of
an answer, and the text up to its end adds the answer and its stop token. That holds for templates whose rendering of
the first turns does not change as others follow; each example is checked, and others are refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import UserError
from .tokens import num_shared
from .tool_calls import Turn

Render = Callable[[list[Turn], bool], str]
"""(turns, whether the generation prompt follows) -> their text."""
Span = tuple[int, int]


class UnstableRenderingError(Exception):
    """The template renders the first turns of a conversation differently once others follow."""


def answer_spans(turns: list[Turn], text: str, render: Render, stop_tokens: Sequence[str]) -> list[Span]:
    """The parts of `text` that the model writes as the assistant, each from the prompt to its stop token.

    turns: with weights; answers of weight 0 are left out. text: their rendering. Raises UnstableRenderingError.
    """
    return [
        (_answer_start(turns[:i], text, render), _without_blanks(text, _turn_end(turns, i, text, render), stop_tokens))
        for i, turn in enumerate(turns)
        if turn["role"] == "assistant" and turn.get("weight", 1)
    ]


def untrained_spans(turns: list[Turn], text: str, render: Render) -> list[Span]:
    """The parts of `text` that belong to turns of weight 0, their headers included. Raises UnstableRenderingError."""
    return [
        (_end(turns[:i], text, render) if i else 0, _turn_end(turns, i, text, render))
        for i, turn in enumerate(turns)
        if not turn.get("weight", 1)
    ]


def inside(spans: Sequence[Span], offsets: Sequence[Span]) -> list[bool]:
    """For each token, by its characters' (start, end), whether it has one inside a span. Spans are in order."""
    marks, position = [], 0
    for start, end in offsets:
        while position < len(spans) and spans[position][1] <= start:
            position += 1
        marks.append(position < len(spans) and max(start, spans[position][0]) < min(end, spans[position][1]))
    return marks


def unstable(example: str) -> UserError:
    """The error for an example, by the start of its last answer."""
    return UserError(
        f"the chat template renders earlier turns differently once others follow, so that the assistant's tokens of "
        f"{example[:60]!r} cannot be identified: name a model.chat_template with {{% generation %}}...{{% "
        "endgeneration %} around the assistant's turns, or train all tokens: no assistant_only_loss and no weights"
    )


def _turn_end(turns: list[Turn], i: int, text: str, render: Render) -> int:
    return len(text) if i + 1 == len(turns) else _end(turns[: i + 1], text, render)


def _answer_start(turns: list[Turn], text: str, render: Render) -> int:
    """The length of the prompt after these turns; some add to it a <think> that this answer does not have."""
    prompt = _rendering(turns, True, render)
    if text.startswith(prompt):
        return len(prompt)
    return max(_end(turns, text, render), num_shared(prompt, text))


def _end(turns: list[Turn], text: str, render: Render) -> int:
    """The length of the turns' rendering, with which `text` starts."""
    rendering = _rendering(turns, False, render)
    if not text.startswith(rendering):
        raise UnstableRenderingError
    return len(rendering)


def _rendering(turns: list[Turn], prompts: bool, render: Render) -> str:
    try:
        return render(turns, prompts)
    except Exception:  # anything that a template raises, such as "a user's turn must follow"
        raise UnstableRenderingError from None


def _without_blanks(text: str, end: int, stop_tokens: Sequence[str]) -> int:
    """The end without the white space after a stop token: the model has stopped there."""
    stripped = text[:end].rstrip()
    return len(stripped) if stripped.endswith(tuple(stop_tokens)) else end


def stop_tokens_of(tokenizer: Any) -> tuple[str, ...]:
    """The tokens that may end an answer: the tokenizer's eos and added tokens."""
    return tuple(str(token) for token in {tokenizer.eos_token, *tokenizer.added_tokens_encoder} if token)
