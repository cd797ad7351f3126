"""Settings of the optimizers: every default, choice and bound, in one place. Imports no torch.

Read by the recipe's schema, the signatures of `optim`, the checks of a parameter group, the
registry of the maps (`spectral.maps`), and the documentation; tests/test_optimizer_settings.py
compares them.
"""

import math
from typing import Any, Literal, NamedTuple, get_args

AdjustLrFn = Literal["none", "original", "match_rms_adamw", "match_rms_measured"]
Matrices = Literal["inside-blocks", "all-2d"]
"""The parameters of a model that are matrices to the optimizer, see `optim.route`."""
BlockName = Literal["q", "k", "v", "gate", "up", "heads"]
"""Names of the blocks into which a fused weight is split, see `optim.blocks`."""
BLOCKS: tuple[str, ...] = get_args(BlockName)
Compensation = Literal["none", "kahan"]
WeightDecayTo = Literal["zero", "start"]
"""The weights towards which weight decay moves: zero, or those before the first step."""
MomentumDtype = Literal["float32", "bfloat16"]
"""The dtype of the momentum of matrices; that of float64 matrices is float64."""
MapInput = Literal["momentum", "sign"]
"""The input of a map: the momentum (with Nesterov), or the sign of each of its numbers, as in
AdaMuon."""
SecondMoment = Literal["none", "rows", "elements"]
"""The second moment of a map's output, which is divided by its root: NorMuon's of `rows`, AdaMuon's
of `elements`."""
FactorPrecision = Literal["float32", "float16", "bfloat16"]
Precision = Literal["auto", FactorPrecision]
"""The precision of the factors of a map's matrix products, whose sums are float32."""


LARGEST = 1e30
"""The largest number without a bound of its own: its product with a scale or a decay is still a
float32."""


class Bounds(NamedTuple):
    """An interval of numbers, open at `above` and `below`, closed at `least` and `most`."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, value: Any) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        # The words of messages and of the schema's remedies: one place for both.
        words = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        return " and ".join(
            f"{word} {value:g}" for word, value in words.items() if value not in (None, LARGEST)
        )


NON_NEGATIVE = Bounds(least=0, most=LARGEST)
POSITIVE = Bounds(above=0, most=LARGEST)
COEFFICIENT = Bounds(least=0, below=1)
"""Bounds of the coefficients of moving averages: momentum, betas."""
NUM_STEPS = Bounds(least=1, most=99)
"""Bounds of the number of Newton-Schulz iterations: torch.optim.Muon refuses 100."""
POWER = Bounds(above=0, most=1)
NUM_SUPPRESSIONS = Bounds(least=0, most=99)

# Defaults of recipes. Where the class of torch or of a paper has another one, the class used alone
# keeps that, under a name of its own below.
WEIGHT_DECAY = 0.1
AUX_WEIGHT_DECAY = 0.0
WEIGHT_DECAY_TO: WeightDecayTo = "zero"
ADAMW_WEIGHT_DECAY = 1e-2
"""torch.optim.AdamW's, of the class AdamW used alone; in a recipe it is WEIGHT_DECAY, as for the
other optimizers."""
LR = 1e-3
"""torch.optim's, of the classes Muon and AdamW used alone; a recipe states its own."""
MATRICES: Matrices = "inside-blocks"
MOMENTUM = 0.95
NESTEROV = True
COMPENSATION: Compensation = "none"
MOMENTUM_DTYPE: MomentumDtype = "float32"
ADJUST_LR_FN: AdjustLrFn = "match_rms_measured"
"""The default of recipes and trainers, for every optimizer of matrices: learning rates then compare
with AdamW's."""
SOREN_ADJUST_LR_FN: AdjustLrFn = "none"
"""The default of the class Soren used alone: the paper's text."""
MUON_ADJUST_LR_FN: AdjustLrFn = "original"
"""The default of the classes Muon and HTMuon used alone: their code."""
MAP_INPUT: MapInput = "momentum"
SECOND_MOMENT: SecondMoment = "none"
SECOND_MOMENT_BETA = 0.95
"""NorMuon's, and AdaMuon's, which is its momentum."""
MATCH_RMS = 0.2
"""RMS of AdamW's update over its learning rate, as observed after a few hundred steps
(research/studies/optimizers.md has the first ones): the aim of both `match_rms_` scales, if a
recipe does not state another one."""
BETAS = (0.9, 0.999)
EPS = 1e-8

RESOLUTIONS = (0.0004, 0.001, 0.01)
"""The normalised singular values from which a minimax polynomial of `spectral.coefficients` is
accurate."""
RESOLUTION = 0.0004
SNS_STEPS = 15
RELEASED_STEPS = 5
"""K of the authors' released code."""
MUON_STEPS = 5
HTMUON_POWER = 0.125
PROMOTIONS, SUPPRESSIONS = 3, 2

PRECISION: Precision = "auto"


def adamw_rms(beta1: float) -> float:
    """RMS of AdamW's update over its learning rate if gradients are noise without a mean: sqrt((1 -
    b) / (1 + b)).

    That of an average of independent numbers with the weights (1 - b) b^k, over that of one of
    them. The `adamw` of the key `match_rms`, as in verl's pull request 7120; 0.23 for b = 0.9.
    """
    return math.sqrt((1 - beta1) / (1 + beta1))
