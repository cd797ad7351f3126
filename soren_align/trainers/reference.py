"""The reference of a DPO: the key of its cached log-probabilities, and the check that it is the starting model.

Before the first update the policy is its own reference: all rewards, beta times the change of an answer's
log-probability, are 0, and the sigmoid loss is ln 2. Log-probabilities of another model, from a cache or from a
reference that was loaded from elsewhere, would silently train towards another goal.
"""

import hashlib
import json
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd
from transformers import TrainerCallback

from ..errors import UserError
from ..sharding.ranks import Ranks
from ..spectral.precision import BACKENDS, FULL
from .identity import LIBRARIES, weights_hash

ROUNDING = {torch.float32: 2.0**-15, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
"""Root mean square of the rounding error of a token's log-probability. A Llama of 8 layers of 256 columns with random
weights and logits of RMS 2.6 is 0.057 from float32 in bfloat16, 0.0070 in float16, and in float32 5.9e-6 from float64;
with logits of RMS 0.3 an eighth of each. Two kernels differ by less. Float32 has a margin for the sums of wide layers.
"""
ROUTED = 2.0**-3
"""The same with experts: rounding changes a router's choice between two that are nearly equal."""
SIGMAS = 6.0
_PRECOMPUTED_BY = ("max_length", "truncation_mode", "ld_alpha", "bf16", "fp16", "per_device_train_batch_size")
_PRECOMPUTED_BY += ("per_device_eval_batch_size", "precompute_ref_batch_size", "world_size")


def reference_key(trainer: Any, ranks: Ranks) -> str:
    """Return the key of the reference's cached log-probabilities: of all that they depend on but the examples.

    Collective. TRL's own key has the weights alone, and is the same for all models under ZeRO 3, whose state_dict is
    empty.
    """
    model, device = trainer.ref_model or trainer.model, trainer.args.device
    parts = [
        trainer._precompute_model_hash,
        weights_hash(model, ranks) if trainer.is_deepspeed_enabled else None,
        {**trainer.model.config.to_dict(), "_name_or_path": None},
        trainer.origin,  # the start and the whole recipe: other settings may change the last bits
        [getattr(trainer.args, name) for name in _PRECOMPUTED_BY],
        [LIBRARIES, str(device.type), torch.cuda.get_device_name(device) if device.type == "cuda" else None],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class ReferenceCheck(TrainerCallback):
    """Raises UserError, on every rank, at step 1 of a new run whose policy and reference are different models.

    Collective. For a DPO whose reference is its start. Training passes that draw random numbers, such as of dropout,
    are not checked.
    """

    def __init__(self, trainer: Any, ranks: Ranks):
        self.trainer, self.ranks = trainer, ranks
        self.is_pending = False
        self._batches: list[Tensor] = []

    def on_train_begin(self, args, state, control, **kwargs):
        """Check new runs only: a resumed run was checked at its own first step."""
        self.is_pending = state.global_step == 0 and not _is_random(self.trainer)

    def add(self, loss: Tensor, completion_mask: Tensor) -> None:
        """Note a micro-batch of this rank: its loss, tokens and answers."""
        counts = completion_mask.sum(), completion_mask.new_tensor(len(completion_mask))
        self._batches.append(torch.stack([value.detach().double() for value in (loss, *counts)]))

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Compare the rewards and the loss of the first step, on the only one that the host reads."""
        if not self.is_pending:
            return
        self.is_pending = False
        trainer, logged = self.trainer, self.trainer._metrics["train"]
        rewards = [sum(logged[key]) / len(logged[key]) for key in ("rewards/chosen", "rewards/rejected")]
        losses, tokens, answers = torch.stack(self._batches).sum(0).tolist()
        *means, tokens, answers = self.ranks.sums([losses / len(self._batches), *rewards, tokens, answers])
        loss, *rewards = (value / self.ranks.num_ranks for value in means)
        limits = _limits(trainer, tokens / answers, answers / 2)
        problem = None
        # NaN and infinities are reported with the gradients that have them.
        if any(limits.reward < abs(reward) < math.inf for reward in rewards):
            chosen, rejected = rewards
            problem = (
                f"the rewards are {chosen:.2g} (chosen) and {rejected:.2g} (rejected), not 0 +- {limits.reward:.1g}"
            )
        elif trainer.loss_types == ["sigmoid"] and not trainer.use_weighting and not trainer.aux_loss_enabled:
            weight = trainer.loss_weights[0]
            if abs(weight) * limits.loss < abs(loss - weight * math.log(2)) < math.inf:
                problem = f"the loss is {loss:.5g}, not {weight * math.log(2):.5g} +- {abs(weight) * limits.loss:.1g}"
        if problem:
            cause, remedy = "", "true computes them once, by the starting model itself"
            if trainer.precompute_ref_logps:
                cause = "log-probabilities of another model, cached beside the tokens; "
                remedy = "false computes them at every step"
            raise UserError(
                f"step 1: the reference is not the starting model: before any update {problem}. Likely causes: {cause}"
                "a model folder that changed as the run started; a forward pass that differs in training (attention, "
                f"kernels). trainer.precompute_ref_log_probs: {remedy}"
            )


class _Limits(NamedTuple):
    """Of the absolute mean reward, and of the loss's distance from ln 2, by rounding alone."""

    reward: float
    loss: float


def _limits(trainer: Any, tokens: float, num_pairs: float) -> _Limits:
    """Return the limits for `num_pairs` pairs of answers of `tokens` tokens each, on average.

    The errors of a policy and its reference: independent ones of each token, and a bias of half the square, since the
    mean of a distorted model's log-probabilities is lower (Jensen).
    """
    sigma = max(ROUNDING.get(dtype, ROUNDING[torch.float32]) for dtype in _dtypes(trainer))
    if hasattr(trainer.model.config.get_text_config(), "output_router_logits"):
        sigma = ROUTED
    random, bias = SIGMAS * sigma * math.sqrt(tokens), sigma**2 * tokens
    reward = trainer.beta * (random / math.sqrt(num_pairs) + bias)
    # ln(1 + exp(-x)) = ln 2 - x / 2 + x^2 / 8 - ... for the margin x of a pair
    return _Limits(reward, reward + (trainer.beta * 2 * (random + bias)) ** 2 / 8 + 1e-6)


def _dtypes(trainer: Any) -> set[torch.dtype]:
    """Return the dtypes of the model's arithmetic, bfloat16 for quantized weights and for reduced float32 products."""
    dtypes = {p.dtype if p.is_floating_point() else torch.bfloat16 for p in trainer.model.parameters()}
    has_full_products = all(backend.fp32_precision in FULL for backend in BACKENDS.values())
    if trainer.args.bf16 or not has_full_products:
        dtypes.add(torch.bfloat16)
    return dtypes | ({torch.float16} if trainer.args.fp16 else set())


def _is_random(trainer: Any) -> bool:
    """Whether the policy's training passes draw random numbers: dropout in layers, attention or routers, and noise."""
    if trainer.args.neftune_noise_alpha:
        return True
    for module in trainer.model.modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            return True
        named = ((name, value) for name, value in vars(module).items() if "drop" in name or "jitter" in name)
        if any(isinstance(value, float) and value > 0 for _, value in named):
            return True
    return False
