"""Write the tables of docs/learning-rates.md from `soren_align/planning/rates.toml`.

    python docs/make_rates.py

tests/test_docs.py compares the page with what `page` returns.
"""

import re
from pathlib import Path

from soren_align.planning.rates import ADAMW, CONVENTIONS, Convention

PAGE = Path(__file__).with_name("learning-rates.md")
TABLE = re.compile(r"<!-- table of (scales|sources) -->\n(\|.*\n)*")
# hidden size, size of keys and values, size of the MLP, layers: of the published config.json
MODELS = {"Qwen2.5-7B": (3584, 512, 18944, 28), "Mistral-7B, Llama-3-8B": (4096, 1024, 14336, 32)}


def page(text: str) -> str:
    """`text` with its two tables written anew."""
    makers = {"scales": _scales, "sources": _sources}
    return TABLE.sub(lambda match: f"<!-- table of {match[1]} -->\n{makers[match[1]]()}", text)


def shapes(hidden: int, keys: int, mlp: int, layers: int) -> list[tuple[int, int, int]]:
    """(outputs, inputs, number) of q and o, k and v, gate and up, down."""
    pairs = [(hidden, hidden), (keys, hidden), (mlp, hidden)]
    return [*((m, n, 2 * layers) for m, n in pairs), (hidden, mlp, layers)]


def adamw_rates(convention: Convention) -> tuple[str, ...]:
    """AdamW's rate over the tool's, at the default factor, for each group of MODELS."""
    models = [shapes(*sizes) for sizes in MODELS.values()]
    pairs = [(convention.update_rms(model), ADAMW.update_rms(model)) for model in models]
    return tuple(f"{r / a:.3g}" for rms, adamw in pairs for r, a in zip(rms, adamw, strict=True))


def _scales() -> str:
    """A row for all conventions of the same rates."""
    names: dict[tuple[str, ...], list[str]] = {}
    for convention in CONVENTIONS:
        names.setdefault(adamw_rates(convention), []).append(f"`{convention.name}`")
    first, second = MODELS
    head = ["TOOL:MODE", f"{first}: q, o", "k, v", "gate, up", "down"]
    head += [f"{second}: q, o", "k, v", "gate, up", "down"]
    return _markdown(head, [[", ".join(names[rates]), *rates] for rates in names])


def _sources() -> str:
    """A row for each file of a tool."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for c in CONVENTIONS:
        factor = f"`{c.key}` ({c.factor:g})" if c.key else "-"
        tool, _, mode = c.name.partition(":")
        key = (f"`{tool}`", factor, f"{c.source} ({c.version})")
        rows.setdefault(key, []).append(f"`{mode}`: {c.scale}" if mode else c.scale)
    head = ["tool", "scale of each mode", "FACTOR (default)", "formula read in (version)"]
    cells = [[tool, "; ".join(scales), *others] for (tool, *others), scales in rows.items()]
    return _markdown(head, cells)


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
