"""Write what the commands print into the pages that show it.

    python docs/make_outputs.py

In README.md and the pages of docs/ a fenced block of the language `console` holds commands, each
after `$ `, and their outputs, 80 columns wide, without a GPU and without the hub. A comment before
the block names the parts of the last command's output that are shown: `<!-- shown: steps, memory
-->`. Parts are separated by blank lines and named by their first words; `...` stands for the
others. tests/test_docs.py compares the pages with what `page` returns.
"""

import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Run = Callable[[list[str], str, dict[str, str]], tuple[int, str, str]]
BLOCK = re.compile(
    r"(?:<!-- shown: (?P<shown>[^\n]*) -->\n)?```console\n(?P<lines>.*?)```\n", re.DOTALL
)


def pages() -> list[Path]:
    """The pages that show what commands print."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [file for file in files if BLOCK.search(file.read_text(encoding="utf-8"))]


def page(text: str, run: Run | None = None) -> str:
    """The text of a page with the output of every command made anew.

    run: (arguments, folder, environment) -> (exit code, standard output, standard error); None
    starts a process.
    """
    return BLOCK.sub(lambda match: _block(match, run or _start), text)


def _block(match: re.Match[str], run: Run) -> str:
    commands = [line[2:] for line in match["lines"].splitlines() if line.startswith("$ ")]
    shown = match["shown"].split(", ") if match["shown"] else []
    with tempfile.TemporaryDirectory() as folder:
        *outputs, last = [_output(command, folder, run) for command in commands]
    outputs = [*outputs, _excerpt(last, shown)]
    parts = [
        f"$ {command}\n{output}".strip() for command, output in zip(commands, outputs, strict=True)
    ]
    comment = f"<!-- shown: {match['shown']} -->\n" if shown else ""
    return f"{comment}```console\n" + "\n\n".join(parts) + "\n```\n"


def _output(command: str, folder: str, run: Run) -> str:
    """What a command prints in `folder`."""
    name, *arguments = command.split()
    if name != "soren-align":
        raise ValueError(
            f"{command}: only soren-align is run; write other commands into a block of another language"
        )
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": f"{folder}/hub",
        "COLUMNS": "80",
        "PYTHONPATH": str(ROOT),
    }
    code, output, error = run(arguments, folder, environment)
    if code:
        raise ValueError(f"{command}: {error}")
    return "\n".join(line.rstrip() for line in output.splitlines()).strip()


def _start(arguments: list[str], folder: str, environment: dict[str, str]) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "soren_align", *arguments]
    env = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=300)
    return done.returncode, done.stdout, done.stderr


def _excerpt(output: str, shown: list[str]) -> str:
    """The parts of an output that begin with one of `shown`, in their order, `...` for others; all
    without `shown`.
    """
    if not shown:
        return output
    parts = re.split(r"\n\n+", output)
    missing = [name for name in shown if not any(part.startswith(name) for part in parts)]
    if missing:
        raise ValueError(
            f"no part of the output begins with {', '.join(missing)}; it has:\n{output}"
        )
    runs = itertools.groupby(parts, lambda part: part.startswith(tuple(shown)))
    return "\n".join("\n\n".join(run) if is_shown else "..." for is_shown, run in runs)


if __name__ == "__main__":
    for file in pages():
        file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
