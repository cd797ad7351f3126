"""Muon: all singular values of the momentum pushed towards 1."""

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..core.optimizer_settings import (
    COMPENSATION,
    LR,
    MOMENTUM,
    MUON_ADJUST_LR_FN,
    MUON_STEPS,
    NESTEROV,
    NUM_STEPS,
    STATES,
    WEIGHT_DECAY,
    AdjustLrFn,
    Compensation,
    States,
)
from ..spectral import newton_schulz
from .group_settings import whole_number
from .spectral_optimizer import SpectralOptimizer


class Muon(SpectralOptimizer, name="muon"):
    """torch.optim.Muon, bit for bit on float32 matrices, with AdamW groups beside them. Arguments as in `Soren`.

    ns_steps: of the Newton-Schulz iteration.
    """

    map_settings: ClassVar = {"ns_steps": whole_number(NUM_STEPS)}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = LR,
        *,
        momentum: float = MOMENTUM,
        nesterov: bool = NESTEROV,
        weight_decay: float = WEIGHT_DECAY,
        compensation: Compensation = COMPENSATION,
        states: States = STATES,
        ns_steps: int = MUON_STEPS,
        adjust_lr_fn: AdjustLrFn = MUON_ADJUST_LR_FN,
    ):
        super().__init__(
            params,
            lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            compensation=compensation,
            states=states,
            adjust_lr_fn=adjust_lr_fn,
            ns_steps=ns_steps,
        )

    def map_matrix(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        """The singular values of x, pushed towards 1."""
        return newton_schulz(x, group["ns_steps"])
