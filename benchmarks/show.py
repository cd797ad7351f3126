"""Tables of the results, for a terminal of 80 columns."""

from typing import Any

from rich.console import Group
from rich.text import Text

from soren_align.core.text import Table, number


def terminal(results: dict[str, Any]) -> Group:
    """The tables below a head with machine and versions."""
    head, body = (
        Text("\n".join(_head(results)), style="dim"),
        [table.rich() for table in _tables(results)],
    )
    return Group(head, *body, Text("\n".join(["", *_notes(results)]), style="dim"))


def _head(results: dict[str, Any]) -> list[str]:
    """Machine, versions, commit."""
    m = results["machine"]
    v = m["versions"]
    commit, _, changes = (m["commit"] or "").partition("+")
    code = (
        f"commit {commit[:12]}{changes and ' + '}{changes}"
        if commit
        else f"soren-align {v['soren-align']}"
    )
    threads = "1 thread" if m["num_threads"] == 1 else f"{m['num_threads']} threads"
    return [
        f"{results['shapes_name']} on {m['device']}, {threads}",
        f"Python {v['python']}, torch {v['torch']}, {code}",
    ]


def _notes(results: dict[str, Any]) -> list[str]:
    """Explanations of the columns, and notes on skipped measurements."""
    if results["command"] == "maps":
        lines = [
            f"input: {results['input']}",
            "ms: median time over rounds in which all maps run in turn; ±: half the interquartile range",
            "util.: the speed of a map in FLOP/s, divided by the speed of a large matrix product in the same "
            "dtype on this device",
            "/Muon: time divided by the time of Muon's iteration, in bfloat16 (as in torch.optim.Muon) and in float32",
            "errors: largest / mean relative error of the output's singular values, compared with the sigmoid "
            "(for Muon: compared with 1). The matrices have equal singular values "
            "(flat), the singular values 1, 1/2, 1/3, ... (power law), or independent normal entries (gaussian)",
        ]
    else:
        lines = [
            "ms: median of rounds in which the optimizers take turns; ±: half the interquartile range"
        ]
        lines += [
            "/torch, /Muon, /AdamW: the time, divided by the time of torch.optim.Muon (bfloat16), our Muon or "
            "fused AdamW"
        ]
        lines += [
            "state: memory of the optimizer state; peak: memory of the state and of temporary tensors"
        ]
        if results["training_seconds"] is not None:
            rate = results["matmul_flops_per_second"]["bfloat16"]
            lines.append(
                f"share: time divided by that of a training step with {results['num_tokens']} tokens, estimated as "
                f"6 x parameters x tokens / {rate / 1e12:.0f} TFLOP/s (the rate of bfloat16 products here)"
            )
    if results["machine"]["load"] > results["machine"]["num_processors"]:
        lines.append(
            "other processes were running at the start, so the times are too long and the ratios are uncertain"
        )
    return [*lines, *results["notes"]]


def _tables(results: dict[str, Any]) -> list[Table]:
    """The tables of either command; all but the first column are numbers."""
    if results["command"] == "step":
        layers = results["num_layers"]
        title = (
            f"a step on {results['num_parameters']:,} parameters, "
            f"{layers['measured']} of {layers['of']} layers, {results['num_rounds']} rounds"
        )
        header = [
            "optimizer",
            "ms",
            "±",
            "/torch",
            "/Muon",
            "/AdamW",
            "state MB",
            "peak MB",
            "share",
        ]
        rows = []
        for row in results["optimizers"]:
            ratios = [
                number(row[f"ratio_to_{name}"], ".2f") for name in ("torch_muon", "muon_float32")
            ]
            ratios.append(f"{row['ratio_to_fused_adamw']:.1f}")
            sizes = [_scaled(row[key], 1e6) for key in ("state_bytes", "peak_bytes")]
            share = number(row["share_of_training_step"], ".0%")
            rows.append([row["name"], *_milliseconds(row["seconds"]), *ratios, *sizes, share])
        return [Table(header, rows, title)]
    tables, ratios = [], ("ratio_to_muon", "ratio_to_muon_float32")
    for shape in results["shapes"]:
        name = "x".join(map(str, shape["shape"]))
        speeds = shape["matmul_flops_per_second"].items()
        rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {dtype}" for dtype, rate in speeds)
        matrices = "1 matrix" if shape["count"] == 1 else f"{shape['count']} matrices"
        title = f"time of each map, {name}: {matrices}, {shape['num_rounds']} rounds; matrix products reach {rates}"
        header = ["map", "ms", "±", "GFLOP", "util.", "/Muon bf16", "/Muon fp32"]
        rows = []
        for row in shape["maps"]:
            flops, share = _scaled(row["flops"], 1e9), number(row["share_of_matmul_rate"], ".0%")
            cells = [number(row[key], ".2f") for key in ratios]
            rows.append([row["name"], *_milliseconds(row["seconds"]), flops, share, *cells])
        tables.append(Table(header, rows, title))
        small = "x".join(map(str, shape["error_shape"]))
        title = f"errors of the singular values of each map's output, measured on {small}"
        if small != name:
            title += f", because the exact decomposition of {name} takes too long"
        rows = [
            [
                row["name"],
                *(f"{_error(e['max'])} / {_error(e['mean'])}" for e in row["errors"].values()),
            ]
            for row in shape["maps"]
        ]
        tables.append(Table(["map", *shape["maps"][0]["errors"]], rows, title))
    rows = []
    for row in results["over_all_shapes"]:
        statistics = [row[key] or {} for key in ratios]
        cells = [
            number(values.get(key), ".2f")
            for values in statistics
            for key in ("geometric_mean", "max")
        ]
        rows.append([row["name"], *cells])
    title = f"time of each map relative to Muon's time: geometric mean and maximum over {len(results['shapes'])} shapes"
    return [*tables, Table(["map", "/Muon bf16", "max", "/Muon fp32", "max"], rows, title)]


def _milliseconds(seconds: dict[str, float]) -> list[str]:
    spread = (seconds["high"] - seconds["low"]) / 2 / seconds["median"]
    return [_scaled(seconds["median"], 1e-3), number(spread, ".0%")]


def _scaled(value: float | None, unit: float) -> str:
    """Three digits, or all before the decimal point: 0.0123, 4.56, 1234; a dash for None."""
    return (
        "-" if value is None else number(value / unit, ".3g" if abs(value / unit) < 100 else ".0f")
    )


def _error(value: float) -> str:
    return f"{value:.1%}" if value >= 1e-3 else f"{value:.0e}"
