"""Did it help? Models answer a suite's questions through lm-eval, beside the checkpoint that they started from.

`suites` reads what is asked and `tasks` loads it. `harness` asks one model: through `answering`, which deals the work
out to `workers`, each with the model by one of the `backends`, and keeps every answer in a `journal`; `scores` counts.
`pairing` compares models question by question, `lineage` finds the checkpoints that a run came from, `stage` evaluates
them all; `tables` and `picture` show the result, beside `quoted` rows of others.
"""
