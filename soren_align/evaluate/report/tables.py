"""The table, for the terminal and table.md: a row per model, the starting checkpoint first, published scores last."""

import re
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..stats.contamination import NGRAM

NUM_COLUMNS = 3
"""Columns beside each other: with their intervals, three fit into 80 characters; the others follow in a table below."""
SHA = re.compile(r"^([0-9a-f]{12})[0-9a-f]{28}")
"""A commit, which is shown by its first 12 digits."""
SETTINGS = {
    "versions": "versions",
    "task_versions": "task versions",
    "num_fewshot": "few-shot examples",
    "metrics": "metrics",
    "clusters": "clusters",
    "seeds": "seeds",
    "data": "data",
    "generation_config": "generation config",
    "chat_template": "chat template",
    "bos": "BOS token",
    "dtype": "dtype",
    "device": "device",
    "backend": "backend",
    "batch_size": "batch size",
    "num_processes": "processes",
    "commit": "commit of soren-align",
}
"""The label of each setting under the table, in this order: data and prompts first, then the model's settings."""


def terminal(results: dict[str, Any]) -> Group:
    """Return the table with differences, intervals and p-values, and under it the notes that are needed to read it."""
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
    footer = Table.grid(padding=(0, 1))
    for note in notes(results, brief=True):
        footer.add_row("-", Text(note, overflow="fold"), style="dim")
    return Group(*parts, footer)


def markdown(results: dict[str, Any]) -> str:
    """Return the same as a Markdown page, with all columns in one table."""
    columns = list(results["rows"][0]["scores"])
    lines = [f"# {plain(results['title'])}", "", "Percent ± standard error.", ""]
    lines += [f"| model | {' | '.join(map(in_cell, columns))} |", f"|---|{'---:|' * len(columns)}"]
    for row, name, _ in _rows(results):
        lines.append(f"| {in_cell(name)} | {' | '.join('<br>'.join(_cell(row, column)) for column in columns)} |")
    return "\n".join([*lines, "", *(f"- {plain(note)}" for note in notes(results))]) + "\n"


def plain(text: str) -> str:
    """Return untrusted text as one line of Markdown: no HTML, no newlines, no control characters."""
    text = "".join(c if c.isprintable() else " " for c in text)
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def in_cell(text: str) -> str:
    """Return untrusted text for a cell of a table."""
    return plain(text).replace("|", "\\|")


def notes(results: dict[str, Any], brief: bool = False) -> list[str]:
    """Return the notes under the table: a legend, additional scores, models, and the settings that reproduce it.

    brief: without the statistical methods and the settings.
    """
    return [
        *_legend(results, brief),
        *_details(results),
        *_contamination(results),
        *results.get("notes", []),
        *([] if brief else _settings(results)),
    ]


def _rows(results: dict[str, Any]) -> list[tuple[dict[str, Any], str, str]]:
    """Return each row with its name in the table and its style."""
    own = [(row, row["name"], "") for row in results["rows"]]
    return own + [(row, f"{row['name']} (published)", "dim") for row in results.get("published", [])]


def _cell(row: dict[str, Any], column: str) -> list[str]:
    """Return the lines of a cell: the score, the difference and its p-value."""
    score = row["scores"].get(column)
    if score is None:
        return ["-"]  # published scores need not have all columns
    if column in row.get("unpaired", {}):
        return [_score(score), "not compared"]
    return [_score(score), *(_difference(row["differences"][column]) if "differences" in row else [])]


def _difference(d: dict[str, Any]) -> list[str]:
    """Return a difference with its interval, and its p-value."""
    p = "p < 0.001" if d["p_holm"] < 0.001 else f"p {d['p_holm']:.3f}"
    star = "* " if d["p_holm"] < 0.05 else ""
    return [f"{d['value']:+.1f} [{d['low']:+.1f}, {d['high']:+.1f}]", star + p]


def _score(score: dict[str, Any]) -> str:
    return f"{score['value']:.1f} ± {score['stderr']:.1f}" if "stderr" in score else f"{score['value']:.1f}"


def _legend(results: dict[str, Any], brief: bool) -> list[str]:
    first, *later = results["rows"]
    lines = []
    differences = [each for row in later for each in (row.get("differences") or {}).values()]
    if differences:
        num_also = sum(len(each.get("also", ())) for each in differences)
        also = f", and apart from these for the {num_also} of other scores below" if num_also else ""
        intervals = "" if brief else " (Bonett and Price's; for averages and fractional scores by bootstrap)"
        tests = "" if brief else " (McNemar's exact test, else bootstrap)"
        lines += [
            f"+x [low, high]: difference to {first['name']} on the same questions, with its 95% interval{intervals}",
            f"p: two-sided p-value of the difference{tests}, Holm-corrected for the {len(differences)}"
            f" comparison{'s' * (len(differences) > 1)} in this table{also}; *: p < 0.05",
        ]
        if not brief or any(each["low"] * each["high"] > 0 and each["p_holm"] >= 0.05 for each in differences):
            lines.append("intervals are not corrected: one may exclude 0 beside a p above 0.05")
    num_clusters = {
        column: each["num_clusters"]
        for row in later
        for column, each in (row.get("differences") or {}).items()
        if "num_clusters" in each
    }
    if num_clusters:
        lines.append(
            "questions of one cluster are not independent, so that interval and p of some columns are Student's t over"
            f" clusters: {_text(num_clusters)}"
        )
    for row in later:
        lines += _not_compared(row, first["name"])
        lines += _compared_with_start(row)
    intervals = [
        f"{row['name']} {column} [{score['low']:.1f}, {score['high']:.1f}]"
        for row in results["rows"]
        for column, score in row["scores"].items()
        if score.get("stderr") == 0 and score.get("low", 0) < score.get("high", 0)
    ]
    if intervals:
        lines.append(
            "± 0.0: answers that are all right, or all wrong, have no standard error; their 95% intervals (Wilson's):"
            f" {', '.join(intervals)}"
        )
    sources = dict.fromkeys(row["source"] for row in results.get("published", []))
    return [*lines, *(f"published scores, not evaluated here and not compared: {source}" for source in sources)]


def _not_compared(row: dict[str, Any], first: str) -> list[str]:
    """Return a line for each reason why columns of a row are not compared."""
    unpaired = row.get("unpaired", {})
    lines = []
    for reason in dict.fromkeys(unpaired.values()):
        columns = [column for column, each in unpaired.items() if each == reason]
        which = "" if len(columns) == len(row["scores"]) else f", {', '.join(columns)}"
        lines.append(f"not compared with {first}: {row['name']}{which} ({reason})")
    return lines


def _compared_with_start(row: dict[str, Any]) -> list[str]:
    """Return a line with the differences to the model that a row was trained from, where it is not the first row."""
    differences = (row.get("start") or {}).get("differences")
    if not differences:
        return []
    texts = [f"{column} {', '.join(_difference(each))}" for column, each in differences.items()]
    return [f"{row['name']} minus {row['start']['name']}, its start (p corrected for these alone): {'; '.join(texts)}"]


def _details(results: dict[str, Any]) -> list[str]:
    """Return lines with the additional scores, the models, and the number of truncated prompts."""
    rows, lines = results["rows"], []
    for column in rows[0]["scores"]:
        for label in rows[0]["scores"][column].get("also", {}):
            lines.append(f"{column}, {label}: {', '.join(_also(row, column, label) for row in rows)}")
    for row in rows:
        source = row.get("chat_template_of", row["name"])
        if source != row["name"]:
            template = f"with the chat template of {source}" if source else "without a chat template"
            lines.append(f"{row['name']} was evaluated {template}")
    models = [f"{row['name']} {row['model']}" for row in rows if row["model"]]  # model cards omit local folders
    lines += [f"models: {', '.join(models)}"] if models else []
    eos = {row["name"]: row["eos_token_id"] for row in rows if row.get("eos_token_id") is not None}
    if len(set(map(str, eos.values()))) > 1:
        lines.append(f"generated text ends with token: {', '.join(f'{name} {token}' for name, token in eos.items())}")
    truncated = {row["name"]: {c: n for c, n in row.get("truncated", {}).items() if n} for row in rows}
    counts = [f"{name}: {_text(columns)}" for name, columns in truncated.items() if columns]
    return lines + ([f"prompts truncated to the model's context: {'; '.join(counts)}"] if counts else [])


def _contamination(results: dict[str, Any]) -> list[str]:
    """Return lines with the questions that the training examples contain, and the scores without them."""
    columns = results.get("contamination") or {}
    lines, clean = [], [column for column, each in columns.items() if not each["overlapping"]]
    for column, each in columns.items():
        if column in clean:
            continue
        counts = f"{each['overlapping']:,} of {each['questions']:,} questions are in the training examples"
        whole = f"{each['exact']:,} as a whole" if each["exact"] else ""
        parts = each["overlapping"] - each["exact"]
        how = ", ".join(filter(None, (whole, f"{parts:,} by {NGRAM} words in a row" if parts else "")))
        scores = ", ".join(f"{row} {_clean(score)}" for row, score in each.get("scores", {}).items())
        lines.append(
            f"contamination, {column}: {counts} ({how}); {f'without them: {scores}' if scores else 'no others'}"
        )
    if clean:
        number = next(iter(columns.values()))["examples_read"]
        lines.append(
            f"contamination: no question of {', '.join(clean)} is in the {number:,} training examples, as a whole or by"
            f" {NGRAM} words in a row"
        )
    return lines


def _clean(score: dict[str, Any]) -> str:
    """Return a score without some questions, and its difference to the first row."""
    text, d = f"{score['value']:.1f}", score.get("difference")
    return f"{text}, difference {d['value']:+.1f} [{d['low']:+.1f}, {d['high']:+.1f}]" if d else text


def _also(row: dict[str, Any], column: str, label: str) -> str:
    """Return an additional score, with its difference to the first row."""
    d = ((row.get("differences") or {}).get(column) or {}).get("also", {}).get(label)
    change = f" ({', '.join(_difference(d))})" if d else ""
    return f"{row['name']} {_score(row['scores'][column]['also'][label])}{change}"


def _settings(results: dict[str, Any]) -> list[str]:
    settings = {key: value for key, value in results["settings"].items() if value not in (None, {})}
    if "metrics" in settings:
        settings["metrics"] = {c: m.removesuffix(",none").replace(",", "/") for c, m in settings["metrics"].items()}
    if isinstance(commit := settings.get("commit"), str):
        settings["commit"] = SHA.sub(r"\1", commit)
    questions = {c: score["n"] for c, score in results["rows"][0]["scores"].items() if "n" in score}
    labels = SETTINGS | {key: key for key in settings if key not in SETTINGS}
    values = {"questions": questions} | {labels[key]: settings[key] for key in labels if key in settings}
    lines = [f"{label}: {_text(value)}" for label, value in values.items()]
    return [*(line for line in lines if ", " in line), "; ".join(line for line in lines if ", " not in line)]


def _text(value: Any) -> str:
    """Return a value as text; of a dict with equal values this one value, else each with its key."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, dict):
        return str(value)
    texts = {name: _text(each) for name, each in value.items()}
    if len(texts) > 1 and len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{name} {text}" for name, text in texts.items())
