"""What stands in the tree about the shipped recipes' models and datasets, for a plan without the hub.

The numbers are the published ones; a plan that rests on them says so.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, get_session

from .. import shipped
from ..recipe import TrainSplit

SECONDS = 3.0
"""So long a plan waits for the hub to answer; its client would try for half a minute."""


def model_config(name: str) -> Path | None:
    """The folder with the config.json of a model of the shipped recipes."""
    folder = shipped.ROOT / "configs/models" / name
    return folder if (folder / "config.json").is_file() else None


def num_rows(sources: Sequence[TrainSplit]) -> int | None:
    """How many rows splits of the shipped recipes' datasets have together, by their cards; None if one is not known."""
    datasets = json.loads((shipped.ROOT / "configs/datasets.json").read_text(encoding="utf-8"))
    total = 0
    for source in sources:
        rows = datasets.get(source.path, {}).get("rows", {}).get(source.split)
        if rows is None:
            return None
        total += round(min(rows, source.limit or rows) * source.weight)
    return total


def go_offline_without_hub() -> None:
    """If the hub does not answer, keep its clients from trying for long. Before they are imported."""
    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # whatever its client raises: it cannot be asked
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
