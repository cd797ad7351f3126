"""The update rule of Soren, Muon and HTMuon: Algorithm 2 of the Soren paper, with decoupled weight decay.

For a matrix W [m, n] with gradient G and momentum M (zeros before the first step):

    M <- momentum * M + (1 - momentum) * G                update_momentum_
    N <- momentum * M + (1 - momentum) * G                nesterov; without it N <- M
    O <- U s(S) V^T  for  N = U S V^T                     map_matrix of the optimizer's class; Soren: s = sigmoid
    O <- O / RMS(O)                                       only for match_rms_measured: with_unit_rms
    W <- (1 - lr * weight_decay) * W                      decay_and_add_
    W <- W - lr * scale(m, n) * O                         decay_and_add_ with lr_scale

Only the map and the RMS need a whole matrix. All else is elementwise, and is done on any piece of the matrix, on the
rank that holds it. `GroupUpdate.step_` composes the functions for whole matrices; `soren_align.sharding` composes the
same functions around its collectives: gather the N of every piece on the matrix's owner rank, map, scatter O to the
pieces.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..spectral.matrices import frobenius_norm
from .eight_bits import SharedBlocks, decoded, decoded_range, encode_, spans_of
from .map_batches import map_batches
from .pieces import Piece, Whole, local, staged, whole_pieces
from .rounding import master_weights, store_master_weights_
from .state import momentum_dtype
from .storage import Storage, Storages, join, matrix_names, matrix_shape, num_matrices, split
from .update_records import AppliedUpdate, PendingUpdate

ADAMW_RMS = 0.2
"""RMS of AdamW's update over its learning rate, as observed after some hundred steps (docs/optimizers.md has the first
ones): the aim of both `match_rms_` scales."""


def update_momentum_(momentum: Tensor, grad: Tensor, coefficient: float) -> None:
    """momentum <- coefficient * momentum + (1 - coefficient) * grad: an average without bias correction."""
    momentum.lerp_(grad.to(momentum.dtype), 1 - coefficient)


def nesterov(momentum: Tensor, grad: Tensor, coefficient: float) -> Tensor:
    """coefficient * momentum + (1 - coefficient) * grad, in momentum's dtype; `momentum` is that of this step."""
    return grad.to(momentum.dtype).lerp(momentum, coefficient)


def lr_scale(adjust_lr_fn: str, num_rows: int, num_columns: int, map_level: float) -> float:
    """The factor of the learning rate of an m x n matrix; map_level: s of an ordinary singular value, Soren's is 1/2.

    "original" is sqrt(max(1, m / n)), "match_rms_adamw" 0.2 sqrt(max(m, n)) / map_level, "match_rms_measured" 0.2,
    of an output that is divided by its RMS, "none" 1.
    """
    if adjust_lr_fn == "original":
        return math.sqrt(max(1, num_rows / num_columns))
    if adjust_lr_fn == "match_rms_adamw":
        return ADAMW_RMS * math.sqrt(max(num_rows, num_columns)) / map_level
    return ADAMW_RMS if adjust_lr_fn == "match_rms_measured" else 1.0


def with_unit_rms(output: Tensor) -> Tensor:
    """Each matrix of a map's output [..., m, n], not modified, over its root mean square; zero stays zero.

    An RMS below 1e-12, of a map that is not scale-free, counts as 1e-12.
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
) -> None:
    """parameter <- parameter * (1 - lr * weight_decay) - lr * scale * direction.

    Computed in the direction's dtype, float32 or float64, and rounded once to the parameter's.
    compensation: None, or the lower half of the float32 master weights (int16), which are then updated without loss.
    """
    weights = master_weights(parameter, compensation).to(direction.dtype)  # parameter itself, unless it is narrower
    weights.mul_(1 - lr * weight_decay).add_(direction, alpha=float(-(lr * scale)))
    store_master_weights_(parameter, compensation, weights)


@dataclass(frozen=True, eq=False)
class GroupUpdate:
    """The update rule with the settings and states of one parameter group.

    lr: the group's; a tensor is on the CPU. lr_scale: (m, n) -> its factor.
    map_matrix: x [m, n] or [k, m, n], names of the matrices -> their map. workspace_mb: see `map_batches`.
    The observers get every update on this rank, before it is applied and after. shared_blocks: of 8-bit states; whoever
    calls `update_momenta_` finishes them.
    """

    group: dict[str, Any]
    state: Mapping[Tensor, dict[str, Tensor]]
    lr: float | Tensor
    map_matrix: Callable[[Tensor, Sequence[str]], Tensor]
    lr_scale: Callable[[int, int], float]
    workspace_mb: float | None = 0
    pending_observer: Callable[[PendingUpdate], None] | None = None
    observer: Callable[[AppliedUpdate], None] | None = None
    shared_blocks: SharedBlocks | None = None

    @property
    def storages(self) -> Storages:
        """Of the group's parameters."""
        return self.group.get("storages", {})

    def step_(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """One step of parameters that are whole matrices, or all experts of a layer, all with a gradient."""
        self.update_momenta_(named)
        slabs = (whole_pieces(name, parameter, self.storages.get(name, "plain")) for name, parameter in named)
        self.map_and_add_([slab for parts in slabs for slab in parts])

    def map_and_add_(self, pieces: Sequence[Piece], device: torch.device | None = None) -> None:
        """Map slabs that lie whole in `pieces`, on `device` (None: where each is), and add the outputs."""
        self.map_(
            [Whole(p.shape, momentum_dtype(p.parameter), device or p.parameter.device, p.storage) for p in pieces],
            [p.name for p in pieces],
            lambda i: staged(self.map_input(pieces[i]).reshape(pieces[i].shape), device),
            lambda i, output: self.add_output_(pieces[i], output),
        )

    def update_momenta_(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Count the step and update the momentum of every parameter, whole or shard; once per step, first."""
        for _, parameter in named:
            state = self.state[parameter]
            state["step"] = state["step"] + 1  # a new tensor: a state dict may hold the old one
            grad, coefficient = local(parameter.grad), self.group["momentum"]  # type: ignore
            if "spans" not in state:
                update_momentum_(local(state["exp_avg"]), grad, coefficient)
            for span in spans_of(state):
                momentum = decoded(state, "exp_avg", span)
                update_momentum_(momentum, grad.reshape(-1)[span.start : span.stop], coefficient)
                encode_(state, "exp_avg", span, momentum, self.shared_blocks)

    def map_input(self, piece: Piece) -> Tensor:
        """N of a piece, in the shape of `piece.view_of`; may be the momentum itself: do not modify it."""
        state = self.state[piece.parameter]
        momentum = piece.view_of(state["exp_avg"])
        if "spans" in state:
            momentum = decoded_range(state, "exp_avg", piece.start, piece.numel).view(momentum.shape)
        if not self.group["nesterov"]:
            return momentum
        return nesterov(momentum, piece.view_of(piece.parameter.grad), self.group["momentum"])  # type: ignore[arg-type]

    def map_(
        self,
        slabs: Sequence[Whole],
        names: Sequence[str],
        load: Callable[[int], Tensor],
        store: Callable[[int, Tensor], None],
    ) -> None:
        """Map the matrices of every slab that is not empty, those of equal slabs in batches.

        load(i): the input of slab i, [rows, columns], not modified. store(i, output): called once per slab.
        """
        for batch in map_batches(slabs, self.workspace_mb):
            shape, dtype, device, storage = slabs[batch[0]]
            matrices = [name for i in batch for name in matrix_names(names[i], storage)]
            if len(batch) == 1:
                outputs: Sequence[Tensor] = [self._direction(load(batch[0]), storage, matrices)]
            else:
                stack = torch.empty(len(batch), *shape, dtype=dtype, device=device)
                for matrix, index in zip(stack, batch, strict=True):
                    matrix.copy_(load(index))
                outputs = self._direction(stack, storage, matrices).unbind()
            for index, output in zip(batch, outputs, strict=True):
                store(index, output)
            del outputs, output  # before the next are loaded and mapped

    def _direction(self, x: Tensor, storage: Storage, names: Sequence[str]) -> Tensor:
        """The mapped matrices of a slab, or of several [k, rows, columns], stored as `x` stores them."""
        if num_matrices(storage) > 1:
            parts = split(x, storage)
            if x.ndim == 2:  # one by one, as the workspace may hold no more
                outputs = [
                    self._direction(part.contiguous(), "plain", [name]) for part, name in zip(parts, names, strict=True)
                ]
                return join(torch.stack(outputs), storage)
            return join(self._direction(parts.flatten(0, 1), "plain", names).view(parts.shape), storage)
        output = self.map_matrix(x, names)
        return with_unit_rms(output) if self.group["adjust_lr_fn"] == "match_rms_measured" else output

    def add_output_(self, piece: Piece, output: Tensor) -> None:
        """Decay the weights of a piece and add its part of the map's output: piece.numel elements in any shape."""
        lr, scale = self.lr, self.lr_scale(*matrix_shape(piece.shape, piece.storage))
        parameter, compensation = piece.view_of(piece.parameter), self.state[piece.parameter].get("compensation")
        compensation = None if compensation is None else piece.view_of(compensation)
        direction = output.reshape(parameter.shape).to(parameter.device)
        if self.pending_observer is not None:
            self.pending_observer(PendingUpdate(self.group, parameter, compensation, direction, scale))
        before = master_weights(parameter, compensation).clone() if self.observer is not None else parameter
        decay_and_add_(parameter, compensation, direction, lr=lr, scale=scale, weight_decay=self.group["weight_decay"])
        if self.observer is not None:
            shape = piece.shape if piece.is_whole else parameter.shape
            after = master_weights(parameter.detach(), compensation)
            self.observer(AppliedUpdate(piece.name, self.group, before.view(shape), after.view(shape)))

    def replicated_tensors(self, piece: Piece) -> list[Tensor]:
        """The tensors that a step changes on the owner rank and that all replicas share: weights and compensation."""
        compensation = self.state[piece.parameter].get("compensation")
        # As bfloat16: neither gloo nor NCCL sends int16.
        others = [] if compensation is None else [compensation.view(piece.parameter.dtype)]
        return [piece.view_of(tensor) for tensor in (piece.parameter.detach(), *others)]
