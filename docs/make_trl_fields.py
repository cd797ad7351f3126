"""Write soren_align/recipe/trl.json: the fields of TRL's config classes, so that no command imports TRL to check a key.

Run it after an upgrade of TRL or transformers; tests/recipe/test_trl_config.py compares.
"""

import json

from soren_align.recipe import trl
from soren_align.tasks import TASKS


def content() -> dict:
    """The fields by config class, and the versions that they are of."""
    configs = sorted({task.config for task in TASKS.values()})
    return {"versions": trl.versions(), **{config: trl.read_fields(config) for config in configs}}


if __name__ == "__main__":
    trl.FILE.write_text(json.dumps(content(), indent=1) + "\n", encoding="utf-8")
