"""Studies: search, train and compare several optimizers on the same data and seeds."""
