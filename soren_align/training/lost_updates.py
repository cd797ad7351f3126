"""Measure the share of updates that rounding removes.

An update far below one ulp of a weight does not change the weight, and no loss curve shows why. So
the first step's updates are applied to a copy, at the peak learning rate (the warm-up may start at
0), and the changed entries are counted. After training, the same is measured in the dtype of the
saved model.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import TrainerCallback

from ..core.errors import UserError
from ..optim import PendingUpdate, Sums, ulp
from ..run.record import SURVIVAL_THRESHOLD
from .trained_optimizer import AttachedOptimizer, StartingWeights

GROUPS = ("matrices", "other_parameters")
REMEDIES = (
    "Nothing was saved. Change one of these keys: model.dtype: float32; or "
    "optimizer.compensation: kahan, for bfloat16 parameters; or a larger optimizer.lr; or "
    "optimizer.adjust_lr_fn: match_rms_measured, with AdamW's learning rates. To train with "
    "these losses, write run.lost_updates: warn"
)


@dataclass(frozen=True)
class LostUpdatesPolicy:
    """If most updates are lost at the first step: stop, or warn.

    report(groups, warnings) is called once, on every rank, before a run is stopped; see
    `FirstStepCheck.groups`.
    """

    action: Literal["stop", "warn"]
    report: Callable[[dict[str, Any], list[str]], object]


WARN = LostUpdatesPolicy(
    "warn", lambda groups, problems: [warnings.warn(text, stacklevel=2) for text in problems]
)


class FirstStepCheck(TrainerCallback):
    """Measures the first step of a new run.
    Collective; raises UserError on every rank if most updates are lost.

    groups: {"matrices": {"fraction_changed", "dtype", "update_rms", "ulp", "lr"},
    "other_parameters": ...}; reported too if every gradient of the training was zero.
    fraction_changed: of the entries with a nonzero update, those that change at lr, the peak.
    update_rms: of these entries, without decay. ulp: at the root mean square of their weights, in
    dtype.
    """

    def __init__(self, attached: AttachedOptimizer, policy: LostUpdatesPolicy):
        self.attached, self.policy = attached, policy
        self.groups: dict[str, dict[str, Any]] = {}
        self._pending = False
        # of each group: entries with an update, changed, in bfloat16; sums of squares of updates
        # and of weights
        self._sums = Sums(5 * len(GROUPS))
        self._peaks = [0.0] * len(GROUPS)
        self._matrices: dict[str, Any] = {}  # the parameter group

    def on_train_begin(self, args, state, control, **kwargs):
        """Measure new runs only: a resumed run was measured at its own first step."""
        self._pending = state.global_step == 0

    def on_step_begin(self, args, state, control, **kwargs):
        """Observe the coming step. If the loss scale skips it, the next one is observed."""
        if self._pending:
            optimizer = self.attached.optimizer
            self._peaks = [
                float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups
            ]
            # ZeRO 1 and 2 step with a list of one group at a time
            self._matrices = optimizer.param_groups[0]
            optimizer.update_observers |= {self._add}

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Report the result, the same on every rank; raise UserError if the policy is to stop."""
        if not self._pending:
            return
        self.attached.optimizer.update_observers -= {self._add}
        # Gather: each rank has counted the tensors that it updates.
        sums = self.attached.ranks.sums(self._sums.totals())
        if not sums[0] and not sums[5]:  # every update is zero, or the step was skipped
            return
        self._pending = False
        for index, name in enumerate(GROUPS):
            num_updated, num_changed, num_bfloat16, squares, weight_squares = sums[
                5 * index : 5 * index + 5
            ]
            if num_updated:
                dtype = torch.bfloat16 if num_bfloat16 else torch.float32
                self.groups[name] = {
                    "fraction_changed": num_changed / num_updated,
                    "dtype": str(dtype).removeprefix("torch."),
                    "update_rms": math.sqrt(squares / num_updated),
                    "ulp": ulp(math.sqrt(weight_squares / num_updated), dtype),
                    "lr": self._peaks[index],
                }
        # Judge at the peak rate: the warm-up's first rate may be 0, and would lose every update.
        problems = [
            f"step 1: rounding loses most updates of the {name.replace('_', ' ')}: at the peak "
            f"learning rate {group['lr']:g}, only {group['fraction_changed']:.2%} of the entries "
            f"change in {group['dtype']}. The update RMS is {group['update_rms']:.1e}, but one "
            f"ulp of a typical weight is {group['ulp']:.1e}"
            for name, group in self.groups.items()
            if group["fraction_changed"] < SURVIVAL_THRESHOLD
        ]
        stops = self.policy.action == "stop"
        self.policy.report(self.groups, [] if stops else problems)
        if problems and stops:
            raise UserError(*problems, REMEDIES)

    def on_train_end(self, args, state, control, **kwargs):
        """Report a training whose gradients were all zero: no update was ever measured."""
        if self._pending and state.global_step and not args.fp16:  # where all may be skipped
            zero = (
                f"all gradients were zero until the end (step {state.global_step}), so that only "
                "the weight decay has changed the weights; check the examples and the loss"
            )
            self.policy.report({}, [zero])

    def _add(self, pending: PendingUpdate) -> None:
        index = 0 if pending.group is self._matrices else 1
        lr = self._peaks[index]
        for before, after, direction in pending.applied(lr):
            # Rows of an embedding whose token did not occur have no update, and are no lost ones.
            updated, changed = direction != 0, before != after
            del after
            count = updated.sum()
            counts = (
                count,
                changed.logical_and_(updated).sum(),
                count * (before.dtype == torch.bfloat16),
            )
            squares = (lr * pending.scale * direction).square_().sum()
            self._sums.add(
                5 * index, *counts, squares, torch.where(updated, before, 0).float().square_().sum()
            )


def change_after_saving(
    start: StartingWeights, attached: AttachedOptimizer, dtype: torch.dtype
) -> dict[str, Any]:
    """Return how much of the change since the start remains if both ends are rounded to `dtype`.
    Collective.

    {"dtype", "matrices": {"fraction_changed", "projection"}, "other_parameters": ...}.
    fraction_changed: of the entries that changed, those that still differ after rounding.
    projection: <rounded change, change> / |change|^2, 1 if rounding loses nothing.
    """
    # Both ends are rounded: what the saved model differs from is the start as it was published.
    sums = Sums(4 * len(GROUPS))
    for index, weights, before in start.pairs(attached.optimizer):
        change = weights - before
        rounded = weights.to(dtype, copy=True).float().sub_(before.to(dtype, copy=True).float())
        changed = change != 0
        counts = changed.sum(), changed.logical_and_(rounded != 0).sum()
        sums.add(4 * index, *counts, rounded.mul_(change).sum(), change.square_().sum())
    totals = attached.ranks.sums(sums.totals())
    result: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    for index, name in enumerate(GROUPS):
        num_changed, num_remaining, product, square = totals[4 * index : 4 * index + 4]
        if num_changed:
            projection = product / square if square else 1.0
            result[name] = {
                "fraction_changed": num_remaining / num_changed,
                "projection": projection,
            }
    return result
