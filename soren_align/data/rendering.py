"""A conversation as its chat template renders it, and the parts of that text that belong to its
turns.

A template is a program of another author. transformers renders it in Jinja's sandbox, which keeps
it from files, the network and Python; that a template can waste the time of whoever uses it is not
prevented.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..core.errors import UserError
from .masks import num_shared
from .turns import CUT_ANSWER, EMPTY_ANSWER, REASONING, Turn, for_template, without

SET_TEMPLATE = "set model.chat_template to qwen2.5, zephyr or a .jinja file"
TEMPLATE_REMEDY = f"{SET_TEMPLATE} that prints message['content'] and a stop token after it"


@contextmanager
def template_errors(subject: str) -> Iterator[None]:
    """Turn any exception of a template within this context into a UserError of one line that starts
    with `subject`.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        line = f" (line {error.lineno} of the template)" if hasattr(error, "lineno") else ""  # pyright: ignore
        raise UserError(f"{subject}: {reason}{line}") from None


Span = tuple[int, int]


class Rendering:
    """A conversation as its chat template renders it, and the parts of that text that belong to its
    turns.

    For templates that do not mark the trained tokens, and turns of weight 0. The text up to a turn,
    with the template's generation prompt, is the prompt of an answer, and the text up to its end
    adds the answer and its stop token. That holds for templates whose rendering of the first turns
    does not change as others follow; each example is checked, and for others UserError is raised.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        turns: list[Turn],
        options: dict[str, Any],
        text: str,
    ):
        """options: keywords of apply_chat_template. text: the conversation's rendering."""
        self.tokenizer, self.turns, self.options, self.text = tokenizer, turns, options, text

    def of(self, turns: list[Turn], prompts: bool = False, **options: Any) -> str:
        """The text of other turns. prompts: whether the generation prompt follows."""
        how: dict[str, Any] = {
            "tokenize": False,
            "add_generation_prompt": prompts,
            **self.options,
            **options,
        }
        return str(self.tokenizer.apply_chat_template(for_template(turns), **how))

    def answer_spans(self) -> list[Span]:
        """The parts that the model writes as the assistant, each from the prompt to its stop token;
        without answers of weight 0."""
        tokenizer: Any = self.tokenizer
        # Not eos alone: templates end turns by special tokens of their own.
        stop_tokens = tuple(
            str(token) for token in {tokenizer.eos_token, *tokenizer.added_tokens_encoder} if token
        )
        spans = []
        for i, turn in enumerate(self.turns):
            if turn["role"] == "assistant" and turn.get("weight", 1):
                prompt = self._beginning(i, prompts=True)
                # Some prompts have a <think> that this answer does not have.
                is_prompt = self.text.startswith(prompt)
                start = (
                    len(prompt) if is_prompt else max(self.end(i), num_shared(prompt, self.text))
                )
                end = self.end(i + 1)
                stripped = self.text[:end].rstrip()  # after a stop token the model has stopped
                spans.append((start, len(stripped) if stripped.endswith(stop_tokens) else end))
        return spans

    def left_out(self, trained: list[Turn]) -> list[str]:
        """The kinds of parts without which the text is the same: the template ignores them.

        CUT_ANSWER is among them if it does not print all of the last answer, EMPTY_ANSWER if it
        prints nothing of an answer made of tool calls alone, or with reasoning.
        trained: turns that are, unless their weight is 0.
        """
        turns, tools = self.turns, self.options.get("tools", [])
        kinds = self.cut_turns(trained)
        has_parts = (
            turn.keys() - {"role", "content", "weight"} or turn["role"] == "tool" for turn in turns
        )
        if not tools and not any(has_parts):
            return kinds
        # Many templates print only the reasoning that follows the last question.
        last_user = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=0)
        earlier, later = turns[:last_user], turns[last_user:]
        changed = {
            "tools": (turns, []),
            "tool calls": ([without(turn, "tool_calls") for turn in turns], tools),
            "tool results": (
                [turn | {"content": ""} if turn["role"] == "tool" else turn for turn in turns],
                tools,
            ),
            "reasoning": (earlier + [without(turn, *REASONING) for turn in later], tools),
            "the reasoning of earlier answers": (
                [without(turn, *REASONING) for turn in earlier] + later,
                tools,
            ),
        }
        # By rendering without a part, not by searching the text for it: the name of a dropped call
        # stands in the list of tools as well (notes/log.md).
        text = self.text
        # A part without which the template fails is one that it prints.
        for kind, others in changed.items():
            with suppress(Exception):  # of the template
                if others != (turns, tools) and self.of(others[0], tools=others[1] or None) == text:
                    kinds.append(kind)
        prints_reasoning = not any("reasoning" in kind for kind in kinds)
        is_silent = "tool calls" in kinds and any(
            turn["role"] == "assistant"
            and turn.get("weight", 1)
            and not turn["content"].strip()
            and not (prints_reasoning and any(turn.get(key) for key in REASONING))
            for turn in trained
        )
        return [*kinds, EMPTY_ANSWER] if is_silent else kinds

    def cut_turns(self, trained: list[Turn]) -> list[str]:
        """The kinds of turns that the text does not contain as they are: R1's and Qwen3's templates
        remove reasoning from a content, of earlier answers or of all; others print no system turn.
        """
        # Without white space, which templates trim and write anew.
        text = "".join(self.text.split())
        answers = [t for t in trained if t["role"] == "assistant" and t.get("weight", 1)]
        kinds = ["a part of earlier answers"] * (len(answers) - 1) + [CUT_ANSWER]
        # Not results of tools, which templates write as JSON.
        prompts = [turn for turn in self.turns if turn["role"] in ("system", "developer", "user")]
        named = [
            *zip(kinds, answers, strict=False),
            *((f"a part of {turn['role']} turns", turn) for turn in prompts),
        ]
        cut = (kind for kind, turn in named if "".join(turn["content"].split()) not in text)
        return list(dict.fromkeys(cut))

    def end(self, num_turns: int) -> int:
        """The length of the rendering of the first turns, with which the text starts."""
        if num_turns in (0, len(self.turns)):
            return len(self.text) if num_turns else 0
        beginning = self._beginning(num_turns)
        if not self.text.startswith(beginning):
            raise self._unstable()
        return len(beginning)

    def _beginning(self, num_turns: int, prompts: bool = False) -> str:
        try:
            return self.of(self.turns[:num_turns], prompts)
        except Exception:  # anything that a template raises, such as "a user's turn must follow"
            raise self._unstable() from None

    def _unstable(self) -> UserError:
        return UserError(
            "the chat template renders earlier turns differently when later turns are added, so"
            f" the assistant's tokens of {str(self.turns[-1]['content'])[:60]!r} cannot be"
            " identified. Set model.chat_template to a template with {% generation %}...{%"
            " endgeneration %} around the assistant's turns; or train all tokens, without"
            " assistant_only_loss and without weights of turns"
        )


def inside(spans: Sequence[Span], offsets: Sequence[Span]) -> list[bool]:
    """Whether each token, by its characters' (start, end), has one inside a span.
    Spans are in order.
    """
    marks, position = [], 0
    for start, end in offsets:
        while position < len(spans) and spans[position][1] <= start:
            position += 1
        marks.append(
            position < len(spans) and max(start, spans[position][0]) < min(end, spans[position][1])
        )
    return marks
