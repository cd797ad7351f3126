"""The minimum detectable effect: the true difference that a study answers with "better" with the declared power."""

from math import sqrt

from scipy.special import nctdtrinc

from .estimates import Estimate

FAMILY_ERROR = 0.05
"""The probability of any wrong "better", "worse" or "retained" in a study."""


def detectable(spread: Estimate, comparisons: int, power: float) -> float:
    """Return the true difference that is found with probability `power` at Holm's first threshold.

    spread: with the parts of the variance; its value does not count. comparisons: of the whole study.
    """
    if spread.variance == 0:
        return 0.0
    error = sqrt(spread.variance)
    threshold = spread.margin(FAMILY_ERROR / comparisons) / error
    return error * float(nctdtrinc(spread.degrees, 1 - power, threshold))
