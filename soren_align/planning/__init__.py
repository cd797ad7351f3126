"""Compute what training by a recipe would do and cost, without training, GPU or weights.

`plan` collects everything, with the schedule, the size of the updates and the disk space; `show`
prints it. `inputs` are config and examples, `offline` the numbers that the package ships about the
models and datasets of its recipes. `flops` measures forward and backward on fake tensors. `step`
gives the cost of an optimizer step on one of several processes, `memory` its tensors by kind.
`rates` translates the learning rates of other tools.
"""
