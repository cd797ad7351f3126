"""The chat template and the stop token: set as the recipe says, and tried on the first row."""

import difflib
import re
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .. import shipped
from ..recipe import UserError
from .columns import COLUMNS, Task

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers and TRL look for it
_REMEDY = "set model.chat_template to qwen2.5, zephyr or a .jinja file"


def set_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None, eos_token: str | None) -> None:
    """Give the tokenizer the recipe's template (a shipped one's name, or a file) and stop token; null leaves its own.

    UserError if the file cannot be read, or the stop token is no single token of the vocabulary.
    """
    if chat_template is not None:
        file = shipped.templates().get(chat_template) or shipped.resolve(chat_template)
        try:
            tokenizer.chat_template = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"model.chat_template: {chat_template} cannot be read: {error}") from None
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            name = tokenizer.name_or_path or "the tokenizer"
            added: Any = tokenizer.added_tokens_encoder
            near = difflib.get_close_matches(eos_token, added, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it stops at {tokenizer.eos_token!r} if left out"
            raise UserError(f"model.eos_token: {eos_token!r} is no single token of {name}{hint}")
        tokenizer.eos_token = eos_token


def check_template(tokenizer: PreTrainedTokenizerBase, task: Task, assistant_only_loss: bool, dataset: Dataset) -> None:
    """UserError if the tokenizer's chat template cannot render the first row, or cannot mark what is to be trained.

    assistant_only_loss: SFT's; DPO trains on the last turn whatever the template marks.
    """
    name = tokenizer.name_or_path or "the tokenizer"
    template = _template(tokenizer, name)
    only_assistant = assistant_only_loss and task == "sft"
    if only_assistant and not _GENERATION.search(template):
        raise UserError(
            f"{name}: assistant_only_loss needs a chat template that marks the assistant's words, and this one "
            "has no {% generation %}. Set model.chat_template to qwen2.5, zephyr or a template with "
            "{% generation %}...{% endgeneration %} around what the assistant says and its stop token, "
            "or set trainer.assistant_only_loss to false"
        )
    for column in COLUMNS[task]:
        turns = dataset[0][column]
        text, num_marked = _render(tokenizer, turns, name, only_assistant)
        said = [turn["content"].strip() for turn in turns if turn["role"] == "assistant"]
        if said[-1] not in text:
            raise UserError(
                f"{name}: the chat template leaves out what the assistant says: {said[-1][:60]!r} of the first row "
                f"is not in its rendering, {text[:120]!r}; {_REMEDY} that prints message['content']"
            )
        if only_assistant and num_marked == 0:
            raise UserError(
                f"{name}: the chat template has {{% generation %}} but marks no token of the first row; "
                "put the markers around message['content'] of the assistant's turns"
            )


def _template(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    if not tokenizer.chat_template:
        raise UserError(f"{name}: has no chat template; {_REMEDY}")
    try:
        return tokenizer.get_chat_template()
    except ValueError:  # several named templates, none of them "default"
        found = ", ".join(tokenizer.chat_template)
        raise UserError(f"{name}: has the chat templates {found}, and no default; {_REMEDY}") from None


def _render(
    tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, Any]], name: str, only_assistant: bool
) -> tuple[str, int]:
    """The conversation as text, and the number of tokens marked as the assistant's."""
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        if not only_assistant:
            return str(text), 0
        marked: Any = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        return str(text), sum(marked["assistant_masks"])
    except OverflowError:  # transformers, where the markers enclose nothing
        return str(text), 0
    except Exception as error:  # a template is a program of its own: it may raise anything
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        line = f" (line {error.lineno} of the template)" if hasattr(error, "lineno") else ""  # pyright: ignore
        raise UserError(f"{name}: the chat template fails on the first row: {said}{line}") from None
