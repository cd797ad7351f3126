"""What a recipe would do and cost, told without doing it: no GPU, no weights, and for the shipped recipes no network.

`plan` gathers, `text` shows. `passes` measures a pass forward and backward on tensors without contents, `processes`
tells what each of several processes holds, `updates` how far a step moves a weight, `known` what stands in the tree
about the models and datasets of the shipped recipes.
"""
