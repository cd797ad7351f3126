"""What really stepped, and how far: the measurements behind metrics.jsonl and run.json.

The loss says whether a run learns; these say whether the *optimizer* did what its name promises: the change that
arrived in the weights (after decay and rounding), the distance from the start, the contrast that the map left between
strong and weak modes. The measuring happens on logging steps only.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..errors import UserError
from ..optim import CHUNK, SpectralOptimizer, Sums, chunks, copied_to_cpu, master_weights
from ..sharding import Sharding, chain_of, local, restore_groups_
from ..sharding.ranks import Ranks

MAX_PROBED = 8
"""Matrices whose map output is decomposed on a logging step: one per shape, and not more than these."""


class WrongOptimizer(UserError):
    """The optimizer that steps is not the one that the recipe names."""


class Watch(TrainerCallback):
    """Measures one training run; `measures` are merged into each log, `record` goes into run.json.

    Every rank measures the tensors that it alone steps, and the ranks add up: these methods are collective.
    """

    def __init__(self, reference: SpectralOptimizer, ranks: Ranks, metrics: Path | None = None):
        """reference: the optimizer as it should be, over the whole parameters; metrics: a .jsonl file for the logs."""
        self.reference, self.ranks, self.metrics = reference, ranks, metrics
        self.optimizer: Any = None
        self._wrappers: list[Any] = []
        self.tokens: Any = 0  # a tensor where the tokens are: read on logging steps only
        self.record: dict[str, Any] = {}
        self._weights: list[tuple[int, Tensor, Tensor]] = []  # number of the group, what is stepped here, its start
        self._matrices: dict[str, Any] = {}  # the group of the matrices
        self._changes, self._num_changed = Sums(2), [0, 0]  # squares and entries: of the matrices, of the rest
        self._modes: list[tuple[Tensor, Tensor]] = []  # strongest and weakest of a map's output
        self._probed: set[tuple[int, ...]] = set()
        self._maps_before = 0
        self._aux_rate = 0.0
        self._since = (time.perf_counter(), 0)

    # -- what really steps ------------------------------------------------------------------------------------------

    @property
    def num_matrices(self) -> int:
        """Parameters that the spectral map must see, once each, per optimizer step."""
        return sum(len(g["params"]) for g in self.reference.param_groups if g["rule"] == "spectral")

    def recognise(self, optimizer: Any) -> None:
        """Look behind accelerate's wrappers. WrongOptimizer if another steps than the recipe's."""
        *self._wrappers, self.optimizer = chain_of(optimizer)
        if type(self.optimizer) is not type(self.reference):
            raise WrongOptimizer(
                f"the recipe names {type(self.reference).__name__}, but {type(self.optimizer).__name__} would step"
            )

    def begin(self, placed: Sharding) -> None:
        """Note what steps, and remember parts of weights before a checkpoint is loaded over them."""
        self.record = {
            "class": type(self.optimizer).__name__,
            "chain": [type(o).__name__ for o in (*self._wrappers, self.optimizer)],
            "parallel": placed.kind,
            "num_matrices": self.num_matrices,
            "groups": [
                {k: v for k, v in g.items() if k not in ("params", "param_names", "lr")} | {"tensors": len(g["params"])}
                for g in self.reference.param_groups
            ],
        }
        if placed.kind != "ddp":
            self._remember([(number, tensor) for number, group in enumerate(placed.tensors) for tensor in group])

    def remember_whole(self) -> None:
        """Remember the weights where each rank has all of them: a checkpoint is loaded before the optimizer is made."""
        whole = [(number, p) for number, group in enumerate(self.reference.param_groups) for p in group["params"]]
        self._remember(whole[self.ranks.rank :: self.ranks.num_ranks])

    def _remember(self, stepped: Sequence[tuple[int, Tensor]]) -> None:
        starts = _compact([local(tensor.detach()) for _, tensor in stepped])
        self._weights = [(*pair, start) for pair, start in zip(stepped, starts, strict=True)]

    def on_train_begin(self, args, state, control, **kwargs):
        """From here on the optimizer's groups stay the same objects."""
        if self.record["parallel"] == "zero":
            restore_groups_(self.optimizer, self.reference.param_groups, kwargs["lr_scheduler"].get_last_lr())
        self._matrices = self.optimizer.param_groups[0]
        self._since = (time.perf_counter(), int(self.tokens))

    def on_step_begin(self, args, state, control, **kwargs):
        """Observe the coming step if its log will be written. DeepSpeed steps within the last backward pass."""
        step = state.global_step + 1
        self._maps_before = self.optimizer.num_maps
        if step % max(state.logging_steps, 1) == 0 or (step == 1 and args.logging_first_step):
            self._changes, self._num_changed, self._modes, self._probed = Sums(2), [0, 0], [], set()
            self._aux_rate = float(self.optimizer.param_groups[-1]["lr"])  # now: by the log, the schedule has moved on
            self.optimizer.observer, self.optimizer.map_observer = self._observe, self._probe

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Every matrix exactly once per optimizer step, on one rank, whatever the accumulation."""
        self.optimizer.observer = self.optimizer.map_observer = None
        scaler = next((s for w in self._wrappers if (s := getattr(w, "scaler", None)) is not None), None)
        skipped = any(getattr(w, "overflow", False) or getattr(w, "step_was_skipped", False) for w in self._wrappers)
        maps, num_skipping = map(int, self.ranks.sums([self.optimizer.num_maps - self._maps_before, skipped]))
        if maps == 0 and num_skipping:
            self._accept_skip(scaler, args.fp16)
            return
        if maps != self.num_matrices:
            raise WrongOptimizer(f"{maps} spectral maps in one optimizer step for {self.num_matrices} matrices")
        self.record["maps_per_step"] = maps

    def _accept_skip(self, scaler: Any, fp16: bool) -> None:
        """Count a step left out for its loss scale. FloatingPointError if that is not what was wrong with it.

        scaler: torch's GradScaler, which would halve its scale for ever; DeepSpeed stops at 1 by itself.
        """
        if scaler is None and not fp16:
            raise FloatingPointError(
                "NaN or infinity in the gradient; DeepSpeed left this step out, nothing was changed"
            )
        if scaler is not None and scaler.get_scale() < 1:
            raise FloatingPointError(
                f"NaN or infinity in the gradient at a loss scale of {scaler.get_scale():g}: not for float16's range"
            )
        self.record["skipped_steps"] = self.record.get("skipped_steps", 0) + 1

    def _observe(self, seen: Any) -> None:
        number = 0 if seen.group is self._matrices else 1
        self._num_changed[number] += seen.after.numel()
        for after, before in chunks(seen.after, seen.before):
            self._changes.add(number, (after - before).float().square_().sum())

    def _probe(self, output: Tensor) -> None:
        if output.shape not in self._probed and len(self._probed) < MAX_PROBED:
            self._probed.add(output.shape)
            self._modes.append(_extreme_singular_values(output))

    # -- what is written down ---------------------------------------------------------------------------------------

    def measures(self, num_tokens: int) -> dict[str, float]:
        """The latest measurements, for the log: see docs/metrics.md for their meaning.

        num_tokens: seen so far, on all ranks.
        """
        found: dict[str, float] = {}
        if len(self.reference.param_groups) > 1:
            found["aux_learning_rate"] = self._aux_rate
        modes = Sums(2)
        for extremes in self._modes:
            modes.add(0, *extremes)
        moved, aux_moved, numel, aux_numel, strongest, weakest, probed, guarded = self.ranks.sums(
            [
                *self._changes.totals(),
                *self._num_changed,
                *modes.totals(),
                len(self._modes),
                self.optimizer.num_guarded,
            ]
        )
        for role, squares, number in (("", moved, numel), ("aux_", aux_moved, aux_numel)):
            if number:
                found[f"{role}update_rms"] = math.sqrt(squares / number)
        found |= self.distances()
        if probed:
            found |= {"map_strongest": strongest / probed, "map_weakest": weakest / probed}
        found["num_guarded"] = int(guarded)
        if "skipped_steps" in self.record:
            found["num_skipped"] = self.record["skipped_steps"]
        now, (then, tokens) = time.perf_counter(), self._since
        found["tokens_per_second"] = round((num_tokens - tokens) / max(now - then, 1e-9), 1)
        self._since = (now, num_tokens)
        return found

    def distances(self) -> dict[str, float]:
        """||W - W_0|| / ||W_0|| over the matrices, and over the rest."""
        here = Sums(4)  # squares of the way and of the start: of the matrices, of the rest
        for number, now, then in self.ways():
            here.add(2 * number, (now - then).square_().sum(), then.square().sum())
        moved, norm, aux_moved, aux_norm = self.ranks.sums(here.totals())
        found = {"relative_change": math.sqrt(moved / norm) if norm else 0.0}
        if len(self.reference.param_groups) > 1:
            found["aux_relative_change"] = math.sqrt(aux_moved / aux_norm) if aux_norm else 0.0
        return found

    def ways(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(number of the group, weights now, weights at the start), float32, in chunks of what this rank answers for.

        With a compensation the weights are its sum with the parameter. Read them, do not keep them.
        """
        for number, tensor, start in self._weights:
            kept = self.optimizer.state.get(tensor, {}).get("compensation")
            for held, rest, then in chunks(local(tensor.detach()), None if kept is None else local(kept), start):
                yield number, master_weights(held, rest).float(), then.to(held.device).float()

    def refuse_drift(self, step: int) -> None:
        """UserError if the ranks of DDP average other gradients than each other; each has all the momentum to tell by.

        DDP averages gradients only where the loss is computed through its wrapper. Where something goes around it, the
        ranks step with gradients of their own. 1e-6: GPUs of two kinds may sum differently.
        """
        if self.ranks.num_ranks == 1:
            return
        squares = Sums(1)
        for kept in self.optimizer.state.values():
            for (momentum,) in chunks(local(kept["exp_avg"])):
                squares.add(0, momentum.double().square_().sum())
        least, most = self.ranks.min_and_max(math.sqrt(squares.totals()[0]))
        if not math.isclose(least, most, rel_tol=1e-6):
            raise UserError(
                f"step {step}: the ranks' gradients were not averaged: their momentum has a norm of {least:g} to "
                f"{most:g}. A loss that goes around DDP does this; run it in one process, or under ZeRO"
            )

    def on_log(self, args, state, control, logs=None, **kwargs):
        """A line of metrics.jsonl per log."""
        if self.metrics and logs:
            with self.metrics.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def _extreme_singular_values(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the smallest, where the matrix is."""
    # By the smaller Gram matrix in float64, good to 1e-8 of the largest: far cheaper than an SVD of a tall matrix.
    tall = matrix if matrix.shape[0] > matrix.shape[1] else matrix.mT
    gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64, device=matrix.device)
    for rows in tall.split(max(1, CHUNK // tall.shape[1])):
        exact = rows.double()
        gram.addmm_(exact.mT, exact)
    sigma = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    return sigma[-1], sigma[0]


def _compact(weights: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the CPU; in bfloat16 where that loses nothing, as for a checkpoint that was published in it."""
    lost = Sums(len(weights))
    for number, tensor in enumerate(weights):
        for (part,) in chunks(tensor):
            lost.add(number, (part.to(torch.bfloat16).to(part.dtype) != part).any())
    dtypes = [tensor.dtype if loses else torch.bfloat16 for tensor, loses in zip(weights, lost.totals(), strict=True)]
    return [copied_to_cpu(tensor, None, dtype) for tensor, dtype in zip(weights, dtypes, strict=True)]
