"""Benchmarks: time, FLOPs and errors of the maps, time and memory of an optimizer step.

`maps` and `steps` are the commands `bench maps` and `bench step`, `show` makes tables of their
results; `shapes` are the matrices, `timing` compares times. `spectra` is the command `spectrum`:
errors of the maps on the momenta of a run, as tables and pictures. `shapes` and this file import no
torch.
"""
