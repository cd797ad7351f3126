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

from .adamw_step import adamw_step_
from .gradients import refuse_unusable_gradients
from .rounding import COMPENSATION_DTYPE, Proposal, is_compensated
from .settings import BOOKKEEPING, RULE_KEYS, check_settings, name_of, refuse_changed_settings, refuse_incomplete_state
from .spectral_step import GroupStep, Piece, Placement, Update

STATE_KEYS = {"spectral": ("step", "exp_avg"), "adamw": ("step", "exp_avg", "exp_avg_sq")}


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
        self._refuse_unusable_gradients()
        for group in self.param_groups:
            # Also for parameters without a gradient, so that a checkpoint with a hole in it is a broken one.
            for parameter in group["params"]:
                self._complete_state(parameter, group)
            with_grad = [(name_of(group, i), p) for i, p in enumerate(group["params"]) if p.grad is not None]
            if group["rule"] == "spectral":
                self._spectral_step(with_grad, group)
            else:
                adamw_step_(self, with_grad, group)
        return loss

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
        step = GroupStep(self, group, [parameter for _, parameter in named])
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

    def _complete_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for key in _state_keys(parameter, group)[1:]:
                state[key] = torch.zeros_like(parameter, dtype=_state_dtype(parameter, key))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, completed with the settings of its own rule.

        ValueError for an unknown rule, a setting of another rule, a value that is not allowed, an "adamw" group
        without a learning rate of its own, and a spectral group with a parameter that is not a matrix.
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

        check_settings({**self.defaults, **group}, where)
        super().add_param_group(group)
        for key in self.defaults.keys() - set(keys):
            del group[key]
        self._refuse_wrong_parameters(group)

    def _refuse_wrong_parameters(self, group: dict[str, Any]) -> None:
        for position, parameter in enumerate(group["params"]):
            name = name_of(group, position)
            # ZeRO 3 empties the tensor and keeps the true shape in ds_shape.
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            if not parameter.is_floating_point():
                raise ValueError(f"{type(self).__name__} updates real numbers; {name} is {parameter.dtype}")
            if group["rule"] == "spectral" and len(shape) != 2:
                advice = "Route it to AdamW (soren_align.param_groups does)."
                raise ValueError(f"{type(self).__name__} updates matrices; {name} has shape {shape}. {advice}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint's state and learning rates.

        ValueError if any other setting differs from the present one, or if a parameter's state is missing.
        """
        refuse_changed_settings(state_dict["param_groups"], self.param_groups)
        refuse_incomplete_state(state_dict, self.param_groups, _state_keys)
        super().load_state_dict({**state_dict, "state": {}})
        # By hand: torch casts state to the parameter's dtype, and would round a bfloat16 parameter's float32 momentum.
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for number, parameter in zip(saved["params"], group["params"], strict=True):
                for key in _state_keys(parameter, group) if number in state_dict["state"] else ():
                    value = state_dict["state"][number][key]
                    kept = value.cpu() if key == "step" else value.to(parameter.device, _state_dtype(parameter, key))
                    self.state[parameter][key] = kept


def _state_keys(parameter: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
    return STATE_KEYS[group["rule"]] + (("compensation",) if is_compensated(parameter, group) else ())


def _state_dtype(parameter: Tensor, key: str) -> torch.dtype:
    if key == "compensation":
        return COMPENSATION_DTYPE
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
