"""One update path for matrices and for everything else.

A group with rule "spectral" is updated by a map of its momentum's singular values, one with rule "adamw" by torch's own
AdamW. The optimizers differ by the map alone, `map_matrix`. Nothing here knows of ranks, ZeRO or trainers.

    EMA momentum -> Nesterov -> map of the whole matrix -> adjust_lr_fn -> decoupled decay -> add
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..spectral import full_precision
from .adamw_step import adamw_step_
from .gradients import refuse_unusable_gradients
from .group_settings import (
    ADAMW_DEFAULTS,
    BOOKKEEPING,
    RULE_KEYS,
    check_settings,
    name_of,
    refuse_changed_settings,
    refuse_wrong_parameters,
)
from .rounding import Proposal
from .spectral_step import GroupStep, Piece, Placement, Update
from .state import loaded_state, new_state


class SpectralOptimizer(torch.optim.Optimizer):
    """The base of Soren, Muon, HTMuon and AdamW; a subclass brings `map_matrix` and the settings that it reads."""

    rule = "spectral"  # of a group that names none
    map_keys: tuple[str, ...] = ()  # settings of a spectral group that only this class's map reads
    map_level = 1.0  # what the map sends an ordinary singular value to; match_rms_adamw divides by it
    workspace_mb: float | None = 0  # for mapping matrices of one shape in a batch; 0: one by one, None: WORKSPACE_MB

    # On the class, because torch's copy and pickle of an optimizer keep only its state and its groups.
    observer: Callable[[Update], None] | None = None
    proposal_observer: Callable[[Proposal], None] | None = None  # gets every step on this rank, before it is taken
    map_observer: Callable[[Tensor], None] | None = None  # gets every output of a map on this rank, to read
    placement: Placement | None = None  # where the matrices lie, if the parameters are shards or replicas of them
    num_maps = 0  # matrices mapped so far
    num_guarded = 0  # of these, how often the guard of the map acted

    def map_matrix(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        """The update's direction for the averaged gradient x: [m, n], float32 or float64; x is not modified.

        With a `workspace_mb` x may be [k, m, n], k matrices.
        """
        raise NotImplementedError

    # torch.compile(optimizer.step) calls it as it is: compiled, what it counts would be lost.
    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The closure's loss, after one step of every parameter that has a gradient.

        FloatingPointError for a NaN or an infinity in any gradient, ValueError for a shard of unknown place in a
        spectral group or a sparse gradient; then nothing has changed. With a placement they are raised on every rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Also where a training loop calls this within its autocast.
        with full_precision({p.device.type for group in self.param_groups for p in group["params"]}):
            self._take_step()
        return loss

    def _take_step(self) -> None:
        self._refuse_unusable_gradients()
        with_grad = [
            [(name_of(group, i), p) for i, p in enumerate(group["params"]) if p.grad is not None]
            for group in self.param_groups
        ]
        for named, group in zip(with_grad, self.param_groups, strict=True):
            if self.placement is not None and group["rule"] == "spectral":
                self.placement.prepare(named)  # of all groups, before one is changed
        for group in self.param_groups:  # too: memory may be lacking, and then no weight has moved
            self._complete_state(group)
        for named, group in zip(with_grad, self.param_groups, strict=True):
            if group["rule"] == "spectral":
                self._spectral_step(named, group)
            else:
                adamw_step_(self, named, group)

    def _refuse_unusable_gradients(self) -> None:
        placement = self.placement
        try:
            refuse_unusable_gradients(self.param_groups, type(self).__name__, placement.holds if placement else None)
        except (ValueError, FloatingPointError) as error:
            if placement is None:
                raise
            found: Exception | None = error
        else:
            found = None
        if placement is not None:
            groups = self.param_groups
            placement.agree([(name_of(group, i), p) for group in groups for i, p in enumerate(group["params"])], found)

    def _spectral_step(self, named: list[tuple[str, Tensor]], group: dict[str, Any]) -> None:
        step = GroupStep(self, group)
        step.advance_([parameter for _, parameter in named])
        if self.placement is not None:
            self.placement.step_(step, named)
            return
        step.take_([Piece(name, (p.shape[0], p.shape[1]), p, 0, p.numel()) for name, p in named])

    @classmethod
    def lr_scale(cls, adjust_lr_fn: str, num_rows: int, num_columns: int) -> float:
        """What `adjust_lr_fn` multiplies the learning rate of an m x n matrix by."""
        if adjust_lr_fn == "original":
            return math.sqrt(max(1, num_rows / num_columns))
        if adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(num_rows, num_columns)) / cls.map_level
        return 1.0

    def _complete_state(self, group: dict[str, Any]) -> None:
        # Also for parameters without a gradient, so that a checkpoint with a hole in it is a broken one.
        for parameter in group["params"]:
            if not self.state[parameter]:
                self.state[parameter].update(new_state(parameter, group))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, completed with the settings of its own rule.

        ValueError for an unknown rule, a setting of another rule, a value that is not allowed, an "adamw" group
        without a learning rate of its own, and a spectral group with a parameter that is not a matrix; then the
        optimizer is as it was.
        """
        group = {"rule": self.rule, **param_group}
        where = f"{type(self).__name__} group {len(self.param_groups)}"
        rules = {"spectral", "adamw"} if self.rule == "spectral" else {"adamw"}
        if group["rule"] not in rules:
            raise ValueError(f"{where} rule: found {group['rule']!r}; write {' or '.join(sorted(rules))}")
        keys = RULE_KEYS[group["rule"]] + (self.map_keys if group["rule"] == "spectral" else ())
        for key in group.keys() - set(keys) - set(BOOKKEEPING):
            raise ValueError(f"{where} {key}: not a setting of rule {group['rule']!r}; it has {', '.join(keys)}")
        if group["rule"] != self.rule and "lr" not in group:
            raise ValueError(f"{where} lr: missing; matrices and AdamW need learning rates of their own")

        defaults = {**ADAMW_DEFAULTS, **self.defaults}
        group = {**{key: defaults[key] for key in keys if key in defaults}, **group}
        check_settings(group, where)
        if not isinstance(group["params"], Tensor | set):  # these are torch's to wrap and to refuse
            group["params"] = list(group["params"])  # once: it may be a generator
        refuse_wrong_parameters(group, type(self).__name__)
        super().add_param_group(group)
        for key in self.defaults.keys() - set(keys):
            del group[key]
        if self.state:  # so that a checkpoint from before the next step is whole
            self._complete_state(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load copies of a checkpoint's state, and its learning rates; a momentum too that a scheduler moves.

        ValueError if any other setting differs from the present one, or if a parameter's state is missing or of
        another shape; then nothing has changed. Hooks run in torch's order, around both.
        """
        state: dict[Tensor, dict[str, Tensor]] = {}

        def validate(_: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
            refuse_changed_settings(checkpoint["param_groups"], self.param_groups, self.map_keys)
            state.update(loaded_state(checkpoint, self.param_groups))
            numbers = {number for group in checkpoint["param_groups"] for number in group["params"]}
            return {**checkpoint, "state": {k: v for k, v in checkpoint["state"].items() if k not in numbers}}

        handles = [
            self.register_load_state_dict_pre_hook(validate),
            self.register_load_state_dict_post_hook(lambda _: self.state.update(state), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()
