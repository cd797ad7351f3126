"""The results for a reader: the table in the terminal and in table.md, and the figure.

A row per model, the starting checkpoint first, published scores last; in the figure a panel per
column, a dot per row with its 95% interval.
"""

import re
from collections.abc import Sequence
from math import ceil, floor
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from ...core.figures import FONT, Colors, short, style_axes, write_pictures
from ...core.text import Table, join_words, p_value, without_html
from .results import Interval, PublishedRow, Results, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_COLUMNS = 3
"""Columns beside each other: with their intervals, three fit into 80 characters; the others follow
in a table below."""
SHA = re.compile(r"^([0-9a-f]{12})[0-9a-f]{28}")
"""A commit, which is shown by its first 12 digits."""
DATA = (
    "versions",
    "task_versions",
    "num_fewshot",
    "metrics",
    "num_choices",
    "clusters",
    "seeds",
    "data",
)
MODEL = (
    "generation_config",
    "chat_template",
    "bos",
    "dtype",
    "device",
    "backend",
    "batch_size",
    "num_processes",
)
"""The settings under the table, in this order: data and prompts first, then the model's settings;
last the commit."""
LABELS = {"num_fewshot": "few-shot examples", "bos": "BOS token", "num_processes": "processes"}
LABELS |= {
    "commit": "commit of soren-align",
    "num_choices": "choices (a normalized score is 0 for random answers)",
}
"""Labels of the settings whose label is not their key."""
MIN_QUESTIONS = 20
"""Below it an interval covers nearly all that is possible, [-45.6, +85.6] of five questions: it is
not shown."""
TOO_FEW = "too few questions"
MAX_COUNTS = 6
"""The most columns of the sentence over the table."""
MAX_BELOW = 4
"""Panels of the figure below each other; more stand in two columns."""
INCHES, DPI = 5.2, 200
"""The figure's width and density: 520 units on a wide page, with letters of 13; on a phone of 390
letters of 10."""


def terminal(results: Results, *, brief: bool = False) -> Group:
    """Return the table with differences, intervals and p-values, and under it the notes that are
    needed to read it.

    brief: with those notes alone that put the scores in question.
    """
    columns = list(results["rows"][0]["scores"])
    parts: list[Any] = [Text(f"{sentence}\n") for sentence in [headline(results)] if sentence]
    parts += [Text(f"{results['title']}, {_unit(results)}", style="bold")]
    for i in range(0, len(columns), NUM_COLUMNS):
        parts += [_table(results, columns[i : i + NUM_COLUMNS]).rich(), Text()]
    footer = RichTable.grid(padding=(0, 1))
    for note in [*_about(results), *(warnings(results) if brief else notes(results, brief=True))]:
        footer.add_row("-", Text(note, overflow="fold"), style="dim")
    return Group(*parts, *[footer] * bool(footer.rows))


def markdown(results: Results, *, fold: bool = False) -> str:
    """Return the same as a Markdown page, with all columns in one table.
    fold: hide the notes until they are opened.
    """
    table = _table(results, list(results["rows"][0]["scores"]))
    lines = [
        f"# {without_html(results['title'])}",
        "",
        *[f"{sentence}\n" for sentence in [without_html(headline(results))] if sentence],
        f"{_unit(results).capitalize()}.",
        "",
        table.markdown(),
        "",
    ]
    begin = ["<details><summary>Notes on these scores</summary>", ""] if fold else []
    end = ["", "</details>"] if fold else []
    under = [f"- {without_html(note)}" for note in [*_about(results), *notes(results)]]
    return "\n".join([*lines, *begin, *under, *end]) + "\n"


def _about(results: Results) -> list[str]:
    """Return a line for each column with what its questions are."""
    return [f"{column}: {text}" for column, text in results.get("about", {}).items()]


def headline(results: Results) -> str:
    """Return in a sentence what the last row answers right, beside the row that it started from.

    "SFT is right on 18 of 20 trained questions (before: 0) and 30 of 40 general questions (before:
    31, no clear change)". "" for one row, many columns, or scores that are no counts of right
    answers.
    """
    own = results["rows"][-1]
    first, differences = start_of(results, own)
    scores = {c: score for c, score in own["scores"].items() if "n" in score}
    if own is first or not differences or not 0 < len(scores) <= MAX_COUNTS:
        return ""
    parts = []
    for column, score in scores.items():
        values = (score["value"], first["scores"][column]["value"])
        counts = [value * score["n"] / 100 for value in values]
        if column not in differences or any(abs(c - round(c)) > 1e-6 for c in counts):
            return ""
        after, before = (f"{round(count):,}" for count in counts)
        finding = ""
        if after != before and has_too_few(own, column):
            finding = ", too few to judge"
        elif after != before and differences[column]["p_holm"] >= 0.05:
            finding = ", no clear change"
        if rule := score.get("without_model"):
            finding += f"; {rule['rule']}, without a model: {rule['value'] * score['n'] / 100:.0f}"
        noun = "pairs" if column == "preference" else f"{column} questions"
        name = "before" if first is results["rows"][0] else first["name"]
        parts.append(f"{after} of {score['n']:,} {noun} ({name}: {before}{finding})")
    # What is learned by heart need not be known from another wording.
    is_by_heart = "trained" in scores and not {"rephrased", "held-out"} & {*scores}
    by_heart = " Asked word for word; other wordings were not asked." * is_by_heart
    return f"{own['name']} is right on {join_words(parts)}.{by_heart}"


def start_of(results: Results, own: Row) -> tuple[Row, dict[str, Any]]:
    """Return the row that `own` started from, or else the first, and the differences from it."""
    rows, start = {row["name"]: row for row in results["rows"]}, own.get("start")
    if start and start["name"] in rows:
        return rows[start["name"]], start["differences"]
    return results["rows"][0], own.get("differences") or {}


def gains(results: Results, own: Row) -> tuple[Row, list[str]]:
    """Return the row that a row of the results started from, and for each column the score and
    whether it is better.

    "zoo_mc: 100.0, from 20.0: +80.0 [+71.1, +86.3], better (120 questions)". Where the table has no
    row of the start, the first one takes its place.
    """
    first, differences = start_of(results, own)
    lines = []
    for column, score in own["scores"].items():
        count = f" ({score['n']:,} question{'s' * (score['n'] != 1)})" if "n" in score else ""
        d, text = differences.get(column), f"{column}: {score['value']:.1f}"
        if own is first or d is None:
            lines.append(f"{text}{'' if own is first else ', not compared'}{count}")
            continue
        # Too few questions first: their interval covers nearly all that is possible, and a p below
        # 0.05 of so few would be taken for a finding.
        if is_too_few := has_too_few(own, column):
            finding = TOO_FEW
        else:
            finding = (
                "not distinguishable"
                if d["p_holm"] >= 0.05
                else "better"
                if d["value"] > 0
                else "worse"
            )
        lines.append(
            f"{text}, from {first['scores'][column]['value']:.1f}: {_interval(d, is_too_few)},"
            f" {finding}{count}"
        )
    return first, lines


def notes(results: Results, brief: bool = False) -> list[str]:
    """Return the notes under the table: a legend, additional scores, models, and the settings that
    reproduce it.

    brief: without the statistical methods and the settings.
    """
    rows, lines = results["rows"], _legend(results, brief)
    for column, score in rows[0]["scores"].items():
        for label in score.get("also", {}):
            scores = [(row["name"], row["scores"][column].get("also", {})[label]) for row in rows]
            texts = [f"{name} {_score(value, results)}" for name, value in scores]
            lines.append(f"{column}, {label}: {', '.join(texts)}")
    for row in rows:
        source = row.get("chat_template_of", row["name"])
        if source != row["name"]:
            template = (
                f"with the chat template of {source}" if source else "without a chat template"
            )
            lines.append(f"{row['name']} was evaluated {template}")
    # model cards omit local folders
    models = [f"{row['name']} {row['model']}" for row in rows if row["model"]]
    lines += [f"models: {', '.join(models)}"] if models else []
    eos = {
        row["name"]: row.get("eos_token_id") for row in rows if row.get("eos_token_id") is not None
    }
    if len(set(map(str, eos.values()))) > 1:
        lines.append(
            "generated text ends with token:"
            f" {', '.join(f'{name} {token}' for name, token in eos.items())}"
        )
    lines += [*_truncation(results), *results["notes"]]
    return lines if brief else [*lines, *_settings(results)]


def warnings(results: Results) -> list[str]:
    """Return the notes that put the scores in question: truncated prompts, and others."""
    return [*_truncation(results), *results["notes"]]


def _rows(results: Results) -> list[tuple[Row | PublishedRow, str, bool]]:
    """Return each row with its name in the table, and whether it was evaluated here."""
    rows: list[tuple[Row | PublishedRow, str, bool]] = [
        (row, row["name"], True) for row in results["rows"]
    ]
    return rows + [(row, f"{row['name']} (published)", False) for row in results["published"]]


def _table(results: Results, columns: Sequence[str]) -> Table:
    def cell(row: Any, column: str) -> str:
        score = row["scores"].get(column)
        if score is None:
            return "-"  # published scores need not have all columns
        if column in row.get("unpaired", {}):
            return f"{_score(score, results)}\nnot compared"
        differences = row.get("differences")
        shown = (
            _difference(differences[column], has_too_few(row, column))
            if differences is not None
            else []
        )
        return "\n".join([_score(score, results), *shown])

    rows = _rows(results)
    cells = [[name, *(cell(row, column) for column in columns)] for row, name, _ in rows]
    dim = frozenset(i for i, (_, _, is_own) in enumerate(rows) if not is_own)
    return Table(["model", *columns], cells, dim=dim, marked="* ")


def has_too_few(row: Row, column: str) -> bool:
    """Whether a score is of fewer than MIN_QUESTIONS questions; an average is of those of all
    columns.
    """
    scores = row["scores"]
    return (
        0
        < scores[column].get("n", sum(score.get("n", 0) for score in scores.values()))
        < MIN_QUESTIONS
    )


def _difference(d: Any, is_too_few: bool) -> list[str]:
    """Return a difference with its interval, and its p-value."""
    last = TOO_FEW if is_too_few else f"{'* ' if d['p_holm'] < 0.05 else ''}{p_value(d['p_holm'])}"
    if not is_too_few and d["p_holm"] > 0.9995:
        # More readers understand it than "p 1.000".
        last = "not distinguishable" if d["value"] else "unchanged"
    return [_interval(d, is_too_few), last]


def _interval(d: Interval, is_too_few: bool) -> str:
    return f"{d['value']:+.1f}" + ("" if is_too_few else f" [{d['low']:+.1f}, {d['high']:+.1f}]")


def _unit(results: Results) -> str:
    return "percent with 95% intervals" if results.get("intervals") else "percent ± standard error"


def _score(score: Any, results: Results) -> str:
    if results.get("intervals") and "low" in score:
        return f"{score['value']:.1f} [{score['low']:.1f}, {score['high']:.1f}]"
    return (
        f"{score['value']:.1f} ± {score['stderr']:.1f}"
        if "stderr" in score
        else f"{score['value']:.1f}"
    )


def _legend(results: Results, brief: bool) -> list[str]:
    """Return the lines that explain the cells of the table, each only if a cell needs it."""
    sources = dict.fromkeys(row["source"] for row in results["published"])
    return [
        *_about_differences(results, brief),
        *_about_rows(results),
        *(f"published scores, not evaluated here and not compared: {source}" for source in sources),
    ]


def _about_differences(results: Results, brief: bool) -> list[str]:
    """Return lines on intervals, p-values, columns with too few questions, and clusters."""
    first, *later = results["rows"]
    cells = [
        (row, column, difference)
        for row in later
        for column, difference in (row.get("differences") or {}).items()
    ]
    shown = [(column, d) for row, column, d in cells if not has_too_few(row, column)]
    lines = []
    if shown:
        # The statistical methods stand in table.md alone: a terminal has the finding.
        intervals = " (Bonett and Price's; for averages and fractional scores by bootstrap)"
        tests = " (McNemar's exact test for right or wrong answers, bootstrap for other scores)"
        if brief:
            intervals = tests = ""
        lines += [
            (
                f"+x [low, high]: difference to {first['name']} on the same questions, with its 95%"
                f" interval{intervals}"
            ),
            (
                f"p: two-sided p-value of the difference{tests}, Holm-corrected for the"
                f" {len(cells)} comparison{'s' * (len(cells) > 1)} in this"
                f" table; *: p < 0.05"
            ),
        ]
        # An interval that excludes 0 beside a p above 0.05 looks like a mistake.
        if not brief or any(d["low"] * d["high"] > 0 and d["p_holm"] >= 0.05 for _, d in shown):
            lines.append(
                "intervals are not corrected: an interval may exclude 0 although p is above 0.05"
            )
    scores = first["scores"]
    few = {c: score["n"] for c, score in scores.items() if "n" in score and has_too_few(first, c)}
    if cells and few:
        lines.append(
            f"{TOO_FEW}: with fewer than {MIN_QUESTIONS} questions, a difference has no interval "
            f"and no p; number of questions: {_text(few)}"
        )
    if num_clusters := {c: d["num_clusters"] for c, d in shown if "num_clusters" in d}:
        lines.append(
            "questions of one cluster are not independent, so the standard errors, intervals and "
            "p-values of these columns are computed over clusters (Student's t); number of "
            f"clusters: {_text(num_clusters)}"
        )
    return lines


def _about_rows(results: Results) -> list[str]:
    """Return lines on rows that are not compared with the first one, or were trained from another
    row.
    """
    first, *later = results["rows"]
    lines = []
    for row in later:
        unpaired = row.get("unpaired", {})
        for reason in dict.fromkeys(unpaired.values()):
            columns = [column for column, other in unpaired.items() if other == reason]
            which = "" if len(columns) == len(row["scores"]) else f", {', '.join(columns)}"
            lines.append(f"not compared with {first['name']}: {row['name']}{which} ({reason})")
        if (start := row.get("start")) and start["differences"]:
            texts = [
                f"{column} {', '.join(_difference(d, has_too_few(row, column)))}"
                for column, d in start["differences"].items()
            ]
            to = f"{row['name']} minus {start['name']}, its starting checkpoint"
            lines.append(f"{to} (p corrected for this line alone): {'; '.join(texts)}")
    return lines


def _truncation(results: Results) -> list[str]:
    """Return a line with the numbers of prompts that were truncated, if any were."""
    truncated = {
        row["name"]: {c: n for c, n in row.get("truncated", {}).items() if n}
        for row in results["rows"]
    }
    counts = [f"{name}: {_text(columns)}" for name, columns in truncated.items() if columns]
    return [f"prompts truncated to the model's context: {'; '.join(counts)}"] if counts else []


def _settings(results: Results) -> list[str]:
    settings: dict[str, Any] = {
        key: value for key, value in results["settings"].items() if value not in (None, {})
    }
    if "metrics" in settings:
        settings["metrics"] = {
            c: m.removesuffix(",none").replace(",", "/") for c, m in settings["metrics"].items()
        }
    if isinstance(commit := settings.get("commit"), str):
        settings["commit"] = SHA.sub(r"\1", commit)
    questions = {c: score["n"] for c, score in results["rows"][0]["scores"].items() if "n" in score}
    labels = {key: LABELS.get(key, key.replace("_", " ")) for key in (*DATA, *MODEL, "commit")}
    labels |= {key: key for key in settings if key not in labels}
    values = {"questions": questions} | {
        labels[key]: settings[key] for key in labels if key in settings
    }
    lines = [f"{label}: {_text(value)}" for label, value in values.items()]
    return [
        *(line for line in lines if ", " in line),
        "; ".join(line for line in lines if ", " not in line),
    ]


def _text(value: Any) -> str:
    """Return a value as text; of a dict with equal values this one value, else each with its
    key.
    """
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, dict):
        return str(value)
    texts = {name: _text(each) for name, each in value.items()}
    if len(texts) > 1 and len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def draw(results: Results, path: Path) -> None:
    """Write the figure of `results` as a PNG, and NAME-dark.png for a dark page; the same results
    give the same bytes.

    A panel for each column, all from 0 to 100 (from a lower number, if a normalized score is below
    0), with a dot for each row in the table's order, and its score as a number. An arrow leads from
    the first row's score to each other's; a dotted line marks answers at random. Published
    scores are hollow and grey, without an interval if none was published.
    """
    write_pictures(path, lambda colors: _figure(results, colors))


def _figure(results: Results, colors: Colors) -> "Figure":
    from matplotlib.figure import Figure

    columns, rows = list(results["rows"][0]["scores"]), _rows(results)
    first = results["rows"][0]
    across = 1 if len(columns) <= MAX_BELOW else 2
    down = ceil(len(columns) / across)
    title = fill(short(results["title"], 160), 60)
    chances = [first["scores"][c].get("chance") for c in columns]
    caption = (
        f"percent, with the 95% interval of each score; arrow: from {short(first['name'], 30)}"
    )
    caption = fill(f"{caption}{'; dotted: answers at random' if {*chances} != {None} else ''}", 62)
    lines = title.count("\n") + caption.count("\n")
    height = 0.75 + 0.18 * lines + down * (0.34 + 0.23 * len(rows))
    figure = Figure(figsize=(INCHES, height), dpi=DPI, layout="constrained", facecolor=colors.paper)
    font: dict[str, Any] = {"color": colors.ink, "parse_math": False}
    figure.suptitle(title, fontsize=FONT + 1, fontweight="bold", **font)
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flatten()
    for panel, column, chance in zip(panels, columns, chances, strict=False):
        style_axes(panel, column, "", colors, pad=3)
        before = first["scores"][column]["value"]
        if chance is not None:
            panel.axvline(chance, color=colors.muted, linewidth=1.2, linestyle=":", zorder=1)
        for y, (row, _, is_own) in enumerate(rows):
            score: Any = row["scores"].get(column)
            if score is None:
                continue
            color = colors.lines[1] if is_own else colors.muted
            half = 1.96 * score.get("stderr", 0)  # published scores have no low and high
            ends = [
                score.get("low", max(score["value"] - half, 0)),
                score.get("high", min(score["value"] + half, 100)),
            ]
            panel.plot(ends, [y, y], color=color, linewidth=1.6, zorder=2)
            if row is not first and score["value"] != before:
                arrow = {"arrowstyle": "-|>", "color": colors.muted, "linewidth": 0.8, "shrinkA": 0}
                panel.annotate("", (score["value"], y), (before, y), arrowprops=arrow, zorder=1)
            face = color if is_own else colors.paper
            panel.plot(
                score["value"],
                y,
                "o",
                markersize=5.5,
                color=color,
                markerfacecolor=face,
                zorder=3,
                clip_on=False,
            )
            side: dict[str, Any] = {
                "xycoords": ("axes fraction", "data"),
                "textcoords": "offset points",
                "ha": "right",
            }
            side |= {
                "xytext": (38, 0),
                "va": "center_baseline",
                "fontsize": FONT - 0.5,
                "color": color,
            }
            panel.annotate(f"{score['value']:.1f}", (1, y), **side)
        panel.tick_params(axis="y", length=0)
        panel.grid(visible=False, axis="y")
        panel.spines["left"].set_visible(False)
    for panel in panels[len(columns) :]:
        panel.set_visible(False)
    for panel in panels[len(columns) - across : len(columns)]:  # the lowest ones
        panel.tick_params(axis="x", labelbottom=True)
    left = 25 * floor(
        min([0, *(row["scores"][c].get("low", 0) for row in results["rows"] for c in columns)]) / 25
    )
    panels[0].set_xlim(left, 100)  # a normalized score may be below 0
    panels[0].set_xticks(
        [tick for tick in range(-100, 101, 25 if left >= -25 else 50) if tick >= left]
    )
    panels[0].set_yticks(
        range(len(rows)), [short(name, 24) for _, name, _ in rows], parse_math=False
    )
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    figure.supxlabel(caption, fontsize=FONT - 1, **font | {"color": colors.muted})
    return figure
