"""A run folder and its content: lock, record, weights, and the origin of the weights."""
