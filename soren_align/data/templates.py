"""The chat template and the stop token: set by the recipe, and checked on the first example."""

from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..core import shipped
from ..core.errors import UserError, did_you_mean
from ..core.files import read_text
from ..tasks import TASKS, TaskName
from .arrow import has_turns
from .encode import ChatEncoder, has_marks
from .rendering import template_errors
from .tool_calls import for_template, template_options

_REMEDY = "set model.chat_template to qwen2.5, zephyr or a .jinja file"


def set_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None, eos_token: str | None) -> None:
    """Set the recipe's template (a shipped one's name, or a file) and stop token; null leaves the tokenizer's own.

    Raises UserError if the file cannot be read, or the stop token is no single token of the vocabulary.
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
    task: TaskName,
    assistant_only_loss: bool,
    dataset: Dataset,
    completion_only_loss: bool | None = None,
) -> list[str]:
    """Check the first example; returns notices, such as of a stop token that is not the template's.

    Raises UserError if the chat template cannot render the example, if the tokens to train are neither marked by it nor
    can be derived, or leave out the stop token; and for plain texts, if a setting needs conversations.
    assistant_only_loss: SFT's; DPO trains on the last turn whatever the template marks.
    """
    name = tokenizer.name_or_path or "the tokenizer"
    only_assistant = assistant_only_loss and task == "sft"
    if completion_only_loss and task == "sft" and "completion" not in dataset.column_names:
        raise UserError(
            "trainer.completion_only_loss needs examples of prompts and completions, and these have "
            f"{', '.join(dataset.column_names)}; for conversations write trainer.assistant_only_loss"
        )
    if not has_turns(dataset):
        return _check_plain(tokenizer, name, only_assistant, dataset)
    _template(tokenizer, name)
    notices: list[str] = []
    options = template_options(dataset[0])
    for turns in _conversations(dataset[0], task):
        text, ids, marked = _render(tokenizer, turns, options, name, only_assistant)
        answers = [turn["content"].strip() for turn in turns if turn["role"] == "assistant"]
        if answers[-1] not in text:
            raise UserError(
                f"{name}: the chat template leaves out the assistant's turns: {answers[-1][:60]!r} of the first "
                f"example is not in its rendering, {text[:120]!r}; {_REMEDY} that prints message['content']"
            )
        if only_assistant and not any(marked):
            raise UserError(
                f"{name}: the chat template has {{% generation %}} but marks no token of the first example; "
                "put the markers around message['content'] of the assistant's turns"
            )
        notices = _stop_problem(tokenizer, name, ids, marked if only_assistant else [True] * len(ids))
    return notices


def _conversations(example: dict[str, Any], task: TaskName) -> list[list[dict[str, Any]]]:
    if example.get("completion"):
        chats = [example["prompt"] + example["completion"]]
    else:
        chats = [example[column] for column in TASKS[task].columns]
    return [[{key: value for key, value in turn.items() if key != "weight"} for turn in chat] for chat in chats]


def _check_plain(tokenizer: PreTrainedTokenizerBase, name: str, only_assistant: bool, dataset: Dataset) -> list[str]:
    if only_assistant:
        raise UserError(
            f"trainer.assistant_only_loss needs conversations, and these examples are plain texts "
            f"({', '.join(dataset.column_names)}): set it to false (of prompt and completion, the completion alone is "
            "trained anyway), or turn them into conversations by data.train.columns: {instruction: prompt, output: "
            "completion}"
        )
    if not tokenizer.eos_token:
        raise UserError(f"{name}: has no eos_token to end plain texts with; write model.eos_token")
    return []


def _stop_problem(tokenizer: PreTrainedTokenizerBase, name: str, ids: list[int], trained: list[bool]) -> list[str]:
    """Notices of why the model would not learn to stop. Raises UserError if the cause is the template's marks."""
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
        names = ", ".join(tokenizer.chat_template)
        raise UserError(f"{name}: has the chat templates {names}, and no default; {_REMEDY}") from None


def _render(
    tokenizer: PreTrainedTokenizerBase,
    turns: list[dict[str, Any]],
    options: dict[str, Any],
    name: str,
    only_assistant: bool,
) -> tuple[str, list[int], list[bool]]:
    """(text, tokens, assistant marks of the tokens) of a conversation; the marks are [] unless `only_assistant`."""
    plain = for_template(turns)
    apply: Any = tokenizer.apply_chat_template
    with template_errors(f"{name}: the chat template fails on the first example"):
        text = str(apply(plain, tokenize=False, **options))
        ids = apply(plain, return_dict=True, **options)
        if not only_assistant:
            return text, ids["input_ids"], []
        if not has_marks(tokenizer.get_chat_template(tools=options.get("tools"))):
            (example,) = ChatEncoder(tokenizer, assistant_only=True).conversations([turns], [options])
            return text, example.sides[0].ids, example.sides[0].trained
        try:
            marked = apply(plain, return_dict=True, return_assistant_tokens_mask=True, **options)
        except OverflowError:  # transformers, where the markers enclose nothing
            return text, ids["input_ids"], []
        return text, ids["input_ids"], [bool(mark) for mark in marked["assistant_masks"]]
