"""Soren and its rivals: the same optimizer with another map of the momentum's singular values."""

from math import inf
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..spectral import (
    exact_sigmoid,
    guarded_minimax_sigmoid,
    guarded_soft_newton_schulz,
    newton_schulz,
    spectral_power,
)
from .group_settings import ADAMW_DEFAULTS
from .spectral_optimizer import SpectralOptimizer

AdjustLrFn = Literal["none", "original", "match_rms_adamw"]
Compensation = Literal["none", "kahan"]
BETAS, EPS = ADAMW_DEFAULTS["betas"], ADAMW_DEFAULTS["eps"]


class Soren(SpectralOptimizer):
    """W <- W - lr * U s(S) V^T, with U S V^T the Nesterov momentum and s the sigmoid.

    params: matrices, named or not, or groups; see `soren_align.param_groups` for a whole model.
    momentum, nesterov: M <- M + (1 - momentum) (G - M), N = G + momentum (M - G); no bias correction. OneCycleLR and
        CyclicLR with cycle_momentum move it, and leave the betas of AdamW groups alone.
    weight_decay: W <- W (1 - lr * weight_decay) before the step, with the unadjusted lr.
    compensation: "kahan" keeps beside each bfloat16 parameter what rounding takes from its steps (rounding.py), so that
        they are those of float32; other parameters have no need of it.
    spectral_map: "minimax", accurate from the normalised singular value `resolution` on (0.01, or 0.001 for more work);
        "sns", the paper's Algorithm 1 with `ns_steps`, further off and dearer; or "exact", the definition.
    adjust_lr_fn: "none", "original" (sqrt(max(1, m/n))) or "match_rms_adamw" (0.2 sqrt(max(m, n)), divided by the
        sigmoid's 1/2 so that learning rates compare with AdamW's).
    workspace_mb: MB (2^20 bytes) for mapping matrices of one shape in a batch; one that needs more is mapped alone.
        None is 16 on a CPU, 256 elsewhere. It changes a step by rounding only.
    The map must see averaged, unscaled gradients, clipped before the step; singular values above 4 are guarded.
    Source: the paper's Algorithm 2.
    """

    map_keys = ("spectral_map", "ns_steps", "resolution")
    map_level = 0.5

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        compensation: Compensation = "none",
        spectral_map: Literal["minimax", "sns", "exact"] = "minimax",
        resolution: float = 0.01,
        ns_steps: int = 15,
        adjust_lr_fn: AdjustLrFn = "none",
        workspace_mb: float | None = None,
    ):
        shared = _defaults(lr, momentum, nesterov, weight_decay, adjust_lr_fn, compensation)
        super().__init__(
            params, {**shared, "spectral_map": spectral_map, "resolution": resolution, "ns_steps": ns_steps}
        )
        if workspace_mb is not None and not 0 <= workspace_mb < inf:
            raise ValueError(f"workspace_mb: found {workspace_mb!r}; write 0 or more, and finite, or None")
        self.workspace_mb = workspace_mb

    def __getstate__(self) -> dict[str, Any]:
        # No setting of a group: a checkpoint may go on where there is more memory, or less.
        return {**super().__getstate__(), "workspace_mb": self.workspace_mb}

    def map_matrix(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        """The sigmoid of the singular values of x."""
        if group["spectral_map"] == "exact":
            return exact_sigmoid(x)
        if group["spectral_map"] == "minimax":
            output, num_guarded = guarded_minimax_sigmoid(x, resolution=group["resolution"])
        else:
            output, num_guarded = guarded_soft_newton_schulz(x, group["ns_steps"])
        self.num_guarded += num_guarded
        return output


class Muon(SpectralOptimizer):
    """torch.optim.Muon, bit for bit on float32 matrices, with AdamW groups beside them. Arguments as in `Soren`."""

    map_keys = ("ns_steps",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        compensation: Compensation = "none",
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLrFn = "original",
    ):
        shared = _defaults(lr, momentum, nesterov, weight_decay, adjust_lr_fn, compensation)
        super().__init__(params, {**shared, "ns_steps": ns_steps})

    def map_matrix(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        """The singular values of x, pushed towards 1."""
        return newton_schulz(x, group["ns_steps"])


class HTMuon(SpectralOptimizer):
    """W <- W - lr * U S^p V^T, by decomposition. Arguments as in `Soren`.

    Source: arXiv 2603.10067. Nesterov is on, as in its code; the algorithm in the Soren paper shows it without.
    """

    map_keys = ("p",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        compensation: Compensation = "none",
        p: float = 0.125,
        adjust_lr_fn: AdjustLrFn = "original",
    ):
        super().__init__(
            params, {**_defaults(lr, momentum, nesterov, weight_decay, adjust_lr_fn, compensation), "p": p}
        )

    def map_matrix(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        """The singular values of x to the power p."""
        return spectral_power(x, group["p"])


class AdamW(SpectralOptimizer):
    """torch.optim.AdamW, bit for bit on float32 and float64 parameters, with the state and checks of the others."""

    rule = "adamw"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS,
        weight_decay: float = 1e-2,
        compensation: Compensation = "none",
    ):
        shared = {"lr": lr, "weight_decay": weight_decay, "compensation": compensation}
        super().__init__(params, {**shared, "betas": betas, "eps": eps})


def _defaults(
    lr: float | Tensor,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    adjust_lr_fn: AdjustLrFn,
    compensation: Compensation,
) -> dict[str, Any]:
    """What a group takes when it says nothing; every group keeps the settings of its own rule.

    Without betas, by which torch's schedulers tell an optimizer that has no momentum to cycle.
    """
    spectral = {"momentum": momentum, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    return {"lr": lr, "weight_decay": weight_decay, "compensation": compensation, **spectral}
