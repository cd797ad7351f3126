"""What really stepped, and how far: the measurements behind metrics.jsonl and run.json.

The loss says whether a run learns; these say whether the *optimizer* did what its name promises: the change that
arrived in the weights (after decay and rounding), the distance from the start, the contrast that the map left between
strong and weak modes. The measuring happens on logging steps only.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from ..recipe import UserError

MAX_PROBED = 8
"""Matrices whose map output is decomposed on a logging step: one per shape, and not more than these."""


class WrongOptimizer(UserError):
    """The optimizer that steps is not the one that the recipe names."""


class Watch(TrainerCallback):
    """Measures one training run; `measures` are merged into each log, `record` goes into run.json."""

    def __init__(self, trainer: Trainer, optimizer_class: type, metrics: Path | None = None):
        self.trainer, self.expected, self.metrics = trainer, optimizer_class, metrics
        self.optimizer: Any = None
        self.start: dict[str, Tensor] = {}
        self.tokens: Any = 0  # a tensor where the tokens are: read on logging steps only
        self.record: dict[str, Any] = {}
        self._changes: dict[str, list[tuple[float, int]]] = {}
        self._modes: list[tuple[float, float]] = []
        self._probed: set[tuple[int, ...]] = set()
        self._maps_before = 0
        self._aux_rate = 0.0
        self._since = (time.perf_counter(), 0)

    # -- what really steps ------------------------------------------------------------------------------------------

    def on_train_begin(self, args, state, control, **kwargs):
        """Look behind accelerate's wrapper, and keep the weights to measure distances from."""
        chain: list[Any] = [self.trainer.optimizer]
        while hasattr(chain[-1], "optimizer"):
            chain.append(chain[-1].optimizer)
        self.optimizer = chain[-1]
        if type(self.optimizer) is not self.expected:
            raise WrongOptimizer(
                f"the recipe names {self.expected.__name__}, but {type(self.optimizer).__name__} would step"
            )
        self.record = {
            "class": type(self.optimizer).__name__,
            "chain": [type(o).__name__ for o in chain],
            "num_matrices": self.num_matrices,
            "groups": [
                {k: v for k, v in g.items() if k not in ("params", "param_names", "lr")} | {"tensors": len(g["params"])}
                for g in self.optimizer.param_groups
            ],
        }
        self._since = (time.perf_counter(), int(self.tokens))

    @property
    def num_matrices(self) -> int:
        """Parameters that the spectral map must see, once each, per optimizer step."""
        return sum(len(g["params"]) for g in self.optimizer.param_groups if g["rule"] == "spectral")

    def remember_start(self, model: torch.nn.Module) -> None:
        """Keep the trainable weights as they are now: call before a checkpoint is loaded over them."""
        self.start = {name: _compact(p.detach()) for name, p in model.named_parameters() if p.requires_grad}

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Observe the coming step if its log will be written."""
        step = state.global_step + 1
        self._maps_before = self.optimizer.num_maps
        if step % max(state.logging_steps, 1) == 0 or (step == 1 and args.logging_first_step):
            self._changes, self._modes, self._probed = {}, [], set()
            self._aux_rate = float(self.optimizer.param_groups[-1]["lr"])  # now: by the log, the schedule has moved on
            self.optimizer.observer = self._observe

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Every matrix exactly once per optimizer step, whatever the accumulation."""
        self.optimizer.observer = None
        maps = self.optimizer.num_maps - self._maps_before
        if maps != self.num_matrices:
            raise WrongOptimizer(f"{maps} spectral maps in one optimizer step for {self.num_matrices} matrices")
        self.record["maps_per_step"] = maps

    def _observe(self, seen: Any) -> None:
        change = (seen.after - seen.before).float()
        role = "" if self._is_matrix(seen.name) else "aux_"
        self._changes.setdefault(role, []).append((float(change.square().sum()), change.numel()))
        if seen.output is not None and seen.output.shape not in self._probed and len(self._probed) < MAX_PROBED:
            self._probed.add(seen.output.shape)
            self._modes.append(_extreme_singular_values(seen.output))

    def _is_matrix(self, name: str) -> bool:
        return name in self.optimizer.param_groups[0].get("param_names", ())

    # -- what is written down ---------------------------------------------------------------------------------------

    def measures(self, num_tokens: int) -> dict[str, float]:
        """The latest measurements, for the log: see docs/metrics.md for their meaning.

        num_tokens: seen so far, on all ranks.
        """
        found: dict[str, float] = {}
        groups = self.optimizer.param_groups
        if len(groups) > 1:
            found["aux_learning_rate"] = self._aux_rate
        for role, changes in self._changes.items():
            squares, numel = map(sum, zip(*changes, strict=True))
            found[f"{role}update_rms"] = math.sqrt(squares / numel)
        found |= self.distances()
        if self._modes:
            strongest, weakest = zip(*self._modes, strict=True)
            found["map_strongest"] = sum(strongest) / len(strongest)
            found["map_weakest"] = sum(weakest) / len(weakest)
        found["num_guarded"] = self.optimizer.num_guarded
        now, (then, tokens) = time.perf_counter(), self._since
        found["tokens_per_second"] = round((num_tokens - tokens) / max(now - then, 1e-9), 1)
        self._since = (now, num_tokens)
        return found

    def distances(self) -> dict[str, float]:
        """||W - W_0|| / ||W_0|| over the matrices, and over the rest."""
        sums: dict[str, list[float]] = {}
        for group in self.optimizer.param_groups:
            role = "" if group is self.optimizer.param_groups[0] else "aux_"
            for name, p in zip(group["param_names"], group["params"], strict=True):
                start = self.start[name].to(p.device, torch.float32)
                moved, norm = sums.setdefault(role, [0.0, 0.0])
                sums[role] = [moved + float((p.detach() - start).square().sum()), norm + float(start.square().sum())]
        return {f"{role}relative_change": math.sqrt(m / n) if n else 0.0 for role, (m, n) in sums.items()}

    def on_log(self, args, state, control, logs=None, **kwargs):
        """A line of metrics.jsonl per log."""
        if self.metrics and logs:
            with self.metrics.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def _extreme_singular_values(matrix: Tensor) -> tuple[float, float]:
    # By the smaller Gram matrix in float64, good to 1e-8 of the largest: far cheaper than an SVD of a tall matrix.
    wide = (matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix).double()
    sigma = torch.linalg.eigvalsh(wide @ wide.mT).clamp(min=0).sqrt()
    return float(sigma[-1]), float(sigma[0])


def _compact(weights: Tensor) -> Tensor:
    """A copy on the CPU; in bfloat16 where that loses nothing, as for a checkpoint that was published in it."""
    half = weights.to(torch.bfloat16)
    return (half if torch.equal(half.to(weights.dtype), weights) else weights).to("cpu", copy=True)
