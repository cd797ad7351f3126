"""The loss of TRL 1.15 on CPUs: the log-probabilities of labels in plain torch.

TRL 1.15 computes them by Triton kernels alone, so that nothing could be trained without a GPU; TRL
1.16 has a way in torch. This file leaves with TRL 1.15.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import torch
import trl
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from trl.trainer import utils

from ..core.patches import patched

TILE_NUMEL = 1 << 27
"""Logits that are held at a time, as in TRL's kernels: 4,096 tokens x 32,768 words."""
NAME = "trl.trainer.utils._ChunkedLogProbFunction"
_for_this_process = ExitStack()


class PlainLogProbs:
    """In place of TRL's autograd function of this name, for tensors that are not on a GPU."""

    on_gpus: Any = None

    @classmethod
    def apply(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        scale: float,
        outputs: Sequence[str],
    ) -> Sequence[Tensor | None]:
        """Return log_probs, entropy, log_sum_sq_probs, mean_logits and is_top1, [tokens] each, or
        None for those that are not in `outputs`; see TRL's FusedCausalLMOutput.

        hidden: [tokens, features]; weight: [words, features].
        """
        if hidden.is_cuda:
            settings = (temperature, chunk_size, softcap, scale, outputs)
            return cls.on_gpus.apply(hidden, weight, bias, labels, *settings)
        num_tokens = max(1, TILE_NUMEL // len(weight))
        tiles = [
            checkpoint(
                _tile, h, weight, bias, of_h, temperature, softcap, scale, use_reentrant=False
            )
            for h, of_h in zip(hidden.split(num_tokens), labels.split(num_tokens), strict=True)
        ]
        columns: Any = zip(*tiles, strict=True)
        names = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        return tuple(
            torch.cat(column) if name == "log_probs" or name in outputs else None
            for name, column in zip(names, columns, strict=True)
        )


def _tile(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float,
    softcap: float | None,
    scale: float,
) -> tuple[Tensor, ...]:
    logits = linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    log_probs = logits.log_softmax(-1)
    of_labels = log_probs.gather(-1, labels[:, None]).squeeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    with torch.no_grad():
        log_sum_sq = (2 * log_probs).logsumexp(-1)
        rest = log_sum_sq, logits.mean(-1), logits.argmax(-1) == labels
    return of_labels, entropy, *rest


def plain_forward(model: Any, tokens: Tensor) -> Any:
    """An output with the `loss` of tokens [batch, length], all of which are labels. TRL 1.15 looks
    for labels by their values, which the fake tensors of a plan do not have.
    """
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    head = model.get_output_embeddings()
    of_labels, *_ = PlainLogProbs.apply(
        *(hidden.flatten(0, 1), head.weight, head.bias, tokens[:, 1:].flatten()),
        *(1.0, 0, None, 1.0, ()),
    )
    return SimpleNamespace(loss=-cast(Tensor, of_labels).mean())


def needs_plain_loss() -> bool:
    """Whether TRL is 1.15."""
    return Version(trl.__version__) < Version("1.16")


def use_plain_loss() -> None:
    """Let TRL 1.15 train without a GPU; later versions are not changed."""
    if needs_plain_loss():
        PlainLogProbs.on_gpus = vars(utils)["_ChunkedLogProbFunction"]
        _for_this_process.enter_context(patched(NAME, PlainLogProbs))
