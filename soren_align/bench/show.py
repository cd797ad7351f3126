"""Tables of the results, for a terminal of 80 columns and for a page of Markdown."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..core.files import write


@dataclass(frozen=True)
class Grid:
    """A table: the first column is text, the others are numbers."""

    title: str
    header: list[str]
    rows: list[list[str]]


def terminal(results: dict[str, Any]) -> Group:
    """The tables below a head with machine and versions."""
    parts: list[Any] = [Text("\n".join(head(results)), style="dim")]
    for grid in grids(results):
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column(grid.header[0], no_wrap=True)
        for name in grid.header[1:]:
            table.add_column(name, justify="right", no_wrap=True)
        for row in grid.rows:
            table.add_row(*row)
        parts += [Text(f"\n{grid.title}", style="bold"), table]
    return Group(*parts, Text("\n".join(["", *notes(results)]), style="dim"))


def markdown(results: dict[str, Any]) -> str:
    """The same as a part of a page."""
    lines = [*(f"{line}  " for line in head(results))]
    for grid in grids(results):
        lines += ["", f"**{grid.title}**", "", f"| {' | '.join(grid.header)} |"]
        lines += ["|---|" + "---:|" * (len(grid.header) - 1)]
        lines += [f"| {' | '.join(row)} |" for row in grid.rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes(results))]) + "\n"


def update_page(results: dict[str, Any], page: Path) -> None:
    """Write the tables into a page, replacing those of the same command, shapes and kind of device, or at its end."""
    key = f"bench {results['command']} --shapes {results['shapes_name']} --device {results['machine']['kind']}"
    begin, end = f"<!-- {key} -->\n", f"<!-- /{key} -->\n"
    part = f"{begin}## `soren-align {key}`\n\n{markdown(results)}{end}"
    text = page.read_text(encoding="utf-8") if page.is_file() else "# Benchmarks\n"
    before, marker, rest = text.partition(begin)
    after = rest.partition(end)[2]
    write(page, before + part + after if marker else f"{text.rstrip()}\n\n{part}")


def head(results: dict[str, Any]) -> list[str]:
    """Machine, versions, commit."""
    m = results["machine"]
    v = m["versions"]
    commit, _, changes = (m["commit"] or "").partition("+")
    code = f"commit {commit[:12]}{changes and ' + '}{changes}" if commit else f"soren-align {v['soren-align']}"
    threads = "1 thread" if m["num_threads"] == 1 else f"{m['num_threads']} threads"
    return [
        f"{results['shapes_name']} on {m['device']}, {threads}",
        f"Python {v['python']}, torch {v['torch']}, {code}",
    ]


def grids(results: dict[str, Any]) -> list[Grid]:
    """The tables of either command."""
    return _maps(results) if results["command"] == "maps" else _step(results)


def notes(results: dict[str, Any]) -> list[str]:
    """Explanations of the columns, and notes on skipped measurements."""
    if results["command"] == "maps":
        lines = [
            f"input: {results['input']}",
            "ms: median of interleaved rounds; ±: half the interquartile range",
            "util.: FLOP/s relative to a large matrix product in the same dtype, measured just before",
            "/Muon: time over that of Muon's iteration in bfloat16 (as in torch.optim.Muon) and in float32",
            "errors: max / mean relative error over all modes, to the sigmoid in float64 (Muon and peers: to 1)",
        ]
    else:
        lines = ["ms: median of interleaved rounds; ±: half the interquartile range"]
        lines += ["/torch, /Muon, /AdamW: time over torch.optim.Muon (bfloat16), our Muon in float32, fused AdamW"]
        lines += ["state: optimizer state; peak: state and temporary tensors, without parameters and gradients"]
        if results["training_seconds"] is not None:
            rate = results["matmul_flops_per_second"]["bfloat16"]
            lines.append(
                f"share: of the time of a training step with {results['num_tokens']} tokens, estimated as "
                f"6 x parameters x tokens / {rate / 1e12:.0f} TFLOP/s (bfloat16 products, measured here)"
            )
    if results["machine"]["load"] > results["machine"]["num_processors"]:
        lines.append("other processes were running at the start: times are too long, ratios uncertain")
    return [*lines, *results["notes"]]


def _maps(results: dict[str, Any]) -> list[Grid]:
    tables = []
    for shape in results["shapes"]:
        name = "x".join(map(str, shape["shape"]))
        rates = ", ".join(f"{dtype} {rate / 1e9:.0f}" for dtype, rate in shape["matmul_flops_per_second"].items())
        number = "1 matrix" if shape["count"] == 1 else f"{shape['count']} matrices"
        title = f"{name}: {number}, {shape['num_rounds']} rounds; matrix products: {rates} GFLOP/s"
        header = ["map", "ms", "±", "GFLOP", "util.", "/Muon bf16", "/Muon fp32"]
        rows = [
            [
                row["name"],
                *_milliseconds(row["seconds"]),
                _number(row["flops"], 1e9),
                _percent(row["share_of_matmul_rate"]),
                _ratio(row["ratio_to_muon"]),
                _ratio(row["ratio_to_muon_float32"]),
            ]
            for row in shape["maps"]
        ]
        tables.append(Grid(title, header, rows))
        small = "x".join(map(str, shape["error_shape"]))
        title = f"errors at {name}" if small == name else f"errors at {small}, in place of {name}"
        rows = [
            [row["name"], *(f"{_error(e['max'])} / {_error(e['mean'])}" for e in row["errors"].values())]
            for row in shape["maps"]
        ]
        tables.append(Grid(title, ["map", *shape["maps"][0]["errors"]], rows))
    rows = [
        [
            row["name"],
            *(
                _ratio(row[key] and row[key][statistic])
                for key in ("ratio_to_muon", "ratio_to_muon_float32")
                for statistic in _STATISTICS
            ),
        ]
        for row in results["over_all_shapes"]
    ]
    title = f"all {len(results['shapes'])} shapes: geometric mean and maximum"
    return [*tables, Grid(title, ["map", "/Muon bf16", "max", "/Muon fp32", "max"], rows)]


_STATISTICS = ("geometric_mean", "max")


def _step(results: dict[str, Any]) -> list[Grid]:
    layers = results["num_layers"]
    title = (
        f"a step on {results['num_parameters']:,} parameters, "
        f"{layers['measured']} of {layers['of']} layers, {results['num_rounds']} rounds"
    )
    header = ["optimizer", "ms", "±", "/torch", "/Muon", "/AdamW", "state MB", "peak MB", "share"]
    rows = [
        [
            row["name"],
            *_milliseconds(row["seconds"]),
            _ratio(row["ratio_to_torch_muon"]),
            _ratio(row["ratio_to_muon_float32"]),
            f"{row['ratio_to_fused_adamw']:.1f}",
            _number(row["state_bytes"], 1e6),
            _number(row["peak_bytes"], 1e6),
            _percent(row["share_of_training_step"]),
        ]
        for row in results["optimizers"]
    ]
    return [Grid(title, header, rows)]


def _milliseconds(seconds: dict[str, float]) -> list[str]:
    return [_number(seconds["median"], 1e-3), _percent((seconds["high"] - seconds["low"]) / 2 / seconds["median"])]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _number(value: float | None, unit: float) -> str:
    """Three digits, or all before the decimal point; a dash for None."""
    if value is None:
        return "-"
    scaled = value / unit
    return f"{scaled:.0f}" if scaled >= 100 else f"{scaled:.3g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _error(value: float) -> str:
    return f"{value:.1%}" if value >= 1e-3 else f"{value:.0e}"
