"""Find the optimizer inside accelerate's wrappers, and compare it with the recipe."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..core.errors import UserError
from ..optim import SpectralOptimizer, Sums, chunks, copied_to_cpu, master_weights
from ..optim.layout import LINEAR, Weight, weights_in, whole_shape
from ..sharding import local, restore_groups_
from ..sharding.ranks import Ranks


class OptimizerMismatch(UserError):
    """The optimizer that steps is not the recipe's, or its map did not run once per matrix."""


@dataclass(frozen=True, eq=False)
class AttachedOptimizer:
    """The optimizer that steps, and where its tensors are.

    wrappers: those around `optimizer`, the outermost first. expected: the optimizer that the recipe
    describes, built over the whole parameters and never stepped. parallel: "ddp" (also for one
    process), "zero" or "fsdp2".
    tensors: those that this rank updates, by parameter group.
    """

    optimizer: Any
    wrappers: list[Any]
    expected: SpectralOptimizer
    parallel: str
    tensors: list[list[Tensor]]
    ranks: Ranks

    @cached_property  # of thousands of experts, and read at every step
    def weights(self) -> list[Weight]:
        """The weights that have a spectral map, in the order of the model."""
        weights: list[Weight] = []
        for group in (group for group in self.expected.param_groups if group["rule"] == "spectral"):
            layouts = group.get("weight_layouts", {})
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                weights += weights_in(name, whole_shape(parameter), layouts.get(name, LINEAR))
        return weights

    @cached_property
    def names_of_matrices(self) -> list[str]:
        """The names of the matrices, each mapped once per optimizer step, in the order of the
        model.
        """
        return [matrix for weight in self.weights for matrix in weight.matrix_names]

    @property
    def has_other_parameters(self) -> bool:
        """Whether AdamW updates a second parameter group."""
        return len(self.expected.param_groups) > 1

    def refuse_unaveraged_gradients(self, step: int) -> None:
        """Raise UserError if the ranks of DDP have different momentum, which shows that gradients
        were not averaged.

        Collective. DDP averages gradients only if the loss is computed through its wrapper; every
        rank keeps all momentum. The norms may differ by 1e-6: GPUs of two kinds may sum in another
        order.
        """
        if self.ranks.num_ranks == 1:
            return
        squares = Sums(1)
        for state in self.optimizer.state.values():
            for (momentum,) in chunks(local(state["exp_avg"])):
                squares.add(0, momentum.double().square_().sum())
        norms = self.ranks.gather(math.sqrt(squares.totals()[0]))
        smallest, largest = min(norms), max(norms)
        if not math.isclose(smallest, largest, rel_tol=1e-6):
            raise UserError(
                f"step {step}: the processes did not average their gradients: the norm of the "
                f"momentum differs between the processes, from {smallest:g} to {largest:g}. The "
                "loss was computed without DDP's wrapper; use one process, or ZeRO"
            )


class OptimizerCheck(TrainerCallback):
    """Raises OptimizerMismatch unless every matrix goes through the map exactly once per optimizer
    step. Collective.

    counts: of these checks, and of steps skipped because of the loss scale. Checkpoints contain
    them: a run resumed at its last step takes none that could be counted.
    """

    def __init__(self, attached: AttachedOptimizer):
        self.attached = attached
        self.counts: dict[str, int] = {}
        self._num_maps_before = 0

    @property
    def record(self) -> dict[str, Any]:
        """Class, wrappers and parameter groups of the optimizer, and the counts, for run.json."""
        attached, hidden = self.attached, ("params", "param_names", "weight_layouts", "lr")
        return {
            "class": type(attached.optimizer).__name__,
            "chain": [
                type(optimizer).__name__ for optimizer in (*attached.wrappers, attached.optimizer)
            ],
            "parallel": attached.parallel,
            "num_matrices": len(attached.names_of_matrices),
            "groups": [
                {key: value for key, value in group.items() if key not in hidden}
                | {"num_tensors": len(group["params"])}
                for group in attached.expected.param_groups
            ],
            **self.counts,
        }

    def on_train_begin(self, args, state, control, **kwargs):
        """Restore the counts of the checkpoint, and the group settings that loading one of ZeRO may
        have resharding.
        """
        self.counts |= (state.stateful_callbacks or {}).get(type(self).__name__, {})  # pyright: ignore (a dict)
        if self.attached.parallel == "zero":
            rates = kwargs["lr_scheduler"].get_last_lr()
            restore_groups_(self.attached.optimizer, self.attached.expected.param_groups, rates)

    def on_step_begin(self, args, state, control, **kwargs):
        """Note the number of maps before the step."""
        self._num_maps_before = self.attached.optimizer.num_maps

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Compare the number of maps of this step, over all ranks, with the number of matrices."""
        wrappers, optimizer = self.attached.wrappers, self.attached.optimizer
        # Two kinds of skipped steps: torch's GradScaler, in accelerate's wrapper, and DeepSpeed's
        # own `overflow`.
        scaler = next((s for w in wrappers if (s := getattr(w, "scaler", None)) is not None), None)
        skipped = any(
            getattr(w, "overflow", False) or getattr(w, "step_was_skipped", False) for w in wrappers
        )
        # Matrices are mapped by their owner ranks: only the sum over ranks can be compared.
        counts = self.attached.ranks.sums([optimizer.num_maps - self._num_maps_before, skipped])
        num_maps, num_skipping_ranks = map(int, counts)
        if num_maps == 0 and num_skipping_ranks:
            if scaler is None and not args.fp16:
                raise FloatingPointError(
                    "the gradient has a NaN or an infinity. DeepSpeed skipped this step, which "
                    "changed nothing"
                )
            # torch's GradScaler would halve its scale without end; DeepSpeed stops at a scale of 1
            # by itself.
            if scaler is not None and scaler.get_scale() < 1:
                raise FloatingPointError(
                    "the gradient has a NaN or an infinity even at the loss scale "
                    f"{scaler.get_scale():g}; write trainer.bf16: true instead of fp16"
                )
            self.counts["num_skipped_steps"] = self.counts.get("num_skipped_steps", 0) + 1
            return
        num_matrices = len(self.attached.names_of_matrices)
        if num_maps != num_matrices:
            raise OptimizerMismatch(
                f"{num_maps} spectral maps in one optimizer step for {num_matrices} matrices"
            )
        self.counts["maps_per_step"] = num_maps


class StartingWeights:
    """Copies of the weights on the CPU, at the time of construction, from which the present weights
    are measured.

    tensors: (index of the parameter group, tensor updated here). Every rank copies only the
    tensors, or parts of tensors, that it alone measures; the ranks add their sums.
    """

    def __init__(self, tensors: Sequence[tuple[int, Tensor]]):
        copies = compact_copies([local(tensor.detach()) for _, tensor in tensors])
        self._tensors = [(*pair, copy) for pair, copy in zip(tensors, copies, strict=True)]

    def pairs(
        self, optimizer: Any, most: int | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (index of the group, present weights, starting weights), float32, in chunks that
        cover all tensors.

        With a compensation, the present weights are its sum with the parameter. Do not modify or
        keep them.
        most: number of elements from which on evenly spaced rows of every tensor are yielded
        instead of all.
        """
        stride = (
            max(1, round(sum(copy.numel() for *_, copy in self._tensors) / most)) if most else 1
        )
        for index, tensor, copy in self._tensors:
            rest = optimizer.state.get(tensor, {}).get("compensation")
            here = (local(tensor.detach()), None if rest is None else local(rest), copy)
            rows = (part if part is None or not part.ndim else part[::stride] for part in here)
            for weights, compensation, start in chunks(*rows):
                yield (
                    index,
                    master_weights(weights, compensation).float(),
                    start.to(weights.device).float(),
                )


def relative_changes(
    start: StartingWeights, attached: AttachedOptimizer, most: int | None = None
) -> dict[str, float]:
    """Return |W - W_0| / |W_0| (Frobenius) over all matrices, and over all other parameters.
    Collective.

    most: elements on this rank that are compared; of more, evenly spaced rows of every tensor.
    """
    # Sums of squares on the device, read once at the end: of the change and of the start, of the
    # matrices and of the other parameters.
    squares = Sums(4)
    for index, weights, before in start.pairs(attached.optimizer, most):
        squares.add(2 * index, (weights - before).square_().sum(), before.square().sum())
    change, norm, aux_change, aux_norm = attached.ranks.sums(squares.totals())
    changes = {"relative_change": math.sqrt(change / norm) if norm else 0.0}
    if attached.has_other_parameters:
        changes["aux_relative_change"] = math.sqrt(aux_change / aux_norm) if aux_norm else 0.0
    return changes


def compact_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies on the CPU, in bfloat16 where that is exact, as it is for a checkpoint
    published in bfloat16.
    """
    # A host read per tensor would take seconds for thousands of experts: all are counted first.
    inexact = Sums(len(tensors))
    for index, tensor in enumerate(tensors):
        for (part,) in chunks(tensor):
            inexact.add(index, (part.to(torch.bfloat16).to(part.dtype) != part).any())
    totals = inexact.totals()
    dtypes = [
        tensor.dtype if count else torch.bfloat16
        for tensor, count in zip(tensors, totals, strict=True)
    ]
    return [
        copied_to_cpu(tensor, None, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)
    ]
