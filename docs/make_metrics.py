"""Write the tables of docs/metrics.md from `soren_align/run/metrics.py`.

    python docs/make_metrics.py

tests/test_docs.py compares the page with what `page` returns.
"""

import re
from pathlib import Path

from soren_align.run.metrics import METRICS

PAGE = Path(__file__).with_name("metrics.md")
TABLE = re.compile(r"<!-- measured at every (log|evaluation) -->\n(\|.*\n)*")


def page(text: str) -> str:
    """`text` with its two tables of measurements written anew."""
    return TABLE.sub(lambda match: _table(match[1]), text)


def _table(moment: str) -> str:
    of_evaluations = moment == "evaluation"
    lines = (
        ["| key | recipe | meaning |", "|---|---|---|"]
        if of_evaluations
        else ["| key | meaning |", "|---|---|"]
    )
    for metric in METRICS.values():
        if (metric.recipe is not None) == of_evaluations:
            keys = ", ".join(f"`{key}`" for key in (metric.key, metric.further_key) if key)
            lines.append(
                f"| {keys} |" + f" `{metric.recipe}` |" * of_evaluations + f" {metric.meaning} |"
            )
    return f"<!-- measured at every {moment} -->\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
