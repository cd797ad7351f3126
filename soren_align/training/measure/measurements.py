"""Measurements of the optimizer's updates, for metrics.jsonl (docs/metrics.md).

The loss shows whether a run learns; these numbers show whether the optimizer works as intended: the
change that reached the weights after decay and rounding, the distance from the starting weights,
the singular values of the map's output. They are measured on logging steps only: those of the
recipe, and of a run too short for two logs its first and last.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from ...core.errors import UserError
from ...core.files import append
from ...optim import AppliedMap, PendingUpdate, Sums, matrices_of
from ...recipe.schema import LogSpectra
from ...run.folder import metrics_line
from ...spectral import distance_from_sigmoid, singular_values
from ...spectral.exact import contrast_numbers, null_space_bound
from ..trained_optimizer import AttachedOptimizer, StartingWeights, relative_changes
from .progress import logs_for_short_run

MAX_DECOMPOSED = 8
"""Map outputs that are decomposed on a logging step: one of each shape, and at most so many."""
MAX_COMPARED = 2**21
"""Weights per rank that are compared with the starting ones on a logging step, of larger models a
sample: all those of Qwen2.5-3B are 6 GB to copy to the GPU, these 4 MB. All of 7M weights took 13
ms on a CPU. After training all are compared."""
MAX_ROWS = 1024
"""The most rows (the shorter side) of a matrix whose map is compared with the exact sigmoid, or has
its contrast measured (docs/metrics.md has the cost)."""
CONTRAST = ("map_contrast", "map_cosine_to_muon", "map_cosine_to_momentum")


@dataclass(frozen=True)
class MeasurementLog:
    """The files of measurements, on the first rank alone, and which are recorded.

    metrics: a .jsonl file that gets a line per log. spectra: one that gets a line per matrix at
    each step of `section`.
    """

    metrics: Path | None = None
    spectra: Path | None = None
    section: LogSpectra = field(default_factory=LogSpectra)


class Measurements(TrainerCallback):
    """Measures one training run.
    `values` are merged into each log; every log becomes a line of `log.metrics`.

    Every rank measures the tensors that it updates, and the ranks add their sums: `values` is
    collective.
    """

    def __init__(
        self,
        attached: AttachedOptimizer,
        start: StartingWeights,
        log: MeasurementLog = MeasurementLog(),
    ):
        self.attached, self.start, self.log = attached, start, log
        # A tensor on the device of the batches, which is read on logging steps only.
        self.num_tokens: Any = 0
        self.num_padding: Any = 0
        self._matrices: dict[str, Any] = {}  # the parameter group
        self._aux_learning_rate = 0.0
        # One matrix of each shape, always the same ones: their values at different steps can be
        # compared.
        firsts: dict[Any, str] = {}
        for weight in attached.weights:
            firsts.setdefault((weight.shape, weight.layout), weight.matrix_names[0])
        self._decomposed = [*firsts.values()][:MAX_DECOMPOSED]
        # Position and name of the matrix whose map is compared with the exact sigmoid.
        self._compared = (0, "")
        self._since = (time.perf_counter(), 0, 0)  # time and both numbers at the last log
        self._reset()

    def _reset(self) -> None:
        # Of the squared updates of the matrices and of the other parameters; of the largest and the
        # smallest singular values of map outputs; the error of one map, on the owner rank of the
        # matrix `_compared`; and of the three numbers of a map's contrast, with the number of
        # matrices that have one.
        self._sums = Sums(9)
        self._numel, self._num_decomposed, self._num_compared = [0, 0], 0, 0

    def values(self, num_tokens: int, num_padding: int = 0) -> dict[str, float]:
        """Return the measurements of the last logging step; docs/metrics.md describes the keys.
        Collective.

        num_tokens: trained on since the start of this process, on all ranks. num_padding: beside
        them in the batches.
        """
        values: dict[str, float] = {}
        if self.attached.has_other_parameters:
            values["aux_learning_rate"] = self._aux_learning_rate
        # One collective for all sums: a log must cost less than a step.
        counts = [
            *self._numel,
            self._num_decomposed,
            self._num_compared,
            self.attached.optimizer.num_guarded,
        ]
        sums = self.attached.ranks.sums([*self._sums.totals(), *counts])
        squares, aux_squares, largest, smallest, map_error, *contrasts, num_contrasts = sums[:9]
        numel, aux_numel, num_decomposed, num_compared, num_guarded = sums[9:]
        if numel:
            values["update_rms"] = math.sqrt(squares / numel)
        if aux_numel:
            values["aux_update_rms"] = math.sqrt(aux_squares / aux_numel)
        values |= relative_changes(self.start, self.attached, MAX_COMPARED)
        if num_decomposed:
            values["map_max_singular_value"] = largest / num_decomposed
            values["map_min_singular_value"] = smallest / num_decomposed
        if num_contrasts:
            values |= {
                key: total / num_contrasts for key, total in zip(CONTRAST, contrasts, strict=True)
            }
        if num_compared:
            values |= {"map_error": map_error, "map_error_matrix": self._compared[0]}
        values["num_out_of_range"] = int(num_guarded)
        # Tokens of all ranks, over the time that includes evaluations and checkpoints.
        now, (then, num_tokens_then, num_padding_then) = time.perf_counter(), self._since
        num_new, num_filled = num_tokens - num_tokens_then, num_padding - num_padding_then
        values["tokens_per_second"] = round(num_new / max(now - then, 1e-9), 1)
        values["padding"] = round(num_filled / max(num_new + num_filled, 1), 4)
        self._since = (now, num_tokens, num_padding)
        return values

    def on_train_begin(self, args, state, control, **kwargs):
        """Start the clock of tokens per second."""
        self._since = (time.perf_counter(), int(self.num_tokens), int(self.num_padding))

    def on_step_begin(self, args, state, control, **kwargs):
        """Observe the coming step if it will be logged.
        DeepSpeed steps within the last backward pass.
        """
        # On logging steps alone: singular values of eight matrices cost more than the step of a
        # small model.
        step = state.global_step + 1
        if (
            step % max(state.logging_steps, 1) == 0
            or (step == 1 and args.logging_first_step)
            or logs_for_short_run(args, state, step)
        ):
            self._reset()
            optimizer = self.attached.optimizer
            # ZeRO 1 and 2 step with a list of one group at a time
            self._matrices = optimizer.param_groups[0]
            # Noted here, since at the log the schedule has advanced.
            self._aux_learning_rate = float(optimizer.param_groups[-1]["lr"])
            names = self.attached.names_of_matrices or [""]
            # By the step alone, so that it is equal on all ranks.
            position = step // max(state.logging_steps, 1) % len(names)
            # A different matrix at each log: all of them come round, at the cost of one
            # decomposition per log.
            self._compared = position, names[position]
            optimizer.update_observers |= {self._add_update}
            optimizer.map_observers |= {self._add_map}

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Observe no further step until the next one that is logged."""
        self.attached.optimizer.update_observers -= {self._add_update}
        self.attached.optimizer.map_observers -= {self._add_map}

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Append a line to the file."""
        if self.log.metrics and logs:
            append(self.log.metrics, metrics_line({"step": state.global_step, **logs}))

    def _add_update(self, update: PendingUpdate) -> None:
        index = 0 if update.group is self._matrices else 1
        self._numel[index] += update.weight.numel()
        for before, after, _ in update.applied():
            self._sums.add(index, (after - before).float().square_().sum())

    def _add_map(self, applied: AppliedMap) -> None:
        shape = applied.output.shape
        if applied.name in self._decomposed:  # on one rank: an owner has it
            values = singular_values(applied.output)
            self._sums.add(2, values[0], values[-1])
            self._num_decomposed += 1
            if min(shape) <= MAX_ROWS:
                sigma, output = singular_values(applied.input), applied.output.flatten()
                sigma = sigma.where(sigma > null_space_bound(applied.input) * sigma[0], 0.0)
                numbers = contrast_numbers(sigma, values)
                # Of the matrices themselves: a map that is not increasing exchanges the order of
                # the singular values.
                x = applied.input.flatten()
                numbers[2] = x.dot(output) / (x.norm() * output.norm())
                has_contrast = numbers.isfinite().all()  # a zero momentum has none
                self._sums.add(5, *numbers.where(has_contrast, 0.0), has_contrast)
        approximates = applied.group.get("map", {"name": "exact"})["name"] != "exact"
        if (
            self.log.section.map_error
            and approximates
            and applied.name == self._compared[1]
            and min(shape) <= MAX_ROWS
        ):
            self._sums.add(4, distance_from_sigmoid(applied.input, applied.output))
            self._num_compared += 1


def matching(names: Sequence[str], globs: Sequence[str]) -> list[str]:
    """Return the names that one of run.log_spectra's globs matches.
    Raises UserError if a glob matches none.
    """
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UserError(
                f"run.log_spectra.matrices: {glob!r} matches no matrix; run `soren-align plan` "
                "for a list"
            )
    return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]


class SpectraRecorder(TrainerCallback):
    """Appends the singular values of the map's inputs, or of the gradients, to `log.spectra` at
    `section.steps`.

    One line per matrix and step, in the order of the model: {"step", "name", "shape",
    "singular_values"}, the latter in descending order, to seven digits; a gradient's has "of":
    "gradient". `run/spectra.py` reads the file. Collective at these steps; a momentum is
    decomposed on the matrix's owner rank, gradients on the first rank.

    Raises UserError if one of `section.matrices` matches no matrix.
    """

    def __init__(self, attached: AttachedOptimizer, log: MeasurementLog):
        self.attached, self.log, self.section = attached, log, log.section
        names = matching(attached.names_of_matrices, log.section.matrices)
        self._positions = {name: position for position, name in enumerate(names)}
        self._records: list[dict[str, Any]] = []

    def on_step_begin(self, args, state, control, **kwargs):
        """Observe the coming step if it is one of `steps`."""
        if state.global_step + 1 in self.section.steps and "momentum" in self.section.of:
            self.attached.optimizer.map_observers |= {self._add}

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Record the gradients, averaged over ranks and clipped."""
        is_recorded = "gradient" in self.section.of and self.attached.ranks.is_first
        if is_recorded and state.global_step + 1 in self.section.steps:
            for group in self.attached.optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    if group["rule"] == "spectral" and parameter.grad is not None:
                        layout = group.get("weight_layouts", {}).get(name, "linear")
                        for matrix, gradient in matrices_of(name, parameter.grad.float(), layout):
                            self._record(matrix, gradient, of="gradient")

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Gather the records of all ranks, and append them."""
        step = state.global_step + 1
        if step not in self.section.steps:
            return
        self.attached.optimizer.map_observers -= {self._add}
        records = [record for part in self.attached.ranks.gather(self._records) for record in part]
        self._records = []
        if self.log.spectra:
            records = sorted(
                records, key=lambda record: ("of" in record, self._positions[record["name"]])
            )
            append(
                self.log.spectra,
                "".join(json.dumps({"step": step, **record}) + "\n" for record in records),
            )

    def _add(self, applied: AppliedMap) -> None:
        self._record(applied.name, applied.input)

    def _record(self, name: str, matrix: Tensor, **about: str) -> None:
        if name in self._positions:
            # Seven digits are float32's.
            values = [float(f"{value:.7g}") for value in singular_values(matrix).tolist()]
            self._records.append(
                {"name": name, **about, "shape": list(matrix.shape), "singular_values": values}
            )
