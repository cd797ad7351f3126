"""Evaluation: models answer a suite's questions through lm-eval, and are compared with their
starting checkpoint.

`run/stage` evaluates several models and writes the results. `suite/suites` reads a suite and
published scores, `suite/tasks` loads its tasks within the `sandbox`; `run/preflight` checks all
rows before a model is loaded, and `run/lineage` finds the checkpoints that a run was trained from.
`run/harness` evaluates one model through lm-eval; `requests` takes responses from its cache, or
sends the requests to `workers`, each with the model loaded by one of the `backends`. `stats/scores`
computes a column's score, `significance` compares models by the tests of `paired`, which also keeps
the points that a study needs. `report/results` is the form of results.json, `report/tables` shows
it. `answers/` compares results of other tools.
"""
