"""One trajectory on any number of ranks: where the matrices live, and what ranks tell each other."""
