"""Maps by a formula, and the named ones, which are formulas with a parameter: the functions of
their records in `maps`.

A record's settings are those of `compose`; `completed` adds the composition, which a recipe,
run.json and a checkpoint then contain, so that a resumed run has the very same. Torch is imported
when a map is called.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..core.errors import UserError
from ..core.optimizer_settings import FactorPrecision
from .flops import composition_flops

if TYPE_CHECKING:
    from torch import Tensor

    from .compose import Composed, Target

TEXTS = {
    "soft_sign": ("x / sqrt(x^2 + tau^2)", "tau"),
    "tanh": ("tanh(x / tau)", "tau"),
    "clip": ("min(x / tau, 1)", "tau"),
    "soren_lambda": ("(x + sqrt(x^2 + strength)) / (1 + sqrt(1 + strength))", "strength"),
}
"""The formula of each named map, and its parameter."""
Settings = Mapping[str, Any]


def _compose() -> Any:
    # numpy, and scipy for a formula that is neither shipped nor cached
    return import_module(".compose", __package__)


def target_of(name: str, settings: Settings) -> "Target":
    """What a map matches. Raises UserError for a text that is no formula."""
    text, parameter = TEXTS.get(name, (settings.get("formula"), None))
    parameters = {parameter: settings[parameter]} if parameter else {}
    return _compose().target_of(
        text, parameters, settings["of"], settings["resolution"], settings["limit"]
    )


def completed(name: str, settings: Settings) -> dict[str, Any]:
    """The settings with their composition, unless they have it.
    Raises UserError if there is none within `error`.
    """
    compose, target, record = _compose(), target_of(name, settings), settings["composition"]
    if settings["exact"]:
        compose.refuse_unsuitable(target)
        return {**settings, "composition": None}
    key = compose.key_of(target, settings["error"])
    if record and record.get("key") == key:
        try:
            compose.from_dict(record)
        except (KeyError, TypeError, ValueError):
            raise UserError(
                "composition: is damaged; remove this key, and it is computed again"
            ) from None
        return dict(settings)
    return {
        **settings,
        "composition": {"key": key, **compose.compose(target, settings["error"]).as_dict()},
    }


def composed_of(settings: Settings) -> "Composed":
    """The composition of complete settings."""
    return _compose().from_dict(settings["composition"])


def function(
    name: str, x: "Tensor", precision: FactorPrecision, max_norm: float | None, **settings: Any
) -> Any:
    """U f(S / N) V^T of x, and the number of guarded matrices."""
    composed = import_module(".composed", __package__)
    limit = settings["limit"] if settings["of"] in ("rms", "none") else 1.0
    if settings["exact"]:
        return composed.exact_formula(
            x, target_of(name, settings).formula, settings["of"], limit
        ), 0
    composition = composed_of(settings).composition
    return composed.guarded_composition(x, composition, settings["of"], limit, precision, max_norm)


def target(name: str, sigma: "Tensor", **settings: Any) -> "Tensor":
    """f(S / N) of the singular values of one matrix."""
    unit = import_module(".composed", __package__).unit_of(sigma, settings["of"])
    return target_of(name, settings).formula(sigma / unit)


def flops(m: int, n: int, precision: FactorPrecision, **settings: Any) -> int | None:
    """Floating-point operations of the products; None for a decomposition."""
    return (
        None
        if settings["exact"]
        else composition_flops(composed_of(settings).composition, m, n, precision)
    )


def level(m: int, n: int, **settings: Any) -> float:
    """The largest value of f, up to the error."""
    return 1.0 if settings["exact"] else composed_of(settings).largest
