"""The base of all optimizers: groups of matrices, updated by a map of singular values, and AdamW
groups.

A group with rule "spectral" is updated by `step.spectral_step_`, one with rule "adamw" by torch's
own AdamW. Optimizers differ only in `map_matrix`, its settings and its state. Nothing here depends
on ranks, ZeRO or trainers (tests/test_layers.py): where matrices lie is known to `strategy`.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..core.optimizer_settings import (
    ADJUST_LR_FN,
    MATCH_RMS,
    AdjustLrFn,
    Compensation,
    MapInput,
    MomentumDtype,
    SecondMoment,
    WeightDecayTo,
)
from ..spectral import full_precision
from .adamw import adamw_step_
from .exchange import Exchange, ShardingStrategy
from .gradients import checked_numbers
from .group_settings import (
    OTHER_KEYS,
    RULE_DEFAULTS,
    RULES,
    Check,
    checked_settings,
    names_of,
    refuse_changed_settings,
    refuse_combinations,
)
from .layout import MapState, WeightLayout, whole_shape
from .second_moment import row_moments
from .state import StateForm, loaded_state, new_state, state_form
from .step import GroupMaps, PendingUpdate, spectral_step_


@dataclass(frozen=True)
class MapContext:
    """What a map may need to know beside its matrices."""

    names: Sequence[str] = ()
    """The names of the matrices."""
    step: int = 0
    """The number of this step, from 1 on."""
    max_norm: float | None = None
    """At least |x|_F of every matrix; None: not known."""


@dataclass(frozen=True, eq=False)
class AppliedMap:
    """The input of a map and its output for one whole matrix, on its owner rank.
    Read the tensors, do not keep them.
    """

    name: str
    group: dict[str, Any]
    input: Tensor
    output: Tensor


SMALL_UPDATES = 5
"""Times smaller than AdamW's, from which on a class warns of its own scale: Soren's of 156 rows or
columns."""
OPTIMIZERS: dict[str, type["SpectralOptimizer"]] = {}
"""The optimizers that `build_optimizer` builds, by name. A subclass registers itself: class X(...,
name="x")."""


class SharedSettings(TypedDict, total=False):
    """The settings of Soren, Muon and HTMuon alike, see `Soren`; the defaults are in
    `group_settings.RULE_DEFAULTS`.
    """

    momentum: float
    momentum_dtype: MomentumDtype
    nesterov: bool
    weight_decay: float
    weight_decay_to: WeightDecayTo
    compensation: Compensation
    map_input: MapInput
    second_moment: SecondMoment
    second_moment_beta: float
    match_rms: float | Literal["adamw"]


class SpectralOptimizer(torch.optim.Optimizer):
    """The base of Soren, Muon, HTMuon and AdamW.
    A subclass defines `map_matrix`, and the settings of its map.
    """

    rule = "spectral"  # of a group that names none
    # the settings of a spectral group for this class's map
    map_settings: ClassVar[Mapping[str, Check]] = {}
    # the state that the map has for each matrix; `map_matrix` gets it by keyword
    map_state: ClassVar[MapState] = {}
    map_level = 1.0  # the map's value for an ordinary singular value; match_rms_adamw divides by it
    own_adjust_lr_fn: ClassVar[AdjustLrFn] = "none"  # where adjust_lr_fn is None
    # for mapping matrices of one shape in a batch; 0: one by one; see `matrix_batches`
    workspace_mb: float | None = 0

    # that of one process, unless the parameters are shards or replicas: then set it
    strategy: ShardingStrategy
    # each gets every update on this rank
    update_observers: frozenset[Callable[[PendingUpdate], None]]
    # each gets every map of a matrix on this rank
    map_observers: frozenset[Callable[[AppliedMap], None]]
    # At least the norm of all gradients of the coming step, finite only if all are; None: the step
    # computes it. Where clipping has computed it, the step need not read gradients and momenta once
    # more.
    gradient_norm: Tensor | None
    num_maps: int  # matrices mapped
    # of these, matrices with a singular value beyond the domain of the map's polynomials
    num_guarded: int

    def __init_subclass__(cls, *, name: str = "", **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if name in OPTIMIZERS:
            raise ValueError(
                f"{cls.__name__}: {OPTIMIZERS[name].__name__} already has the name {name!r}; "
                "choose another name"
            )
        if name:
            OPTIMIZERS[name] = cls

    @classmethod
    def keywords(cls) -> dict[str, Any]:
        """The keywords of the constructor with their defaults, those of its rule included."""
        parameters = inspect.signature(cls.__init__).parameters.values()
        own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return own
        required = dict.fromkeys(cls.map_settings, inspect.Parameter.empty)
        return {**own, **required, **RULE_DEFAULTS[cls.rule], **own}  # its own come first

    def __init__(self, params: ParamsT, lr: float | Tensor, **settings: Any):
        """settings: of the class's rule and map, see `Soren`; those left out have the rule's
        defaults.

        Warns if adjust_lr_fn is None and the class's own makes updates much smaller than AdamW's.
        """
        for key in settings.keys() - RULES[self.rule].keys() - self.map_settings.keys():
            raise TypeError(
                f"{type(self).__name__}.__init__() got an unexpected keyword argument {key!r}"
            )
        if is_left_out := settings.get("adjust_lr_fn", "") is None:
            settings["adjust_lr_fn"] = self.own_adjust_lr_fn
        # Without betas, by which torch's schedulers recognize an optimizer that has no momentum to
        # cycle.
        super().__init__(params, {"lr": lr, **RULE_DEFAULTS[self.rule], **settings})
        self._start()
        if is_left_out:
            groups = [
                group
                for group in self.param_groups
                if group.get("adjust_lr_fn") == self.own_adjust_lr_fn
            ]
            matrices = [p for group in groups for p in group["params"] if p.numel() and p.ndim > 1]
            shapes = (tuple(p.shape[-2:]) for p in matrices)
            num_rows, num_columns = max(shapes, key=max, default=(1, 1))
            rms = self.lr_scale(self.own_adjust_lr_fn, num_rows, num_columns) * self.map_level
            rms /= math.sqrt(max(num_rows, num_columns))  # of an update at learning rate 1
            if SMALL_UPDATES * rms <= MATCH_RMS:
                warnings.warn(
                    f"{type(self).__name__} without adjust_lr_fn uses {self.own_adjust_lr_fn!r}: "
                    "the update of a "
                    f"{num_rows} x {num_columns} matrix has an RMS of about {rms:.2g} lr, "
                    f"{MATCH_RMS / rms:.0f} times "
                    "smaller than AdamW's update. For AdamW's learning rates, write "
                    f"adjust_lr_fn={ADJUST_LR_FN!r}, "
                    "the default of recipes and trainers. To keep small updates, write "
                    f"adjust_lr_fn={self.own_adjust_lr_fn!r}",
                    stacklevel=3,
                )

    def _start(self) -> None:
        """What is not the optimizer's state; torch's copy and pickle of an optimizer keep none of
        it.
        """
        self.strategy = ShardingStrategy()
        self.update_observers = frozenset()
        self.map_observers = frozenset()
        self.gradient_norm = None
        self.num_maps = self.num_guarded = 0
        self._bound = math.inf  # of the momenta and of the last step's gradients

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # a copy, or unpickled; torch's load_state_dict calls this too
        if "strategy" not in vars(self):
            self._start()

    def map_matrix(
        self, x: Tensor, group: dict[str, Any], context: MapContext, **state: Tensor
    ) -> Tensor:
        """The direction of the update for its input x: [m, n], float32 or float64; x is not
        modified.

        With a `workspace_mb` x may be [k, m, n], k matrices. state: the tensors that `map_state`
        declares, zeros before the first step, [*shape] or [k, *shape]; the map changes them in
        place.
        """
        raise NotImplementedError

    # torch.compile(optimizer.step) calls it uncompiled: compiled, its counts would be lost.
    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient; returns the closure's loss.

        Raises FloatingPointError for a NaN or an infinity in any gradient, and ValueError for a
        shard of unknown layout in a spectral group or a sparse gradient; then nothing has changed.
        Every rank raises.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Also where a training loop calls this within its autocast.
        with full_precision(
            {p.device.type for group in self.param_groups for p in group["params"]}
        ):
            try:
                self._step()
            finally:
                self.gradient_norm = None
        return loss

    def _step(self) -> None:
        # Check: one read of the host for all that it must know, before anything changes.
        groups = self.param_groups
        # a momentum that is rounded at every step may grow above its gradients
        is_rounded = any(group.get("momentum_dtype") == "bfloat16" for group in groups)
        bound = math.inf if is_rounded else self._bound
        numbers = checked_numbers(
            groups, self.state, type(self).__name__, self.strategy, self.gradient_norm, bound
        )
        self._bound = numbers.bound
        with_grad = [
            [
                (name, p)
                for name, p in zip(names_of(group), group["params"], strict=True)
                if p.grad is not None
            ]
            for group in groups
        ]
        # Plans and states of all groups, before one is changed: if memory is exhausted here too, no
        # weight has changed.
        plans: list[Exchange | None] = []
        for named, group in zip(with_grad, groups, strict=True):
            if not named or group["rule"] != "spectral":
                plans.append(None)
                continue
            layouts = group.get("weight_layouts", {})
            plans.append(self.strategy.plan(named, layouts, self._state_of_maps(group)))
        for group in groups:
            self._complete_state(group)
        # Update, group by group: nothing below raises, unless memory or a rank is lost.
        observers = tuple(self.update_observers)
        for named, group, lr, exchange in zip(with_grad, groups, numbers.lrs, plans, strict=True):
            if exchange is None:
                adamw_step_(group, named, self.state, lr=lr, observers=observers)
            else:
                maps = self._maps_of(group, lr, numbers.max_norm)
                spectral_step_(group, named, self.state, exchange, maps, observers)

    def _maps_of(self, group: dict[str, Any], lr: float | Tensor, max_norm: float) -> GroupMaps:
        scale = partial(self.lr_scale, group["adjust_lr_fn"], match_rms=group["match_rms"])
        return GroupMaps(lr, scale, partial(self._mapped, group, max_norm), self.workspace_mb)

    def _mapped(
        self,
        group: dict[str, Any],
        max_norm: float,
        x: Tensor,
        names: Sequence[str],
        **numbers: Tensor,
    ) -> Tensor:
        shapes = {key: shape_of(*x.shape[-2:]) for key, shape_of in self.map_state.items()}
        state = {key: numbers[key].view(*x.shape[:-2], *shape) for key, shape in shapes.items()}
        context = MapContext(
            names,
            step=int(self.state[group["params"][0]]["step"]),  # on the CPU
            max_norm=max_norm if group["map_input"] == "momentum" else None,
        )
        output = self.map_matrix(x, group, context, **state)
        self.num_maps += len(names)
        # Observers get one matrix at a time, however many were mapped together.
        for observe in self.map_observers:
            inputs, outputs = (x[None], output[None]) if x.ndim == 2 else (x, output)
            for name, matrix, result in zip(names, inputs, outputs, strict=True):
                observe(AppliedMap(name, group, matrix, result))
        return output

    @classmethod
    def lr_scale(
        cls, adjust_lr_fn: str, num_rows: int, num_columns: int, *, match_rms: float = MATCH_RMS
    ) -> float:
        """The factor by which `adjust_lr_fn` scales the learning rate of an m x n matrix.

        "original" is sqrt(max(1, m / n)), "match_rms_adamw" match_rms sqrt(max(m, n)) / map_level,
        "match_rms_measured" match_rms, of an output that is divided by its RMS, "none" 1.
        """
        if adjust_lr_fn == "original":
            return math.sqrt(max(1, num_rows / num_columns))
        if adjust_lr_fn == "match_rms_adamw":
            return match_rms * math.sqrt(max(num_rows, num_columns)) / cls.map_level
        return match_rms if adjust_lr_fn == "match_rms_measured" else 1.0

    def _state_of_maps(self, group: dict[str, Any]) -> MapState:
        """The state of the map's class, and that of the group's second moment of the rows."""
        return {**self.map_state, **row_moments(group["second_moment"])}

    def _complete_state(self, group: dict[str, Any]) -> None:
        # Also for parameters without a gradient, so that a checkpoint that lacks a state is known
        # to be broken.
        for name, parameter in zip(names_of(group), group["params"], strict=True):
            if not self.state[parameter]:
                self.state[parameter].update(
                    new_state(parameter, self._state_form(name, parameter, group))
                )

    def _state_form(self, name: str, parameter: Tensor, group: dict[str, Any]) -> StateForm:
        of_maps = self._state_of_maps(group) if group["rule"] == "spectral" else {}
        layouts = group.get("weight_layouts", {})
        shapes = (
            self.strategy.map_state_shapes(name, parameter, layouts, of_maps) if of_maps else {}
        )
        return state_form(parameter, group, shapes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, completed with the settings of its own rule.

        Raises ValueError for an unknown rule, a setting of another rule, a value that is not
        allowed, an "adamw" group without a learning rate of its own, and a spectral group with a
        parameter that is not a matrix; then the optimizer is unchanged.
        """
        group = {"rule": self.rule, **param_group}
        where = f"{type(self).__name__} group {len(self.param_groups)}"
        rules = {"spectral", "adamw"} if self.rule == "spectral" else {"adamw"}
        if group["rule"] not in rules:
            raise ValueError(
                f"{where} rule: found {group['rule']!r}; write {' or '.join(sorted(rules))}"
            )
        checks = {
            **RULES[group["rule"]],
            **(self.map_settings if group["rule"] == "spectral" else {}),
        }
        for key in group.keys() - checks.keys() - set(OTHER_KEYS):
            raise ValueError(
                f"{where} {key}: is no setting of rule {group['rule']!r}; write one of "
                f"{', '.join(checks)}"
            )
        if group["rule"] != self.rule and "lr" not in group:
            raise ValueError(
                f"{where} lr: is missing; write the learning rate of this group, which {self.rule} "
                "does not share"
            )

        # Complete: a group holds all settings of its rule and no others, so that a checkpoint
        # records what was used.
        defaults = {**RULE_DEFAULTS["adamw"], **self.defaults}
        group = {**{key: defaults[key] for key in checks if key in defaults}, **group}
        group = _with_layouts(checked_settings(group, checks, where))
        if group["rule"] == "spectral":
            refuse_combinations(group, where)
        # Check the parameters: a vector in a spectral group would be "mapped" without an error.
        # torch wraps the one and refuses the other
        if not isinstance(group["params"], Tensor | set):
            group["params"] = list(group["params"])  # once: it may be a generator
        params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        for known_name, entry in zip(names_of({**group, "params": params}), params, strict=True):
            name, parameter = entry if isinstance(entry, tuple) else (known_name, entry)
            if not isinstance(parameter, Tensor):
                continue  # torch raises TypeError
            shape = whole_shape(parameter)
            if not parameter.is_floating_point():
                raise ValueError(
                    f"{type(self).__name__} updates real numbers, but {name} is {parameter.dtype}; "
                    f"freeze {name}"
                )
            is_experts = len(shape) == 3 and name in group.get("weight_layouts", {})
            if group["rule"] == "spectral" and len(shape) != 2 and not is_experts:
                raise ValueError(
                    f"{type(self).__name__} updates matrices, but {name} has shape {shape}. "
                    "Route it to AdamW (soren_align.param_groups does)."
                )
        super().add_param_group(group)
        # torch has completed the group by the defaults of both rules: those of the other one go
        # again.
        for key in self.defaults.keys() - checks.keys():
            del group[key]
        if self.state:  # so that a checkpoint saved before the next step is complete
            self._complete_state(group)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, of tensors and plain data alone: layouts as texts."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            if layouts := group.get("weight_layouts"):
                group["weight_layouts"] = {name: str(layout) for name, layout in layouts.items()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load copies of a checkpoint's state, its learning rates, and a momentum that a scheduler
        changes.

        Raises ValueError if any other setting differs from the current one, or if a parameter's
        state is missing or of another shape; then nothing has changed. Hooks run in torch's order,
        around both.
        """
        state: dict[Tensor, dict[str, Tensor]] = {}

        def validate(_: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
            map_keys = {
                key for cls in (*OPTIMIZERS.values(), type(self)) for key in cls.map_settings
            }
            refuse_changed_settings(checkpoint["param_groups"], self.param_groups, map_keys)
            state.update(loaded_state(checkpoint, self.param_groups, self._state_form))
            numbers = {number for group in checkpoint["param_groups"] for number in group["params"]}
            # An earlier checkpoint lacks settings that were added since, which had their defaults.
            groups = [
                _with_layouts(now | was)
                for now, was in zip(self.param_groups, checkpoint["param_groups"], strict=True)
            ]
            state_of_others = {k: v for k, v in checkpoint["state"].items() if k not in numbers}
            return {**checkpoint, "param_groups": groups, "state": state_of_others}

        handles = [
            self.register_load_state_dict_pre_hook(validate),
            self.register_load_state_dict_post_hook(
                lambda _: self.state.update(state), prepend=True
            ),
        ]
        # The loaded momenta have no known bound: the next step reads their norms.
        self._bound = math.inf
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()


def _with_layouts(group: dict[str, Any]) -> dict[str, Any]:
    """The group, with the layouts of its weights read from their texts."""
    if "weight_layouts" not in group:
        return group
    layouts = group["weight_layouts"]
    parsed = {name: WeightLayout.parse(layout) for name, layout in layouts.items()}
    return {**group, "weight_layouts": parsed}
