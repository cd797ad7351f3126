"""Timings for developers of maps and optimizers; no part of the wheel, and no promises.

`maps` and `steps` measure, `timing` compares times, `shapes` are the matrices, `show` makes the
tables. See README.md for the commands.
"""
