"""Ask a model the questions of a suite, and score its responses."""
