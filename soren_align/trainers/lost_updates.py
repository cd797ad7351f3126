"""Whether what the optimizer wants arrives in the weights: measured at the first step, and again at the export.

An update far below the spacing of the numbers that hold a weight changes nothing, and no loss curve says why. So the
first step's updates are taken on a copy, at the peak learning rate (warm-up may begin at 0), and the entries that moved
are counted. At the end the same question is asked of the model folder's dtype.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from ..errors import UserError
from ..manifest import SURVIVAL_THRESHOLD
from ..optim import Proposal, Sums, chunks, move_, spacing, summed
from .measurements import Watch

NAMES = ("matrices", "rest")


class Resolution(TrainerCallback):
    """Measures the first step of a run that begins; `found` then holds a dict per group. Collective.

    found: {"matrices": {"fraction", "dtype", "update", "ulp", "lr"}, "rest": ...}. fraction: of the entries with a
    direction, those that change at lr, the peak. update: root mean square of these entries' steps, without decay. ulp:
    spacing of the numbers in dtype around the weights' root mean square.
    """

    def __init__(self, watch: Watch, lost_updates: str, say: Callable[[dict[str, Any], list[str]], object]):
        """lost_updates: "stop" or "warn". say(found, warnings) is called once, on every rank."""
        self.watch, self.lost_updates, self.say = watch, lost_updates, say
        self.found: dict[str, dict[str, Any]] = {}
        self._waits = False
        # of each: entries with a direction, changed, in bfloat16; squares of steps, weights
        self._sums = Sums(5 * len(NAMES))
        self._rates = [0.0] * len(NAMES)

    def on_train_begin(self, args, state, control, **kwargs):
        """A run that goes on was measured when it began."""
        self._waits = state.global_step == 0

    def on_step_begin(self, args, state, control, **kwargs):
        """Look at the coming step. DeepSpeed may leave it out; then at the one after it."""
        if self._waits:
            self._rates = [float(g.get("initial_lr", g["lr"])) for g in self.watch.optimizer.param_groups]
            self.watch.optimizer.proposal_observer = self._see

    def on_optimizer_step(self, args, state, control, **kwargs):
        """The verdict, the same on every rank. UserError if too much is lost."""
        if not self._waits:
            return
        self.watch.optimizer.proposal_observer = None
        sums = self.watch.ranks.sums(self._sums.totals())
        if not sums[0] and not sums[5]:  # nothing had a direction, or no step was taken
            return
        self._waits = False
        for number, name in enumerate(NAMES):
            wanted, changed, narrow, squares, weights = sums[5 * number : 5 * number + 5]
            if wanted:
                dtype = torch.bfloat16 if narrow else torch.float32
                self.found[name] = {
                    "fraction": changed / wanted,
                    "dtype": str(dtype).removeprefix("torch."),
                    "update": math.sqrt(squares / wanted),
                    "ulp": spacing(math.sqrt(weights / wanted), dtype),
                    "lr": self._rates[number],
                }
        complaints = [
            _complaint(name, seen) for name, seen in self.found.items() if seen["fraction"] < SURVIVAL_THRESHOLD
        ]
        stops = self.lost_updates == "stop"
        self.say(self.found, [] if stops else complaints)
        if complaints and stops:
            raise UserError(*complaints, REMEDIES)

    def _see(self, proposal: Proposal) -> None:
        number = 0 if proposal.group is self.watch.optimizer.param_groups[0] else 1
        lr, decay = self._rates[number], proposal.group["weight_decay"]
        for held, direction, rest in chunks(proposal.held, proposal.direction, proposal.compensation):
            moved, moved_rest = held.clone(), None if rest is None else rest.clone()
            move_(moved, moved_rest, direction, -lr * proposal.scale, lr * decay)
            then, now = summed(held, rest), summed(moved, moved_rest)
            wanted, changed = direction != 0, then != now
            del moved, moved_rest, now
            count = wanted.sum()
            counts = count, changed.logical_and_(wanted).sum(), count * (then.dtype == torch.bfloat16)
            steps = (lr * proposal.scale * direction).square_().sum()
            self._sums.add(5 * number, *counts, steps, torch.where(wanted, then, 0).float().square_().sum())


REMEDIES = (
    "Nothing was saved. Any of these keeps them: model.dtype: float32; optimizer.compensation: kahan, for bfloat16 "
    "parameters; a larger optimizer.lr; optimizer.adjust_lr_fn: match_rms_adamw, at AdamW's learning rates. "
    "run.lost_updates: warn trains all the same"
)


def _complaint(name: str, seen: dict[str, Any]) -> str:
    return (
        f"step 1: the updates of the {name} are lost to rounding: at the peak learning rate, {seen['lr']:g}, "
        f"{seen['fraction']:.2%} of the entries that are to change do, in {seen['dtype']}. A typical update is "
        f"{seen['update']:.1e}, the numbers around a typical weight are {seen['ulp']:.1e} apart"
    )


def survival(watch: Watch, dtype: torch.dtype) -> dict[str, Any]:
    """How much of the way from the start is left once both ends are rounded to `dtype`. Collective.

    {"dtype", "matrices": {"entries", "projection"}, "rest": ...}. entries: of those that changed, the share that still
    differs from the start. projection: of the rounded way onto the way, over its square: 1 where all of it is kept.
    """
    sums = Sums(4 * len(NAMES))
    for number, now, then in watch.ways():
        way = now - then
        kept = _rounded(now, dtype).sub_(_rounded(then, dtype))
        changed = way != 0
        entries = changed.sum(), changed.logical_and_(kept != 0).sum()
        sums.add(4 * number, *entries, kept.mul_(way).sum(), way.square_().sum())
    flat = watch.ranks.sums(sums.totals())
    found: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    for number, name in enumerate(NAMES):
        changed, left, along, square = flat[4 * number : 4 * number + 4]
        if changed:
            found[name] = {"entries": left / changed, "projection": along / square if square else 1.0}
    return found


def _rounded(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, rounded to `dtype`."""
    return weights.to(dtype, copy=True).float()
