"""Translate learning rates between tools, by the RMS of one update of a matrix.

A tool adds lr * factor * scale * O to an m x n matrix. The min(m, n) singular values of O are about
1, so that O has an RMS of 1 / sqrt(max(m, n)). The tools differ in scale and factor: rates.toml has
them, each read in the tool's own source. tests/planning/test_rates.py runs the installed tools.
"""

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.errors import UserError, did_you_mean
from ..core.optimizer_settings import MATCH_RMS
from ..core.text import Table, Terminal, join_words, print_labelled

SCALES: dict[str, Callable[[int, int], float]] = {
    "": lambda m, n: 1.0,
    "sqrt(m/n)": lambda m, n: math.sqrt(m / n),
    "sqrt(max(1, m/n))": lambda m, n: math.sqrt(max(1, m / n)),
    "sqrt(max(m, n))": lambda m, n: math.sqrt(max(m, n)),
}
"""Scales of an m x n matrix (m outputs, n inputs), without the number before them."""


@dataclass(frozen=True)
class Convention:
    """The meaning of a learning rate in one mode of a tool; fields as in rates.toml."""

    name: str
    """TOOL or TOOL:MODE."""
    scale: str
    source: str
    version: str
    factor: float = 1.0
    key: str = ""
    """The tool's key of the factor; empty if it has none."""
    clips: bool = False
    """Whether the factor is a norm to which the updates of all matrices are clipped together."""
    decays: bool = True
    lr: float = 1.0

    @property
    def tool(self) -> str:
        """The name without the mode."""
        return self.name.partition(":")[0]

    @property
    def form(self) -> str:
        """The words of `parse`: "megatron:spectral[,MUON_EXTRA_SCALE_FACTOR]"."""
        return self.name + (f"[,{self.key.upper()}]" if self.key else "")

    def update_rms(self, shapes: Sequence[tuple[int, int, int]]) -> list[float]:
        """Return the RMS of one update for each shape. shapes: (m, n, number) of all matrices."""
        shape = self.scale.lstrip("0123456789. ")
        number = self.scale.removesuffix(shape)
        scales = [float(number or 1) * SCALES[shape](m, n) for m, n, _ in shapes]
        factor = self.factor
        if self.clips:
            # The square of the norm of O is its rank. AdamW's gradients, which the norm has too,
            # are left out: Qwen2.5-0.5B's updates alone have a norm of 550.
            squares = (k * min(m, n) * s**2 for s, (m, n, k) in zip(scales, shapes, strict=True))
            factor = min(1.0, factor / math.sqrt(sum(squares)))
        sizes = zip(scales, shapes, strict=True)
        return [self.lr * factor * s / math.sqrt(max(m, n)) for s, (m, n, _) in sizes]


def _conventions() -> list[Convention]:
    """The table of rates.toml, a record per mode."""
    text = (Path(__file__).parent / "rates.toml").read_text(encoding="utf-8")
    sections: dict[str, dict[str, Any]] = tomllib.loads(text)
    records = []
    for name, own in sections.items():
        section = {**sections.get(own.pop("same", ""), {}), **own}
        (key, factor), *_ = section.pop("factor", {"": 1.0}).items()
        modes = section.pop("modes", None) or {"": section.pop("scale")}
        for mode, scale in modes.items():
            name_of_mode = f"{name}:{mode}" if mode else name
            records.append(Convention(name_of_mode, scale, factor=factor, key=key, **section))
    return records


CONVENTIONS = _conventions()
ADAMW, OURS = CONVENTIONS[0], "soren-align"


def parse(text: str, option: str, *, has_lr: bool) -> Convention:
    """Return the convention of TOOL[:MODE][,FACTOR], with ",LR" behind it if `has_lr`.

    option: for messages. Raises UserError.
    """
    name, *words = (word.strip() for word in text.split(","))
    tool, _, mode = name.partition(":")
    modes = [convention for convention in CONVENTIONS if convention.tool == tool]
    tools, names = {c.tool: 0 for c in CONVENTIONS}, [c.name for c in modes]
    place = f"{option} {text}"
    if not modes:
        remedy = did_you_mean(tool, tools, f"write one of {', '.join(tools)}")
        raise UserError(f"{place}: {tool!r} is no known tool{remedy}")
    if mode and name not in names:
        remedy = did_you_mean(name, names, f"write {join_words(names, 'or')}")
        raise UserError(f"{place}: {tool} has no mode {mode!r}{remedy}")
    convention = next((c for c in modes if c.name == name), modes[0])

    form, numbers = convention.form + ",LR" * has_lr, []
    for word in words:
        try:
            numbers.append(float(word))
        except ValueError:
            numbers.append(math.nan)
        if not 0 < numbers[-1] < math.inf:
            raise UserError(f"{place}: {word!r} is no number above 0; write {form}")
    if has_lr and not numbers:
        raise UserError(f"{place}: has no learning rate; write {form}")
    if len(numbers) > has_lr + bool(convention.key):
        raise UserError(f"{place}: has too many numbers; write {form}")
    lr = numbers.pop() if has_lr else 1.0
    return replace(convention, lr=lr, factor=numbers[0] if numbers else convention.factor)


def translate(
    matrices: Sequence[dict[str, Any]], start: Convention, target: Convention | None = None
) -> dict[str, Any]:
    """Return a translation as plain data: the size of the updates, and rates for the same size.

    matrices: {"layers", "shape", "number"} of each shape. start: with its rate.
    """
    shapes = [(*row["shape"], row["number"]) for row in matrices]
    # One rate can match one group only, if the scales of two tools differ: the largest group.
    main = max(range(len(shapes)), key=lambda i: math.prod(shapes[i]))
    rms = start.update_rms(shapes)

    def differences(sizes: Sequence[float]) -> list[str]:
        """Return "down_proj moves 5.3 times less" for each group unlike the largest one."""
        phrases = []
        for row, size in zip(matrices, sizes, strict=True):
            ratio = size / sizes[main]
            if not math.isclose(ratio, 1, rel_tol=1e-6):
                times = f"{max(ratio, 1 / ratio):.1f} times {'more' if ratio > 1 else 'less'}"
                verb = "move" if len(row["layers"]) > 1 else "moves"
                phrases.append(f"{join_words(row['layers'])} {verb} {times}")
        return phrases

    def described(c: Convention) -> dict[str, Any]:
        factor = {c.key: c.factor} if c.key else {}
        return {"name": c.name, "factor": factor, "lr": c.lr, "scale": c.scale}

    def equivalent(convention: Convention) -> dict[str, Any]:
        """Return the rate of another convention for the same updates of the largest group."""
        units = replace(convention, lr=1.0).update_rms(shapes)
        lrs = [size / unit for size, unit in zip(rms, units, strict=True)]
        has_decay = convention.decays and start.decays
        return {
            **described(replace(convention, lr=lrs[main])),
            "lr_of_group": lrs,
            # A group that needs a smaller rate moves more at this one.
            "differences": differences([1 / lr for lr in lrs]),
            "weight_decay_times": start.lr / lrs[main] if has_decay else None,
        }

    # The first of our scales with the same proportions; else the one that AdamW's rates suit.
    ours = [equivalent(c) for c in CONVENTIONS if c.tool == OURS] if start.tool != OURS else []
    return {
        "from": described(start),
        "matrices": [{**row, "update_rms": r} for row, r in zip(matrices, rms, strict=True)],
        "largest": matrices[main]["layers"],
        "differences": differences(rms),
        "adamw": equivalent(ADAMW),
        "to": equivalent(target) if target else None,
        "soren_align": next((row for row in ours if not row["differences"]), [*ours, None][0]),
    }


def print_conventions(console: Terminal) -> None:
    """Print all conventions, 80 columns wide."""
    rows = [[c.name, c.scale, c.key] for c in CONVENTIONS]
    console.print(Table(["TOOL:MODE", "scale", "FACTOR"], rows, align="lll").rich())
    console.print()
    meaning = "an m x n matrix changes by lr * FACTOR * scale * O; O has singular values of about 1"
    print_labelled(console, "scale", meaning)


def print_translation(translation: dict[str, Any], console: Terminal) -> None:
    """Print the return value of `translate`, 80 columns wide."""
    origin, target = translation["from"], translation["to"]
    print_labelled(console, "from", f"{setting(origin)}, with the scale {origin['scale']}")
    console.print()
    columns = [translation["adamw"]]
    columns += [target] if target and target["name"] != ADAMW.name else []
    rows = []
    for i, row in enumerate(translation["matrices"]):
        numbers = [row["update_rms"], *(column["lr_of_group"][i] for column in columns)]
        cells = [", ".join(row["layers"]), " x ".join(map(str, row["shape"])), str(row["number"])]
        rows.append([*cells, *(short(number, 2) for number in numbers)])
    head = ["matrices", "shape", "number", "update RMS"]
    head += ["lr in\n" + column["name"].replace(":", ":\n") for column in columns]
    console.print(Table(head, rows).rich())
    console.print()

    largest = join_words(translation["largest"])
    differences = join_words(translation["differences"])
    sentence = f"compared with {largest}, {differences}" if differences else "all of the same RMS"
    print_labelled(console, "updates", sentence)
    for label, row in (("to", target), ("ours", translation["soren_align"])):
        if row is None:
            continue
        print_labelled(console, label, setting(row), wrap=False)
        differences = join_words(row["differences"])
        same = f"the same updates of {largest}; then {differences}" if differences else ""
        print_labelled(console, "", same or "the same updates of all matrices")
        times = row["weight_decay_times"]
        if times and not math.isclose(times, 1, rel_tol=0.01):
            decay = f"for the same decay, lr * weight_decay, multiply weight_decay by {times:.3g}"
            print_labelled(console, "", decay)
    if translation["soren_align"]:
        aux = "optimizer.aux_lr, for AdamW's parameters, is optimizer.lr by default"
        print_labelled(console, "", aux)


def setting(row: dict[str, Any]) -> str:
    """Return an equivalent rate in the words of `parse`, or of a recipe if it is ours."""
    tool, _, mode = row["name"].partition(":")
    factor = {key: f"{value:g}" for key, value in row["factor"].items()}
    lr = short(row["lr"])
    if tool != OURS:
        return ",".join([row["name"], *factor.values(), lr])
    optimizer, _, scale = mode.rpartition(".")
    keys = {"name": optimizer, "adjust_lr_fn": scale, "lr": lr}
    keys |= factor if row["factor"].get("match_rms") != MATCH_RMS else {}
    return " ".join(f"optimizer.{key}={value}" for key, value in keys.items() if value)


def short(rate: float, digits: int = 3) -> str:
    """Return a rate, rounded to so many digits, as recipes write it: 2.0e-5, 4.18e-5."""
    mantissa, _, exponent = f"{rate:.{digits - 1}e}".partition("e")
    return f"{float(mantissa)}e{int(exponent)}"
