"""The base of all optimizers: groups of matrices, updated by a map of singular values, and AdamW groups.

A group with rule "spectral" is updated by the rule in `update`, one with rule "adamw" by torch's own AdamW. Optimizers
differ only in `map_matrix` and its settings. Nothing here depends on ranks, ZeRO or trainers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..spectral import full_precision
from .adamw_step import adamw_step_
from .eight_bits import Segment, SharedBlocks
from .gradients import checked_numbers
from .group_settings import (
    OTHER_KEYS,
    RULE_DEFAULTS,
    RULES,
    Check,
    checked_settings,
    names_of,
    refuse_changed_settings,
    refuse_wrong_parameters,
)
from .placement import Placement
from .state import loaded_state, new_state
from .update import GroupUpdate, lr_scale
from .update_records import AppliedMap, AppliedUpdate, PendingUpdate

OPTIMIZERS: dict[str, type["SpectralOptimizer"]] = {}
"""The optimizers that `build_optimizer` builds, by name. A subclass registers itself: class X(..., name="x")."""


class SpectralOptimizer(torch.optim.Optimizer):
    """The base of Soren, Muon, HTMuon and AdamW. A subclass defines `map_matrix`, and the settings of its map."""

    rule = "spectral"  # of a group that names none
    map_settings: ClassVar[Mapping[str, Check]] = {}  # the settings of a spectral group for this class's map
    map_level = 1.0  # the map's value for an ordinary singular value; match_rms_adamw divides by it
    workspace_mb: float | None = 0  # for mapping matrices of one shape in a batch; 0: one by one; see `map_batches`

    # On the class, because torch's copy and pickle of an optimizer keep only its state and its groups.
    placement: Placement | None = None  # set it if the parameters are shards or replicas of matrices
    pending_observer: Callable[[PendingUpdate], None] | None = None  # gets every update on this rank before it is made
    observer: Callable[[AppliedUpdate], None] | None = None  # gets every update on this rank after it is made
    map_observers: frozenset[Callable[[AppliedMap], None]] = frozenset()  # each gets every map of a matrix on this rank
    # At least the norm of all gradients of the coming step, finite only if all are; None: the step computes it. Where
    # clipping has computed it, the step need not read gradients and momenta once more.
    gradient_norm: Tensor | None = None
    max_norm: float | None = None  # at least |x|_F of every input of `map_matrix` in this step; None: not known
    num_maps = 0  # matrices mapped
    _bound = math.inf  # of the momenta and of the last step's gradients
    num_guarded = 0  # of these, matrices with a singular value beyond the domain of the map's polynomials

    def __init_subclass__(cls, *, name: str = "", **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if name in OPTIMIZERS:
            raise ValueError(f"{cls.__name__}: the name {name!r} is taken by {OPTIMIZERS[name].__name__}")
        if name:
            OPTIMIZERS[name] = cls

    def __init__(self, params: ParamsT, lr: float | Tensor, **settings: Any):
        """settings: of the class's rule and map, see `Soren`; those left out have the rule's defaults."""
        for key in settings.keys() - RULES[self.rule].keys() - self.map_settings.keys():
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {key!r}")
        # Without betas, by which torch's schedulers recognize an optimizer that has no momentum to cycle.
        super().__init__(params, {"lr": lr, **RULE_DEFAULTS[self.rule], **settings})

    def map_matrix(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        """The direction of the update for its input x: [m, n], float32 or float64; x is not modified.

        With a `workspace_mb` x may be [k, m, n], k matrices.
        """
        raise NotImplementedError

    # torch.compile(optimizer.step) calls it uncompiled: compiled, its counts would be lost.
    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient; returns the closure's loss.

        Raises FloatingPointError for a NaN or an infinity in any gradient, and ValueError for a shard of unknown layout
        in a spectral group or a sparse gradient; then nothing has changed. With a placement every rank raises.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Also where a training loop calls this within its autocast.
        with full_precision({p.device.type for group in self.param_groups for p in group["params"]}):
            try:
                self._step()
            finally:
                self.max_norm = self.gradient_norm = None
        return loss

    def _step(self) -> None:
        is_rounded = any(group.get("states") == "8bit" for group in self.param_groups)  # a momentum above its gradients
        name, norm = type(self).__name__, None if is_rounded else self.gradient_norm
        numbers = checked_numbers(self.param_groups, self.state, name, self.placement, norm, self._bound)
        self.max_norm, self._bound = numbers.max_norm, numbers.bound
        with_grad = [
            [(name, p) for name, p in zip(names_of(group), group["params"], strict=True) if p.grad is not None]
            for group in self.param_groups
        ]
        for named, group in zip(with_grad, self.param_groups, strict=True):
            if self.placement is not None and group["rule"] == "spectral":
                # for all groups, before one is changed
                self.placement.prepare(named, group.get("storages", {}))
        for group in self.param_groups:  # too: if memory is exhausted here, no weight has changed
            self._complete_state(group)
        for named, group, lr in zip(with_grad, self.param_groups, numbers.lrs, strict=True):
            if group["rule"] == "spectral":
                self._spectral_step(named, group, lr)
            else:
                shared_blocks = self._shared_blocks(named)
                adamw_step_(named, group, lr, self.state, self.pending_observer, self.observer, shared_blocks)

    def _spectral_step(self, named: list[tuple[str, Tensor]], group: dict[str, Any], lr: float | Tensor) -> None:
        update = GroupUpdate(
            group,
            self.state,
            lr=lr,
            map_matrix=partial(self._mapped, group=group),
            lr_scale=partial(self.lr_scale, group["adjust_lr_fn"]),
            workspace_mb=self.workspace_mb,
            pending_observer=self.pending_observer,
            observer=self.observer,
            shared_blocks=self._shared_blocks(named),
        )
        if self.placement is None:
            update.step_(named)
        else:
            self.placement.step_(update, named)

    def _mapped(self, x: Tensor, names: Sequence[str], group: dict[str, Any]) -> Tensor:
        output = self.map_matrix(x, group)
        self.num_maps += len(names)
        for observe in self.map_observers:
            inputs, outputs = (x[None], output[None]) if x.ndim == 2 else (x, output)
            for name, matrix, result in zip(names, inputs, outputs, strict=True):
                observe(AppliedMap(name, group, matrix, result))
        return output

    @classmethod
    def lr_scale(cls, adjust_lr_fn: str, num_rows: int, num_columns: int) -> float:
        """The factor by which `adjust_lr_fn` scales the learning rate of an m x n matrix."""
        return lr_scale(adjust_lr_fn, num_rows, num_columns, cls.map_level)

    def _complete_state(self, group: dict[str, Any]) -> None:
        # Also for parameters without a gradient, so that a checkpoint that lacks a state is known to be broken.
        for parameter in group["params"]:
            if not self.state[parameter]:
                self.state[parameter].update(new_state(parameter, group, self._segments(parameter)))

    def _shared_blocks(self, named: Sequence[tuple[str, Tensor]]) -> SharedBlocks | None:
        return None if self.placement is None else self.placement.shared_blocks(named)

    def _segments(self, parameter: Tensor) -> Sequence[Segment] | None:
        return None if self.placement is None else self.placement.segments(parameter)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, completed with the settings of its own rule.

        Raises ValueError for an unknown rule, a setting of another rule, a value that is not allowed, an "adamw" group
        without a learning rate of its own, and a spectral group with a parameter that is not a matrix; then the
        optimizer is unchanged.
        """
        group = {"rule": self.rule, **param_group}
        where = f"{type(self).__name__} group {len(self.param_groups)}"
        rules = {"spectral", "adamw"} if self.rule == "spectral" else {"adamw"}
        if group["rule"] not in rules:
            raise ValueError(f"{where} rule: found {group['rule']!r}; write {' or '.join(sorted(rules))}")
        checks = {**RULES[group["rule"]], **(self.map_settings if group["rule"] == "spectral" else {})}
        for key in group.keys() - checks.keys() - set(OTHER_KEYS):
            raise ValueError(f"{where} {key}: not a setting of rule {group['rule']!r}; it has {', '.join(checks)}")
        if group["rule"] != self.rule and "lr" not in group:
            raise ValueError(f"{where} lr: missing; matrices and AdamW need learning rates of their own")

        defaults = {**RULE_DEFAULTS["adamw"], **self.defaults}
        group = {**{key: defaults[key] for key in checks if key in defaults}, **group}
        group = checked_settings(group, checks, where)
        if not isinstance(group["params"], Tensor | set):  # torch wraps the one and refuses the other
            group["params"] = list(group["params"])  # once: it may be a generator
        refuse_wrong_parameters(group, type(self).__name__)
        super().add_param_group(group)
        for key in self.defaults.keys() - checks.keys():
            del group[key]
        if self.state:  # so that a checkpoint saved before the next step is complete
            self._complete_state(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load copies of a checkpoint's state, its learning rates, and a momentum that a scheduler changes.

        Raises ValueError if any other setting differs from the current one, or if a parameter's state is missing or of
        another shape; then nothing has changed. Hooks run in torch's order, around both.
        """
        state: dict[Tensor, dict[str, Tensor]] = {}

        def validate(_: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
            map_keys = {key for cls in (*OPTIMIZERS.values(), type(self)) for key in cls.map_settings}
            refuse_changed_settings(checkpoint["param_groups"], self.param_groups, map_keys)
            state.update(loaded_state(checkpoint, self.param_groups, self._segments))
            numbers = {number for group in checkpoint["param_groups"] for number in group["params"]}
            return {**checkpoint, "state": {k: v for k, v in checkpoint["state"].items() if k not in numbers}}

        handles = [
            self.register_load_state_dict_pre_hook(validate),
            self.register_load_state_dict_post_hook(lambda _: self.state.update(state), prepend=True),
        ]
        self._bound = math.inf
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()
