"""The optimizers in plain torch: one process, whole matrices, the SVD, no speed.

For readers, and for tests/optim/test_reference.py, which compares the maps of Soren, Muon and
HTMuon with it on one process; several ranks are compared with one (tests/sharding). W has gradient
G:

    M <- b M + (1 - b) G                   momentum, at first 0
    N <- b M + (1 - b) G                   Nesterov
    O <- U f(S) V^T  for  N = U S V^T      f(s) = 1 / (1 + exp(-s)) Soren, 1 Muon, s^p HTMuon
    W <- W - lr * decay (W - W0) - lr * scale * O   W0 = 0, or W before the first step

All other parameters are updated by AdamW.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "soren": torch.sigmoid,
    "muon": torch.ones_like,
    "htmuon": lambda sigma: sigma**0.125,
}


def map_singular_values(x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """U f(S) V^T of x = U S V^T; directions in which x is zero stay zero."""
    u, sigma, vh = torch.linalg.svd(x.double(), full_matrices=False)
    # What is below rounding has no direction: the sigmoid would give it half of a step.
    is_null = sigma <= sigma[0] * max(x.shape) * torch.finfo(torch.float32).eps
    return (u * f(sigma).masked_fill(is_null, 0.0) @ vh).to(x.dtype)


class ReferenceOptimizer:
    """Soren, Muon or HTMuon for `matrices`, AdamW for `others`.

    rms: None, or the RMS that every update at learning rate 1 is scaled to (match_rms_measured).
    """

    def __init__(
        self,
        name: str,
        matrices: Sequence[Tensor],
        others: Sequence[Tensor] = (),
        *,
        lr: float,
        aux_lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        weight_decay_to: str = "zero",
        rms: float | None = None,
    ):
        self.f, self.matrices, self.lr, self.weight_decay = MAPS[name], matrices, lr, weight_decay
        self.momentum, self.nesterov, self.rms = momentum, nesterov, rms
        self.momenta = [torch.zeros_like(weight) for weight in matrices]
        is_start = float(weight_decay_to == "start")
        self.starts = [weight.detach() * is_start for weight in matrices]
        self.adamw = torch.optim.AdamW(others, aux_lr, weight_decay=0.0) if others else None

    @torch.no_grad()
    def step(self) -> None:
        """One step of every parameter."""
        b = self.momentum
        for weight, start, average in zip(self.matrices, self.starts, self.momenta, strict=True):
            grad = weight.grad
            assert grad is not None
            # The lines of the module's docstring, in their order: N reads the momentum of this
            # step.
            average.mul_(b).add_((1 - b) * grad)
            n = b * average + (1 - b) * grad if self.nesterov else average
            output = map_singular_values(n, self.f)
            scale = 1.0 if self.rms is None else self.rms / output.square().mean().sqrt()
            decay = self.lr * self.weight_decay * (weight - start)
            weight.sub_(decay).sub_(self.lr * scale * output)
        if self.adamw is not None:
            self.adamw.step()
