"""How long the maps and the optimizers take, on which machine, and how far off the maps are.

`shapes` says which matrices, `timing` how to compare times, `accuracy` what a map does to known spectra; `candidates`
are our maps, `peers` those of others; `maps` and `step` are the two commands, and `tables` prints what they return.
`shapes` and this file import no torch.
"""
