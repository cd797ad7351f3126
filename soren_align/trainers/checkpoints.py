"""Which checkpoint a run may go on from.

transformers writes a checkpoint file by file, resumes from half of one, and starts the optimizer from nothing where
its state is missing, all without a word. Here a checkpoint counts once `soren_align.json` lies in it, written last,
which lists every file with its size and what the checkpoint belongs to: recipe, data, starting weights, template.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from ..recipe import UserError, differences
from ..report import SEAL, write
from ..sharding import to_universal

NEEDED = ("scheduler.pt", "trainer_state.json")


def seal(checkpoint: Path, origin: dict[str, Any]) -> None:
    """Declare a checkpoint complete; origin: what it belongs to, plain data."""
    found = (f for f in sorted(checkpoint.rglob("*")) if f.is_file() and f.name != SEAL)
    files = {f.relative_to(checkpoint).as_posix(): f.stat().st_size for f in found}
    write(checkpoint / SEAL, json.dumps({"origin": origin, "files": files}, indent=2) + "\n")


def latest(folder: Path, origin: dict[str, Any]) -> tuple[Path | None, list[str]]:
    """The newest checkpoint under `folder` to go on from, or None, and notices about unfinished ones, now removed.

    Raises UserError if the newest complete one is damaged or belongs to something else: choosing an older one, or
    none, is not a decision to take silently.
    """
    notices = []
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=step_of, reverse=True):
        if not (checkpoint / SEAL).is_file():
            # A kill fell into the writing; nobody can go on from this.
            shutil.rmtree(checkpoint)
            notices.append(f"{checkpoint.name} was not completely written; removed")
            continue
        check(checkpoint, origin)
        return checkpoint, notices
    return None, notices


def check(checkpoint: Path, origin: dict[str, Any]) -> None:
    """UserError unless every file of the checkpoint is there and it belongs to this run's recipe, data and start."""
    if not (checkpoint / SEAL).is_file():
        raise UserError(f"{checkpoint}: no complete checkpoint of soren-align ({SEAL} is missing)")
    record = json.loads((checkpoint / SEAL).read_text(encoding="utf-8"))
    sizes = {name: (checkpoint / name).stat().st_size for name in record["files"] if (checkpoint / name).is_file()}
    damaged = [n for n in {*record["files"], *NEEDED} if sizes.get(n) != record["files"].get(n, -1)]
    # optimizer.pt; under ZeRO each rank's *_optim_states.pt, under FSDP2 a folder optimizer_0
    if not damaged and not any("optim" in name for name in sizes):
        damaged = ["the optimizer's state"]
    if damaged:
        raise UserError(
            f"{checkpoint}: {', '.join(sorted(damaged))} missing or cut short; going on would start the optimizer or "
            "the schedule from nothing. Restore it, or remove this checkpoint's folder to go on from the one before"
        )
    there = record["origin"]
    if "processes" in there and there["processes"] is None:  # made for any number: `for_any_number`
        there, origin = ({k: v for k, v in side.items() if k != "processes"} for side in (there, origin))
    changed = differences(there, origin)
    if changed:
        raise UserError(
            f"{checkpoint}: belongs to another run:",
            *(f"  {line}" for line in changed),
            "Restore these to go on, or choose another run.output_dir",
        )


def for_any_number(checkpoint: Path) -> None:
    """Let a complete checkpoint be resumed from by any number of processes. Later ones are bound to a number again."""
    origin = json.loads((checkpoint / SEAL).read_text(encoding="utf-8"))["origin"]
    if (checkpoint / "latest").is_file():  # DeepSpeed's; those of DDP are whole already
        to_universal(checkpoint)
    seal(checkpoint, origin | {"processes": None})


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name; -1 for a name of another kind."""
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else -1
