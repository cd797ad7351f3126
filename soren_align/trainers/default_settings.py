"""The optimizer's settings of a trainer that is used as a library, without a recipe."""

from collections.abc import Mapping
from typing import Any

from peft import PeftModel
from transformers import TrainingArguments

from ..errors import UserError
from ..optim import OPTIMIZERS
from ..recipe import OptimizerSection

OptimizerSettings = str | Mapping[str, Any] | OptimizerSection | None
"""None: Soren. A name: soren, muon, htmuon, adamw. A mapping: keywords of `build_optimizer`, any of which may be left
out. A recipe's optimizer section: complete, nothing is added."""
TRANSFORMERS_DEFAULTS = ("adamw_torch", "adamw_torch_fused")


def optimizer_keywords(settings: OptimizerSettings, args: TrainingArguments, model: Any) -> dict[str, Any]:
    """Return the keywords of `build_optimizer`; those that `settings` leaves out are taken from args.

    args has learning_rate (lr and aux_lr), weight_decay, betas and epsilon. The scale is that of our recipes: every
    update has RMS 0.2 lr, AdamW's after some hundred steps. Raises UserError if args.optim names another optimizer.
    """
    if isinstance(settings, OptimizerSection):
        return settings.model_dump(exclude_none=True)
    if args.optim not in TRANSFORMERS_DEFAULTS:
        other = getattr(args.optim, "value", args.optim)
        raise UserError(f'args.optim: is {other}, which has no effect here; write optimizer_settings="muon", ...')
    keywords: dict[str, Any] = {"name": settings} if isinstance(settings, str) else dict(settings or {})
    name = keywords.setdefault("name", "soren")
    if name in OPTIMIZERS and OPTIMIZERS[name].rule == "spectral":
        keywords.setdefault("adjust_lr_fn", "match_rms_adamw" if isinstance(model, PeftModel) else "match_rms_measured")
        keywords.setdefault("aux_lr", args.learning_rate)
    keywords.setdefault("lr", args.learning_rate)
    keywords.setdefault("weight_decay", args.weight_decay)
    keywords.setdefault("betas", (args.adam_beta1, args.adam_beta2))
    keywords.setdefault("eps", args.adam_epsilon)
    return keywords
