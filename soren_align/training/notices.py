"""Findings about data and chat template that do not stop a run."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import trl
from trl.chat_template_utils import get_training_chat_template

from .. import data
from ..core.errors import UserError
from ..recipe import Recipe, columns_text, compute_dtype
from ..recipe.parallel import gradient_notice, trainer_value

UNKNOWN_SHARE = 0.001
"""Share of unknown tokens from which a notice reports them. A tenth of a percent is a word in every
other page."""


def setup_notices(
    setup: Any, max_length: int | None, positions: int | None, template_notices: Sequence[str]
) -> Iterator[str]:
    """Yield the notices about the tokens that are trained.

    setup: a TrainingSetup, whose module imports this one. positions: of the model, if its config
    has a number. template_notices: those about the chat template, one of which is about the stop
    token.
    """
    recipe, counts, packing = setup.recipe, setup.account, setup.packing
    if not counts.stop_token_trained and not template_notices:
        yield (
            f"the stop token is never trained, because trainer.max_length {max_length} cuts every "
            "answer"
        )
    yield from _loss_notices(setup)
    repeats = any(source.weight > 1 for source in recipe.data.sources)
    if counts.pairs:
        yield from counts.pairs.notices(setup.splits.train.dataset, repeats=repeats)
    if counts.labels:
        good, bad = (
            trainer_value(recipe, f"{kind}_weight") for kind in ("desirable", "undesirable")
        )
        yield from counts.labels.notices(setup.splits.train.dataset, good, bad, repeats)
    if packing:
        yield from packing.notices()
    yield from gradient_notice(recipe.run.parallel, compute_dtype(recipe))
    # In all other sequences positions restart at each example.
    longest = counts.lengths["max"]
    if packing and packing.strategy == "wrapped":
        longest = max_length or longest
    longest = min(longest, max_length or longest)
    if positions is not None and longest > positions:
        yield (
            f"examples have up to {longest:,} tokens, but the model has {positions:,} positions; "
            "lower trainer.max_length"
        )
    for kind, number in counts.num_left_out.items():
        yield (
            f"the chat template leaves out {kind} of {number:,} of {counts.num_examples:,} "
            "examples, so that the model does not see this part. Another template may print this "
            "part"
        )
    num_tokens = counts.num_tokens + counts.num_truncated_tokens
    share = counts.num_unknown_tokens / max(1, num_tokens)
    if share >= UNKNOWN_SHARE:
        yield (
            f"{counts.num_unknown_tokens:,} of {num_tokens:,} tokens ({share:.2%}) are "
            f"{setup.tokenizer.unk_token}: the tokenizer does not know this text, so the model "
            "does not see this text. Use a model whose tokenizer does"
        )


def _loss_notices(setup: Any) -> Iterator[str]:
    """Yield notices about which tokens are in the loss, and whether the template is used."""
    recipe, dataset = setup.recipe, setup.splits.train.dataset
    columns = dataset.column_names
    if "messages" in columns and "assistant_only_loss" not in recipe.trainer:
        yield (
            "the loss contains all tokens of conversations, also the user's messages. To train "
            "only on the answers, write trainer.assistant_only_loss: true. To hide this notice, "
            "write false for this key"
        )
    if "completion" in columns and not data.has_turns(dataset) and setup.tokenizer.chat_template:
        # The `columns` by which prompts and answers in plain text become turns.
        own: dict[str, str] = {**recipe.data.sources[0].columns}
        answers = {"instruction": "prompt", "output": "completion"}
        turns = {ours: own.get(column, column) for ours, column in answers.items()}
        yield (
            "prompts and answers are plain texts and are trained without the model's chat "
            "template, but `soren-align chat` and some suites use the template. To train with the "
            f"template, write data.train.columns: {columns_text(turns)}"
        )


def plain_pair_notices(recipe: Recipe, train: Any, tokenizer: Any) -> list[str]:
    """Return a notice about plain pairs that are rendered with the chat template, unless the recipe
    has the key.

    train: the loaded examples. Raises UserError if there is no template.
    """
    plain = next((f for f in (data.PLAIN_PAIRS, data.PLAIN_LABELLED) if f in train.layout), None)
    if plain is None:
        return []
    key, first = "data.train.apply_chat_template", train.dataset[0]
    turns = first["chosen"] if "chosen" in first else first["prompt"] + first["completion"]
    without = f"train the texts as they are, write {key}: false"
    if not tokenizer.chat_template:
        raise UserError(
            f"{train.source['path']}: has {plain}, but the tokenizer has no chat "
            f"template; write model.chat_template, or, to {without}"
        )
    # Texts that contain <|im_start|> and the like were rendered before: a second template around
    # them would be trained too.
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    if marks := sorted(mark for mark in special if any(mark in turn["content"] for turn in turns)):
        return [
            f"the first example contains {', '.join(marks)}, and is rendered with the chat "
            f"template. If the texts are already rendered, write {key}: false"
        ]
    if all(source.apply_chat_template is not None for source in recipe.data.sources):
        return []
    return [
        "prompts and answers are plain texts, and are trained with the model's chat template. To "
        f"{without}. To hide this notice, write true for this key"
    ]


def template_remedy(tokenizer: Any) -> str:
    """What to set where the chat template leaves out answers or their stop token: TRL's training
    template, if it has one of this template.
    """
    with contextlib.suppress(Exception):  # TRL does not support the template
        text = get_training_chat_template(tokenizer)
        for file in Path(trl.__file__).parent.glob("chat_templates/*_training.jinja"):
            if file.read_text(encoding="utf-8") == text:
                return f"set model.chat_template to TRL's training template of this model, {file}"
    return data.TEMPLATE_REMEDY
