"""The registry of the maps of singular values: a record for each, and the records by name in MAPS.

Soren, the recipe's `map` with its schema and documentation, `plan`, `spectrum`, benchmarks and the
tests read a map's record and nothing else, so that a new map is one record here, with its function
in a file of its own, and its tests. The recipe is validated before torch is imported, hence torch
and a map's file are imported when a map is called.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..core import optimizer_settings as default
from ..core import third_party
from ..core.errors import UserError
from ..core.optimizer_settings import (
    NUM_STEPS,
    NUM_SUPPRESSIONS,
    POWER,
    RESOLUTIONS,
    Bounds,
    FactorPrecision,
    Precision,
)
from . import coefficients, composition
from .coefficients import Step
from .composition import Composed, Of

if TYPE_CHECKING:
    from torch import Tensor

Output = tuple["Tensor", "Tensor | int"]
"""U f(S) V^T, and the number of guarded matrices: those with a singular value that f was evaluated
elsewhere for."""
NARROW_FROM = 64
"""Rows (the shorter side) from which "auto" is float16: in fewer, as in factors of LoRA, tensor
cores save nothing."""


@dataclass(frozen=True)
class Setting:
    """A setting of a map: its default, the numbers that it may be, and its documentation."""

    default: Any
    """A number; or a text, true or false, or a record (None: computed), which have no bounds."""
    bounds: Bounds | None = None
    choices: tuple[Any, ...] = ()
    """The allowed values, in place of bounds."""
    is_variant: bool = True
    """Whether `variants` has each of the choices."""
    doc: str = ""
    """The documentation in the recipe; empty for keys of the optimizer section, which has it."""


def sigmoid(sigma: "Tensor", **settings: Any) -> "Tensor":
    """Soren's target."""
    return sigma.sigmoid()


def polar(sigma: "Tensor", **settings: Any) -> "Tensor":
    """Muon's target: all singular values are 1."""
    return sigma.new_ones(sigma.shape)


def power(sigma: "Tensor", p: float) -> "Tensor":
    """HTMuon's target."""
    return sigma.pow(p)


def itself(sigma: "Tensor", **settings: Any) -> "Tensor":
    """The target of momentum SGD."""
    return sigma


def pions(sigma: "Tensor", **settings: Any) -> "Tensor":
    """Pion's target, which is its polynomials themselves."""
    return _file("iterate").high_pass(sigma.diag(), **settings).diagonal()


@dataclass(frozen=True, kw_only=True)
class SpectralMap:
    """A map of singular values, U f(S) V^T of x = U S V^T."""

    name: str
    optimizer: str = "soren"
    """Muon and HTMuon have one map each, Soren chooses one by its setting `map`."""
    title: str = ""
    """The name in plans and cards, which may contain settings, as "{steps}". Empty where an
    optimizer has one map only."""
    label: str
    """The name in the tables of `benchmarks`, with settings too."""
    doc: str = ""
    """The documentation of the section of Soren's `map`."""
    source: str
    function: Callable[..., Output]
    """function(x, *, precision, max_norm, and the settings): x of [..., m, n] is not modified;
    max_norm is an upper bound of |x|_F of every matrix, or None where it is not known."""
    is_finite: bool = False
    """Whether the output is finite for every finite matrix: `testing.check_map` tries it."""
    is_drawn: bool = False
    """Whether `function` draws random numbers: it then takes `seeds`, one for each matrix, which
    follow from the matrix's name and the step, so that any number of ranks draws the same."""
    target: Callable[..., "Tensor"]
    """target(sigma, and the settings): f, which `function` is or approximates; the benchmarks show
    its name."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    precisions: tuple[Precision, ...] = ("auto",)
    """Precisions of its products' factors; the optimizer's setting `precision` is one of them."""
    auto_precision: Callable[[int, bool], FactorPrecision] = lambda num_rows, on_gpu: "float32"
    """auto_precision(rows of a matrix (its shorter side), whether it is on a GPU): what "auto"
    means."""
    flops: Callable[..., int | None] | None = None
    """flops(m, n, precision, and the settings) of its matrix products, for m <= n; None, or a None
    that it returns: a decomposition."""
    workspace: Callable[[int, int, FactorPrecision], int] = lambda m, n, precision: (
        2 * m * m + 7 * m * n
    )
    """workspace(m, n, precision): numbers that it allocates at once, its result included, for m <=
    n and a matrix of norm 1 at most, as clipped gradients are. Measured:
    tests/spectral/test_cost.py. By default that of a decomposition, without the workspace of its
    library."""
    complete: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """complete(settings): with those that follow from others. Raises UserError for settings that
    contradict others."""
    level: Callable[..., float] | None = None
    """level(m, n, and the settings): the largest mean that an output's singular values can have,
    where that is not the optimizer's `map_level`."""

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings with their defaults, complete."""
        return self.complete(self.plain_defaults)

    @property
    def plain_defaults(self) -> dict[str, Any]:
        """The settings with their defaults, without those that follow from others."""
        return {key: setting.default for key, setting in self.settings.items()}

    def variants(self) -> Iterator[dict[str, Any]]:
        """The settings to measure: the defaults, with each choice of a setting that has choices."""
        varied = {key: setting for key, setting in self.settings.items() if setting.is_variant}
        choices = [(key, choice) for key, setting in varied.items() for choice in setting.choices]
        yield from ({**self.defaults, key: choice} for key, choice in choices)
        if not choices:
            yield self.defaults

    def factor_precision(
        self, precision: Precision, num_rows: int, on_gpu: bool
    ) -> FactorPrecision:
        """The precision for a matrix of so many rows (its shorter side), float32 or narrower."""
        return self.auto_precision(num_rows, on_gpu) if precision == "auto" else precision

    def num_flops(
        self,
        num_rows: int,
        num_columns: int,
        precision: FactorPrecision = "float32",
        **settings: Any,
    ) -> int | None:
        """Floating-point operations of the matrix products for one matrix; None for a
        decomposition, not counted.

        settings: those that are not the defaults.
        """
        m, n = sorted((num_rows, num_columns))
        return (
            self.flops(m, n, precision, **self.complete({**self.plain_defaults, **settings}))
            if self.flops
            else None
        )

    def num_workspace_numbers(
        self, num_rows: int, num_columns: int, precision: FactorPrecision = "float32"
    ) -> int:
        """The numbers that the map of one matrix allocates at once, its result included, see
        `workspace`.
        """
        m, n = sorted((num_rows, num_columns))
        return self.workspace(m, n, precision)


def steps_flops(num_rows: int, num_columns: int, steps: Sequence[Step]) -> int:
    """Operations of steps of `iterate`, num_rows <= num_columns: x x^T, its square, and their sum
    times x. A square is counted whole, also where a library computes one triangle of it.
    """
    num_quintic = sum(step[2] != 0 for step in steps)
    return len(steps) * 4 * num_rows**2 * num_columns + num_quintic * 2 * num_rows**3


def steps_workspace(
    num_rows: int, num_columns: int, precision: FactorPrecision, *, has_total: bool = False
) -> int:
    """The numbers (of 4 bytes) that steps of `iterate` allocate at once, num_rows <= num_columns.

    Three iterates and a Gram matrix; in 16 bits the first step, which is in 32, takes the most.
    has_total: a sum of iterates beside them.
    """
    m, n = num_rows, num_columns
    numbers = 3 * m * n + m * m if precision == "float32" else 2 * m * n + 2 * m * m
    return numbers + has_total * m * n


def seed_of(name: str, step: int) -> int:
    """The seed of a matrix's draw at a step: the same on every rank, machine and version of
    Python.
    """
    return int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:7], "big")


def _file(name: str) -> Any:
    """A file of this folder, imported when a map is called, with torch."""
    return import_module(f".{name}", __package__)


MINIMAX = SpectralMap(
    name="minimax",
    title="minimax, our approximation",
    label="minimax {resolution:g}",
    doc=(
        "Seven quintic steps that differ from the sigmoid by at most 0.75%, for all singular values"
        " of at least `resolution` times the norm of the matrix."
    ),
    source="research/studies/minimax_polynomials.py",
    function=lambda x, **settings: _file("iterate").guarded_minimax_sigmoid(x, **settings),
    is_finite=True,
    target=sigmoid,
    settings={
        "resolution": Setting(
            default.RESOLUTION,
            choices=RESOLUTIONS,
            doc=(
                "The smallest singular value, divided by the norm of the matrix, for which the"
                " polynomial is accurate. 0.001 and 0.01 take six and four steps."
            ),
        )
    },
    precisions=("auto", "float32", "float16", "bfloat16"),
    # A CPU emulates float16.
    auto_precision=lambda num_rows, on_gpu: (
        "float16" if on_gpu and num_rows >= NARROW_FROM else "float32"
    ),
    flops=lambda m, n, precision, resolution: steps_flops(
        m, n, coefficients.SIGN[resolution].steps
    ),
    workspace=lambda m, n, precision: steps_workspace(m, n, precision),
)


SNS = SpectralMap(
    name="sns",
    title="sns, the paper's Algorithm 1, K = {steps}",
    label="SNS K={steps}",
    doc=(
        "Soft Newton-Schulz, the paper's Algorithm 1, which is less accurate than minimax and takes"
        " longer."
    ),
    source="the paper's Algorithm 1",
    function=lambda x, *, steps, precision, max_norm: _file("sns").guarded_soft_newton_schulz(
        x, steps, max_norm=max_norm, in_bfloat16=precision == "bfloat16"
    ),
    is_finite=True,
    target=sigmoid,
    settings={"steps": Setting(default.SNS_STEPS, NUM_STEPS, doc="The number of iterations.")},
    precisions=("auto", "float32", "bfloat16"),
    # x x^T and its product with x, of K steps and of 2 for the tanh
    flops=lambda m, n, precision, steps: steps_flops(
        m, n, [coefficients.NEWTON_SCHULZ] * (steps + 2)
    ),
    workspace=lambda m, n, precision: m * m + 5 * m * n,
)

RELEASED = replace(  # the same steps from other starts
    SNS,
    name="released",
    title="released, the authors' code, K = {steps}",
    label="released K={steps}",
    doc=(
        "The map of the authors' released code, which differs from the paper's map: the updates are"
        " smaller, and closer to those of momentum SGD."
    ),
    source="muon.py of github.com/PhiVanDat123/sigmoid_muon, commit c72cda5",
    function=lambda x, *, steps, precision, max_norm: (_file("sns").released_sigmoid(x, steps), 0),
    # its authors' aim; it is another function, and the benchmarks show its distance
    target=sigmoid,
    settings={
        "steps": Setting(
            default.RELEASED_STEPS,
            NUM_STEPS,
            doc="The number of iterations. The released code has 5 iterations.",
        )
    },
    precisions=("auto", "float32"),
    level=lambda m, n, steps: _file("sns").released_level(m, n, steps),
)

EXACT = SpectralMap(
    name="exact",
    title="exact, the paper's definition",
    label="exact",
    doc=(
        "The sigmoid itself, by a singular value decomposition. This map is slow; `minimax` and"
        " `sns` approximate it."
    ),
    source="the paper's definition of Soren",
    function=lambda x, *, precision, max_norm: (_file("exact").exact_sigmoid(x), 0),
    is_finite=True,
    target=sigmoid,
)


def _level_of_a_momentum(m: int, n: int) -> float:
    return 1 / math.sqrt(min(m, n))  # of a norm of 1 at most, as clipped gradients have


IDENTITY = SpectralMap(
    name="identity",
    title="identity, momentum SGD",
    label="identity",
    doc="The output is the momentum itself, so the optimizer is SGD with Nesterov momentum.",
    source="the paper's section 4.1, which compares Soren with it",
    function=lambda x, *, precision, max_norm: (_file("exact").identity(x), 0),
    is_finite=True,
    target=itself,
    flops=lambda m, n, precision: 0,
    workspace=lambda m, n, precision: 7 * m * n // 4,  # with what the check for NaN needs
    level=_level_of_a_momentum,
)

HIGH_PASS = SpectralMap(
    name="high_pass",
    title="high_pass, Pion's map",
    label="high_pass {promotions}+{suppressions}",
    doc="Pion's map: the leading singular values become 1, the others fall towards 0.",
    source="Pion, arXiv 2605.19282",
    function=lambda x, *, precision, max_norm, **settings: (
        _file("iterate").high_pass(x, **settings),
        0,
    ),
    is_finite=True,
    target=pions,
    settings={
        "promotions": Setting(
            default.PROMOTIONS,
            NUM_STEPS,
            doc="The number of steps that raise the leading singular values.",
        ),
        "suppressions": Setting(
            default.SUPPRESSIONS,
            NUM_SUPPRESSIONS,
            doc="The number of steps that lower the other singular values.",
        ),
    },
    flops=lambda m, n, precision, promotions, suppressions: steps_flops(
        m, n, [coefficients.PROMOTION] * promotions + [coefficients.SUPPRESSION] * suppressions
    ),
    workspace=lambda m, n, precision: 2 * m * n + m * m,
)

MUON = SpectralMap(
    name="muon",
    optimizer="muon",
    label="Muon bfloat16",
    source="kellerjordan.github.io/posts/muon",
    function=lambda x, *, ns_steps, precision, max_norm: (
        _file("iterate").newton_schulz(x, ns_steps),
        0,
    ),
    is_finite=True,
    target=polar,
    settings={"ns_steps": Setting(default.MUON_STEPS, NUM_STEPS)},
    auto_precision=lambda num_rows, on_gpu: "bfloat16",  # as torch.optim.Muon's
    flops=lambda m, n, precision, ns_steps: steps_flops(m, n, [coefficients.MUON] * ns_steps),
    # in bfloat16: elements of half the size
    workspace=lambda m, n, precision: (3 * m * n + m * m) // 2,
)

HTMUON = SpectralMap(
    name="htmuon",
    optimizer="htmuon",
    label="HTMuon",
    source="arXiv 2603.10067",
    function=lambda x, *, p, precision, max_norm: (_file("powers").power(x, p), 0),
    is_finite=True,
    target=power,
    settings={"p": Setting(default.HTMUON_POWER, POWER)},
    flops=lambda m, n, precision, p: _file("powers").power_flops(m, n, p),
)

POWERS = replace(
    HTMUON,
    name="power",
    optimizer="soren",
    title="power, p = {p:g}",
    label="power {p:g}",
    doc=(
        "sigma^p, as HTMuon's. In matrices of at least 1024 rows (the shorter side), p = 1/2, 1/4"
        " and 1/8 need no decomposition; others are slow."
    ),
    source="Muon^p, arXiv 2606.13867",
    settings={
        "p": Setting(
            default.HTMUON_POWER, POWER, doc="The exponent: 1 is momentum SGD; near 0 it is Muon."
        )
    },
    level=lambda m, n, p: _level_of_a_momentum(m, n) ** p,
)


PARAMETER = Bounds(least=1e-6, most=1e6)
"""The bounds of tau and of strength."""


def _products_of(composed: Callable[[Mapping[str, Any]], Composed | None]) -> dict[str, Any]:
    """The fields of a record that follow from its composition; None: a decomposition."""

    def flops(m: int, n: int, precision: FactorPrecision, **settings: Any) -> int | None:
        record = composed(settings)
        return steps_flops(m, n, record.composition.steps) if record else None

    def level(m: int, n: int, **settings: Any) -> float:
        record = composed(settings)
        return record.largest if record else 1.0

    return {
        "is_finite": True,
        "precisions": MINIMAX.precisions,
        "auto_precision": MINIMAX.auto_precision,
        "flops": flops,
        "level": level,
        "workspace": lambda m, n, precision: steps_workspace(m, n, precision, has_total=True),
    }


def _composed(
    name: str,
    parameter: str,
    setting: Setting,
    formula: Callable[["Tensor", float], "Tensor"],
    of: Of = "nu",
    **record: Any,
) -> SpectralMap:
    """The record of a map whose compositions are shipped, for some numbers of its parameter.

    formula(x, number): f, which the compositions match, of singular values divided by `of`.
    """

    def of_x(settings: Mapping[str, Any], x: "Tensor") -> "Tensor":
        return formula(x, settings[parameter])

    def composed(settings: Mapping[str, Any]) -> Composed | None:
        number = float(settings[parameter])
        return None if settings["exact"] else composition.shipped(name, parameter, number)

    def function(
        x: "Tensor", *, precision: FactorPrecision, max_norm: float | None, **settings: Any
    ) -> Output:
        # Two to seven steps, where Muon's iteration has five.
        if record := composed(settings):
            return _file("iterate").guarded_composition(x, record, precision, max_norm)
        return _file("exact").exact_function(x, partial(of_x, settings), of), 0

    def target(sigma: "Tensor", **settings: Any) -> "Tensor":
        return of_x(settings, sigma / _file("exact").unit_of(sigma, of))

    def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
        composed(settings)  # raises UserError before the training
        return dict(settings)

    target.__name__ = name
    exact = "`true`: compute the exact function by a singular value decomposition, which is slow."
    return SpectralMap(
        name=name,
        function=function,
        target=target,
        complete=complete,
        settings={parameter: setting, "exact": Setting(False, doc=exact)},
        **_products_of(composed),
        **record,
    )


def _tau(doc: str) -> Setting:
    return Setting(0.1, PARAMETER, doc=doc)


SOFT_SIGN = _composed(
    "soft_sign",
    "tau",
    _tau("The x that becomes 1 / sqrt(2): 0.03, 0.1 or 0.3; with `exact`, any positive number."),
    lambda x, tau: x / (x.square() + tau**2).sqrt(),
    title="soft_sign, tau = {tau:g}",
    label="soft_sign {tau:g}",
    doc=(
        "x / sqrt(x^2 + tau^2): nearly 1 for large x, and proportional to x for small x. x is a"
        " singular value divided by (sum of sigma^8)^(1/8), a little more than the largest one."
    ),
    source="SoftMuon, arXiv 2605.31371",
)
TANH = _composed(
    "tanh",
    "tau",
    _tau("The x that becomes 0.76: 0.03, 0.1 or 0.3; with `exact`, any positive number."),
    lambda x, tau: (x / tau).tanh(),
    title="tanh, tau = {tau:g}",
    label="tanh {tau:g}",
    doc=(
        "tanh(x / tau): nearly 1 for large x, and proportional to x for small x. x: as for"
        " `soft_sign`."
    ),
    source="a soft clip as SPECTRA's, arXiv 2603.14315",
)
CLIP = _composed(
    "clip",
    "tau",
    _tau(
        "The threshold: each x of at least `tau` becomes 1: 0.03, 0.1 or 0.3; with `exact`, any"
        " positive number."
    ),
    lambda x, tau: (x / tau).clamp(max=1.0),
    title="clip, tau = {tau:g}",
    label="clip {tau:g}",
    doc=(
        "min(x / tau, 1): 1 for x of at least tau, and proportional to x below. Polynomials cannot"
        " match the corner at tau exactly: their error is 3%. x: as for `soft_sign`."
    ),
    source="MuCon, arXiv 2605.26459",
)
SOREN_LAMBDA = _composed(
    "soren_lambda",
    "strength",
    Setting(
        0.2, PARAMETER, doc="The number lambda: 0.2, 0.5 or 1; with `exact`, any positive number."
    ),
    lambda x, strength: (x + (x.square() + strength).sqrt()) / (1 + math.sqrt(1 + strength)),
    of="norm",
    title="soren_lambda, lambda = {strength:g}",
    label="soren_lambda {strength:g}",
    doc=(
        "(x + sqrt(x^2 + lambda)) / (1 + sqrt(1 + lambda)): a map by the authors of Soren, whose"
        " updates are between those of Muon and of momentum SGD. x is a singular value divided by"
        " the Frobenius norm."
    ),
    source="soren_lamda.py of github.com/ngovuminh2005/SPFT",
)


def _with_content(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `file` with the content of the file, which a run, a recipe.yaml and a
    checkpoint then contain: a resumed run has the very same, or is refused.
    """
    content = settings["composition"]
    # Another file than the content's: of a run's recipe.yaml and --set optimizer.map.file=...
    if content is None or content.get("file") != settings["file"]:
        content = {**composition.read(settings["file"]), "file": settings["file"]}
    # Read again: the recipe.yaml of a run may have been edited.
    try:
        composition.from_dict(content)
    except (KeyError, TypeError, ValueError):
        raise UserError("composition: is damaged; remove this key, and the file is read") from None
    return {**settings, "composition": content}


def _content(settings: Mapping[str, Any]) -> Composed:
    return composition.from_dict(settings["composition"])


FILE = SpectralMap(
    name="file",
    title="{file}",
    label="file",
    doc=(
        "Any function of the singular values, as polynomials in a file that `python -m"
        " research.maps` writes. With `file`, you may leave out the key `name`."
    ),
    source="yours",
    function=lambda x, *, precision, max_norm, **settings: _file("iterate").guarded_composition(
        x, _content(settings), precision, max_norm
    ),
    target=lambda sigma, **settings: _file("exact").composed_values(sigma, _content(settings)),
    complete=_with_content,
    settings={
        "file": Setting(
            "shipped:configs/compositions/tanh-0.1.json",
            doc=(
                "The file of the polynomials, beside the recipe or in the working directory. It"
                " states the function, and a proved bound of the error."
            ),
        ),
        "composition": Setting(
            None,
            doc=(
                "The content of the file. Do not write this key yourself: a run adds it to its"
                " recipe.yaml."
            ),
        ),
    },
    **_products_of(_content),
)

_MAPS = (MINIMAX, SNS, RELEASED, EXACT, IDENTITY, HIGH_PASS, POWERS)
_MAPS += (SOFT_SIGN, TANH, CLIP, SOREN_LAMBDA, FILE, MUON, HTMUON)


def _problem(spectral_map: Any, name: str) -> str:
    """What keeps another package's map from being one of Soren's; "" if nothing does."""
    if not isinstance(spectral_map, SpectralMap):
        return f"it is a {type(spectral_map).__name__}; it must be a SpectralMap"
    if spectral_map.name != name:
        return f"the map's own name is {spectral_map.name!r}"
    return (
        ""
        if spectral_map.optimizer == "soren"
        else f"its optimizer is {spectral_map.optimizer!r}, not 'soren'"
    )


# Maps of other packages, such as the null maps of research/, are choices like ours from here on.
_MAPS += tuple(
    third_party.objects(third_party.MAPS, [spectral_map.name for spectral_map in _MAPS], _problem)
)
MAPS = {spectral_map.name: spectral_map for spectral_map in _MAPS}
SOREN_MAPS = {
    name: spectral_map for name, spectral_map in MAPS.items() if spectral_map.optimizer == "soren"
}
"""The choices of Soren's `map`, the default first."""
