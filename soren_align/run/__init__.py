"""A run folder and what stands in it: its lock, its record, its weights, and where they come from."""
