"""One step of one spectral group, in the three things that any layout of its matrices can be built from.

    averaged(piece) -> N        map_(matrices, load, store)        apply_(piece, output)

Momentum, decay and adding are elementwise, so that they happen on any stretch of a matrix, where it lies; only the map
needs whole matrices. With matrices in pieces a `Placement` brings them together; nothing here knows of ranks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..spectral import num_workspace_numbers
from .rounding import Proposal, move_, summed
from .state import momentum_dtype

if TYPE_CHECKING:
    from .spectral_optimizer import SpectralOptimizer

# MB (2^20 bytes), by device. On two CPU cores a batch of 64 x 64 takes a quarter of the time, of 256 x 256 four fifths,
# of 512 x 512 a third more: 16 MB keep those apart. Elsewhere 256 is a guess, not yet measured.
WORKSPACE_MB = {"cpu": 16}
WORKSPACE_MB_ELSEWHERE = 256


class Piece(NamedTuple):
    """`numel` numbers of a matrix of `shape`, which lie in `parameter`, read as one row, from `start` on."""

    name: str
    shape: tuple[int, int]
    parameter: Tensor
    start: int
    numel: int

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the matrix."""
        return self.numel == self.shape[0] * self.shape[1]


class Whole(NamedTuple):
    """What a matrix is mapped as; those that are alike may be mapped in one batch."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class Update:
    """One parameter's step on this rank, as an observer sees it. `after` is the live parameter: read it, don't keep it.

    Of a matrix in pieces each piece is an update of its own. With a compensation both are the float32 sums.
    """

    name: str
    group: dict[str, Any]
    before: Tensor
    after: Tensor


class Placement(Protocol):
    """Where the matrices lie of an optimizer whose parameters are shards or replicas."""

    def holds(self, parameter: Tensor) -> bool:
        """Whether it is known which matrices `parameter` holds pieces of."""
        ...

    def agree(self, named: Sequence[tuple[str, Tensor]], error: Exception | None) -> None:
        """Raise on every rank if any rank found an error, or if the ranks lack different gradients."""
        ...

    def prepare(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Find out how these tensors of one spectral group will step. ValueError, on every rank, if they cannot."""
        ...

    def step_(self, step: "GroupStep", named: Sequence[tuple[str, Tensor]]) -> None:
        """Bring every matrix of these tensors through step.map_ once, on some rank, and its output back to apply_."""
        ...


class GroupStep:
    """A step of one group by its settings."""

    def __init__(self, optimizer: "SpectralOptimizer", group: dict[str, Any]):
        self._optimizer, self._group = optimizer, group

    def advance_(self, parameters: Sequence[Tensor]) -> None:
        """Take the gradients of `parameters` into their momentum: before anything else, once."""
        for parameter in parameters:
            state = self._optimizer.state[parameter]
            momentum = local(state["exp_avg"])
            state["step"] = state["step"] + 1
            grad = local(parameter.grad).to(momentum.dtype)  # type: ignore[arg-type]
            momentum.lerp_(grad, 1 - self._group["momentum"])

    def averaged(self, piece: Piece) -> Tensor:
        """The piece's gradient averaged over the steps, in the shape of its stretch; read it, do not write to it."""
        momentum = _stretch(self._optimizer.state[piece.parameter]["exp_avg"], piece)
        if not self._group["nesterov"]:
            return momentum
        grad = _stretch(piece.parameter.grad, piece).to(momentum.dtype)  # type: ignore[arg-type]
        return grad.lerp(momentum, self._group["momentum"])

    def map_(
        self, matrices: Sequence[Whole], load: Callable[[int], Tensor], store: Callable[[int, Tensor], None]
    ) -> None:
        """Map every one of `matrices` that is not empty, those alike together within the workspace.

        load(i): the averaged matrix number i, [m, n], not modified. store(i, output): what becomes of its output.
        """
        for batch in self._batches(matrices):
            if len(batch) == 1:
                outputs = [self._optimizer.map_matrix(load(batch[0]), self._group)]
            else:
                shape, dtype, device = matrices[batch[0]]
                stack = torch.empty(len(batch), *shape, dtype=dtype, device=device)
                for matrix, index in zip(stack, batch, strict=True):
                    matrix.copy_(load(index))
                outputs = self._optimizer.map_matrix(stack, self._group).unbind()
            self._optimizer.num_maps += len(batch)
            for index, output in zip(batch, outputs, strict=True):
                if self._optimizer.map_observer is not None:
                    self._optimizer.map_observer(output)
                store(index, output)
            del outputs, output  # before the next are loaded and mapped

    def take_(self, pieces: Sequence[Piece], device: torch.device | None = None) -> None:
        """Map matrices that lie whole in `pieces`, on `device` (None: where each is), and take their steps."""
        self.map_(
            [Whole(p.shape, momentum_dtype(p.parameter), device or p.parameter.device) for p in pieces],
            lambda i: self.averaged(pieces[i]).reshape(pieces[i].shape).to(device),
            lambda i, output: self.apply_(pieces[i], output),
        )

    def apply_(self, piece: Piece, output: Tensor) -> None:
        """Decay the piece and take its step, of which `output` is the direction: piece.numel numbers in any shape."""
        group, observer, proposed = self._group, self._optimizer.observer, self._optimizer.proposal_observer
        lr, scale = _scalar(group["lr"]), self._optimizer.lr_scale(group["adjust_lr_fn"], *piece.shape)
        target, kept = _stretch(piece.parameter, piece), self._optimizer.state[piece.parameter].get("compensation")
        compensation = None if kept is None else _stretch(kept, piece)
        direction = output.reshape(target.shape).to(target.device)
        if proposed is not None:
            proposed(Proposal(group, target, compensation, direction, scale))
        before = summed(target, compensation).clone() if observer is not None else target
        move_(target, compensation, direction, -(lr * scale), lr * group["weight_decay"])
        if observer is not None:
            shape = piece.shape if piece.is_whole else target.shape
            after = summed(target.detach(), compensation)
            observer(Update(piece.name, group, before.view(shape), after.view(shape)))

    def changed(self, parameter: Tensor) -> list[Tensor]:
        """What of a matrix the rank that took its step knows alone: itself, and its compensation, as bits."""
        kept = self._optimizer.state[parameter].get("compensation")
        bits = [] if kept is None else [kept.view(parameter.dtype)]  # neither gloo nor NCCL sends int16
        return [parameter.detach(), *bits]

    def _batches(self, matrices: Sequence[Whole]) -> list[list[int]]:
        """Places of matrices of one kind, as many together as the workspace holds; those of a kind keep their order."""
        kinds: dict[Whole, list[int]] = {}
        for index, matrix in enumerate(matrices):
            if 0 not in matrix.shape:
                kinds.setdefault(matrix, []).append(index)
        batches = []
        for (shape, dtype, device), alike in kinds.items():
            most = self._optimizer.workspace_mb
            most = WORKSPACE_MB.get(device.type, WORKSPACE_MB_ELSEWHERE) if most is None else most
            each = (num_workspace_numbers(*shape) + math.prod(shape)) * dtype.itemsize  # with its place in the batch
            size = max(1, int(most * 2**20 / each))
            batches += [alike[start : start + size] for start in range(0, len(alike), size)]
        return batches


def local(tensor: Tensor) -> Tensor:
    """What of `tensor` lies on this rank, sharing its memory: FSDP2's tensors know; any other is here as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]


def _stretch(tensor: Tensor, piece: Piece) -> Tensor:
    here = local(tensor)
    # A whole tensor in its own shape, whatever its strides.
    return here if piece.numel == here.numel() else here.view(-1)[piece.start : piece.start + piece.numel]


def _scalar(lr: float | Tensor) -> float | Tensor:
    return lr.squeeze() if isinstance(lr, Tensor) else lr
