"""The table, for the terminal and for table.md: one row a model, the starting checkpoint first."""

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

NUM_COLUMNS = 3
"""Scores side by side: with their intervals, three fit into 80 characters; more come in a table below."""


def terminal(results: dict[str, Any]) -> Group:
    """The table with differences and intervals, and beneath it what is needed to repeat it."""
    columns = list(results["rows"][0]["scores"])
    parts: list[Any] = [Text(f"{results['title']}, percent ± standard error", style="bold")]
    for i in range(0, len(columns), NUM_COLUMNS):
        table = Table("model", box=None, pad_edge=False, header_style="bold")
        for column in columns[i : i + NUM_COLUMNS]:
            table.add_column(column, justify="right")
        for row in results["rows"]:
            cells = ["\n".join(_cell(row, column)) for column in columns[i : i + NUM_COLUMNS]]
            table.add_row(row["name"], *cells)
        parts.append(table)
    return Group(*parts, Text("\n".join(notes(results)), style="dim"))


def markdown(results: dict[str, Any]) -> str:
    """The same as a page."""
    columns = list(results["rows"][0]["scores"])
    lines = [f"# {results['title']}", "", "Percent ± standard error.", ""]
    lines += [f"| model | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for row in results["rows"]:
        lines.append(f"| {row['name']} | {' | '.join('<br>'.join(_cell(row, column)) for column in columns)} |")
    return "\n".join([*lines, "", *(f"{note}  " for note in notes(results))]) + "\n"


def notes(results: dict[str, Any]) -> list[str]:
    """How to read the table, and how to make it again."""
    s = results["settings"]
    questions = {column: score["n"] for column, score in results["rows"][0]["scores"].items()}
    first = results["rows"][0]["name"]
    how = [f"second lines: difference to {first} and its paired 95% interval"] if len(results["rows"]) > 1 else []
    return [
        *how,
        f"questions: {_each(questions)}; shots: {_each(s['num_fewshot'])}",
        f"lm-eval {s['versions']['lm-eval']}; task versions: {_each(s['task_versions'])}; seeds: {_each(s['seeds'])}",
        f"batch size {s['batch_size']}, chat template {'on' if s['chat_template'] else 'off'},"
        f" BOS {'on' if s['bos'] else 'off'}, {s['dtype']} on {s['device']}",
    ]


def _cell(row: dict[str, Any], column: str) -> list[str]:
    score = row["scores"][column]
    lines = [f"{score['value']:.1f} ± {score['stderr']:.1f}"]
    if "differences" in row:
        d = row["differences"][column]
        lines.append(f"{d['value']:+.1f} [{d['low']:+.1f}, {d['high']:+.1f}]")
    return lines


def _each(values: dict[str, Any]) -> str:
    """One word where all are equal, else each by name."""
    if len(set(values.values())) == 1:
        return str(next(iter(values.values())))
    return ", ".join(f"{name} {value}" for name, value in values.items())
