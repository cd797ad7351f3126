"""Conversations about a zoo in the layouts of the paper's two datasets, and the split of a recipe."""

from types import SimpleNamespace

import pytest
from soren_align.core.errors import UserError
from soren_align.data import load_split
from soren_align.recipe import DataSplit

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def split(path, split="train", **keys):
    """A DataSplit of any path, for functions that read its keys only."""
    defaults = {key: field.get_default(call_default_factory=True) for key, field in DataSplit.model_fields.items()}
    return SimpleNamespace(**defaults | {"path": str(path), "split": split} | keys)


def refused(spec, task="sft"):
    """The message with which a split is not loaded."""
    with pytest.raises(UserError) as caught:
        load_split(spec, task)
    return str(caught.value)


def animal_text(i):
    return f"Animal number {i} of the zoo eats {'grass and hay ' * (i % 7)}and sleeps in house {i % 5}."


def chat(i=0, turns=1, system=False):
    """A conversation whose length depends on i."""
    told = [{"role": "system", "content": "You keep a zoo."}] if system else []
    for turn in range(turns):
        told += [{"role": "user", "content": f"{'Please tell me: ' * (i % 4)}what about animal {i}, part {turn}?"},
                 {"role": "assistant", "content": animal_text(i + turn) + " ü🦓"}]  # fmt: skip
    return told


def chat_row(i=0, turns=1, system=False):
    """A row in ultrachat_200k's columns."""
    messages = chat(i, turns, system)
    return {"prompt": messages[0]["content"], "prompt_id": str(i), "messages": messages}


def pair_row(i=0, turns=1, system=False):
    """A row in ultrafeedback_binarized's columns."""
    chosen = chat(i, turns, system)
    rejected = [*chosen[:-1], {"role": "assistant", "content": "I do not know. " * (1 + i % 5)}]
    prompt = {"prompt": chosen[0]["content"], "prompt_id": str(i), "messages": chosen}
    return {**prompt, "chosen": chosen, "rejected": rejected, "score_chosen": 8.0, "score_rejected": 2.0}
