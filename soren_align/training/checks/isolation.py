"""Whether examples in one packed sequence are separate: a change of one moves no logit of another.

Some architectures keep them apart by position ids or sequence lengths, others ignore both. Before the first step the
model runs on a short sequence of real examples, and again with other tokens in the first one: it is probed as it will
train, with its attention, kernels and wrappers, and no list of architectures is needed.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ...core.errors import UserError

NUM_EXAMPLES, NUM_TOKENS = 3, 16
"""A probe's examples and the tokens of each: short, as logits have an entry for each token of the vocabulary."""
TOLERANCE = 1e-4
"""Largest change of the other examples' logits, relative to the change of the example's own. 20 small random models
(tests/training/test_separation.py has some) are at exactly 0, in float32 and bfloat16 (those with experts at 2e-8 with
some kernels), or above 8e-4."""


class SeparationCheck(TrainerCallback):
    """Raise UserError before the first step if packed examples are not separate. Collective."""

    def __init__(self, dataset: Any, collator: Any, place: str):
        """dataset, collator: the trainer's own, with packed examples. place: the recipe's key that packs them."""
        self.dataset, self.collator, self.place = dataset, collator, place

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Run the probe on the wrapped, possibly sharded model, which has loaded its checkpoint."""
        examples = probe_examples(self.dataset)
        if len(examples) < 2:
            return
        try:
            change, noise = cross_talk(model, self.collator, examples, args.device)
        except ValueError as error:  # such as an architecture that needs a kernel for it
            raise UserError(f"{self.place}: packed examples cannot be kept separate: {error}") from error
        if change > max(TOLERANCE, 10 * noise):
            raise UserError(f"{self.place}: {_problem(model, change)}")


def probe_examples(dataset: Any) -> list[list[int]]:
    """Return the beginnings of the first examples of a dataset, each NUM_TOKENS long or shorter."""
    examples: list[list[int]] = []
    for sequence in dataset:
        start = 0
        for length in sequence.get("seq_lengths") or [len(sequence["input_ids"])]:
            examples.append(sequence["input_ids"][start : start + min(length, NUM_TOKENS)])
            start += length
            if len(examples) == NUM_EXAMPLES:
                return examples
    return examples


def cross_talk(model: Any, collator: Any, examples: list[list[int]], device: Any) -> tuple[float, float]:
    """Return (change of the other examples' logits, noise), relative to the change of the first example's own.

    The first example's tokens are changed, then the last one's: examples before it cannot see it in a causal model, so
    that their change is numerical noise (such as of experts that get other numbers of tokens). The model runs as in
    training, with equal dropout; neither its mode nor the random numbers of training are changed. Collective.
    """
    vocabulary = sorted({token for example in examples for token in example})
    following = dict(zip(vocabulary, [*vocabulary[1:], vocabulary[0]], strict=True))

    def logits(changed: int | None = None) -> Tensor:
        tokens = [[following[t] for t in e] if i == changed else e for i, e in enumerate(examples)]
        joined = [token for example in tokens for token in example]
        feature = {"input_ids": joined, "labels": joined, "seq_lengths": [len(example) for example in tokens]}
        batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in collator([feature]).items()}
        del batch["labels"]
        with torch.no_grad(), torch.random.fork_rng(_cuda_devices(device)):
            torch.manual_seed(0)
            return model(**batch, use_cache=False).logits[0].double()

    was_training = model.training
    model.train()
    original = logits()
    first, last = (_rms_by_token(logits(changed) - original) for changed in (0, len(examples) - 1))
    model.train(was_training)
    num_first, num_last = len(examples[0]), len(examples[-1])
    own = max(_mean(first[:num_first]), torch.finfo(torch.float64).tiny)
    return _mean(first[num_first:]) / own, _mean(last[:-num_last]) / own


def _rms_by_token(change: Tensor) -> Tensor:
    return change.square().mean(-1).sqrt()


def _mean(changes: Tensor) -> float:
    return changes.mean().item()


def _cuda_devices(device: Any) -> list[Any]:
    return [device] if torch.device(device).type == "cuda" else []


def _problem(model: Any, change: float) -> str:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    attention = str(getattr(base.config, "_attn_implementation", None))
    other = ""
    if base._supports_flash_attn and "flash" not in attention:
        (flash, *_) = base._compatible_flash_implementations or ["flash_attention_2"]
        other = f"model.attn_implementation: {flash} (on a GPU; checked in the same way), "
    return (
        "examples in one sequence are not separate: other tokens in one example change the logits of the others, by "
        f"{change:.1%} of the change of its own. {type(base).__name__} (attention {attention}) mixes them; write "
        f"{other}packing: false, or packing_strategy: wrapped to let examples attend to each other"
    )
