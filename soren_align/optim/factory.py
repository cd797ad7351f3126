"""From a model and a name to the optimizer, with every parameter routed."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..core.optimizer_settings import AUX_WEIGHT_DECAY, BETAS, EPS, MATRICES, WEIGHT_DECAY, Matrices
from .group_settings import RULE_DEFAULTS
from .routing import param_groups
from .spectral_optimizer import OPTIMIZERS, SpectralOptimizer


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
    **settings: Any,
) -> SpectralOptimizer:
    """The optimizer `name` for every trainable parameter of `model`.

    name: "soren", "muon", "htmuon", "adamw", or that of any other subclass of SpectralOptimizer.
    lr: of the matrices; aux_lr, aux_weight_decay: of the other parameters, which AdamW updates with betas and eps.
        For "adamw" the matrices are a group of their own, and aux_lr is lr if it is None.
        For the others it may be None where there are no other parameters, as with LoRA.
    aux: globs of parameter names, see `route`; matrices: also there.
    settings: keyword arguments of the class (weight_decay, momentum, map, p, ...). weight_decay is 0.1 for every class;
        adjust_lr_fn=None is the class's own default.
    Raises ValueError for an unknown name or setting, a missing aux_lr, and whatever `param_groups` refuses.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"name: found {name!r}; write one of {', '.join(map(repr, sorted(OPTIMIZERS)))}")
    cls = OPTIMIZERS[name]
    if settings.get("adjust_lr_fn", "") is None:
        del settings["adjust_lr_fn"]
    signature = inspect.signature(cls).parameters.values()
    allowed = [parameter.name for parameter in signature if parameter.kind is parameter.KEYWORD_ONLY]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature):  # passed on to SpectralOptimizer
        allowed = [*dict.fromkeys([*allowed, *RULE_DEFAULTS[cls.rule], *cls.map_settings])]
    for key in settings.keys() - set(allowed):
        raise ValueError(f"{key}: not a setting of {name}; it has {', '.join(allowed)}")
    is_adamw = cls.rule == "adamw"
    if is_adamw and aux_lr is None:
        aux_lr = lr
    groups = param_groups(model, lr=lr, aux_lr=aux_lr, aux_weight_decay=aux_weight_decay, aux=aux, matrices=matrices)
    for group in groups:
        if is_adamw:
            group["rule"] = "adamw"
        if group["rule"] == "adamw":
            group.update(betas=betas, eps=eps)
    return cls(groups, lr, **{"weight_decay": WEIGHT_DECAY, **settings})


class OptimizerFactory:
    """`build_optimizer` in the form that `transformers.Trainer(optimizer_cls_and_kwargs=...)` calls.

    Trainer(..., optimizer_cls_and_kwargs=(OptimizerFactory, {"name": "soren", "lr": 1e-3, "aux_lr": 1e-4}))
    """

    def __call__(self, model: nn.Module, **settings: Any) -> SpectralOptimizer:
        """The optimizer for `model`; `settings` are those of `build_optimizer`."""
        return build_optimizer(model, **settings)
