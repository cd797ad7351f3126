"""The chat template and the stop token: set as the recipe says, and tried on the first row."""

import re
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .. import shipped
from ..errors import UserError, did_you_mean
from ..files import read_text
from .columns import COLUMNS, Task
from .rendering import refuse_endless, the_templates
from .split import has_turns

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers and TRL look for it
_REMEDY = "set model.chat_template to qwen2.5, zephyr or a .jinja file"


def set_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None, eos_token: str | None) -> None:
    """Give the tokenizer the recipe's template (a shipped one's name, or a file) and stop token; null leaves its own.

    UserError if the file cannot be read, or the stop token is no single token of the vocabulary.
    """
    if chat_template is not None:
        file = shipped.templates().get(chat_template) or shipped.resolve(chat_template)
        try:
            tokenizer.chat_template = read_text(file)
        except UserError as error:
            raise UserError(f"model.chat_template: {chat_template} cannot be read: {error}") from None
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            name = tokenizer.name_or_path or "the tokenizer"
            added: Any = tokenizer.added_tokens_encoder
            hint = did_you_mean(eos_token, added, f"it stops at {tokenizer.eos_token!r} if left out")
            raise UserError(f"model.eos_token: {eos_token!r} is no single token of {name}{hint}")
        tokenizer.eos_token = eos_token


def check_template(
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    assistant_only_loss: bool,
    dataset: Dataset,
    completion_only_loss: bool | None = None,
) -> list[str]:
    """Notices of what the first row shows, such as a stop token that is not the template's.

    UserError if the chat template cannot render the row, or cannot mark what is to be trained, or leaves the stop token
    out of it; and where the rows are plain texts, if something is asked for that only conversations have.
    assistant_only_loss: SFT's; DPO trains on the last turn whatever the template marks.
    """
    name = tokenizer.name_or_path or "the tokenizer"
    only_assistant = assistant_only_loss and task == "sft"
    if completion_only_loss and task == "sft" and "completion" not in dataset.column_names:
        raise UserError(
            "trainer.completion_only_loss needs rows of prompts and completions, and these have "
            f"{', '.join(dataset.column_names)}; for conversations write trainer.assistant_only_loss"
        )
    if not has_turns(dataset):
        return _check_plain(tokenizer, name, only_assistant, dataset)
    template = _template(tokenizer, name)
    if only_assistant and not _GENERATION.search(template):
        raise UserError(
            f"{name}: assistant_only_loss needs a chat template that marks the assistant's words, and this one "
            "has no {% generation %}. Set model.chat_template to qwen2.5, zephyr or a template with "
            "{% generation %}...{% endgeneration %} around what the assistant says and its stop token, "
            "or set trainer.assistant_only_loss to false"
        )
    notices: list[str] = []
    row = dataset[0]
    for turns in [row["prompt"] + row["completion"]] if "completion" in row else [row[c] for c in COLUMNS[task]]:
        text, ids, marked = _render(tokenizer, turns, name, only_assistant)
        said = [turn["content"].strip() for turn in turns if turn["role"] == "assistant"]
        if said[-1] not in text:
            raise UserError(
                f"{name}: the chat template leaves out what the assistant says: {said[-1][:60]!r} of the first row "
                f"is not in its rendering, {text[:120]!r}; {_REMEDY} that prints message['content']"
            )
        if only_assistant and not any(marked):
            raise UserError(
                f"{name}: the chat template has {{% generation %}} but marks no token of the first row; "
                "put the markers around message['content'] of the assistant's turns"
            )
        notices = _stop_problem(tokenizer, name, ids, marked if only_assistant else [True] * len(ids))
    return notices


def _check_plain(tokenizer: PreTrainedTokenizerBase, name: str, only_assistant: bool, dataset: Dataset) -> list[str]:
    if only_assistant:
        raise UserError(
            f"trainer.assistant_only_loss needs conversations, and these rows are plain texts "
            f"({', '.join(dataset.column_names)}): set it to false (of prompt and completion, the completion alone is "
            "trained anyway)"
        )
    if not tokenizer.eos_token:
        raise UserError(f"{name}: has no eos_token to end plain texts with; write model.eos_token")
    return []


def _stop_problem(tokenizer: PreTrainedTokenizerBase, name: str, ids: list[int], trained: list[bool]) -> list[str]:
    """What keeps the model from learning to stop, as notices; UserError where the mark-up does."""
    last = next((i for i in reversed(range(len(ids))) if str(tokenizer.decode([ids[i]])).strip()), 0)
    end, eos = str(tokenizer.convert_ids_to_tokens(ids[last])), tokenizer.eos_token
    added: Any = tokenizer.added_tokens_encoder
    if ids[last] != tokenizer.eos_token_id and end not in added:
        return [f"the chat template ends answers without a stop token: the model will not learn to stop at {eos}"]
    if not trained[last]:
        raise UserError(
            f"{name}: the chat template leaves {end} out of {{% generation %}}, so that the model would never learn to "
            "stop; put it before {% endgeneration %}"
        )
    if ids[last] != tokenizer.eos_token_id:
        return [f"answers end with {end}, but the model stops at {eos}: write `eos_token: '{end}'` under model"]
    return []


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
) -> tuple[str, list[int], list[bool]]:
    """The conversation as text and as tokens, and which are marked as the assistant's (none if nobody asks)."""
    refuse_endless(tokenizer, name, turns)
    with the_templates(f"{name}: the chat template fails on the first row"):
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
        ids: Any = tokenizer.apply_chat_template(turns, return_dict=True)
        if not only_assistant:
            return text, ids["input_ids"], []
        try:
            marked: Any = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        except OverflowError:  # transformers, where the markers enclose nothing
            return text, ids["input_ids"], []
        return text, ids["input_ids"], [bool(mark) for mark in marked["assistant_masks"]]
