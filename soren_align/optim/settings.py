"""What a parameter group says: the keys of each rule, which values are allowed, and whether a checkpoint agrees.

A group holds the settings of its own rule and no others, so that what a checkpoint keeps is what was used.
"""

from collections.abc import Callable, Sequence
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
# What every group may carry beside its settings; initial_lr is written by learning rate schedulers.
BOOKKEEPING = ("params", "param_names", "rule", "initial_lr")
# A resumed run takes these from the checkpoint, since a scheduler moves them.
LOADED_FREELY = ("params", "lr", "initial_lr")


def check_settings(group: dict[str, Any], where: str) -> None:
    """ValueError naming `where` and the first setting of `group` whose value is not allowed."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"{where} lr: found a tensor of shape {tuple(lr.shape)}; write one number")
    allowed = {
        "lr": (lambda v: float(v) >= 0, "0 or more"),
        "weight_decay": (lambda v: v >= 0, "0 or more"),
        "compensation": (lambda v: v in COMPENSATIONS, f"one of {', '.join(map(repr, COMPENSATIONS))}"),
        "momentum": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
        "nesterov": (lambda v: isinstance(v, bool), "True or False"),
        "adjust_lr_fn": (lambda v: v in ADJUST_LR_FNS, f"one of {', '.join(map(repr, ADJUST_LR_FNS))}"),
        "spectral_map": (lambda v: v in SPECTRAL_MAPS, f"one of {', '.join(map(repr, SPECTRAL_MAPS))}"),
        "ns_steps": (lambda v: isinstance(v, int) and 1 <= v < 100, "a whole number from 1 to 99"),
        "resolution": (lambda v: v in RESOLUTIONS, f"one of {', '.join(map(str, RESOLUTIONS))}"),
        "p": (lambda v: 0 <= v <= 1, "a number from 0 to 1"),
        "betas": (lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "two numbers, at least 0 and below 1"),
        "eps": (lambda v: v >= 0, "0 or more"),
    }
    for key, (holds, wanted) in allowed.items():
        if key in group and not holds(group[key]):
            raise ValueError(f"{where} {key}: found {group[key]!r}; write {wanted}")


def refuse_changed_settings(saved: Sequence[dict], present: Sequence[dict]) -> None:
    """ValueError naming every setting that differs between a checkpoint's groups and the present ones."""
    if len(saved) != len(present):
        raise ValueError(f"the checkpoint has {len(saved)} parameter groups, this optimizer {len(present)}")
    differences = []
    for index, (old, new) in enumerate(zip(saved, present, strict=True)):
        if len(old["params"]) != len(new["params"]):
            counts = f"{len(old['params'])} in the checkpoint, {len(new['params'])} in this optimizer"
            differences.append(f"group {index} number of parameters: {counts}")
        for key in sorted((old.keys() | new.keys()) - set(LOADED_FREELY)):
            was, now = (_comparable(group.get(key, "nothing")) for group in (old, new))
            if was != now:
                was, now = _first_difference(was, now) if key == "param_names" else (was, now)
                differences.append(f"group {index} {key}: {was} in the checkpoint, {now} in this optimizer")
    if differences:
        raise ValueError("the checkpoint was made with other optimizer settings\n" + "\n".join(differences))


def refuse_incomplete_state(
    saved: dict[str, Any], present: Sequence[dict], keys: Callable[[Tensor, dict[str, Any]], Sequence[str]]
) -> None:
    """ValueError if some parameters of a checkpoint have state, and others lack it or have it in another shape.

    keys: the names of a parameter's state in its group. A checkpoint from before the first step has no state, and
    passes.
    """
    if not saved["state"]:
        return
    for old, new in zip(saved["param_groups"], present, strict=True):
        for position, (number, parameter) in enumerate(zip(old["params"], new["params"], strict=True)):
            name, state = name_of(new, position), saved["state"].get(number, {})
            missing = [key for key in keys(parameter, new) if key not in state]
            if missing:
                raise ValueError(f"the checkpoint lacks {', '.join(missing)} of {name}; it cannot be resumed from")
            if state["exp_avg"].shape != parameter.shape:
                shapes = f"shape {tuple(state['exp_avg'].shape)} for {name} of shape {tuple(parameter.shape)}"
                raise ValueError(f"the checkpoint has a momentum of {shapes}; it belongs to another model")


def name_of(group: dict[str, Any], position: int) -> str:
    """The name of the group's parameter at `position`, or its place where names are not known."""
    names = group.get("param_names", ())
    # ZeRO swaps flat shards for the parameters and keeps the names; then a name would be another parameter's.
    return names[position] if len(names) == len(group["params"]) else f"parameter {position}"


def _comparable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _first_difference(was: Any, now: Any) -> tuple[str, str]:
    if isinstance(was, str) or isinstance(now, str):
        return tuple(v if isinstance(v, str) else f"{len(v)} names" for v in (was, now))  # type: ignore[return-value]
    for old, new in zip(was, now, strict=False):
        if old != new:
            return old, new
    return f"{len(was)} names", f"{len(now)} names"
