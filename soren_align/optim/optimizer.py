"""The base of all optimizers: groups of matrices, updated by a map of singular values, and AdamW
groups.

A group with rule "spectral" is updated by `step.spectral_step_`, one with rule "adamw" by torch's
own AdamW. Optimizers differ only in `map_matrix`, its settings and its state. Nothing here depends
on ranks, ZeRO or trainers. `build_optimizer` makes the one of a name for a model, with every
parameter routed.
"""

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from typing import Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ..core.errors import UserError
from ..core.optimizer_settings import (
    ADJUST_LR_FN,
    AUX_WEIGHT_DECAY,
    BETAS,
    EPS,
    MATCH_RMS,
    MATRICES,
    WEIGHT_DECAY,
    AdjustLrFn,
    Compensation,
    MapInput,
    Matrices,
    MomentumDtype,
    SecondMoment,
    adamw_rms,
)
from ..spectral import full_precision
from .adamw import adamw_step_
from .blocks import Split
from .gradients import checked_numbers, first_names
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
from .layout import (
    Exchange,
    MapState,
    ShardingStrategy,
    map_state_sizes,
    weights_in,
    with_map_state,
)
from .routing import param_groups
from .second_moment import row_moments
from .state import StateForm, loaded_state, new_state, state_form
from .step import GroupMaps, PendingUpdate, directions, spectral_step_


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
    # at least |x|_F of every input of `map_matrix` in this step; None: not known
    max_norm: float | None
    matrix_names: Sequence[str]  # of the matrices in `map_matrix`
    num_maps: int  # matrices mapped
    # of these, matrices with a singular value beyond the domain of the map's polynomials
    num_guarded: int

    def __init_subclass__(cls, *, name: str = "", **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if name in OPTIMIZERS:
            raise ValueError(
                f"{cls.__name__}: {OPTIMIZERS[name].__name__} already has the name {name!r}; choose another name"
            )
        if name:
            OPTIMIZERS[name] = cls
        # A constructor that passes settings on to this class's has them, with their defaults, in
        # its signature.
        _, *parameters = inspect.signature(cls.__init__).parameters.values()
        if parameters and parameters[-1].kind is Parameter.VAR_KEYWORD:
            own, types = (
                {parameter.name for parameter in parameters},
                SharedSettings.__annotations__,
            )
            defaults = {
                **RULE_DEFAULTS[cls.rule],
                **dict.fromkeys(cls.map_settings, Parameter.empty),
            }
            parameters[-1:] = (
                Parameter(
                    key,
                    Parameter.KEYWORD_ONLY,
                    default=value,
                    annotation=types.get(key, Parameter.empty),
                )
                for key, value in defaults.items()
                if key not in own
            )
        cls.__signature__ = inspect.Signature(parameters)

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
            matrices = [p for group in groups for p in group["params"]]
            num_rows, num_columns = max(
                (tuple(p.shape[-2:]) for p in matrices if p.ndim > 1), key=max, default=(1, 1)
            )
            rms = self.lr_scale(self.own_adjust_lr_fn, num_rows, num_columns) * self.map_level
            rms /= math.sqrt(max(num_rows, num_columns))  # of an update at learning rate 1
            if SMALL_UPDATES * rms <= MATCH_RMS:
                warnings.warn(
                    f"{type(self).__name__} without adjust_lr_fn uses {self.own_adjust_lr_fn!r}: the update of a "
                    f"{num_rows} x {num_columns} matrix has an RMS of about {rms:.2g} lr, {MATCH_RMS / rms:.0f} times "
                    f"smaller than AdamW's update. For AdamW's learning rates, write adjust_lr_fn={ADJUST_LR_FN!r}, "
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
        self.gradient_norm = self.max_norm = None
        self.matrix_names = ()
        self.num_maps = self.num_guarded = 0
        self._bound = math.inf  # of the momenta and of the last step's gradients

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # a copy, or unpickled; torch's load_state_dict calls this too
        if "strategy" not in vars(self):
            self._start()

    def map_matrix(self, x: Tensor, group: dict[str, Any], **state: Tensor) -> Tensor:
        """The direction of the update for its input x: [m, n], float32 or float64; x is not
        modified.

        With a `workspace_mb` x may be [k, m, n], k matrices. state: the tensors that `map_state`
        declares, zeros before the first step, [*shape] or [k, *shape]; the map changes them in
        place.
        """
        raise NotImplementedError

    def map_is_finite(self, group: dict[str, Any]) -> bool:
        """Whether `map_matrix` has a finite output for every finite input; otherwise a step tries
        all maps first.
        """
        return False

    # torch.compile(optimizer.step) calls it uncompiled: compiled, its counts would be lost.
    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient; returns the closure's loss.

        Raises FloatingPointError for a NaN or an infinity in any gradient or output of a map, and
        ValueError for a shard of unknown layout in a spectral group or a sparse gradient; then
        nothing has changed. Every rank raises.
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
                self.max_norm = self.gradient_norm = None
        return loss

    def _step(self) -> None:
        groups = self.param_groups
        # a momentum that is rounded at every step may grow above its gradients
        is_rounded = any(group.get("momentum_dtype") == "bfloat16" for group in groups)
        norm = None if is_rounded else self.gradient_norm
        numbers = checked_numbers(
            groups, self.state, type(self).__name__, self.strategy, norm, self._bound
        )
        self.max_norm, self._bound = numbers.max_norm, numbers.bound
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
            # a launcher may have emptied the group, on all ranks
            if not named or group["rule"] != "spectral":
                plans.append(None)
                continue
            layouts = group.get("weight_layouts", {})
            plans.append(self.strategy.plan(named, layouts, self._state_of_maps(group)))
        for group in groups:
            self._complete_state(group)
        if any(
            exchange and not self.map_is_finite(g)
            for g, exchange in zip(groups, plans, strict=True)
        ):
            self._refuse_infinite_maps(plans, numbers.lrs)
        observers = tuple(self.update_observers)
        for named, group, lr, exchange in zip(with_grad, groups, numbers.lrs, plans, strict=True):
            if exchange is None:
                adamw_step_(group, named, self.state, lr=lr, observers=observers)
            else:
                spectral_step_(
                    group, named, self.state, exchange, self._maps_of(group, lr), observers
                )

    def _maps_of(self, group: dict[str, Any], lr: float | Tensor) -> GroupMaps:
        scale = partial(self.lr_scale, group["adjust_lr_fn"], match_rms=group["match_rms"])
        return GroupMaps(lr, scale, partial(self._mapped, group), self.workspace_mb)

    def _refuse_infinite_maps(
        self, plans: Sequence[Exchange | None], lrs: Sequence[float | Tensor]
    ) -> None:
        """Map all matrices of the coming step, and change nothing. Collective.

        Raises FloatingPointError, on every rank, for an output that is not finite. The step then
        maps them once more: to keep all outputs until the last one is known would need as much
        memory as the weights.
        """
        counts, observers = (self.num_maps, self.num_guarded), self.map_observers
        self.map_observers = frozenset()
        flags: dict[str, Tensor] = {}
        for group, exchange, lr in zip(self.param_groups, plans, lrs, strict=True):
            if exchange is None or self.map_is_finite(group):
                continue
            for shard, direction in directions(
                group, self.state, exchange, self._maps_of(group, lr), is_trial=True
            ):
                flags[shard.name] = direction.isfinite().all()
        (self.num_maps, self.num_guarded), self.map_observers = counts, observers
        device = next(iter(flags.values())).device if flags else None
        # one host read
        finite = torch.stack([flag.to(device) for flag in flags.values()]).tolist() if flags else []
        broken = [name for name, is_finite in zip(flags, finite, strict=True) if not is_finite]
        problem = FloatingPointError(
            f"NaN or infinity in the map of {first_names(broken)}; the optimizer did not apply this step"
        )
        named = [
            pair
            for group in self.param_groups
            for pair in zip(names_of(group), group["params"], strict=True)
        ]
        self.strategy.check_gradients(
            named, problem if broken else None, torch.zeros(2, dtype=torch.float64)
        )

    def _mapped(
        self, group: dict[str, Any], x: Tensor, names: Sequence[str], **numbers: Tensor
    ) -> Tensor:
        shapes = {key: shape_of(*x.shape[-2:]) for key, shape_of in self.map_state.items()}
        state = {key: numbers[key].view(*x.shape[:-2], *shape) for key, shape in shapes.items()}
        self.matrix_names = names
        output = self.map_matrix(x, group, **state)
        self.num_maps += len(names)
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
        layouts, shapes = group.get("weight_layouts", {}), {}
        # FSDP2: divided as the parameter is, by its first axis
        if of_maps and hasattr(parameter, "to_local"):
            sizes: Counter[str] = Counter()
            for weight in weights_in(name, parameter.shape, layouts.get(name, "linear")):
                sizes.update(map_state_sizes(weight.shape, weight.layout, of_maps))
            for key, size in sizes.items():
                columns, rest = divmod(size, len(parameter))
                if rest:
                    raise ValueError(
                        f"{key} of {name}, which is stored as [inputs, outputs], is not supported under FSDP2; use DDP "
                        "or ZeRO"
                    )
                shapes[key] = (len(parameter), columns)
        elif of_maps:
            for shard in with_map_state(
                self.strategy.shards([(name, parameter)], layouts), of_maps
            ):
                for key, place in shard.map_state.items():
                    shapes[key] = (place.stop,)  # of the last shard
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
                f"{where} {key}: is no setting of rule {group['rule']!r}; write one of {', '.join(checks)}"
            )
        if group["rule"] != self.rule and "lr" not in group:
            raise ValueError(
                f"{where} lr: is missing; write the learning rate of this group, which {self.rule} does not share"
            )

        defaults = {**RULE_DEFAULTS["adamw"], **self.defaults}
        group = {**{key: defaults[key] for key in checks if key in defaults}, **group}
        group = checked_settings(group, checks, where)
        if group["rule"] == "spectral":
            refuse_combinations(group, where)
        # torch wraps the one and refuses the other
        if not isinstance(group["params"], Tensor | set):
            group["params"] = list(group["params"])  # once: it may be a generator
        params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        for known_name, entry in zip(names_of({**group, "params": params}), params, strict=True):
            name, parameter = entry if isinstance(entry, tuple) else (known_name, entry)
            if not isinstance(parameter, Tensor):
                continue  # torch raises TypeError
            # ZeRO 3 empties the tensor and keeps the true shape in ds_shape.
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            if not parameter.is_floating_point():
                raise ValueError(
                    f"{type(self).__name__} updates real numbers, but {name} is {parameter.dtype}; freeze {name}"
                )
            is_experts = len(shape) == 3 and name in group.get("weight_layouts", {})
            if group["rule"] == "spectral" and len(shape) != 2 and not is_experts:
                advice = "Route it to AdamW (soren_align.param_groups does)."
                raise ValueError(
                    f"{type(self).__name__} updates matrices, but {name} has shape {shape}. {advice}"
                )
        super().add_param_group(group)
        for key in self.defaults.keys() - checks.keys():
            del group[key]
        if self.state:  # so that a checkpoint saved before the next step is complete
            self._complete_state(group)

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
            return {
                **checkpoint,
                "state": {k: v for k, v in checkpoint["state"].items() if k not in numbers},
            }

        handles = [
            self.register_load_state_dict_pre_hook(validate),
            self.register_load_state_dict_post_hook(
                lambda _: self.state.update(state), prepend=True
            ),
        ]
        self._bound = math.inf
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()


def build_optimizer(
    model: nn.Module,
    *,
    name: str,
    lr: float,
    aux_lr: float | None = None,
    aux_weight_decay: float = AUX_WEIGHT_DECAY,
    betas: tuple[float, float] = BETAS,
    eps: float = EPS,
    aux: Sequence[str] = (),
    matrices: Matrices = MATRICES,
    split: Split | None = None,
    **settings: Any,
) -> SpectralOptimizer:
    """The optimizer `name` for every trainable parameter of `model`.

    name: "soren", "muon", "htmuon", "adamw", or that of any other subclass of SpectralOptimizer.
    lr: of the matrices; aux_lr, aux_weight_decay: of the other parameters, which AdamW updates with
    betas and eps.
        aux_lr=None is lr. For "adamw" the matrices are a group of their own.
    aux: globs of parameter names, see `route`; matrices, split: also there.
    settings: keyword arguments of the class (weight_decay, momentum, map, p, ...). weight_decay is
    0.1 for every class;
        adjust_lr_fn=None is the class's own default.
    Raises ValueError for an unknown name or setting, and whatever `param_groups` refuses.
    """
    if name not in OPTIMIZERS:
        raise ValueError(
            f"name: no optimizer {name!r}; write one of {', '.join(map(repr, sorted(OPTIMIZERS)))}"
        )
    cls = OPTIMIZERS[name]
    if settings.get("adjust_lr_fn", "") is None:
        del settings["adjust_lr_fn"]
    parameters = inspect.signature(cls).parameters.values()
    allowed = [
        parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
    ]
    for key in settings.keys() - set(allowed):
        raise ValueError(
            f"{key}: is no setting of the optimizer {name}; write one of {', '.join(allowed)}"
        )
    if settings.get("match_rms") == "adamw":
        settings["match_rms"] = adamw_rms(betas[0])
    is_adamw = cls.rule == "adamw"
    rates = {"lr": lr, "aux_lr": aux_lr, "aux_weight_decay": aux_weight_decay}
    of_matrices: dict[str, Any] = {} if is_adamw else {"split": split}
    groups = param_groups(model, **rates, aux=aux, matrices=matrices, **of_matrices)
    for group in groups:
        if is_adamw:
            group["rule"] = "adamw"
        if group["rule"] == "adamw":
            group.update(betas=betas, eps=eps)
    return cls(groups, lr, **{"weight_decay": WEIGHT_DECAY, **settings})


TRANSFORMERS_DEFAULTS = ("adamw_torch", "adamw_torch_fused")
"""Values of `args.optim` that a user has not chosen."""


def completed_settings(settings: str | Mapping[str, Any], args: Any) -> dict[str, Any]:
    """The keywords of `build_optimizer`; those that `settings` leaves out are taken from
    transformers' `args`.

    settings: a name, or keywords without some or all of: name (then Soren), and lr, weight_decay,
    betas and eps (then those of args). The scale is the recipes': every update has RMS 0.2 lr,
    AdamW's after a few hundred steps. Raises UserError if args.optim names another optimizer.
    """
    if args.optim not in TRANSFORMERS_DEFAULTS:
        other = getattr(args.optim, "value", args.optim)
        raise UserError(
            f"args.optim: is {other}, which has no effect here; remove it, and write the optimizer's name in the "
            'optimizer settings ("muon", ...)'
        )
    keywords: dict[str, Any] = (
        {"name": settings} if isinstance(settings, str) else {"name": "soren", **settings}
    )
    if keywords["name"] in OPTIMIZERS and OPTIMIZERS[keywords["name"]].rule == "spectral":
        keywords.setdefault("adjust_lr_fn", ADJUST_LR_FN)
    own = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    return {
        **own,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        **keywords,
    }


class OptimizerFactory:
    """`build_optimizer` in the form in which transformers and Axolotl call a factory of optimizers.

    transformers.Trainer(model, args, optimizer_cls_and_kwargs=(OptimizerFactory, {"args": args,
    "name": "soren"}))
    """

    def __call__(self, model: nn.Module, args: Any = None, **settings: Any) -> SpectralOptimizer:
        """The optimizer for `model`; `settings` are keywords of `build_optimizer`.

        args: transformers' TrainingArguments, for the settings that are left out, see
        `completed_settings`; without them, name and lr are needed.
        """
        return build_optimizer(
            model, **(settings if args is None else completed_settings(settings, args))
        )
