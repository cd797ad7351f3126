"""Write the table of docs/models.md: every architecture, tiny, planned and trained. Two minutes.

    python -m docs.make_models

tests/training/test_architectures.py makes each row anew and compares it with the page.
"""

import re
import tempfile
from pathlib import Path

from tests.support.architectures import ARCHITECTURES, trial

PAGE = Path(__file__).with_name("models.md")
ROWS = re.compile(r"(?<=\|---\|---\|---\|---\|---\|\n)(\|.*\n)*")


def main() -> None:
    """Rewrite the rows of the table, and nothing else of the page."""
    rows = []
    for name in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(trial(name, Path(folder)) + "\n")
        print(rows[-1], end="", flush=True)
    PAGE.write_text(ROWS.sub(lambda _: "".join(rows), PAGE.read_text()))


if __name__ == "__main__":
    main()
