"""Measurements of the optimizer's updates, for metrics.jsonl (docs/metrics.md).

The loss shows whether a run learns; these numbers show whether the optimizer works as intended: the change that reached
the weights after decay and rounding, the distance from the starting weights, the singular values of the map's output.
They are measured on logging steps only.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..optim import CHUNK, Sums, chunks
from .attached_optimizer import AttachedOptimizer
from .starting_weights import StartingWeights, relative_changes

MAX_DECOMPOSED = 8
"""Map outputs that are decomposed on a logging step: one of each shape, and at most so many."""

MAX_COMPARED = 2**25
"""Weights per rank that are compared with the starting ones on a logging step, of larger models a sample: all those of
Qwen2.5-3B are 6 GB to copy to the GPU, these 64 MB. After training all are compared."""


class Measurements(TrainerCallback):
    """Measures one training run. `values` are merged into each log; every log becomes a line of `file`, a .jsonl file.

    Every rank measures the tensors that it updates, and the ranks add their sums: `values` is collective.
    """

    def __init__(self, attached: AttachedOptimizer, start: StartingWeights, file: Path | None = None):
        self.attached, self.start, self.file = attached, start, file
        self.num_tokens: Any = 0  # a tensor on the device of the batches: read on logging steps only
        self._matrices: dict[str, Any] = {}  # the parameter group
        self._aux_learning_rate = 0.0
        self._since = (time.perf_counter(), 0)  # time and number of tokens at the last log
        self._reset()

    def _reset(self) -> None:
        self._squares, self._numel = Sums(2), [0, 0]  # of the updates: of the matrices, of the other parameters
        self._singular_values: list[tuple[Tensor, Tensor]] = []  # largest and smallest of a map's output
        self._shapes: set[tuple[int, ...]] = set()

    def values(self, num_tokens: int) -> dict[str, float]:
        """Return the measurements of the last logging step; docs/metrics.md describes the keys. Collective.

        num_tokens: trained on since the start of this process, on all ranks.
        """
        values: dict[str, float] = {}
        if self.attached.has_other_parameters:
            values["aux_learning_rate"] = self._aux_learning_rate
        extremes = Sums(2)
        for pair in self._singular_values:
            extremes.add(0, *pair)
        num_decomposed, num_guarded = len(self._singular_values), self.attached.optimizer.num_guarded
        sums = self.attached.ranks.sums(
            [*self._squares.totals(), *self._numel, *extremes.totals(), num_decomposed, num_guarded]
        )
        squares, aux_squares, numel, aux_numel, largest, smallest, num_decomposed, num_guarded = sums
        if numel:
            values["update_rms"] = math.sqrt(squares / numel)
        if aux_numel:
            values["aux_update_rms"] = math.sqrt(aux_squares / aux_numel)
        values |= relative_changes(self.start, self.attached, MAX_COMPARED)
        if num_decomposed:
            values["map_max_singular_value"] = largest / num_decomposed
            values["map_min_singular_value"] = smallest / num_decomposed
        values["num_out_of_range"] = int(num_guarded)
        now, (then, num_tokens_then) = time.perf_counter(), self._since
        values["tokens_per_second"] = round((num_tokens - num_tokens_then) / max(now - then, 1e-9), 1)
        self._since = (now, num_tokens)
        return values

    def on_train_begin(self, args, state, control, **kwargs):
        """Start the clock."""
        self._since = (time.perf_counter(), int(self.num_tokens))

    def on_step_begin(self, args, state, control, **kwargs):
        """Observe the coming step if it will be logged. DeepSpeed steps within the last backward pass."""
        step = state.global_step + 1
        if step % max(state.logging_steps, 1) == 0 or (step == 1 and args.logging_first_step):
            self._reset()
            optimizer = self.attached.optimizer
            self._matrices = optimizer.param_groups[0]  # ZeRO 1 and 2 step with a list of one group at a time
            self._aux_learning_rate = float(optimizer.param_groups[-1]["lr"])  # at the log the schedule has advanced
            optimizer.observer, optimizer.map_observer = self._add_update, self._add_map_output

    def on_optimizer_step(self, args, state, control, **kwargs):
        """End the observation."""
        self.attached.optimizer.observer = self.attached.optimizer.map_observer = None

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Append a line to the file."""
        if self.file and logs:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"step": state.global_step, **logs}) + "\n")

    def _add_update(self, update: Any) -> None:
        index = 0 if update.group is self._matrices else 1
        self._numel[index] += update.after.numel()
        for after, before in chunks(update.after, update.before):
            self._squares.add(index, (after - before).float().square_().sum())

    def _add_map_output(self, output: Tensor) -> None:
        if output.shape not in self._shapes and len(self._shapes) < MAX_DECOMPOSED:
            self._shapes.add(output.shape)
            self._singular_values.append(_extreme_singular_values(output))


def _extreme_singular_values(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest, as scalars on the matrix's device."""
    # From the smaller Gram matrix in float64, accurate to 1e-8 of the largest: far cheaper than an SVD.
    tall = matrix if matrix.shape[0] > matrix.shape[1] else matrix.mT
    gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64, device=matrix.device)
    for rows in tall.split(max(1, CHUNK // tall.shape[1])):
        exact = rows.double()
        gram.addmm_(exact.mT, exact)
    sigma = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    return sigma[-1], sigma[0]
