"""What training by a recipe would do and cost, computed without training: no GPU, no weights, no network.

`plan` collects everything, `display` prints it. `inputs` are config and examples, `schedule` the steps and learning
rates. `passes` measures forward and backward on fake tensors, and `compute` turns that into activations and FLOPs.
`step_cost` and `memory` give the cost of an optimizer step per rank, `processes` the plan's section about them,
`update_sizes` the size of the updates, `offline` what the package ships about the models and datasets of its recipes.
"""
