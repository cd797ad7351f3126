"""From a model and a name to the optimizer, with every parameter routed."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from .routing import param_groups
from .soren import BETAS, EPS, AdamW, AdjustLrFn, Compensation, HTMuon, Muon, Soren
from .spectral_optimizer import SpectralOptimizer


def build_optimizer(
    model: nn.Module,
    *,
    name: Literal["soren", "muon", "htmuon", "adamw"],
    lr: float,
    aux_lr: float | None = None,
    weight_decay: float = 0.1,
    aux_weight_decay: float = 0.0,
    momentum: float = 0.95,
    nesterov: bool = True,
    betas: tuple[float, float] = BETAS,
    eps: float = EPS,
    adjust_lr_fn: AdjustLrFn | None = None,
    compensation: Compensation = "none",
    spectral_map: Literal["minimax", "sns", "exact"] = "minimax",
    resolution: float = 0.01,
    ns_steps: int = 15,
    workspace_mb: float | None = None,
    p: float = 0.125,
    aux: Sequence[str] = (),
    map: dict[str, Any] | None = None,  # to be thrown away when the new optim is merged
) -> SpectralOptimizer:
    """The optimizer `name` for every trainable parameter of `model`.

    lr, weight_decay: of the matrices; aux_lr, aux_weight_decay: of the rest, which AdamW updates with betas and eps.
        For "adamw" the matrices go to AdamW too, as a group of their own, and aux_lr may be left out: then it is lr.
        For the others it may be left out where there is no rest, as with LoRA.
    adjust_lr_fn: None is the class's own choice. compensation: "none" or "kahan", for narrow parameters.
    spectral_map, resolution, ns_steps, workspace_mb reach only Soren (Muon keeps its 5 steps), p only HTMuon.
    ValueError for an unknown name, a missing aux_lr, and what `param_groups` raises.
    """
    if map is not None:
        spectral_map, resolution = map["name"], map.get("resolution", resolution)
        ns_steps = map.get("steps", ns_steps)
    if name not in ("soren", "muon", "htmuon", "adamw"):
        raise ValueError(f"name: found {name!r}; write 'soren', 'muon', 'htmuon' or 'adamw'")
    groups = param_groups(
        model,
        lr=lr,
        aux_lr=lr if aux_lr is None and name == "adamw" else aux_lr,
        weight_decay=weight_decay,
        aux_weight_decay=aux_weight_decay,
        aux=aux,
    )
    for group in groups:
        if name == "adamw":
            group["rule"] = "adamw"
        if group["rule"] == "adamw":
            group.update(betas=betas, eps=eps)
    if name == "adamw":
        return AdamW(groups, lr, compensation=compensation)
    shared: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "compensation": compensation}
    if adjust_lr_fn is not None:
        shared["adjust_lr_fn"] = adjust_lr_fn
    if name == "soren":
        shared |= {"spectral_map": spectral_map, "resolution": resolution, "ns_steps": ns_steps}
        return Soren(groups, lr, workspace_mb=workspace_mb, **shared)
    return Muon(groups, lr, **shared) if name == "muon" else HTMuon(groups, lr, p=p, **shared)


class OptimizerFactory:
    """`build_optimizer` in the form that `transformers.Trainer(optimizer_cls_and_kwargs=...)` calls.

    Trainer(..., optimizer_cls_and_kwargs=(OptimizerFactory, {"name": "soren", "lr": 1e-3, "aux_lr": 1e-4}))
    """

    def __call__(self, model: nn.Module, **settings: Any) -> SpectralOptimizer:
        """The optimizer for `model`; `settings` are those of `build_optimizer`."""
        return build_optimizer(model, **settings)
