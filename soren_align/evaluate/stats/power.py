"""The variance of a mean difference, and the true difference that so many questions can detect."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy.special import chdtri, nctdtrinc, stdtrit

from .paired import Paired

Real = float | np.ndarray
"""One study's, or those of many simulated studies."""
FAMILY_ERROR = 0.05
"""The probability of any wrong answer in a study, or in a table."""
POWER = 0.8
"""The probability with which a minimum detectable effect is detected."""


@dataclass(frozen=True)
class Part:
    """A part of a variance, as estimated with so many degrees of freedom."""

    variance: Real
    degrees: Real

    def at(self, alpha: float) -> Real:
        """Return the square of the margin of a two-sided interval if there was only this part."""
        return stdtrit(self.degrees, alpha / 2) ** 2 * self.variance


NOTHING = Part(0.0, 1.0)


def detectable(error: float, degrees: float, margin: float, power: float = POWER) -> float:
    """Return the true difference whose interval, of this margin, excludes 0 with this power.

    error: the standard error of the difference, estimated with so many degrees of freedom.
    """
    # scipy's search for the noncentrality does not end where few degrees of freedom, as of one
    # cluster with nearly all questions, make a margin of 10^6 errors. There the estimated error
    # decides alone: error * sqrt(chi^2 / degrees) is small enough with this power.
    if degrees < 1 or margin > 1e3 * error:
        return margin * max(1.0, sqrt(float(chdtri(degrees, 1 - power)) / degrees))
    return error * float(nctdtrinc(degrees, 1 - power, margin / error))


def detectable_by(part: Part, num_tests: int = 1) -> float | None:
    """Return the minimum detectable effect of a mean difference with this variance, at Holm's first
    threshold.

    None: all differences are equal, which shows no spread.
    """
    if not part.variance:
        return None
    # Holm's first threshold is the strictest: an effect that passes it is detected whatever the
    # other tests of the family give.
    margin = sqrt(part.at(FAMILY_ERROR / num_tests))
    return detectable(sqrt(part.variance), float(part.degrees), margin)


def part_of(column: Paired, smooth: bool = False) -> Part:
    """Return the variance of a mean over questions.
    smooth: as if each model had won one more (Bonett, Price 2012).
    """
    # Clusters that all changed alike have a spread of 0, which would make any difference certain.
    column = column.without_equal_clusters()
    each = column.each
    if clustered := column.clustered_error():
        return Part(clustered[0] ** 2, clustered[1])
    n = len(each) + 2 * smooth
    if n == 1:
        return NOTHING
    # One more win for each model: the variance stays positive if all questions changed alike.
    if smooth:
        return Part((float((each**2).sum()) + 2 - float(each.sum()) ** 2 / n) / n**2, n - 1)
    return Part(float(each.var(ddof=1)) / n, n - 1)


def mean_part(parts: Sequence[Part], count: int) -> Part:
    """Return the part of a mean over independent columns, with Satterthwaite's degrees of
    freedom.
    """
    variance = sum(part.variance for part in parts) / count**2
    if variance == 0:
        return parts[0]
    # Satterthwaite's: columns have different numbers of questions or clusters, so that their
    # variances are known with different precision.
    degrees = variance**2 / sum((part.variance / count**2) ** 2 / part.degrees for part in parts)
    return Part(variance, degrees)
