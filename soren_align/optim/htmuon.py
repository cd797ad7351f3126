"""HTMuon: a power of the momentum's singular values."""

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..core.optimizer_settings import (
    COMPENSATION,
    HTMUON_POWER,
    MOMENTUM,
    MUON_ADJUST_LR_FN,
    NESTEROV,
    POWER,
    STATES,
    WEIGHT_DECAY,
    AdjustLrFn,
    Compensation,
    States,
)
from ..spectral import spectral_power
from .group_settings import number
from .spectral_optimizer import SpectralOptimizer


class HTMuon(SpectralOptimizer, name="htmuon"):
    """W <- W - lr * U S^p V^T, by decomposition. Arguments as in `Soren`.

    Source: arXiv 2603.10067. Nesterov is on, as in its code; the algorithm in the Soren paper shows it without.
    """

    map_settings: ClassVar = {"p": number(POWER)}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        momentum: float = MOMENTUM,
        nesterov: bool = NESTEROV,
        weight_decay: float = WEIGHT_DECAY,
        compensation: Compensation = COMPENSATION,
        states: States = STATES,
        p: float = HTMUON_POWER,
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
            p=p,
        )

    def map_matrix(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        """The singular values of x to the power p."""
        return spectral_power(x, group["p"])
