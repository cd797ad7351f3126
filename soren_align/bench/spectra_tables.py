"""Tables of `soren-align spectrum`, 80 columns wide: a row per matrix and step, a column per map."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .run_spectra import EXACT, SHARES, short_names

WIDTH = 80
NOTE = """\
nu: the norm (sum of sigma^8)^(1/8), by which minimax divides
-: the momentum is zero; left out of mean and extremes
Muon's output counts half, as match_rms_adamw scales it"""


def tables(source: str, records: Sequence[dict[str, Any]]) -> Group:
    """The measurements of `run_spectra.measure` in four tables, the last three with their mean and their extreme."""
    names = short_names([record["name"].removesuffix(".weight") for record in records], 3)
    labels = list(records[0]["maps"])
    approximate = [label for label in labels if label != EXACT]
    header = ["matrix", "step", "shape", "largest", *(f"< {share:g} nu" for share in SHARES)]
    rows = [
        [
            name,
            str(record["step"]),
            " x ".join(map(str, record["shape"])),
            f"{record['largest']:.1e}",
            *(_cell("{:.0%}", share) for share in record["below"].values()),
        ]
        for name, record in zip(names, records, strict=True)
    ]
    parts = [
        Text(f"spectra of {source}", style="dim"),
        *_table("singular values, and the share of small ones", header, rows),
    ]
    for title, key, shown, form, extreme in (
        ("distance from the exact sigmoid", "distance", approximate, "{:.1%}", max),
        ("cosine of the angle to the exact sigmoid", "cosine", approximate, "{:.3f}", min),
        ("size of the update: 1 if every mode is at the map's level", "size", labels, "{:.2f}", min),
    ):
        columns = [[record["maps"][label][key] for record in records] for label in shown]
        rows = [
            [name, str(record["step"]), *(_cell(form, column[i]) for column in columns)]
            for i, (name, record) in enumerate(zip(names, records, strict=True))
        ]
        measured = [[value for value in column if value is not None] for column in columns]
        rows.append(["mean", "", *(_cell(form, fmean(column) if column else None) for column in measured)])
        rows.append([_EXTREMES[extreme], "", *(_cell(form, extreme(column, default=None)) for column in measured)])
        parts += _table(title, ["matrix", "step", *(label.replace(" ", "\n") for label in shown)], rows)
    return Group(*parts, Text(f"\n{NOTE}", style="dim"))


def _cell(form: str, value: float | None) -> str:
    """Return "-" for a zero momentum, which has no cosine."""
    return "-" if value is None else form.format(value)


_EXTREMES: dict[Callable[..., Any], str] = {max: "largest", min: "smallest"}


def _table(title: str, header: list[str], rows: list[list[str]]) -> list[Any]:
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    widths = [
        max(len(line) for cell in column for line in cell.split("\n")) for column in zip(header, *rows, strict=True)
    ]
    room = WIDTH - sum(width + 1 for width in widths[1:])
    table.add_column(header[0], no_wrap=True, vertical="bottom")
    for name in header[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for first, *cells in rows:
        table.add_row(first if len(first) <= room else f"...{first[3 - room :]}", *cells)
    return [Text(f"\n{title}", style="bold"), table]
