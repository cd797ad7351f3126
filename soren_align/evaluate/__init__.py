"""Evaluation: models answer a suite's questions through lm-eval, and are compared with their starting checkpoint.

`stage` evaluates several models and writes the results. `suites` reads a suite and `tasks` loads it; `lineage` finds
the checkpoints that a run was trained from. `harness` evaluates one model through lm-eval; `requests` takes responses
from the `cache`, or sends the requests to `workers`, each with the model loaded by one of the `backends`. `scores`
computes a column's score, `significance` compares models by tests of `paired`; `points` keeps what `compare` needs.
`tables` and `figure` show the results beside `published` scores.
"""
