"""Soren, Muon, HTMuon and AdamW: their settings, and the map of each; the base is
`SpectralOptimizer`.

A matrix optimizer defines `map_matrix`; all else is `SpectralOptimizer`. A new one is a record of
its map (`optimizer_of` makes the class); one whose map has a state is a subclass that names itself,
its settings and its state: see `SpectralOptimizer`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..core import optimizer_settings as default
from ..core.optimizer_settings import (
    NON_NEGATIVE,
    AdjustLrFn,
    Compensation,
    FactorPrecision,
    Precision,
    WeightDecayTo,
)
from ..spectral.maps import HTMUON, MAPS, MUON, SOREN_MAPS, SpectralMap, seed_of
from .group_settings import checked_settings, choice, name_in_model, number, setting_checks
from .optimizer import OPTIMIZERS, MapContext, SharedSettings, SpectralOptimizer


def complete_map(spectral_map: str | Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a map with their defaults: "sns" -> {"name": "sns", "steps": 15}.

    Raises ValueError for an unknown name, a setting of another map, and a value that is not
    allowed.
    """
    settings = {"name": spectral_map} if isinstance(spectral_map, str) else dict(spectral_map)
    if "file" in settings:
        settings.setdefault("name", "file")
    name = choice(tuple(SOREN_MAPS))(settings.pop("name", None))
    defaults = SOREN_MAPS[name].plain_defaults
    for key in settings.keys() - defaults.keys():
        raise ValueError(
            f"map {name!r} has no setting {key!r}; "
            + (f"write one of {', '.join(map(repr, defaults))}" if defaults else f"remove {key!r}")
        )
    # Complete, so that a checkpoint and run.json record the value that was used, and not that of a
    # later version's default.
    checked = checked_settings({**defaults, **settings}, setting_checks(SOREN_MAPS[name]), name)
    return {"name": name, **SOREN_MAPS[name].complete(checked)}


class RegisteredMap(SpectralOptimizer):
    """An optimizer whose map is a record of `spectral.maps`."""

    record: ClassVar[SpectralMap]
    precision: Precision = "auto"

    def map_of(self, group: dict[str, Any]) -> tuple[SpectralMap, dict[str, Any]]:
        """The record of a group's map, and its settings."""
        return self.record, {key: group[key] for key in self.record.settings}

    def factor_precision(self, x: Tensor, spectral_map: SpectralMap) -> FactorPrecision:
        """The precision of the factors of the map of x, [..., m, n]; "auto" leaves float64 as it
        is.
        """
        # float64 is asked for by tests of parity, which a map in float16 could not pass.
        on_gpu = x.is_cuda and x.dtype == torch.float32
        return spectral_map.factor_precision(self.precision, min(x.shape[-2:]), on_gpu)

    def map_matrix(
        self, x: Tensor, group: dict[str, Any], context: MapContext, **state: Tensor
    ) -> Tensor:
        """U f(S) V^T of x, by the group's map."""
        spectral_map, settings = self.map_of(group)
        # By the name and the step, so that any number of ranks, and a resumed run, draws the same.
        if spectral_map.is_drawn:
            settings["seeds"] = [
                seed_of(name_in_model(name), context.step) for name in context.names
            ]
        precision = self.factor_precision(x, spectral_map)
        output, num_guarded = spectral_map.function(
            x, precision=precision, max_norm=context.max_norm, **settings
        )
        self.num_guarded += int(num_guarded)  # a host read, where a norm is large
        return output


class Soren(RegisteredMap, name="soren"):
    """W <- W - lr * U s(S) V^T, with U S V^T the Nesterov momentum and s the sigmoid.

    params: matrices, named or not, or groups; see `soren_align.param_groups` for a whole model.
    momentum, nesterov: as in `step`; no bias correction. OneCycleLR and CyclicLR with
        cycle_momentum change the momentum, and not the betas of AdamW groups.
    weight_decay: W <- W (1 - lr * weight_decay) before the step, with the unadjusted lr.
    weight_decay_to: "start" for W <- W - lr * weight_decay * (W - W0) instead, W0 the weights
        before the first step, which are kept in the state.
    compensation: "kahan" keeps the rounding error of each bfloat16 parameter beside it (see
        `rounding`), so that its updates are those of float32; other parameters do not need it.
    momentum_dtype: "bfloat16" stores the momentum in half of the memory; float64 matrices keep
        theirs.
    map_input: "momentum", or "sign", that of each number of it, as in AdaMuon.
    second_moment: "rows" divides the map's output by the root of a running average, with the
        coefficient second_moment_beta, of its squares over each row, as NorMuon does; "elements" by
        that of each square, as AdaMuon does, whose settings are Muon(map_input="sign",
        second_moment="elements", adjust_lr_fn="match_rms_measured"). Both leave its norm as it is
        (see `second_moment`).
    map: "minimax", accurate from a normalised singular value of 0.0004 on, or {"name": "minimax",
        "resolution": 0.01} for less work; "sns", the paper's Algorithm 1, less accurate and dearer,
        or {"name": "sns", "steps": 15}; "exact", the definition; "released", the map of the
        authors' code, which has a smaller update and is closer to momentum SGD, or {"name":
        "released", "steps": 5}. Others are no sigmoid: `spectral.maps` has them all.
    adjust_lr_fn: "none", "original" (sqrt(max(1, m/n))), "match_rms_adamw" (0.2 sqrt(max(m, n)),
        divided by the sigmoid's 1/2 so that learning rates compare with AdamW's), or
        "match_rms_measured" (0.2 over the RMS of the map's output, so that every update has RMS 0.2
        lr, whatever the spectrum and the map). None is "none", the paper's text, with a warning for
        matrices whose updates it makes much smaller than AdamW's.
    match_rms: instead of the 0.2 of both; "adamw" is sqrt((1 - b) / (1 + b)), b AdamW's default
        beta1.
    workspace_mb: MB (2^20 bytes) for mapping matrices of one shape in a batch; one that needs more
        is mapped alone. None is 16 on a CPU, 2048 elsewhere. It changes a step by rounding only.
    precision: of the factors of the map's matrix products, whose sums are float32: "auto" is
        float16 for minimax on CUDA from 64 rows on (docs/optimizers.md has the distances), and
        float32 otherwise; or "float32", for gradients of low rank, "float16", "bfloat16". sns has
        "bfloat16" beside float32, iterated and summed in it, as Muon is; released has float32
        alone.
    The map needs averaged, unscaled gradients, clipped before the step; singular values above 4.6
    are guarded.
    Source: the paper's Algorithm 2.
    """

    map_settings: ClassVar = {"map": complete_map}
    map_level = 0.5
    own_adjust_lr_fn = default.SOREN_ADJUST_LR_FN

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        map: str | Mapping[str, Any] = "minimax",
        adjust_lr_fn: AdjustLrFn | None = None,
        workspace_mb: float | None = None,
        precision: Precision = default.PRECISION,
        **shared: Unpack[SharedSettings],
    ):
        super().__init__(params, lr, map=map, adjust_lr_fn=adjust_lr_fn, **shared)
        if workspace_mb is not None:
            checked_settings(
                {"workspace_mb": workspace_mb}, {"workspace_mb": number(NON_NEGATIVE)}, "Soren"
            )
        # The choices are the map's, and each group may have a map of its own.
        for group in self.param_groups:
            allowed = (
                SOREN_MAPS[group["map"]["name"]].precisions
                if group["rule"] == "spectral"
                else (precision,)
            )
            if precision not in allowed:
                choices = " or ".join([repr(name) for name in allowed])
                raise ValueError(
                    f"Soren precision: found {precision!r}; for map {group['map']['name']!r} "
                    f"write {choices}"
                )
        self.workspace_mb = workspace_mb
        self.precision: Precision = precision

    def __getstate__(self) -> dict[str, Any]:
        # No settings of a group: a run may resume on a machine with more memory or less, or on
        # another device.
        return {
            **super().__getstate__(),
            "workspace_mb": self.workspace_mb,
            "precision": self.precision,
        }

    def map_of(self, group: dict[str, Any]) -> tuple[SpectralMap, dict[str, Any]]:
        """The sigmoid, or the group's map in its place."""
        settings = dict(group["map"])
        return SOREN_MAPS[settings.pop("name")], settings


class Muon(RegisteredMap, name="muon"):
    """torch.optim.Muon, bit for bit on float32 matrices, with AdamW groups beside them.
    Arguments as in `Soren`.

    ns_steps: of the Newton-Schulz iteration.
    """

    record: ClassVar = MUON
    map_settings: ClassVar = setting_checks(MUON)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = default.LR,
        *,
        ns_steps: int = default.MUON_STEPS,
        adjust_lr_fn: AdjustLrFn | None = default.MUON_ADJUST_LR_FN,
        **shared: Unpack[SharedSettings],
    ):
        # torch.optim.Muon's default is None, and means "original" by it.
        adjust_lr_fn = adjust_lr_fn or default.MUON_ADJUST_LR_FN
        super().__init__(params, lr, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, **shared)


class HTMuon(RegisteredMap, name="htmuon"):
    """W <- W - lr * U S^p V^T. Arguments as in `Soren`; adjust_lr_fn=None is "original".

    p: 1/2, 1/4 and 1/8 need no decomposition in matrices of at least 1024 rows, see
    `spectral.powers`.

    Source: arXiv 2603.10067. Nesterov is on, as in its code; the algorithm in the Soren paper shows
    it without.
    """

    record: ClassVar = HTMUON
    map_settings: ClassVar = setting_checks(HTMUON)
    own_adjust_lr_fn = default.MUON_ADJUST_LR_FN

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        p: float = default.HTMUON_POWER,
        adjust_lr_fn: AdjustLrFn | None = None,
        **shared: Unpack[SharedSettings],
    ):
        super().__init__(params, lr, p=p, adjust_lr_fn=adjust_lr_fn, **shared)


def optimizer_of(record: SpectralMap) -> type[RegisteredMap]:
    """The optimizer that a map's record alone defines: W <- W - lr * U f(S) V^T.
    Arguments: `Soren`, and the record's settings.
    """

    def construct(
        self: RegisteredMap,
        params: ParamsT,
        lr: float | Tensor = default.LR,
        **settings: Unpack[SharedSettings],
    ) -> None:
        SpectralOptimizer.__init__(self, params, lr, **{**record.plain_defaults, **settings})

    # The constructor above takes its settings by **settings, so that they can't be read off its
    # signature, as `SpectralOptimizer.keywords` reads those of the other classes.
    def keywords(cls: type[RegisteredMap]) -> dict[str, Any]:
        return {**super(RegisteredMap, cls).keywords(), **record.plain_defaults}

    members = {
        "__doc__": record.doc,
        "__init__": construct,
        "keywords": classmethod(keywords),
        "record": record,
        "map_settings": setting_checks(record),
    }
    optimizer = type(record.label, (RegisteredMap,), members, name=record.optimizer)
    # pickle finds a class by its module and name.
    globals()[record.label] = optimizer
    return optimizer


class AdamW(SpectralOptimizer, name="adamw"):
    """torch.optim.AdamW(fused=True), TRL's default, bit for bit on float32 and float64 parameters.

    The state and the checks are those of the other optimizers.
    """

    rule = "adamw"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = default.LR,
        *,
        betas: tuple[float, float] = default.BETAS,
        eps: float = default.EPS,
        weight_decay: float = default.ADAMW_WEIGHT_DECAY,
        weight_decay_to: WeightDecayTo = default.WEIGHT_DECAY_TO,
        compensation: Compensation = default.COMPENSATION,
    ):
        decay = {"weight_decay": weight_decay, "weight_decay_to": weight_decay_to}
        super().__init__(params, lr, **decay, compensation=compensation, betas=betas, eps=eps)


# Records of optimizers that have no class above.
for _record in MAPS.values():
    if _record.optimizer not in OPTIMIZERS:
        optimizer_of(_record)
