"""The table, for the terminal and for table.md: one row a model, the starting checkpoint first, quoted rows last."""

import re
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

NUM_COLUMNS = 3
"""Scores side by side: with their intervals, three fit into 80 characters; more come in a table below."""
SETTINGS = {
    "versions": "{}",
    "task_versions": "task versions: {}",
    "num_fewshot": "shots: {}",
    "metrics": "metrics: {}",
    "seeds": "seeds: {}",
    "data": "data: {}",
    "generation": "generation config: {}",
    "chat_template": "chat template {}",
    "bos": "BOS {}",
    "max_length": "prompts up to {} tokens",
    "dtype": "dtype {}",
    "device": "device {}",
    "backend": "backend {}",
    "batch_size": "batch size {}",
    "num_processes": "processes {}",
}
"""How a setting is said, in the order that helps to repeat it: what is asked, then what answers."""


def terminal(results: dict[str, Any]) -> Group:
    """The table with differences, intervals and p-values, and beneath it what is needed to repeat it."""
    columns = list(results["rows"][0]["scores"])
    parts: list[Any] = [Text(f"{results['title']}, percent ± standard error", style="bold")]
    for i in range(0, len(columns), NUM_COLUMNS):
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("model", overflow="fold")
        for column in columns[i : i + NUM_COLUMNS]:
            table.add_column(column, justify="right", no_wrap=True)
        for row, name, style in _rows(results):
            cells = [Text("\n".join(_cell(row, column))) for column in columns[i : i + NUM_COLUMNS]]
            table.add_row(Text(name), *cells, style=style)
        parts += [table, Text()]
    beneath = Table.grid(padding=(0, 1))
    for note in notes(results):
        beneath.add_row("-", Text(note, overflow="fold"), style="dim")
    return Group(*parts, beneath)


def markdown(results: dict[str, Any]) -> str:
    """The same as a page, all columns in one table."""
    columns = list(results["rows"][0]["scores"])
    lines = [f"# {plain(results['title'])}", "", "Percent ± standard error.", ""]
    lines += [f"| model | {' | '.join(map(in_cell, columns))} |", f"|---|{'---:|' * len(columns)}"]
    for row, name, _ in _rows(results):
        lines.append(f"| {in_cell(name)} | {' | '.join('<br>'.join(_cell(row, column)) for column in columns)} |")
    return "\n".join([*lines, "", *(f"- {plain(note)}" for note in notes(results))]) + "\n"


def plain(text: str) -> str:
    """Text of a stranger's file for one line of Markdown: no HTML, no line of its own, no control characters."""
    text = "".join(c if c.isprintable() else " " for c in text)
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def in_cell(text: str) -> str:
    """The same for a cell of a table."""
    return plain(text).replace("|", "\\|")


def notes(results: dict[str, Any]) -> list[str]:
    """How to read the table, what does not fit into it, and how to make it again."""
    return [*_legend(results), *_beside(results), *results.get("notes", []), *_settings(results)]


def _rows(results: dict[str, Any]) -> list[tuple[dict[str, Any], str, str]]:
    """Each row with the name and the style that it stands under."""
    own = [(row, row["name"], "") for row in results["rows"]]
    return own + [(row, f"{row['name']} (quoted)", "dim") for row in results.get("quoted", [])]


def _cell(row: dict[str, Any], column: str) -> list[str]:
    """The score, and beneath it the difference and its p-value."""
    score = row["scores"].get(column)
    if score is None:
        return ["-"]  # a quoted row that does not have it
    lines = [_score(score)]
    if "differences" in row:
        d = row["differences"][column]
        p = "p < 0.001" if d["p_holm"] < 0.001 else f"p {d['p_holm']:.3f}"
        star = "* " if d["p_holm"] < 0.05 else ""
        lines += [f"{d['value']:+.1f} [{d['low']:+.1f}, {d['high']:+.1f}]", star + p]
    return lines


def _score(score: dict[str, Any]) -> str:
    return f"{score['value']:.1f} ± {score['stderr']:.1f}" if "stderr" in score else f"{score['value']:.1f}"


def _legend(results: dict[str, Any]) -> list[str]:
    first, *later = results["rows"]
    lines = []
    if later:
        num = sum(len(row.get("differences", ())) for row in later)
        lines += [
            f"second lines: difference to {first['name']} on the same questions, and its own 95% interval",
            "third lines: the probability p that equally good models differ by as much, by McNemar's exact test where"
            " answers are right or wrong, else by a paired bootstrap; with Holm's correction for the"
            f" {num} comparisons in this table, * where it is below 0.05",
        ]
    sources = dict.fromkeys(row["source"] for row in results.get("quoted", []))
    return [*lines, *(f"quoted, neither asked here nor compared: {source}" for source in sources)]


def _beside(results: dict[str, Any]) -> list[str]:
    """Scores by other readings, and prompts that were cut."""
    rows, lines = results["rows"], []
    for column in rows[0]["scores"]:
        for label in rows[0]["scores"][column].get("also", {}):
            each = [f"{row['name']} {_score(row['scores'][column]['also'][label])}" for row in rows]
            lines.append(f"{column}, {label}: {', '.join(each)}")
    models = [f"{row['name']} {row['model']}" for row in rows if row["model"]]  # a model card leaves folders out
    lines += [f"models: {', '.join(models)}"] if models else []
    ends = {row["name"]: row["ends"] for row in rows if row.get("ends") is not None}
    if len(set(map(str, ends.values()))) > 1:
        lines.append(f"answers end with token: {', '.join(f'{name} {token}' for name, token in ends.items())}")
    cut = {row["name"]: {c: n for c, n in row.get("cut", {}).items() if n} for row in rows}
    each = [f"{name}: {_say(counts)}" for name, counts in cut.items() if counts]
    return lines + ([f"prompts cut to fit the model: {'; '.join(each)}"] if each else [])


def _settings(results: dict[str, Any]) -> list[str]:
    settings = {key: value for key, value in results["settings"].items() if value not in (None, {})}
    if "metrics" in settings:
        settings["metrics"] = {c: m.removesuffix(",none").replace(",", "/") for c, m in settings["metrics"].items()}
    questions = {c: score["n"] for c, score in results["rows"][0]["scores"].items() if "n" in score}
    said = {"": f"questions: {_say(questions)}"}
    said |= {key: how.format(_say(settings[key])) for key, how in SETTINGS.items() if key in settings}
    said |= {key: f"{key} {_say(value)}" for key, value in settings.items() if key not in said}
    short = [line for line in said.values() if ", " not in line]
    return [*(line for line in said.values() if ", " in line), "; ".join(short)]


def _say(value: Any) -> str:
    """One word where all are equal, else each by name."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, dict):
        return str(value)
    words = {name: _say(each) for name, each in value.items()}
    if len(words) > 1 and len(set(words.values())) == 1:
        return next(iter(words.values()))
    return ", ".join(f"{name} {word}" for name, word in words.items())
