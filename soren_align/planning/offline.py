"""Facts about the models and datasets of the shipped recipes, for a plan without the hub.

The numbers are the published ones; a plan that uses them has a notice about it.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core import shipped
from ..core.files import resolve_path
from ..core.patches import hub_offline
from ..recipe import Data, DataSplit, HeldOut, HeldOutNumber, is_local
from ..recipe.model import hub_answers


def model_config(name: str) -> Path | None:
    """The folder with the config.json of a model of the shipped recipes, or of a local one; None
    for another model.
    """
    folder = resolve_path(name) if is_local(name) else shipped.ROOT / "configs/models" / name
    return folder if (folder / "config.json").is_file() else None


def num_examples(data: Data) -> int | None:
    """Training examples of all sources, from the dataset cards of the shipped recipes; None if one
    has no card.
    """
    total = 0
    for source in data.sources:
        number = _card(source).get("rows", {}).get(source.split)
        if number is None:
            return None
        # In the order of training: the limit first, then the weight of the mixture.
        total += round(min(number, source.limit or number) * source.weight)
    if isinstance(data.eval, HeldOutNumber):
        return max(1, total - data.eval.examples)
    return round(total * (1 - data.eval.fraction)) if isinstance(data.eval, HeldOut) else total


def streamed(data: Data, num_trained: int) -> dict[str, Any]:
    """Return {"num_examples", "num_eval_examples", "bytes"} that a stream reads from the hub, for
    `num_trained` examples.

    bytes: of the compressed files, by the mean size of an example on the dataset's card; None if
    one has no card.
    """
    weights = sum(source.weight for source in data.sources)
    parts: list[tuple[DataSplit, float]] = [
        (s, num_trained * s.weight / weights) for s in data.sources
    ]
    num_eval = data.eval.limit if isinstance(data.eval, DataSplit) and data.eval.limit else None
    if isinstance(data.eval, DataSplit) and num_eval:
        parts.append((data.eval, num_eval))
    sizes = []
    for split, number in parts:
        card = _card(split)
        if "download_bytes" in card:
            sizes.append(number * card["download_bytes"] / sum(card["rows"].values()))
    num_bytes = round(sum(sizes)) if len(sizes) == len(parts) else None
    return {"num_examples": num_trained, "num_eval_examples": num_eval, "bytes": num_bytes}


def _card(split: DataSplit) -> dict[str, Any]:
    """The numbers of a dataset's configuration in configs/datasets.json; empty if there are
    none.
    """
    datasets = json.loads((shipped.ROOT / "configs/datasets.json").read_text(encoding="utf-8"))
    return datasets.get("/".join(filter(None, (split.path, split.name))), {})


@contextlib.contextmanager
def offline_without_hub() -> Iterator[None]:
    """Switch offline mode on within this context if the hub does not answer now."""
    with contextlib.nullcontext() if hub_answers() else hub_offline():
        yield
