"""Build the optimizer of a name for a whole model, with every parameter routed.

`OptimizerFactory` is the same in the form in which other trainers call a factory of optimizers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..core.errors import UserError
from ..core.optimizer_settings import (
    ADJUST_LR_FN,
    AUX_WEIGHT_DECAY,
    BETAS,
    EPS,
    MATRICES,
    WEIGHT_DECAY,
    Matrices,
    adamw_rms,
)
from .blocks import Split
from .optimizer import OPTIMIZERS, SpectralOptimizer
from .routing import param_groups


def build_optimizer(
    model: nn.Module,
    *,
    name: str,
    lr: float,
    aux_lr: float | None = None,
    aux_weight_decay: float = AUX_WEIGHT_DECAY,
    betas: tuple[float, float] = BETAS,
    eps: float = EPS,
    aux: Sequence[str] = (),
    matrices: Matrices = MATRICES,
    split: Split | None = None,
    **settings: Any,
) -> SpectralOptimizer:
    """The optimizer `name` for every trainable parameter of `model`.

    name: "soren", "muon", "htmuon", "adamw", or that of any other subclass of SpectralOptimizer.
    lr: of the matrices; aux_lr, aux_weight_decay: of the other parameters, which AdamW updates with
        betas and eps. aux_lr=None is lr. For "adamw" the matrices are a group of their own.
    aux: globs of parameter names, see `route`; matrices, split: also there.
    settings: keyword arguments of the class (weight_decay, momentum, map, p, ...). weight_decay is
        0.1 for every class; adjust_lr_fn=None is the class's own default.
    Raises ValueError for an unknown name or setting, and whatever `param_groups` refuses.
    """
    if name not in OPTIMIZERS:
        raise ValueError(
            f"name: no optimizer {name!r}; write one of {', '.join(map(repr, sorted(OPTIMIZERS)))}"
        )
    cls = OPTIMIZERS[name]
    # Left out rather than passed on: AdamW has no such setting.
    if settings.get("adjust_lr_fn", "") is None:
        del settings["adjust_lr_fn"]
    # Checked here: the constructor would name a class and an argument that no user has written.
    allowed = cls.keywords()
    for key in settings.keys() - allowed.keys():
        raise ValueError(
            f"{key}: is no setting of the optimizer {name}; write one of {', '.join(allowed)}"
        )
    if settings.get("match_rms") == "adamw":
        settings["match_rms"] = adamw_rms(betas[0])
    # AdamW gets the same two groups, so that both of its learning rates mean what they mean for the
    # others.
    is_adamw = cls.rule == "adamw"
    rates = {"lr": lr, "aux_lr": aux_lr, "aux_weight_decay": aux_weight_decay}
    of_matrices: dict[str, Any] = {"needs_matrix": False} if is_adamw else {"split": split}
    groups = param_groups(model, **rates, aux=aux, matrices=matrices, **of_matrices)
    for group in groups:
        if is_adamw:
            group["rule"] = "adamw"
        if group["rule"] == "adamw":
            group.update(betas=betas, eps=eps)
    return cls(groups, lr, **{"weight_decay": WEIGHT_DECAY, **settings})


TRANSFORMERS_DEFAULTS = ("adamw_torch", "adamw_torch_fused")
"""Values of `args.optim` that a user has not chosen."""


def completed_settings(settings: str | Mapping[str, Any], args: Any) -> dict[str, Any]:
    """The keywords of `build_optimizer`; those that `settings` leaves out are taken from
    transformers' `args`.

    settings: a name, or keywords without some or all of: name (then Soren), and lr, weight_decay,
    betas and eps (then those of args). The scale is the recipes': every update has RMS 0.2 lr,
    AdamW's after a few hundred steps. Raises UserError if args has another optimizer, or settings
    of one.
    """
    # Without this a user's other optimizer would be replaced by ours, in silence.
    no_effect = {"optim": TRANSFORMERS_DEFAULTS}
    no_effect |= dict.fromkeys(("optim_args", "optim_target_modules"), (None,))
    for key, allowed in no_effect.items():
        if (value := getattr(args, key, None)) not in allowed:
            raise UserError(
                f"args.{key}: is {getattr(value, 'value', value)}, which has no effect here; "
                'remove it, and write it in the optimizer settings ("muon", {"name": "muon", ...})'
            )
    keywords: dict[str, Any] = (
        {"name": settings} if isinstance(settings, str) else {"name": "soren", **settings}
    )
    if keywords["name"] in OPTIMIZERS and OPTIMIZERS[keywords["name"]].rule == "spectral":
        keywords.setdefault("adjust_lr_fn", ADJUST_LR_FN)
    # A weight decay of 0 is taken as it is: a trainer cannot see whether it was written or left out
    # (notes/log.md, 2026-11-22).
    own = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    return {
        **own,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        **keywords,
    }


class OptimizerFactory:
    """`build_optimizer` in the form in which transformers and Axolotl call a factory of optimizers.

    transformers.Trainer(model, args, optimizer_cls_and_kwargs=(OptimizerFactory, {"args": args,
    "name": "soren"}))
    """

    def __call__(self, model: nn.Module, args: Any = None, **settings: Any) -> SpectralOptimizer:
        """The optimizer for `model`; `settings` are keywords of `build_optimizer`.

        args: transformers' TrainingArguments, for the settings that are left out, see
        `completed_settings`; without them, name and lr are needed.
        """
        return build_optimizer(
            model, **(settings if args is None else completed_settings(settings, args))
        )
