"""Check the settings of parameter groups, and compare them with a checkpoint's settings.

A group holds the settings of its own rule and no others, so that a checkpoint records the settings
that were used.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

from torch import Tensor

from ..core import optimizer_settings as default
from ..core.files import digest
from ..core.optimizer_settings import (
    COEFFICIENT,
    LARGEST,
    NON_NEGATIVE,
    POSITIVE,
    AdjustLrFn,
    Bounds,
    Compensation,
    MapInput,
    MomentumDtype,
    SecondMoment,
    WeightDecayTo,
)
from ..spectral import SpectralMap
from .layout import WeightLayout

Check = Callable[[Any], Any]
"""Returns a setting's complete value. Raises ValueError ("found ...; write ...") if it is not
allowed."""

_OF_BOTH = {
    "weight_decay": default.WEIGHT_DECAY,
    "weight_decay_to": default.WEIGHT_DECAY_TO,
    "compensation": default.COMPENSATION,
}
RULE_DEFAULTS: dict[str, dict[str, Any]] = {
    "spectral": {
        "momentum": default.MOMENTUM,
        "nesterov": default.NESTEROV,
        "momentum_dtype": default.MOMENTUM_DTYPE,
        **_OF_BOTH,
        "map_input": default.MAP_INPUT,
        "second_moment": default.SECOND_MOMENT,
        "second_moment_beta": default.SECOND_MOMENT_BETA,
        "adjust_lr_fn": "none",
        "match_rms": default.MATCH_RMS,
    },
    "adamw": {"betas": default.BETAS, "eps": default.EPS},
}
"""The settings of a rule that its optimizer and group leave out."""
ADDED_LATER = (
    *("momentum_dtype", "map_input", "second_moment", "second_moment_beta", "match_rms"),
    "weight_decay_to",
)
"""Settings that earlier checkpoints lack, which had the defaults."""
# Keys that a group may have beside its settings: how its parameters store matrices (`layout`), a
# user's name for it, and those that torch's schedulers write.
SCHEDULER_KEYS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum")
OTHER_KEYS = ("params", "param_names", "weight_layouts", "rule", "name", *SCHEDULER_KEYS)
# The prefixes in names of a wrapped model's parameters.
_WRAPPER = re.compile(r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")


def check_that(is_allowed: Callable[[Any], bool], advice: str) -> Check:
    """A check by a condition; advice: what to write instead of another value."""

    def check(value: Any) -> Any:
        if not is_allowed(value):
            raise ValueError(f"found {value!r}; write {advice}")
        return value

    return check


def number(bounds: Bounds, names: Mapping[str, float] = {}) -> Check:
    """A check that a value is a number within `bounds`, or the name of one; a tensor of one element
    is one too.
    """

    def check(value: Any) -> Any:
        if isinstance(value, str) and names:
            if value not in names:
                raise ValueError(
                    f"found {value!r}; write a number, or {' or '.join(map(repr, names))}"
                )
            return names[value]
        # torch's optimizers take a learning rate that is a tensor, too.
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"found a tensor of shape {tuple(value.shape)}; write one number")
        if not isinstance(value, int | float | Tensor) or float(value) not in bounds:
            raise ValueError(
                f"found {value!r}; write a {'finite ' * (bounds.most == LARGEST)}number, {bounds}"
            )
        return value

    return check


def choice(options: Sequence[Any]) -> Check:
    """A check that a value is one of `options`."""
    return check_that(lambda value: value in options, f"one of {', '.join(map(repr, options))}")


def setting_checks(spectral_map: SpectralMap) -> dict[str, Check]:
    """The checks of a map's settings."""
    checks: dict[str, Check] = {}
    for key, setting in spectral_map.settings.items():
        # A map's settings are declared once, in its record: bounds for numbers, choices for words,
        # the type of the default for what is left.
        if not (bounds := setting.bounds):
            kind = dict | None if setting.default is None else type(setting.default)
            words = {str: "a text", bool: "True or False"}.get(kind, "a record, or None")
            free = check_that(lambda value, kind=kind: isinstance(value, kind), words)
            checks[key] = choice(setting.choices) if setting.choices else free
        # Counts are checked before numbers in general: 4.5 steps would fail in `range` only, and
        # True is an int to Python.
        elif isinstance(setting.default, int):
            checks[key] = check_that(
                lambda value, bounds=bounds: (
                    isinstance(value, int) and not isinstance(value, bool) and value in bounds
                ),
                f"a whole number, {bounds}",
            )
        else:
            checks[key] = number(bounds)
    return checks


_SHARED_SETTINGS: dict[str, Check] = {
    "lr": number(NON_NEGATIVE),
    "weight_decay": number(NON_NEGATIVE),
    "weight_decay_to": choice(get_args(WeightDecayTo)),
    "compensation": choice(get_args(Compensation)),
}
RULES: dict[str, dict[str, Check]] = {
    "spectral": {
        **_SHARED_SETTINGS,
        "momentum": number(COEFFICIENT),
        "momentum_dtype": choice(get_args(MomentumDtype)),
        "nesterov": check_that(lambda value: isinstance(value, bool), "True or False"),
        "map_input": choice(get_args(MapInput)),
        "second_moment": choice(get_args(SecondMoment)),
        "second_moment_beta": number(COEFFICIENT),
        "adjust_lr_fn": choice(get_args(AdjustLrFn)),
        "match_rms": number(POSITIVE, {"adamw": default.adamw_rms(default.BETAS[0])}),
    },
    "adamw": {
        **_SHARED_SETTINGS,
        "betas": check_that(
            lambda value: len(value) == 2 and all(beta in COEFFICIENT for beta in value),
            f"two numbers, {COEFFICIENT}",
        ),
        "eps": number(NON_NEGATIVE),
    },
}
"""The settings of each rule with their checks; a spectral group has those of its optimizer's map
besides."""


def checked_settings(
    group: dict[str, Any], checks: Mapping[str, Check], where: str
) -> dict[str, Any]:
    """`group` with complete values.
    Raises ValueError naming `where` and the first setting that is not allowed.
    """
    group = dict(group)
    for key, check in checks.items():
        if key in group:
            try:
                group[key] = check(group[key])
            except ValueError as error:
                raise ValueError(f"{where} {key}: {error}") from None
    return group


def refuse_combinations(group: Mapping[str, Any], where: str) -> None:
    """Raise ValueError, naming `where`, for settings of a spectral group that exclude one
    another.
    """
    if (
        group["second_moment"] == "none"
        and group["second_moment_beta"] != default.SECOND_MOMENT_BETA
    ):
        raise ValueError(
            f"{where} second_moment_beta: has no effect without a second moment; write "
            "second_moment='rows' or 'elements'"
        )
    if (
        not group["adjust_lr_fn"].startswith("match_rms_")
        and group["match_rms"] != default.MATCH_RMS
    ):
        raise ValueError(
            f"{where} match_rms: has no effect with adjust_lr_fn={group['adjust_lr_fn']!r}; "
            "write 'match_rms_measured' or 'match_rms_adamw'"
        )


def refuse_changed_settings(
    saved: Sequence[dict], current: Sequence[dict], map_keys: Collection[str]
) -> None:
    """Raise ValueError naming every setting that differs between a checkpoint's groups and the
    current ones.

    Ignored are learning rates, a momentum that a scheduler changes, the prefixes of wrapped models
    in parameter names, names that only one side has, and all that is no setting of the group's
    rule. map_keys: settings of any map.
    """
    if len(saved) != len(current):
        raise ValueError(
            f"the checkpoint has {len(saved)} parameter groups, but this optimizer has "
            f"{len(current)}; build the same groups"
        )
    if not any("rule" in group for group in saved):
        raise ValueError(
            "the checkpoint's optimizer state was not written by soren-align; load the model's "
            "weights alone, and start with a new optimizer state"
        )
    # Codes of 8-bit states have the momentum's shape, and would be taken for its numbers.
    if any(group.get("states") == "8bit" for group in saved):
        raise ValueError(
            "the checkpoint has 8-bit optimizer states, which this version does not read; resume "
            "with the version of soren-align that wrote it, or start again, with momentum_dtype: "
            "bfloat16 if memory is short"
        )
    # All at once: who has changed three settings need not resume three times to learn of them.
    differences = [
        f"group {index} {key}: {was} in the checkpoint, {now} in this optimizer"
        for index, groups in enumerate(zip(saved, current, strict=True))
        for key, was, now in _settings_of(*groups, map_keys)
        if was != now
    ]
    if differences:
        raise ValueError(
            "the checkpoint has other optimizer settings; restore these settings:\n"
            + "\n".join(differences)
        )


def _settings_of(
    saved: dict[str, Any], current: dict[str, Any], map_keys: Collection[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (setting, its value in a checkpoint's group, in the current one), in a form that can be
    compared.
    """
    groups = (saved, current)
    # States are loaded by position, so that this is compared first and names, if both have them,
    # last.
    yield "number of parameters", len(saved["params"]), len(current["params"])
    rules = [group.get("rule", "") for group in groups]
    keys = {"rule", *(map_keys if "spectral" in rules else ())}.union(
        *(RULES.get(rule, ()) for rule in rules)
    )
    # A momentum that a scheduler changes is loaded like a learning rate.
    is_scheduled = any("base_momentum" in group for group in groups)
    for key in sorted(keys - ({"lr", "momentum", "betas"} if is_scheduled else {"lr"})):
        absent = RULE_DEFAULTS["spectral"][key] if key in ADDED_LATER else "nothing"
        was, now = (_comparable(key, group.get(key, absent)) for group in groups)
        yield key, was, now
    # In thousands of experts the kinds of layouts explain more than all of them.
    was, now = (
        [str(WeightLayout.parse(layout)) for layout in group.get("weight_layouts", {}).values()]
        for group in groups
    )
    kinds = [[*dict.fromkeys(layouts)] for layouts in (was, now)]
    if kinds[0] != kinds[1]:
        was, now = kinds
    yield "weight_layouts", was, now
    if all("param_names" in group for group in groups):
        was, now = ([name_in_model(name) for name in group["param_names"]] for group in groups)
        numbers = (f"{len(was)} names", f"{len(now)} names")
        if was != now:
            first = next(((a, b) for a, b in zip(was, now, strict=False) if a != b), numbers)
            yield "param_names", *first


def _comparable(key: str, value: Any) -> Any:
    # The content of a map's file, as a short hash: its numbers have no meaning in a message.
    if key == "map" and isinstance(value, dict):
        return {k: digest(v)[:12] if k == "composition" else v for k, v in value.items()}
    return tuple(value) if isinstance(value, list) else value


def name_in_model(name: str) -> str:
    """A parameter's name without the parts that wrappers of modules add: torch.compile's, FSDP's,
    checkpointing's.
    """
    return _WRAPPER.sub("", name)


def names_of(group: dict[str, Any]) -> Sequence[str]:
    """The names of the group's parameters, or their positions where names are not known."""
    names, num_params = group.get("param_names", ()), len(group["params"])
    # ZeRO replaces the parameters by flat shards and keeps the names, which are then those of other
    # tensors.
    return (
        names
        if len(names) == num_params
        else [f"parameter {position}" for position in range(num_params)]
    )
