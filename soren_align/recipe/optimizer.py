"""The optimizer section of a recipe: one class per optimizer, and one class per map of Soren.

A map is a record in `spectral.maps`, of which its section here is made; so is the section of an
optimizer whose map is a record of its own. Choices, checks, schema and documentation follow from
them. Defaults and bounds come from `optimizer_settings`.
"""

import operator
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..core import optimizer_settings as settings
from ..core import third_party
from ..core.document import Section, tag_of
from ..core.errors import UserError
from ..core.optimizer_settings import (
    AdjustLrFn,
    Bounds,
    Compensation,
    FactorPrecision,
    MapInput,
    Matrices,
    MomentumDtype,
    Precision,
    SecondMoment,
    WeightDecayTo,
)
from ..spectral.maps import MAPS, SOREN_MAPS, SpectralMap


def within(bounds: Bounds) -> Any:
    """The pydantic Field of an int or a float within `bounds`."""
    # A number without a bound of its own: allow_inf_nan, which integers do not take, so that an
    # infinity is answered by "write a finite number" and not by LARGEST.
    least, above, most, below = bounds
    if most != settings.LARGEST:
        return Field(ge=least, gt=above, le=most, lt=below)
    return Field(ge=least, gt=above, le=most, allow_inf_nan=False)


Positive = Annotated[float, within(settings.POSITIVE)]
NonNegative = Annotated[float, within(settings.NON_NEGATIVE)]
Coefficient = Annotated[float, within(settings.COEFFICIENT)]


def worded(remedy: Any) -> WrapValidator:
    """Give one message for all members of a union of plain types, or for all choices."""

    def validate(value: Any, check: Any) -> Any:
        # pydantic reports one error per member of a union, in which the reader would have to find
        # the one that was meant. The schema's types stay; only the message is one.
        try:
            return check(value)
        except ValidationError:
            raise PydanticCustomError("union", remedy) from None

    return WrapValidator(validate)


Block = Annotated[
    settings.BlockName | Annotated[int, Field(ge=2)],
    worded(f"write {', '.join(settings.BLOCKS)}, or a row count (2 or more)"),
]
"""A block of `split`: a projection, all heads, or a row count."""


class _MapSection(Section):
    """The base of sections without source code, in which pydantic would look for docstrings: 1 s
    beside torch.
    """

    model_config = ConfigDict(use_attribute_docstrings=False)


def _fields_of(spectral_map: SpectralMap) -> dict[str, Any]:
    """The pydantic fields of a map's settings."""
    fields: dict[str, Any] = {}
    for key, setting in spectral_map.settings.items():
        # The type of the default is the type of the setting, so that a map's record declares each
        # once.
        kind: Any = dict[str, Any] | None if setting.default is None else type(setting.default)
        if setting.choices:
            kind = Annotated[
                Literal[setting.choices], worded(f"write {' or '.join(map(str, setting.choices))}")
            ]
        elif setting.bounds:
            kind = Annotated[kind, within(setting.bounds)]
        fields[key] = (kind, Field(setting.default, description=setting.doc))
    return fields


def _map_section(spectral_map: SpectralMap, is_default: bool) -> type[Section]:
    """The section with the name and the settings of one of Soren's maps."""
    name = spectral_map.name
    # Only the default map's name may be left out: `map: {}` and `map: {resolution: 0.001}` mean it.
    fields: dict[str, Any] = {"name": (Literal[name], name) if is_default else Literal[name]}
    fields |= _fields_of(spectral_map)
    title = "".join(word.capitalize() for word in name.split("_"))

    # A map may derive settings from others, such as the content of `file`: derived here, so that
    # the resolved recipe in a run folder has all that a resume on another machine needs.
    def complete(section: Any) -> Any:
        try:
            settings = spectral_map.complete(section.model_dump(exclude={"name"}))
        except UserError as error:
            raise PydanticCustomError("map", "{message}", {"message": str(error)}) from None
        # Sections are frozen, so that pydantic's own assignment would be refused.
        section.__dict__.update(settings)
        return section

    validators: Any = {"complete": model_validator(mode="after")(complete)}
    options: Any = {"__base__": _MapSection, "__module__": __name__, "__doc__": spectral_map.doc}
    section: Any = create_model(f"{title}Map", __validators__=validators, **options, **fields)
    return section


def _as_section(value: Any) -> Any:
    """`sns` as `{name: sns}`, null as the default map; anything else unchanged."""
    if value is None:
        return {}
    # A map in a file is named by its file alone.
    if isinstance(value, dict) and "file" in value:
        return {"name": "file", **value}
    return {"name": value} if isinstance(value, str) else value


# The first map is the default, here and in `spectral.maps`.
MAP_SECTIONS = {
    name: _map_section(spectral_map, is_default=number == 0)
    for number, (name, spectral_map) in enumerate(SOREN_MAPS.items())
}
if TYPE_CHECKING:
    Map = Any
else:  # a union of as many members as there are maps is none that a type checker can read
    # By a discriminator and not as a plain union: an error is then about the map that was named,
    # and not about each of a dozen.
    Map = Annotated[
        reduce(
            operator.or_, (Annotated[section, Tag(name)] for name, section in MAP_SECTIONS.items())
        ),
        Discriminator(lambda value: tag_of(value, MAP_SECTIONS)),
        BeforeValidator(_as_section),
    ]


class OptimizerSection(Section):
    """The keys of every optimizer."""

    title: ClassVar[str]
    """The optimizer's name as papers print it."""
    main_keys: ClassVar[dict[type, str]] = {str: "name"}
    other_names: ClassVar[dict[str, str]] = {"learning_rate": "lr"}
    hints: ClassVar[dict[str, str]] = {
        "lora_update": (
            "unknown key; remove it: the two factors of an adapter are updated as separate matrices"
        ),
        "states": (
            "unknown key; remove it, because states are float32. To save memory, write"
            " `momentum_dtype: bfloat16`, which halves the momentum of matrices"
        ),
    }
    removed: ClassVar[dict[str, Any]] = {"states": "float32", "lora_update": "factors"}
    """Keys of earlier versions, with the only value that is still possible."""

    name: Any
    """The optimizer that updates the matrices (see the key `matrices`). AdamW updates all other
    parameters: norms, biases and, by default, embeddings and output head."""
    matrices: Matrices = settings.MATRICES
    """Which parameters are matrices. `inside-blocks`: the weights of linear layers inside the
    transformer blocks, and of experts. `all-2d`: all parameters of two dimensions, including
    embeddings, output head and routers, as in the code that the authors of the Soren paper
    released."""
    lr: Positive
    """Peak learning rate of the matrices."""
    # A default of its own would not follow --set and studies, which change lr: `schema.resolve`
    # writes it out.
    aux_lr: Positive | None = None
    """Peak learning rate of the other parameters. null: equal to `lr`, also if --set or a study
    changes `lr`. If `adjust_lr_fn` is `none` or `original`, set `aux_lr`, because `lr` is then not
    comparable with AdamW's learning rate."""
    weight_decay: NonNegative = settings.WEIGHT_DECAY
    """Decoupled weight decay of the matrices. Each step multiplies the weights by 1 - `lr` x
    `weight_decay`; the scale of `adjust_lr_fn` has no effect on this factor."""
    aux_weight_decay: NonNegative = settings.AUX_WEIGHT_DECAY
    """Decoupled weight decay of the other parameters."""
    weight_decay_to: WeightDecayTo | None = None
    """`start`: weight decay moves the weights towards those before the first step, so that the
    model forgets less. A good `weight_decay` is then about 1 / (`lr` x steps), far above 0.1. This
    stores a copy of the weights. null: `zero`."""
    # null and not "none": who has written "none" has accepted the losses of bfloat16, who has
    # written nothing gets an error (`checks._check_precision`).
    compensation: Compensation | None = None
    """For bfloat16 parameters. `kahan`: store the rounding error of each weight in 16 more bits, so
    that small updates add up as in float32. `none`: store no rounding errors. null: the same as
    `none`, but an error if the parameters are bfloat16 and there are no float32 master weights."""
    betas: Annotated[list[Coefficient], Field(min_length=2, max_length=2)] = list(settings.BETAS)
    """AdamW's betas: the coefficients of its two running averages."""
    eps: Positive = settings.EPS
    """AdamW's epsilon, which is added to the denominator."""
    aux: list[str] = []
    """Names of further parameters that AdamW updates. `*` matches anything. A name that matches no
    parameter is an error."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, values: Any) -> Any:
        """Drop removed keys that have no effect: resolved recipes of earlier run folders contain
        them.
        """
        if not isinstance(values, dict):
            return values
        return {
            key: value
            for key, value in values.items()
            if key not in cls.removed or value not in (None, cls.removed[key])
        }

    @property
    def routing(self) -> dict[str, Any]:
        """The keywords with which `optim.route` gets this section."""
        # AdamW has no `split`: it is elementwise.
        keys = ("aux", "matrices", "split")
        return {key: getattr(self, key) for key in keys if getattr(self, key, None) is not None}

    @property
    def spectral_map(self) -> SpectralMap | None:
        """The map of the matrices' momentum; None for AdamW."""
        return None

    @property
    def map_settings(self) -> dict[str, Any]:
        """The settings of the map."""
        return {}

    def map_precision(self, num_rows: int, on_gpu: bool) -> FactorPrecision:
        """The precision of the map's factors for a matrix of so many rows (its shorter side)."""
        precision: Precision = getattr(self, "precision", settings.PRECISION)
        return (
            self.spectral_map.factor_precision(precision, num_rows, on_gpu)
            if self.spectral_map
            else "float32"
        )

    @property
    def map_title(self) -> str:
        """Which map it is and whose; empty where an optimizer has only one."""
        return self.spectral_map.title.format(**self.map_settings) if self.spectral_map else ""

    @property
    def description(self) -> str:
        """The optimizer in words, for plans and the first lines of a run."""
        return self.name


class MatrixOptimizer(OptimizerSection):
    """The keys of the optimizers that map a matrix of momentum: all but AdamW."""

    own_map: ClassVar[SpectralMap]
    module: ClassVar[str] = ""
    """The module of another package's optimizer that defines its class, a named
    `optim.SpectralOptimizer`."""

    momentum: Coefficient = settings.MOMENTUM
    """Coefficient of the exponential moving average of the matrices' gradients."""
    # Keys that came after the first version have null as their default, here and below: a null does
    # not count in a recipe's hash, so that runs of earlier versions keep theirs
    # (`loader.recipe_hash`).
    momentum_dtype: MomentumDtype | None = None
    """The dtype in which the momentum of the matrices is stored; it is averaged in float32.
    `bfloat16` halves its memory. null: `float32`."""
    nesterov: bool = settings.NESTEROV
    """true: the map's input is the Nesterov average of gradient and momentum. false: it is the
    momentum."""
    # null was allowed before all optimizers had one default: it reads as that default.
    adjust_lr_fn: Annotated[
        AdjustLrFn, BeforeValidator(lambda value: settings.ADJUST_LR_FN if value is None else value)
    ] = settings.ADJUST_LR_FN
    """The factor by which the learning rate of an m x n matrix is multiplied. `match_rms_measured`:
    0.2 / RMS of the map's output. With this factor, the numbers of every update have a root mean
    square (RMS) of 0.2 `lr`, so you can use AdamW's learning rates. `match_rms_adamw`: 0.2
    sqrt(max(m, n)), and 0.4 sqrt(max(m, n)) for Soren. With this factor, an update has an RMS of
    0.2 `lr` only if the momentum has no small singular values. `original`: sqrt(max(1, m/n)).
    `none`: 1, as in the paper's text."""
    match_rms: Positive | Literal["adamw"] | None = None
    """The number that replaces 0.2 in the two `match_rms_` values of `adjust_lr_fn`. `adamw`:
    sqrt((1 - b) / (1 + b)), where b is the first of the `betas`; 0.23 for b = 0.9. AdamW's updates
    have this RMS if the gradients are noise with a mean of zero. null: 0.2."""
    map_input: MapInput | None = None
    """`sign`: apply the map to the sign of each number of the momentum, as AdaMuon does. null:
    `momentum`."""
    second_moment: SecondMoment | None = None
    """Divide the map's output by the square root of a running average of its squares, and restore
    its norm. `rows`: average the mean square of each row, as NorMuon does (arXiv 2510.05491); this
    stores one number per output of a layer. `elements`: average each square, as AdaMuon does (arXiv
    2507.11005, which also has `map_input: sign`); this stores one number per weight. null:
    `none`."""
    second_moment_beta: Coefficient | None = None
    """Coefficient of the running average of `second_moment`. null: 0.95."""

    split: dict[str, Annotated[list[Block], Field(min_length=1)]] = {}
    """Split fused weights, such as the projections of q, k and v in one matrix, into blocks. Soren
    treats each block as a separate matrix: `{"*qkv_proj": [q, k, v], "*gate_up_proj": [gate, up]}`.
    `*` matches anything. A block is the name of a projection, whose size is in the model's config,
    or a row count. `[heads]` makes one block for each attention head. A name that matches no matrix
    is an error."""

    @property
    def spectral_map(self) -> SpectralMap:
        """The map of the class, which has only one."""
        return self.own_map

    @property
    def map_settings(self) -> dict[str, Any]:
        """The settings of the map, which are keys of this section."""
        return {key: getattr(self, key) for key in self.spectral_map.settings}

    @property
    def description(self) -> str:
        """Name, map and scale: "soren (released, the authors' code, K = 5; scale original)"."""
        parts = [self.map_title, "map of signs" if self.map_input == "sign" else ""]
        parts.append(
            f"second moment of {self.second_moment}"
            if self.second_moment not in (None, "none")
            else ""
        )
        parts.append(
            f"scale {self.adjust_lr_fn}{'' if self.match_rms is None else f', RMS {self.rms:.3g}'}"
        )
        return f"{self.name} ({'; '.join(part for part in parts if part)})"

    @property
    def rms(self) -> float:
        """The RMS of an update at learning rate 1 with a `match_rms_` scale."""
        return (
            settings.adamw_rms(self.betas[0])
            if self.match_rms == "adamw"
            else self.match_rms or settings.MATCH_RMS
        )


class SorenSettings(MatrixOptimizer):
    """Soren applies a sigmoid to the singular values of the momentum."""

    title: ClassVar[str] = "Soren"

    name: Literal["soren"]
    map: Map = next(iter(MAP_SECTIONS.values()))()
    """The map, which is the function of the singular values of the momentum. If you write only the
    name of a map, its settings have their default values."""
    workspace_mb: NonNegative | None = None
    """The maps of matrices of equal shape are computed together, in batches that need at most this
    memory, in MB (2^20 bytes). A matrix that needs more memory is a batch of its own. null: 16 on a
    CPU, 2048 elsewhere."""
    precision: Precision = settings.PRECISION
    """The dtype of the numbers that the map's matrix products multiply. The products are summed in
    float32. `auto`: float16 for minimax on a GPU if the matrix has at least 64 rows, otherwise
    float32. In an emulation on recorded momenta, the float16 update differs from the float32 update
    by less than 1%. `minimax` and maps of polynomials (`soft_sign`, `file`, ...) accept all values.
    `sns` accepts auto, float32 and bfloat16. `released` accepts auto and float32. `exact` accepts
    only auto."""

    @property
    def spectral_map(self) -> SpectralMap:
        """The map that the key `map` names."""
        return MAPS[self.map.name]

    @property
    def map_settings(self) -> dict[str, Any]:
        """The settings of `map`."""
        return self.map.model_dump(exclude={"name"})


class MuonSettings(MatrixOptimizer):
    """Muon orthogonalizes the momentum, as torch.optim.Muon does."""

    title: ClassVar[str] = "Muon"
    own_map: ClassVar[SpectralMap] = MAPS["muon"]

    name: Literal["muon"]
    ns_steps: Annotated[int, within(settings.NUM_STEPS)] = settings.MUON_STEPS
    """The number of Newton-Schulz iterations."""


class HTMuonSettings(MatrixOptimizer):
    """HTMuon raises the singular values of the momentum to a power (arXiv 2603.10067)."""

    title: ClassVar[str] = "HTMuon"
    own_map: ClassVar[SpectralMap] = MAPS["htmuon"]

    name: Literal["htmuon"]
    p: Annotated[float, within(settings.POWER)] = settings.HTMUON_POWER
    """Each singular value of the momentum is raised to this power."""


def section_of(spectral_map: SpectralMap) -> type[MatrixOptimizer]:
    """The section of the optimizer that a map's record alone defines."""
    name: Any = spectral_map.optimizer
    create: Any = create_model  # its types do not know fields by name
    section: Any = create(
        f"{spectral_map.label}Settings",
        __base__=MatrixOptimizer,
        __module__=__name__,
        __doc__=spectral_map.doc,
        name=Literal[name],
        **_fields_of(spectral_map),
    )
    section.title, section.own_map = spectral_map.label, spectral_map
    return section


class AdamWSettings(OptimizerSection):
    """torch.optim.AdamW updates all parameters."""

    title: ClassVar[str] = "AdamW"

    name: Literal["adamw"]


def _problem(section: Any, name: str) -> str:
    """Return the reason why another package's section is no optimizer of recipes; "" if it is
    one.
    """
    if not (isinstance(section, type) and issubclass(section, MatrixOptimizer)):
        return "it must be a subclass of soren_align.recipe.MatrixOptimizer"
    # The entry point's name and the section's must be one: recipes choose a section by `name`.
    own = section.model_fields["name"].annotation
    if own != Literal[name]:
        return f"its key `name` must have the type Literal[{name!r}]"
    return (
        ""
        if getattr(section, "module", "")
        else "it has no `module`, whose import defines the optimizer"
    )


_OWN: dict[str, type[OptimizerSection]] = {
    "soren": SorenSettings, "muon": MuonSettings, "htmuon": HTMuonSettings, "adamw": AdamWSettings
}  # fmt: skip
# Maps whose record defines an optimizer of its own (`optim.optimizers.optimizer_of`).
_OWN |= {
    record.optimizer: section_of(record) for record in MAPS.values() if record.optimizer not in _OWN
}
# Ours first: another package's section cannot take one of these names (`third_party.objects`).
OPTIMIZER_SECTIONS: dict[str, type[OptimizerSection]] = _OWN | {
    section.model_fields["name"].annotation.__args__[0]: section
    for section in third_party.objects(third_party.OPTIMIZERS, _OWN, _problem)
}
if TYPE_CHECKING:
    Optimizer = SorenSettings | MuonSettings | HTMuonSettings | AdamWSettings
else:
    Optimizer = Annotated[
        reduce(
            operator.or_,
            (Annotated[section, Tag(name)] for name, section in OPTIMIZER_SECTIONS.items()),
        ),
        Discriminator(lambda value: tag_of(value, OPTIMIZER_SECTIONS)),
    ]
