"""What stands in the tree about the shipped recipes' models and datasets, for a plan without the hub.

The numbers are the published ones; a plan that rests on them says so.
"""

import json
import os
from pathlib import Path

from huggingface_hub import constants, get_session

from .. import shipped
from ..recipe import DataSplit

SECONDS = 3.0
"""So long a plan waits for the hub to answer; its client would try for half a minute."""


def model_config(name: str) -> Path | None:
    """The folder with the config.json of a model of the shipped recipes."""
    folder = shipped.ROOT / "configs/models" / name
    return folder if (folder / "config.json").is_file() else None


def num_rows(split: DataSplit) -> int | None:
    """How many rows a split of a shipped recipe's dataset has, by its card, or its limit if that is less."""
    datasets = json.loads((shipped.ROOT / "configs/datasets.json").read_text(encoding="utf-8"))
    rows = datasets.get(split.path, {}).get("rows", {}).get(split.split)
    return rows and min(rows, split.limit or rows)


def go_offline_without_hub() -> None:
    """If the hub does not answer, keep its clients from trying for long. Before they are imported."""
    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # whatever its client raises: it cannot be asked
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
