"""The step of Soren, Muon and HTMuon, on one process or many: Algorithm 2 of the Soren paper, with
decoupled decay.

`SpectralOptimizer.step` (optim/optimizer.py) calls `spectral_step_` for each group of matrices. The
gradients are then averaged over the ranks, clipped and finite. For a matrix W [m, n] with gradient
G and momentum M (at first zeros):

    M <- momentum * M + (1 - momentum) * G      update_momentum_
    N <- momentum * M + (1 - momentum) * G      nesterov; without it N <- M
    N <- sign(N)                                only for map_input: sign
    O <- U f(S) V^T  for  N = U S V^T           map_matrix of the class, by a map of spectral/
    O <- O / root of its second moments         only for second_moment; the norm stays
    O <- O / RMS(O)                             only for match_rms_measured
    W <- W - lr * weight_decay * (W - W0)       decay_and_add_; W0 = 0, or the weights before step 1
    W <- W - lr * scale(m, n) * O               decay_and_add_; scale is the class's lr_scale

The map, the row moments and the RMS need a whole matrix; all else is elementwise. So each matrix
has an owner: the rank that maps it. `spectral_step_` is the same function everywhere; an `Exchange`
decides what is sent:

    one process    Nothing is sent. Matrices of one shape are mapped in batches, as many as the
                   workspace holds.
    ZeRO, FSDP2    Each rank has shards of W, G and M, and updates these. N is gathered on the
                   matrix's owner, and O is scattered to the shards, by one all-to-all each, in
                   buckets of bounded size. While bucket i is mapped, bucket i + 1 is gathered and
                   the outputs of bucket i - 1 arrive. A matrix that is whole on one rank is not
                   sent.
    DDP            Each rank has all of W, G and M, and updates all of M. The owner alone maps its
                   matrices and updates their W, which is broadcast while the next bucket is mapped.

DeepSpeed calls `step()` once per parameter group (ZeRO 3: per sub-group): matrices and other
parameters are two calls in each optimizer step, each with its own checks.

The exchanges are in optim/exchange.py (one process), sharding/gather.py and sharding/ddp.py; owners
and buckets in sharding/plan.py. Second moments of elements lie in shards as W does: they divide O
after it is scattered, and the RMS is then a sum over the ranks (optim/second_moment.py). AdamW's
step, of all other parameters, is torch's own (optim/adamw.py).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..spectral.matrices import frobenius_norm
from .exchange import Batch, Exchange, MapRequest, Shard
from .layout import Named, local
from .rounding import chunks, master_weights, store_master_weights_
from .second_moment import ROWS, divided_by_elements, divided_by_rows, rescaled_
from .state import map_dtype


@dataclass(frozen=True)
class GroupMaps:
    """The map and the learning rate of a spectral group at a step."""

    lr: float | Tensor
    """On the CPU, if it is a tensor."""
    scale: Callable[[int, int], float]
    """(m, n) -> the factor of lr."""
    map_matrices: Callable[..., Tensor]
    """Matrices [m, n] or [k, m, n], their names, their state by keyword -> O. Only the state is
    modified."""
    workspace_mb: float | None
    """See `exchange.matrix_batches`."""


def spectral_step_(
    group: dict[str, Any],
    named: Named,
    state: Mapping[Tensor, dict[str, Tensor]],
    exchange: Exchange,
    maps: GroupMaps,
    observers: Sequence[Callable[["PendingUpdate"], None]] = (),
) -> None:
    """One step of the tensors `named`, all with a gradient, of a spectral group. Collective.

    state: of each tensor: the step count, the momentum, the compensation, the start, the map's.
    exchange: of these tensors.
    observers: are shown every update on this rank before it is made, for measurements.
    """
    # Elementwise, where each shard is: nothing is sent.
    for _, parameter in named:
        # not in place: a state dict may hold the old tensor
        state[parameter]["step"] = state[parameter]["step"] + 1
        update_momentum_(state[parameter], local(parameter.grad), group["momentum"])

    # The maps, of whole matrices on their owner ranks. Outputs arrive shard by shard, so that at
    # most those of a bucket are held.
    for shard, direction in directions(group, state, exchange, maps):
        weight, compensation, start = shard.weight, shard.compensation, shard.starting_weight
        # it was flat, and perhaps on a GPU
        direction = direction.reshape(weight.shape).to(weight.device)
        scale = maps.scale(*shard.layout.matrix_shape(shard.shape))
        decay = group["weight_decay"]
        for observe in observers:
            observe(
                PendingUpdate(
                    *(shard.name, group, weight, compensation, direction, maps.lr, decay, scale),
                    start=start,
                )
            )
        settings = {"lr": maps.lr, "scale": scale, "weight_decay": decay, "start": start}
        decay_and_add_(weight, compensation, direction, **settings)
        direction = None  # freed before the next batch is made


def directions(
    group: dict[str, Any],
    state: Mapping[Tensor, dict[str, Tensor]],
    exchange: Exchange,
    maps: GroupMaps,
) -> Iterator[tuple[Shard, Tensor]]:
    """Yield (shard, O) for all shards that this rank updates.
    Collective. Arguments: `spectral_step_`.

    Update the shard before taking the next one: then other outputs arrive, and DDP broadcasts the
    updated weights.
    """
    # Second moments of elements lie where the weights do, so that they divide O after the scatter.
    by_elements, beta = group["second_moment"] == "elements", group["second_moment_beta"]
    adapt = partial(divided_by_elements, beta=beta) if by_elements else None
    request = MapRequest(partial(map_input, group=group), maps.workspace_mb, adapt)
    for batch in exchange.whole_matrices(exchange.shards(state), request):
        for shard, direction in batch.returned(whole_outputs(group, batch, maps)):
            if by_elements:
                to_unit_rms = group["adjust_lr_fn"] == "match_rms_measured"
                direction = rescaled_(shard, direction, to_unit_rms=to_unit_rms)
            yield shard, direction
        batch = direction = None  # freed before the next batch is made


def whole_outputs(group: dict[str, Any], batch: Batch, maps: GroupMaps) -> Tensor | None:
    """O of a batch of whole matrices, on their owner rank.

    None for a batch without matrices: this rank maps none of the bucket, and its shards have
    outputs of other ranks.
    """
    is_transposed = batch.layout.transposed

    def mapped(matrices: Tensor, names: Sequence[str], **map_state: Tensor) -> Tensor:
        row_moments = map_state.pop(ROWS, None)
        # A map commutes with the transposition, but its state is that of a matrix as nn.Linear
        # stores it.
        if is_transposed and map_state:
            output = maps.map_matrices(matrices.mT, names, **map_state).mT
        else:
            output = maps.map_matrices(matrices, names, **map_state)
        if row_moments is not None:
            beta = group["second_moment_beta"]
            output = divided_by_rows(output, row_moments, beta, transposed=is_transposed)
        if group["adjust_lr_fn"] != "match_rms_measured" or group["second_moment"] == "elements":
            return output
        return with_unit_rms(output)

    return batch.map(mapped) if batch.names else None


def update_momentum_(state: dict[str, Tensor], grad: Tensor, coefficient: float) -> None:
    """M <- coefficient * M + (1 - coefficient) * grad: an average without bias correction.
    M: state["exp_avg"].
    """
    momentum = local(state["exp_avg"])
    if momentum.dtype != torch.bfloat16:
        momentum.lerp_(grad.to(momentum.dtype), 1 - coefficient)
        return
    # Averaged in float32 and rounded once, to nearest: the gradients' noise dithers it. On a toy
    # the momentum was then 0.5% off its float32 twin; with stochastic rounding it was 0.8%, and
    # the held-out loss no better (tests/optim/test_bfloat16_momentum.py).
    for numbers, gradients in chunks(momentum, grad):
        average = numbers.float().lerp_(gradients.float(), 1 - coefficient)
        numbers.copy_(average)


def nesterov(momentum: Tensor, grad: Tensor, coefficient: float) -> Tensor:
    """coefficient * momentum + (1 - coefficient) * grad, in momentum's dtype; `momentum` is that of
    this step.
    """
    return grad.to(momentum.dtype).lerp(momentum, coefficient)


def map_input(shard: Shard, group: dict[str, Any]) -> Tensor:
    """N of a shard, or its sign, in the shape of its weight; may be the momentum itself: do not
    modify it.
    """
    # itself, unless it is stored in bfloat16
    numbers = shard.momentum.to(map_dtype(shard.parameter))
    if group["nesterov"]:
        grad = shard.view_of(shard.parameter.grad)
        numbers = nesterov(numbers, grad, group["momentum"])
    return numbers.sign() if group["map_input"] == "sign" else numbers


def with_unit_rms(output: Tensor) -> Tensor:
    """Each matrix of a map's output [..., m, n], not modified, over its root mean square; zero
    stays zero.

    An RMS below 1e-12, which only maps that are not scale-free have, counts as 1e-12.
    """
    rms = frobenius_norm(output) / math.sqrt(output.shape[-2] * output.shape[-1])
    return output / rms.clamp(min=1e-12)


def decay_and_add_(
    parameter: Tensor,
    compensation: Tensor | None,
    direction: Tensor,
    *,
    lr: float | Tensor,
    scale: float,
    weight_decay: float,
    start: Tensor | None = None,
) -> None:
    """parameter <- parameter - lr * weight_decay * (parameter - start) - lr * scale * direction.

    direction: O. Computed in its dtype, float32 or float64, and rounded once to the parameter's.
    compensation: None, or the lower half of the float32 master weights (int16), which are then
    updated without loss. start: in the parameter's shape; None is zero.
    """
    # the parameter itself, if wide enough
    weights = master_weights(parameter, compensation).to(direction.dtype)
    if start is not None:
        weights.lerp_(start.to(weights.dtype), float(lr * weight_decay))
    elif weight_decay:  # else a pass over the weights for nothing
        weights.mul_(1 - lr * weight_decay)
    weights.add_(direction, alpha=float(-(lr * scale)))
    store_master_weights_(parameter, compensation, weights)


@dataclass(frozen=True, eq=False)
class PendingUpdate:
    """The direction of one update on this rank, with the weights before it: `weight` itself, or a
    copy.

    The update is decay_and_add_(weight, compensation, direction, lr=lr, scale=scale,
    weight_decay=weight_decay, start=start); AdamW's kernel rounds otherwise. A matrix has one
    update for each of its shards, and AdamW's parameters one for each chunk; for
    match_rms_measured the direction has an RMS of 1 over the whole matrix already. Read the
    tensors in the observer, do not keep them.
    """

    name: str
    group: dict[str, Any]
    weight: Tensor
    compensation: Tensor | None
    direction: Tensor
    lr: float | Tensor
    weight_decay: float
    scale: float = 1.0
    start: Tensor | None = None

    def applied(self, lr: float | Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (master weights before, the same after the update, direction), in chunks; lr:
        instead of its own.
        """
        lr = self.lr if lr is None else lr
        for weight, direction, rest, start in chunks(
            self.weight.detach(), self.direction, self.compensation, self.start
        ):
            before = master_weights(weight, rest)
            # the compensation keeps all of float32: as a float32 weight alone, then
            after = before.clone()
            settings = {"scale": self.scale, "weight_decay": self.weight_decay, "start": start}
            decay_and_add_(after, None, direction, lr=lr, **settings)
            yield before, after, direction
