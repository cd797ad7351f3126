"""Record the singular values of the map's inputs at chosen steps, in spectra.jsonl.

One line per matrix and step, in the order of the model: {"step", "name", "shape", "singular_values"}, the latter in
descending order, to seven digits. `bench/run_spectra.py` reads the file.
"""

import json
from fnmatch import fnmatchcase
from typing import Any

from transformers import TrainerCallback

from ..errors import UserError
from ..files import append
from ..optim import AppliedMap
from ..spectral import singular_values
from .attached_optimizer import AttachedOptimizer
from .measurements import MeasurementLog


class SpectraRecorder(TrainerCallback):
    """Appends to `log.spectra` at `log.steps`. Collective at these steps; a matrix is decomposed on its owner rank.

    Raises UserError if one of `log.matrices` matches no matrix.
    """

    def __init__(self, attached: AttachedOptimizer, log: MeasurementLog):
        self.attached, self.log = attached, log
        matrices = attached.names_of_matrices
        for glob in log.matrices:
            if not any(fnmatchcase(name, glob) for name in matrices):
                raise UserError(f"run.log_spectra.matrices: {glob!r} matches no matrix; `soren-align plan` lists them")
        names = [name for name in matrices if any(fnmatchcase(name, glob) for glob in log.matrices)]
        self._positions = {name: position for position, name in enumerate(names)}
        self._records: list[dict[str, Any]] = []

    def on_step_begin(self, args, state, control, **kwargs):
        """Observe the coming step if it is one of `steps`."""
        if state.global_step + 1 in self.log.steps:
            self.attached.optimizer.map_observers |= {self._add}

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Gather the records of all ranks, and append them."""
        step = state.global_step + 1
        if step not in self.log.steps:
            return
        self.attached.optimizer.map_observers -= {self._add}
        records = [record for part in self.attached.ranks.gather(self._records) for record in part]
        self._records = []
        if self.log.spectra:
            records = sorted(records, key=lambda record: self._positions[record["name"]])
            append(self.log.spectra, "".join(json.dumps({"step": step, **record}) + "\n" for record in records))

    def _add(self, applied: AppliedMap) -> None:
        if applied.name in self._positions:
            values = [float(f"{value:.7g}") for value in singular_values(applied.input).tolist()]
            record = {"name": applied.name, "shape": list(applied.input.shape), "singular_values": values}
            self._records.append(record)
