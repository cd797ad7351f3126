"""AdamW with the groups, states and checks of the spectral optimizers."""

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..core.optimizer_settings import ADAMW_WEIGHT_DECAY, BETAS, COMPENSATION, EPS, LR, STATES, Compensation, States
from .spectral_optimizer import SpectralOptimizer


class AdamW(SpectralOptimizer, name="adamw"):
    """torch.optim.AdamW(fused=True), TRL's default, bit for bit on float32 and float64 parameters.

    The state and the checks are those of the other optimizers.
    """

    rule = "adamw"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = LR,
        *,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS,
        weight_decay: float = ADAMW_WEIGHT_DECAY,
        compensation: Compensation = COMPENSATION,
        states: States = STATES,
    ):
        shared = {"lr": lr, "weight_decay": weight_decay, "compensation": compensation, "states": states}
        # Not SpectralOptimizer's constructor: AdamW has none of the settings of its rule.
        super(SpectralOptimizer, self).__init__(params, {**shared, "betas": betas, "eps": eps})
