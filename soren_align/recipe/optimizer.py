"""The optimizer section: a union of sections on `name`, and Soren's `map`, a union of its own.

A new optimizer is one class here, with its name and the keys that only it has, and one member of `Optimizer`. Choices,
checks, schema and documentation follow from it. Defaults and bounds come from `optimizer_settings`.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from ..core import optimizer_settings as settings
from ..core.optimizer_settings import AdjustLrFn, Compensation, FactorPrecision, Matrices, Precision, States
from .base import Coefficient, NonNegative, Positive, Section, members, tag_of, within


def _resolution(value: float) -> float:
    if value not in settings.RESOLUTIONS:
        raise PydanticCustomError("choice", "write {choices}", {"choices": " or ".join(map(str, settings.RESOLUTIONS))})
    return value


class MinimaxMap(Section):
    """A polynomial within 0.5% of the sigmoid, from singular values of `resolution` on."""

    title: ClassVar[str] = "minimax, our approximation"

    name: Literal["minimax"] = "minimax"
    resolution: Annotated[
        float, AfterValidator(_resolution), Field(json_schema_extra={"enum": list(settings.RESOLUTIONS)})
    ] = settings.RESOLUTION
    """The normalised singular value from which the polynomial is accurate: 0.0004; 0.001 and 0.01 are less work."""


class SnsMap(Section):
    """Soft Newton-Schulz, the paper's Algorithm 1: less accurate than minimax, and more expensive."""

    title: ClassVar[str] = "sns, the paper's Algorithm 1"

    name: Literal["sns"]
    steps: Annotated[int, within(settings.NUM_STEPS)] = settings.SNS_STEPS
    """Iterations."""


class ReleasedMap(Section):
    """The map of the authors' released code, another one than the paper's: its updates are smaller, and closer to
    momentum SGD's."""

    title: ClassVar[str] = "released, the authors' code"

    name: Literal["released"]
    steps: Annotated[int, within(settings.NUM_STEPS)] = settings.RELEASED_STEPS
    """Iterations; 5 in the code."""


class ExactMap(Section):
    """The sigmoid itself, by a singular value decomposition: the reference, and slow."""

    title: ClassVar[str] = "exact, the paper's definition"

    name: Literal["exact"]


def _map_tag(value: Any) -> str:
    return tag_of(value, MAPS)


def _as_section(value: Any) -> Any:
    """`sns` as `{name: sns}`, null as the default map; anything else unchanged."""
    if value is None:
        return {}
    return {"name": value} if isinstance(value, str) else value


Map = Annotated[
    Annotated[MinimaxMap, Tag("minimax")]
    | Annotated[SnsMap, Tag("sns")]
    | Annotated[ReleasedMap, Tag("released")]
    | Annotated[ExactMap, Tag("exact")],
    Discriminator(_map_tag),
    BeforeValidator(_as_section),
]
MAPS = members(Map)


class OptimizerSection(Section):
    """The keys of every optimizer."""

    title: ClassVar[str]
    """The optimizer's name as papers print it."""
    needs_aux_lr: ClassVar[bool] = True
    """Whether `aux_lr` must be set where parameters other than matrices are trained."""
    main_keys: ClassVar[dict[type, str]] = {str: "name"}
    other_names: ClassVar[dict[str, str]] = {"learning_rate": "lr"}

    name: Any
    """The optimizer of the matrices. Norms, biases and, by default, embeddings and head go to AdamW."""
    matrices: Matrices = settings.MATRICES
    """`inside-blocks`: the weights of linear layers inside the blocks, and of experts. `all-2d`: every parameter of two
    dimensions, so that embeddings, head and routers are matrices too, as in the authors' released code."""
    lr: Positive
    """Peak learning rate of the matrices."""
    aux_lr: Positive | None = None
    """Peak learning rate of the other parameters. Required, except for adamw, where null means `lr`, and where there
    are no other parameters, as with LoRA."""
    weight_decay: NonNegative = settings.WEIGHT_DECAY
    """Decoupled weight decay of the matrices, with the unadjusted learning rate."""
    aux_weight_decay: NonNegative = settings.AUX_WEIGHT_DECAY
    """Decoupled weight decay of the other parameters."""
    compensation: Compensation | None = None
    """For bfloat16 parameters. `kahan` keeps beside each parameter, in 16 bits, the rounding error of its updates: they
    then add up as in float32. `none` trains without. null: not needed, for float32 parameters and masters."""
    states: States | None = None
    """`8bit` stores the momentum, and AdamW's moments, in 8 bits per number, with a scale per 256 numbers. null:
    `float32`."""
    betas: Annotated[list[Coefficient], Field(min_length=2, max_length=2)] = list(settings.BETAS)
    """AdamW's coefficients of its running averages."""
    eps: Positive = settings.EPS
    """AdamW's term in the denominator."""
    aux: list[str] = []
    """Names of further parameters for AdamW; `*` matches anything. A name that matches no parameter is an error."""

    @property
    def map_title(self) -> str | None:
        """Which map it is and whose; None where an optimizer has only one."""
        return None

    @property
    def description(self) -> str:
        """The optimizer in words, for plans and the first lines of a run."""
        return self.name

    @property
    def cost_map(self) -> Literal["minimax", "sns", "released", "muon"] | None:
        """The map of `spectral.cost` with the same matrix products, for plans; None for a decomposition."""
        return None

    @property
    def map_steps(self) -> int | None:
        """Iterations of the map; None where their number is no setting."""
        return None

    @property
    def map_resolution(self) -> float:
        """Of the minimax map."""
        return settings.RESOLUTION

    def map_precision(self, num_rows: int, on_gpu: bool) -> FactorPrecision:
        """The precision of the map's factors for a matrix of so many rows (its shorter side)."""
        return "float32"

    def resolved(self, trains_adapter: bool) -> Self:
        """With the defaults that depend on other keys written out."""
        return self


class MatrixOptimizer(OptimizerSection):
    """The keys of the optimizers that map a matrix of momentum: all but AdamW."""

    default_adjust_lr_fn: ClassVar[AdjustLrFn] = "original"

    momentum: Coefficient = settings.MOMENTUM
    """Coefficient of the matrices' exponential moving average."""
    nesterov: bool = settings.NESTEROV
    """Whether the map sees the Nesterov average of gradient and momentum."""
    adjust_lr_fn: AdjustLrFn | None = None
    """Scale of a matrix update: `none`, `original` = sqrt(max(1, m/n)), `match_rms_adamw` = 0.2 sqrt(max(m, n)), which
    makes learning rates comparable with AdamW's, or `match_rms_measured` = 0.2 over the RMS of the map's output, which
    makes every update that large whatever the momentum's spectrum. null: `match_rms_adamw` with LoRA, otherwise the
    optimizer's own: `none` for soren (the paper's text), `original` for the others (their code)."""

    @property
    def description(self) -> str:
        """Name, map and scale: "soren (released, the authors' code, K = 5; scale original)"."""
        return f"{self.name} ({f'{self.map_title}; ' if self.map_title else ''}scale {self.adjust_lr_fn})"

    def resolved(self, trains_adapter: bool) -> Self:
        """With `adjust_lr_fn` written out."""
        default = "match_rms_adamw" if trains_adapter else self.default_adjust_lr_fn
        return self.model_copy(update={"adjust_lr_fn": self.adjust_lr_fn or default})


class SorenSettings(MatrixOptimizer):
    """The sigmoid of the singular values."""

    title: ClassVar[str] = "Soren"
    default_adjust_lr_fn: ClassVar[AdjustLrFn] = "none"

    name: Literal["soren"]
    map: Map = MinimaxMap()
    """How the sigmoid of the singular values is computed; a map's bare name stands for the map with its defaults."""
    workspace_mb: NonNegative | None = None
    """MB (2^20 bytes) for mapping matrices of one shape in a batch; a matrix that needs more is mapped alone. null: 16
    on a CPU, 2048 elsewhere."""
    precision: Precision = settings.PRECISION
    """Of the factors of the map's matrix products, whose sums are float32. `auto`: float16 for minimax on a GPU from 64
    rows on, within 1% of float32's update on recorded momenta (emulated), and float32 otherwise. sns has auto, float32
    and bfloat16, released auto and float32, exact only auto."""

    @property
    def map_title(self) -> str:
        """The title of `map`, and its K."""
        return self.map.title + (f", K = {self.map_steps}" if self.map_steps else "")

    @property
    def cost_map(self) -> Literal["minimax", "sns", "released"] | None:
        """The name of `map`; None for `exact`."""
        return None if isinstance(self.map, ExactMap) else self.map.name

    @property
    def map_resolution(self) -> float:
        """The `resolution` of `map`."""
        return self.map.resolution if isinstance(self.map, MinimaxMap) else settings.RESOLUTION

    def map_precision(self, num_rows: int, on_gpu: bool) -> FactorPrecision:
        """By `precision`."""
        return settings.factor_precision(self.precision, self.map.name, num_rows, on_gpu)

    @property
    def map_steps(self) -> int | None:
        """The `steps` of `map`."""
        return self.map.steps if isinstance(self.map, SnsMap | ReleasedMap) else None


class MuonSettings(MatrixOptimizer):
    """Orthogonalised momentum, as torch.optim.Muon."""

    title: ClassVar[str] = "Muon"

    name: Literal["muon"]
    ns_steps: Annotated[int, within(settings.NUM_STEPS)] = settings.MUON_STEPS
    """Newton-Schulz iterations."""

    @property
    def cost_map(self) -> Literal["muon"]:
        """Newton-Schulz products."""
        return "muon"

    def map_precision(self, num_rows: int, on_gpu: bool) -> FactorPrecision:
        """As torch.optim.Muon's."""
        return "bfloat16"

    @property
    def map_steps(self) -> int:
        """`ns_steps`."""
        return self.ns_steps


class HTMuonSettings(MatrixOptimizer):
    """A power of the singular values (arXiv 2603.10067)."""

    title: ClassVar[str] = "HTMuon"

    name: Literal["htmuon"]
    p: Annotated[float, within(settings.POWER)] = settings.HTMUON_POWER
    """The power of the singular values."""


class AdamWSettings(OptimizerSection):
    """torch.optim.AdamW for all parameters."""

    title: ClassVar[str] = "AdamW"
    needs_aux_lr: ClassVar[bool] = False

    name: Literal["adamw"]

    def resolved(self, trains_adapter: bool) -> Self:
        """With `aux_lr` written out."""
        return self.model_copy(update={"aux_lr": self.aux_lr or self.lr})


def _optimizer_tag(value: Any) -> str:
    return tag_of(value, OPTIMIZERS)


Optimizer = Annotated[
    Annotated[SorenSettings, Tag("soren")]
    | Annotated[MuonSettings, Tag("muon")]
    | Annotated[HTMuonSettings, Tag("htmuon")]
    | Annotated[AdamWSettings, Tag("adamw")],
    Discriminator(_optimizer_tag),
]
OPTIMIZERS: dict[str, type[OptimizerSection]] = members(Optimizer)


def as_adamw(optimizer: OptimizerSection) -> AdamWSettings:
    """The settings with AdamW in the place of the optimizer; keys that AdamW does not have are left out."""
    shared = optimizer.model_dump(include=set(AdamWSettings.model_fields) - {"name"})
    return AdamWSettings(name="adamw", **shared)
