"""The settings of parameter groups: the keys of each rule, their checks, and whether a checkpoint has the same ones.

A group holds the settings of its own rule and no others, so that a checkpoint records the settings that were used.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, get_args

from torch import Tensor

from ..core.optimizer_settings import (
    BETAS,
    COEFFICIENT,
    COMPENSATION,
    EPS,
    LARGEST,
    MOMENTUM,
    NESTEROV,
    NON_NEGATIVE,
    STATES,
    WEIGHT_DECAY,
    AdjustLrFn,
    Bounds,
    Compensation,
    States,
)
from ..spectral import SpectralMap

Check = Callable[[Any], Any]
"""Returns a setting's complete value. Raises ValueError ("found ...; write ...") if it is not allowed."""

_SHARED_DEFAULTS = {"weight_decay": WEIGHT_DECAY, "compensation": COMPENSATION, "states": STATES}
RULE_DEFAULTS: dict[str, dict[str, Any]] = {
    "spectral": {"momentum": MOMENTUM, "nesterov": NESTEROV, **_SHARED_DEFAULTS, "adjust_lr_fn": "none"},
    "adamw": {"betas": BETAS, "eps": EPS},
}
"""The settings of a rule that its optimizer and group leave out."""
# Keys that a group may have beside its settings: how its parameters store matrices (`layout`), a user's name for it,
# and those that torch's schedulers write.
SCHEDULER_KEYS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum")
OTHER_KEYS = ("params", "param_names", "weight_layouts", "rule", "name", *SCHEDULER_KEYS)
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # in names of a wrapped model


def number(bounds: Bounds) -> Check:
    """A check that a value is a number within `bounds`; a tensor of one element is one too."""

    def check(value: Any) -> Any:
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"found a tensor of shape {tuple(value.shape)}; write one number")
        if not isinstance(value, int | float | Tensor) or float(value) not in bounds:
            raise ValueError(f"found {value!r}; write a {'finite ' * (bounds.most == LARGEST)}number, {bounds}")
        return value

    return check


def whole_number(bounds: Bounds) -> Check:
    """A check that a value is a whole number within `bounds`."""

    def check(value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool) or value not in bounds:
            raise ValueError(f"found {value!r}; write a whole number, {bounds}")
        return value

    return check


def choice(options: Sequence[Any]) -> Check:
    """A check that a value is one of `options`."""

    def check(value: Any) -> Any:
        if value not in options:
            raise ValueError(f"found {value!r}; write one of {', '.join(map(repr, options))}")
        return value

    return check


def setting_checks(spectral_map: SpectralMap) -> dict[str, Check]:
    """The checks of a map's settings."""
    checks: dict[str, Check] = {}
    for key, setting in spectral_map.settings.items():
        of_type = whole_number if isinstance(setting.default, int) else number
        checks[key] = of_type(setting.bounds) if setting.bounds else choice(setting.choices)
    return checks


def _truth_value(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError(f"found {value!r}; write True or False")
    return value


def _betas(value: Any) -> Any:
    if len(value) != 2 or any(beta not in COEFFICIENT for beta in value):
        raise ValueError(f"found {value!r}; write two numbers, {COEFFICIENT}")
    return value


_SHARED_SETTINGS: dict[str, Check] = {
    "lr": number(NON_NEGATIVE),
    "weight_decay": number(NON_NEGATIVE),
    "compensation": choice(get_args(Compensation)),
    "states": choice(get_args(States)),
}
_ADDED_LATER = {"states": STATES}
"""Settings that older checkpoints lack, with the value that these had."""

RULES: dict[str, dict[str, Check]] = {
    "spectral": {
        **_SHARED_SETTINGS,
        "momentum": number(COEFFICIENT),
        "nesterov": _truth_value,
        "adjust_lr_fn": choice(get_args(AdjustLrFn)),
    },
    "adamw": {**_SHARED_SETTINGS, "betas": _betas, "eps": number(NON_NEGATIVE)},
}
"""The settings of each rule with their checks; a spectral group has those of its optimizer's map besides."""


def checked_settings(group: dict[str, Any], checks: Mapping[str, Check], where: str) -> dict[str, Any]:
    """`group` with complete values. Raises ValueError naming `where` and the first setting that is not allowed."""
    group = dict(group)
    for key, check in checks.items():
        if key in group:
            try:
                group[key] = check(group[key])
            except ValueError as error:
                raise ValueError(f"{where} {key}: {error}") from None
    return group


def refuse_wrong_parameters(group: dict[str, Any], optimizer: str) -> None:
    """Raise ValueError for a parameter that `optimizer` cannot update by the group's rule; `params` may have names."""
    params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
    for known_name, entry in zip(names_of({**group, "params": params}), params, strict=True):
        name, parameter = entry if isinstance(entry, tuple) else (known_name, entry)
        if not isinstance(parameter, Tensor):
            continue  # torch raises TypeError
        # ZeRO 3 empties the tensor and keeps the true shape in ds_shape.
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if not parameter.is_floating_point():
            raise ValueError(f"{optimizer} updates real numbers; {name} is {parameter.dtype}")
        is_experts = len(shape) == 3 and name in group.get("weight_layouts", {})
        if group["rule"] == "spectral" and len(shape) != 2 and not is_experts:
            advice = "Route it to AdamW (soren_align.param_groups does)."
            raise ValueError(f"{optimizer} updates matrices; {name} has shape {shape}. {advice}")


def refuse_changed_settings(saved: Sequence[dict], current: Sequence[dict], map_keys: Collection[str]) -> None:
    """Raise ValueError naming every setting that differs between a checkpoint's groups and the current ones.

    Ignored are learning rates, a momentum that a scheduler changes, the prefixes of wrapped models in parameter names,
    names that only one side has, and all that is no setting of the group's rule. map_keys: settings of any map.
    """
    if len(saved) != len(current):
        raise ValueError(f"the checkpoint has {len(saved)} parameter groups, this optimizer {len(current)}")
    differences = []
    for index, (old, new) in enumerate(zip(saved, current, strict=True)):
        for key, was, now in _differences(old, new, map_keys):
            differences.append(f"group {index} {key}: {was} in the checkpoint, {now} in this optimizer")
    if differences:
        raise ValueError("the checkpoint was made with other optimizer settings\n" + "\n".join(differences))


def names_of(group: dict[str, Any]) -> Sequence[str]:
    """The names of the group's parameters, or their positions where names are not known."""
    names, num_params = group.get("param_names", ()), len(group["params"])
    # ZeRO replaces the parameters by flat shards and keeps the names, which are then those of other tensors.
    return names if len(names) == num_params else [f"parameter {position}" for position in range(num_params)]


def _differences(old: dict[str, Any], new: dict[str, Any], map_keys: Collection[str]) -> list[tuple[str, Any, Any]]:
    differences: list[tuple[str, Any, Any]] = []
    if len(old["params"]) != len(new["params"]):
        differences.append(("number of parameters", len(old["params"]), len(new["params"])))
    for key in sorted(_setting_keys(old, map_keys) | _setting_keys(new, map_keys)):
        if key in ("momentum", "betas") and ("base_momentum" in old or "base_momentum" in new):
            continue  # loaded from the checkpoint, like a learning rate
        was, now = (_comparable(group.get(key, _ADDED_LATER.get(key, "nothing"))) for group in (old, new))
        if was != now:
            differences.append((key, was, now))
    was, now = ([*group.get("weight_layouts", {}).values()] for group in (old, new))
    if was != now:
        differences.append(("weight_layouts", was, now))
    if "param_names" in old and "param_names" in new:
        was, now = (_plain_names(group["param_names"]) for group in (old, new))
        if was != now:
            differences.append(("param_names", *_first_difference(was, now)))
    return differences


def _setting_keys(group: dict[str, Any], map_keys: Collection[str]) -> set[str]:
    rule = group.get("rule", "")
    return {"rule", *RULES.get(rule, ()), *(map_keys if rule == "spectral" else ())} - {"lr"}


def _comparable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _plain_names(names: Sequence[str]) -> list[str]:
    plain = list(names)
    for wrapper in WRAPPERS:
        plain = [name.replace(wrapper, "") for name in plain]
    return plain


def _first_difference(was: Sequence[str], now: Sequence[str]) -> tuple[str, str]:
    for old, new in zip(was, now, strict=False):
        if old != new:
            return old, new
    return f"{len(was)} names", f"{len(now)} names"
