"""Soren and Muon in one file of plain torch, to copy into a training script.

From soren-align (Apache-2.0), whose package has ZeRO, FSDP2, batches of maps, checks and AdamW for
other parameters. On one process a step has the package's bits (tests/optim/test_one_file.py):
`adjust_lr_fn: match_rms_measured`, Soren's `map: minimax`. Source of Soren: Algorithm 2 of Van et
al., "Orthogonal Witness Control for Muon Optimization via Sigmoid Spectral Reshaping"; of Muon:
kellerjordan.github.io/posts/muon.

    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [Soren(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)]
    ...
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)   # see max_grad_norm
    for optimizer in optimizers:
        optimizer.step()
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Steps (a, b, c) of a u + b u^3 + c u^5 for every singular value u. The first table takes every u
# in [0.0004, 1] to within 6e-5 of 1; the second one is tanh(sigma / 2) for sigma up to 4.6.
SIGN = (
    (8.45447584, -24.8379808, 18.2514154),
    (4.20652011, -3.09320736, 0.569800893),
    (4.11521204, -3.0307237, 0.562840935),
    (3.78007623, -2.79804416, 0.536962419),
    (2.92553548, -2.17203572, 0.468009703),
    (2.05549932, -1.43416772, 0.390902132),
    (1.87676926, -1.25162911, 0.374862547),
)
TANH = ((0.149584378, -0.00423991824, 6.11231626e-05), (3.33824131, -7.85476619, 14.2523812))
TANH_LIMIT, TANH_SLOPE, NORM_LIMIT, BLEND = 4.6, 0.236, 1.01, 0.19
MUON = ((3.4445, -4.7750, 2.0315),) * 5
MATCH_RMS = 0.2  # of an update at learning rate 1, as AdamW's about have


def frobenius_norm(x: Tensor) -> Tensor:
    """|x|_F, [1, 1]; row by row, since one float32 sum over millions of squares is inexact."""
    rows = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.linalg.vector_norm(rows, dim=-2, keepdim=True)


def quintics(y: Tensor, steps: Iterable[tuple[float, float, float]]) -> Tensor:
    """y [m, n], m <= n, after these steps: y <- (a I + b A + c A^2) y with A = y y^T."""
    for a, b, c in steps:
        gram = y @ y.mT
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        if y.dtype == torch.bfloat16:  # whose diagonal has too few bits for a
            y = torch.addmm(y, gram, y, beta=a)
        else:
            gram.diagonal().add_(a)
            y = gram @ y
    return y


def muon_map(x: Tensor) -> Tensor:
    """About U V^T of x = U S V^T [m, n], m <= n, in bfloat16 as torch.optim.Muon has it."""
    y = x.to(torch.float64 if x.dtype == torch.float64 else torch.bfloat16)
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    return quintics(y, MUON).to(x.dtype)


def soren_map(x: Tensor, is_clipped: bool = True) -> Tensor:
    """U s(S) V^T of x = U S V^T [m, n], m <= n, s the sigmoid, within 0.75% for singular values
    from 0.0004 of the largest on.

    is_clipped: |x|_F is at most 1.01, where the tanh of s(sigma) = (1 + tanh(sigma / 2)) / 2 is
    linear; otherwise it costs two steps more.
    """
    # A matrix scaled by its largest entry, and the products of the first step: |A^2|_F gives nu =
    # (sum of sigma^8)^(1/8), which is closer to the largest singular value than |x|_F is.
    scale = torch.linalg.vector_norm(x, torch.inf, dim=(-2, -1), keepdim=True).clamp(min=1e-30)
    if x.shape[-1] > 2**15:
        scale = scale * math.sqrt(x.shape[-1] / 2**15)
    y = torch.div(x, scale, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
    gram = y @ y.mT
    square = gram @ gram
    nu = frobenius_norm(square).clamp(min=1e-24).pow(0.25)

    # The first step, from y / nu; the last one halved, so that the result is one addition.
    (a, b, c), *others, last = SIGN
    others.append((last[0] / 2, last[1] / 2, last[2] / 2))
    inner = torch.addcmul(gram, square, nu.pow(-2), value=c / b)
    start = x * (nu.square() / scale)
    torch.addmm(start, inner, y, beta=a, alpha=b, out=start)
    half = quintics(start.mul_(nu.pow(-3)), others)
    if is_clipped:
        return torch.add(half, x, alpha=TANH_SLOPE)

    # Beyond: the two steps of tanh, of a matrix with singular values up to 4.6 (a larger one is
    # scaled down), blended from the line so that the map has no jump.
    norm = frobenius_norm(x)
    blend = ((norm - NORM_LIMIT) / BLEND).clamp(0, 1)
    power, log = square / nu.pow(4), nu.log() * 4
    for _ in range(8):  # the largest singular value, by squaring
        power = power @ power
        size = frobenius_norm(power)
        size = size.where(size > 0, 1.0)
        power.div_(size)
        log = 2 * log + size.log()
    largest = (log / 2**10).exp()
    tanh = quintics(x * (TANH_LIMIT / largest / scale).clamp(max=1.0), TANH)
    return torch.addcmul(half, x, TANH_SLOPE * (1 - blend)).addcmul_(tanh, blend / 2)


class Soren(torch.optim.Optimizer):
    """W <- (1 - lr * weight_decay) W - lr * 0.2 O / RMS(O),  O the map of the Nesterov momentum.

    params: matrices with averaged, unscaled gradients. lr: comparable with AdamW's. max_grad_norm:
    the norm, at most 1, that the gradients of all parameters are clipped to; None: not clipped.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        max_grad_norm: float | None = 1.0,
    ):
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, defaults | {"weight_decay": weight_decay})
        self.is_clipped = max_grad_norm is not None and max_grad_norm <= 1.0

    def map(self, x: Tensor) -> Tensor:
        """O of a matrix [m, n], m <= n."""
        return soren_map(x, self.is_clipped)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, b = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
                grad = weight.grad.to(wide)
                if not state:
                    state["momentum"] = torch.zeros_like(grad)
                average = state["momentum"].lerp_(grad, 1 - b)
                x = grad.lerp(average, b) if group["nesterov"] else average
                is_tall = x.shape[0] > x.shape[1]
                output = self.map(x.mT).mT if is_tall else self.map(x)
                rms = frobenius_norm(output) / math.sqrt(output.numel())
                output = output / rms.clamp(min=1e-12)
                whole = weight.to(wide)  # itself, unless it is in 16 bits: rounded once, at the end
                if group["weight_decay"]:
                    whole.mul_(1 - lr * group["weight_decay"])
                whole.add_(output, alpha=-(lr * MATCH_RMS))
                if whole is not weight:
                    weight.copy_(whole)
        return loss


class Muon(Soren):
    """The same with Muon's map; its updates have the same size, and so comparable rates."""

    def map(self, x: Tensor) -> Tensor:
        """O of a matrix [m, n], m <= n."""
        return muon_map(x)
