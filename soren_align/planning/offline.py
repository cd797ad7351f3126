"""What the package ships about the models and datasets of its recipes, for a plan without the hub.

The numbers are the published ones; a plan that uses them has a notice about it.
"""

import json
import os
from pathlib import Path

from huggingface_hub import constants, get_session

from .. import shipped
from ..recipe import Data, HeldOut, HeldOutNumber

TIMEOUT_SECONDS = 3.0
"""For the hub's answer; its own client would retry for half a minute."""


def model_config(name: str) -> Path | None:
    """The folder with the config.json of a model of the shipped recipes; None for another model."""
    folder = shipped.ROOT / "configs/models" / name
    return folder if (folder / "config.json").is_file() else None


def num_examples(data: Data) -> int | None:
    """Training examples of all sources, from the dataset cards of the shipped recipes; None if one has no card."""
    datasets = json.loads((shipped.ROOT / "configs/datasets.json").read_text(encoding="utf-8"))
    total = 0
    for source in data.sources:
        number = datasets.get(source.path, {}).get("rows", {}).get(source.split)
        if number is None or source.name is not None:
            return None
        total += round(min(number, source.limit or number) * source.weight)
    if isinstance(data.eval, HeldOutNumber):
        return max(1, total - data.eval.examples)
    return round(total * (1 - data.eval.fraction)) if isinstance(data.eval, HeldOut) else total


def go_offline_without_hub() -> None:
    """Set offline mode if the hub does not answer. Call before the hub's clients are imported."""
    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_SECONDS)
    except Exception:  # whatever its client raises, the hub is unreachable
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
