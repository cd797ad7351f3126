"""Benchmarks: time, FLOPs and errors of the maps, time and memory of an optimizer step.

`shapes` are the matrices, `timing` compares times, `accuracy` measures errors on known spectra; `candidates` are this
package's maps, `peers` those of other packages; `map_times` and `step_times` are the commands `bench maps` and
`bench step`, and `report` makes tables of their results. `run_spectra` is the command `spectrum`: errors of the maps on
the momenta of a run, with `spectra_tables` and `spectra_figure`.
`shapes` and this file import no torch.
"""
