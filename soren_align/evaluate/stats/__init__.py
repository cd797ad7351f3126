"""Statistics of scores: paired comparisons, intervals, power."""
