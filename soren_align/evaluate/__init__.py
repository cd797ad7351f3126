"""Did it help? Models answer a suite's questions through lm-eval, beside the checkpoint that they started from.

`suites` reads what is asked, `tasks` loads it, `harness` asks one model, `pairing` compares models question by
question, `lineage` finds the checkpoints that a run came from, `quoted` reads what others published, `stage` evaluates
them all, and `tables` and `picture` show the result.
"""

from .harness import Answers, evaluate_model
from .lineage import lineage, lineages
from .quoted import load_quoted
from .stage import evaluate, summary
from .suites import Suite, load_suite
from .tasks import preflight

__all__ = [
    "Answers",
    "Suite",
    "evaluate",
    "evaluate_model",
    "lineage",
    "lineages",
    "load_quoted",
    "load_suite",
    "preflight",
    "summary",
]
