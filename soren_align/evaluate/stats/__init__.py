"""Statistics of scores: paired comparisons, intervals, contamination."""
