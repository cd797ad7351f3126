"""Write what the commands print into the pages that show it.

    python docs/make_outputs.py

In README.md and docs/*.md a fenced block of the language `console` holds commands, each after `$ `, and their
outputs, 80 columns wide, without a GPU and without the hub. A comment before the block names the parts of the last
command's output that are shown: `<!-- shown: steps, memory -->`. Parts are separated by blank lines and named by their
first words; `...` stands for the others. tests/test_docs.py compares the pages with what `page` returns.
"""

import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(?:<!-- shown: (?P<shown>[^\n]*) -->\n)?```console\n(?P<lines>.*?)```\n", re.DOTALL)


def pages() -> list[Path]:
    """The pages that show what commands print."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [file for file in files if BLOCK.search(file.read_text(encoding="utf-8"))]


def page(text: str) -> str:
    """The text of a page with the output of every command made anew."""
    return BLOCK.sub(_block, text)


def _block(match: re.Match[str]) -> str:
    commands = tuple(line[2:] for line in match["lines"].splitlines() if line.startswith("$ "))
    shown = match["shown"].split(", ") if match["shown"] else []
    *outputs, last = _run(commands)
    outputs = [*outputs, _excerpt(last, shown)]
    parts = [f"$ {command}\n{output}".strip() for command, output in zip(commands, outputs, strict=True)]
    comment = f"<!-- shown: {match['shown']} -->\n" if shown else ""
    return f"{comment}```console\n" + "\n\n".join(parts) + "\n```\n"


@cache
def _run(commands: tuple[str, ...]) -> list[str]:
    """What each command prints, run one after the other in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": f"{folder}/hub",
            "COLUMNS": "80",
            "PYTHONPATH": str(ROOT),
        }
        return [_printed(command, folder, environment) for command in commands]


def _printed(command: str, folder: str, environment: dict[str, str]) -> str:
    name, *arguments = command.split()
    if name != "soren-align":
        raise ValueError(f"{command}: only soren-align is run; write other commands into a block of another language")
    ours = [sys.executable, "-m", "soren_align.cli", *arguments]
    done = subprocess.run(ours, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)
    if done.returncode:
        raise ValueError(f"{command}: {done.stderr}")
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()).strip()


def _excerpt(output: str, shown: list[str]) -> str:
    """The parts of an output that begin with one of `shown`, in their order, `...` for others; all without `shown`."""
    if not shown:
        return output
    parts = re.split(r"\n\n+", output)
    missing = [name for name in shown if not any(part.startswith(name) for part in parts)]
    if missing:
        raise ValueError(f"no part of the output begins with {', '.join(missing)}; it has:\n{output}")
    kept = [part if part.startswith(tuple(shown)) else "..." for part in parts]
    once = [part for i, part in enumerate(kept) if part != "..." or kept[i - 1 : i] != ["..."]]
    return "\n".join(once)


if __name__ == "__main__":
    for file in pages():
        file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
