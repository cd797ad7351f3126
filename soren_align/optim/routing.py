"""Which parameter is updated by which rule, and why.

Weights of linear layers inside the blocks are matrices to a spectral map. Embeddings, the head (tied or not), norms,
biases and everything else go to AdamW. Every trainable parameter is in exactly one place, by identity, not by name.
Of LoRA adapters, the factors of linear layers are matrices, each mapped by itself; see `adapters`.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from .lora_factors import FACTOR, Adapters


@dataclass(frozen=True, eq=False)
class Route:
    """Where one trainable parameter goes. `shape` is the whole one, also where ZeRO 3 has emptied the tensor."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    rule: str
    reason: str


@dataclass(frozen=True)
class _Place:
    """One of the places where a parameter hangs in the model."""

    name: str
    owner: nn.Module
    in_block: bool


def route(model: nn.Module, aux: Sequence[str] = ()) -> list[Route]:
    """Every trainable parameter of `model` once, in the order of `named_parameters`.

    aux: globs of parameter names that go to AdamW even if they are matrices, e.g. "*.o_proj.weight".
    ValueError for a glob that matches nothing and for adapters that PEFT does not call LoRA.
    """
    places = _places(model)
    adapters = Adapters(model)
    for parameter, found in places.items():
        adapters.refuse_unknown(parameter, found[0].name)
    for glob in aux:
        if not any(fnmatchcase(place.name, glob) for found in places.values() for place in found):
            raise ValueError(f"aux: {glob!r} matches no trainable parameter")

    heads = {"input embedding": "get_input_embeddings", "output embedding": "get_output_embeddings"}
    special = {}
    for reason, getter in heads.items():
        module = getattr(model, getter)() if hasattr(model, getter) else None
        for parameter in module.parameters() if module is not None else ():
            special.setdefault(parameter, reason)

    routes = []
    for parameter, found in places.items():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        obstacle = special.get(parameter) or adapters.obstacle(parameter)
        obstacle = obstacle or _obstacle(found, shape, aux, hasattr(model, "get_output_embeddings"))
        reason = obstacle or (FACTOR if adapters.is_factor(parameter) else "linear layer")
        if len(found) > 1:
            reason += f", tied to {', '.join(place.name for place in found[1:])}"
        routes.append(Route(found[0].name, parameter, shape, "adamw" if obstacle else "spectral", reason))
    return routes


def param_groups(
    model: nn.Module,
    *,
    aux_lr: float | None,
    lr: float | None = None,
    weight_decay: float | None = None,
    aux_weight_decay: float = 0.0,
    aux: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The groups of `model` for Soren, Muon or HTMuon: the matrices, then the rest for AdamW, if there is any.

    lr, weight_decay: of the matrices; None leaves them to the optimizer. aux_lr, aux_weight_decay: of the rest; None
    for aux_lr where there is no rest, as with LoRA.
    ValueError if no parameter is a matrix to be updated whole, for a missing aux_lr, and what `route` raises.
    """
    routes = route(model, aux)
    if not any(r.rule == "spectral" for r in routes):
        reasons = ", ".join(sorted({r.reason for r in routes})) or "no trainable parameter"
        raise ValueError(f"{type(model).__name__} has no matrix for a spectral optimizer; found only: {reasons}")
    rest = [r for r in routes if r.rule == "adamw"]
    if rest and aux_lr is None:
        raise ValueError(
            f"aux_lr: missing; AdamW updates what is no matrix ({rest[0].name}, ...), and its learning rates do not "
            "compare with those of the matrices"
        )
    settings = {
        "spectral": {"lr": lr, "weight_decay": weight_decay},
        "adamw": {"lr": aux_lr, "weight_decay": aux_weight_decay},
    }
    groups = []
    for rule, values in settings.items():
        members = [r for r in routes if r.rule == rule]
        if members:
            lists = {"params": [r.parameter for r in members], "param_names": [r.name for r in members]}
            groups.append({"rule": rule, **lists, **{k: v for k, v in values.items() if v is not None}})
    return groups


def routing_table(routes: Sequence[Route]) -> list[dict[str, Any]]:
    """One plain row per rule and reason: {"rule", "reason", "tensors", "numel"}, the matrices first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for r in sorted(routes, key=lambda r: r.rule != "spectral"):
        row = rows.setdefault((r.rule, r.reason), {"rule": r.rule, "reason": r.reason, "tensors": 0, "numel": 0})
        row["tensors"] += 1
        numel = 1
        for length in r.shape:
            numel *= length
        row["numel"] += numel
    return list(rows.values())


def _places(model: nn.Module) -> dict[nn.Parameter, list[_Place]]:
    """Every trainable parameter with all the places where it hangs; the first gives its name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    lists = {name for name, module in modules.items() if isinstance(module, nn.ModuleList)}
    places = defaultdict(list)
    for path, owner in modules.items():
        parts = path.split(".")
        in_block = any(".".join(parts[:end]) in lists for end in range(len(parts)))
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.requires_grad:
                places[parameter].append(_Place(f"{path}.{name}" if path else name, owner, in_block))
    return places


def _obstacle(found: Sequence[_Place], shape: tuple[int, ...], aux: Sequence[str], needs_block: bool) -> str | None:
    """Why a parameter is not for a spectral map; None if it is."""
    if any(isinstance(place.owner, nn.Embedding) for place in found):
        return "embedding"
    for glob in aux:
        if any(fnmatchcase(place.name, glob) for place in found):
            return f"named by aux {glob!r}"
    if len(shape) != 2:
        return f"{len(shape)}-dimensional"
    if not all(isinstance(place.owner, nn.Linear) and place.name.split(".")[-1] == "weight" for place in found):
        return "not the weight of a linear layer"
    if needs_block and not any(place.in_block for place in found):
        return "outside the blocks"
    return None
