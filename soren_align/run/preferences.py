"""The changes by DPO: the log-probability of the chosen answers, and the length and repetitions
of sampled answers.

The loss only sees the difference of two log-probabilities, so both may fall. docs/data.md has the
reasons and sources.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.text import count

MIN_FALL = 0.1
"""Nats of an answer: below it, the change of the chosen answers is not reported."""
NGRAM = 4
LONGER = 1.5
"""The factor from which sampled answers are reported as longer."""
REPEATED, MORE_REPEATED = 0.2, 0.1
"""The share of repeated n-grams from which it is reported, if it rose by the second number."""
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
"""Chinese and Japanese have no spaces: each character counts as a word."""


def sample_changes(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what changed in the answers of samples.jsonl from step 0 to its end; {} without both.

    num_prompts; characters: [mean at the start, at the end]; repeated: the same of
    `repeated_share`.
    """
    # The answers at the start, and after it, by prompt.
    # The last answer after step 0 counts: later lines replace earlier ones. The start's answers are
    # to the same prompts, so that a change is the training's.
    answers: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for line in lines:
        answers[line["step"] > 0][json.dumps(line["prompt"])] = str(line["completion"])
    sides = [side.values() for side in answers]
    if not sides[0] or len(sides[0]) != len(sides[1]):
        return {}
    return {
        "num_prompts": len(sides[0]),
        "characters": [sum(map(len, texts)) / len(texts) for texts in sides],
        "repeated": [sum(map(repeated_share, texts)) / len(texts) for texts in sides],
    }


def repeated_share(text: str) -> float:
    """Return the share of a text's n-grams of words that are equal to an earlier one, 0 for a text
    without any.
    """
    words = _WORD.findall(text.casefold())
    ngrams = list(zip(*(words[i:] for i in range(NGRAM)), strict=False))
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def describe_preferences(training: Mapping[str, Any], *, remedy: bool = True) -> list[str]:
    """Describe what may be a concern after DPO, a sentence each; [] if nothing is.
    training: run.json's section.

    remedy: whether the last sentence names one.
    """
    preferences, samples = training.get("preferences", {}), training.get("samples")
    changes, problems, texts = preferences.get("log_probability_changes"), [], []
    if changes and changes["chosen"] <= -MIN_FALL:
        chosen, rejected = changes["chosen"], changes["rejected"]
        direction = "by" if rejected < 0 else "rose by"
        fall = (
            f"the log-probability of the chosen answers fell by {-chosen:.3g} on average, that of "
            f"the rejected ones {direction} {abs(rejected):.3g}."
        )
        if rejected < chosen:
            texts.append(
                f"{fall} This is normal in DPO; it is a concern if sampled answers become longer, "
                "repeat themselves or make no sense"
            )
        else:
            problems.append(
                f"{fall} The model has not learned the preference: check the labels, or lower the "
                "learning rate"
            )
    if samples:
        (before, after), (less, more) = samples["characters"], samples["repeated"]
        answers = f"the sampled answers to {count(samples['num_prompts'], 'prompt')}"
        if after >= LONGER * before:
            texts.append(
                f"{answers} became longer: from {before:,.0f} to {after:,.0f} characters on average"
            )
        if more >= max(REPEATED, less + MORE_REPEATED):
            texts.append(
                f"{answers} repeat themselves: {more:.0%} of their sequences of {NGRAM} words are "
                f"repeated, {less:.0%} at the start"
            )
    losses = preferences.get("loss_type", [])
    if texts and remedy and losses and "sft" not in losses:
        texts[-1] += (
            f". If this is a concern, try trainer.loss_type: [{', '.join([*losses, 'sft'])}]"
        )
    return [*problems, *texts]
