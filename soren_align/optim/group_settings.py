"""What a parameter group says: the keys of each rule, which values are allowed, and whether a checkpoint agrees.

A group holds the settings of its own rule and no others, so that what a checkpoint keeps is what was used.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

from torch import Tensor

from ..spectral import RESOLUTIONS

COMPENSATIONS = ("none", "kahan")
ADJUST_LR_FNS = ("none", "original", "match_rms_adamw")
SPECTRAL_MAPS = ("minimax", "sns", "exact")

RULE_KEYS = {
    "spectral": ("lr", "weight_decay", "compensation", "momentum", "nesterov", "adjust_lr_fn"),
    "adamw": ("lr", "weight_decay", "compensation", "betas", "eps"),
}
# Of every map; a group has those of its optimizer's.
MAP_KEYS = ("spectral_map", "ns_steps", "resolution", "p")
ADAMW_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
# What every group may carry beside its settings: a user's name for it, and what torch's schedulers write.
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum")
BOOKKEEPING = ("params", "param_names", "rule", "name", *SCHEDULED)
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")  # in names of a wrapped model


def check_settings(group: dict[str, Any], where: str) -> None:
    """ValueError naming `where` and the first setting of `group` whose value is not allowed."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"{where} lr: found a tensor of shape {tuple(lr.shape)}; write one number")
    allowed = {
        "lr": (lambda v: 0 <= float(v) < inf, "0 or more, and finite"),
        "weight_decay": (lambda v: 0 <= v < inf, "0 or more, and finite"),
        "compensation": (lambda v: v in COMPENSATIONS, f"one of {', '.join(map(repr, COMPENSATIONS))}"),
        "momentum": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
        "nesterov": (lambda v: isinstance(v, bool), "True or False"),
        "adjust_lr_fn": (lambda v: v in ADJUST_LR_FNS, f"one of {', '.join(map(repr, ADJUST_LR_FNS))}"),
        "spectral_map": (lambda v: v in SPECTRAL_MAPS, f"one of {', '.join(map(repr, SPECTRAL_MAPS))}"),
        "ns_steps": (lambda v: isinstance(v, int) and 1 <= v < 100, "a whole number from 1 to 99"),
        "resolution": (lambda v: v in RESOLUTIONS, f"one of {', '.join(map(str, RESOLUTIONS))}"),
        "p": (lambda v: 0 <= v <= 1, "a number from 0 to 1"),
        "betas": (lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "two numbers, at least 0 and below 1"),
        "eps": (lambda v: 0 <= v < inf, "0 or more, and finite"),
    }
    for key, (holds, wanted) in allowed.items():
        if key in group and not holds(group[key]):
            raise ValueError(f"{where} {key}: found {group[key]!r}; write {wanted}")


def refuse_wrong_parameters(group: dict[str, Any], optimizer: str) -> None:
    """ValueError for a parameter that `optimizer` cannot update by the group's rule; `params` may have names."""
    params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
    for position, entry in enumerate(params):
        name, parameter = entry if isinstance(entry, tuple) else (name_of({**group, "params": params}, position), entry)
        if not isinstance(parameter, Tensor):
            continue  # torch says so
        # ZeRO 3 empties the tensor and keeps the true shape in ds_shape.
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if not parameter.is_floating_point():
            raise ValueError(f"{optimizer} updates real numbers; {name} is {parameter.dtype}")
        if group["rule"] == "spectral" and len(shape) != 2:
            advice = "Route it to AdamW (soren_align.param_groups does)."
            raise ValueError(f"{optimizer} updates matrices; {name} has shape {shape}. {advice}")


def refuse_changed_settings(saved: Sequence[dict], present: Sequence[dict], map_keys: Sequence[str]) -> None:
    """ValueError naming every setting that differs between a checkpoint's groups and the present ones.

    Learning rates may differ, a momentum that a scheduler moves, names of the same parameters in a wrapped model, names
    that only one side has, and whatever is no setting of the group's rule. map_keys: settings of the present map.
    """
    if len(saved) != len(present):
        raise ValueError(f"the checkpoint has {len(saved)} parameter groups, this optimizer {len(present)}")
    differences = []
    for index, (old, new) in enumerate(zip(saved, present, strict=True)):
        if len(old["params"]) != len(new["params"]):
            counts = f"{len(old['params'])} in the checkpoint, {len(new['params'])} in this optimizer"
            differences.append(f"group {index} number of parameters: {counts}")
        for key in sorted(_settings(old, map_keys) | _settings(new, map_keys)):
            if key in ("momentum", "betas") and ("base_momentum" in old or "base_momentum" in new):
                continue  # from the checkpoint, like a learning rate
            was, now = (_comparable(group.get(key, "nothing")) for group in (old, new))
            if was != now:
                differences.append(f"group {index} {key}: {was} in the checkpoint, {now} in this optimizer")
        if "param_names" in old and "param_names" in new:
            was, now = (_plain_names(group["param_names"]) for group in (old, new))
            if was != now:
                was, now = _first_difference(was, now)
                differences.append(f"group {index} param_names: {was} in the checkpoint, {now} in this optimizer")
    if differences:
        raise ValueError("the checkpoint was made with other optimizer settings\n" + "\n".join(differences))


def name_of(group: dict[str, Any], position: int) -> str:
    """The name of the group's parameter at `position`, or its place where names are not known."""
    names = group.get("param_names", ())
    # ZeRO swaps flat shards for the parameters and keeps the names; then a name would be another parameter's.
    return names[position] if len(names) == len(group["params"]) else f"parameter {position}"


def _settings(group: dict[str, Any], map_keys: Sequence[str]) -> set[str]:
    """The settings that the group's rule reads, and the rule."""
    rule = group.get("rule", "")
    return {"rule", *RULE_KEYS.get(rule, ()), *((*MAP_KEYS, *map_keys) if rule == "spectral" else ())} - {"lr"}


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
