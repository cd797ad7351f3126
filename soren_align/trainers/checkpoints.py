"""Which checkpoint a run may go on from.

transformers writes a checkpoint file by file, resumes from half of one, and starts the optimizer from nothing where
its state is missing, all without a word. Here a checkpoint counts once `soren_align.json` lies in it, written last,
which lists every file with its size and what the checkpoint belongs to: recipe, data, starting weights, template.
"""

import json
import pickle
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import is_component, read_json, remove, write
from ..recipe import differences
from ..run_folder import SEAL
from ..sharding import check_parts, to_universal

PICKLED = (
    "holds more than tensors and plain data, and is not loaded: a pickle can run code. Remove it, or run.overwrite"
)
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
            remove(checkpoint)
            notices.append(f"{checkpoint.name} was not completely written; removed")
            continue
        check(checkpoint, origin)
        return checkpoint, notices
    return None, notices


def check(checkpoint: Path, origin: dict[str, Any]) -> None:
    """UserError unless every file of the checkpoint is there and it belongs to this run's recipe, data and start."""
    files, there = _sealed(checkpoint)
    sizes = {name: (checkpoint / name).stat().st_size for name in files if (checkpoint / name).is_file()}
    damaged = [n for n in {*files, *NEEDED} if sizes.get(n) != files.get(n, -1)]
    # optimizer.pt; under ZeRO each rank's *_optim_states.pt, under FSDP2 a folder optimizer_0
    if not damaged and not any("optim" in name for name in sizes):
        damaged = ["the optimizer's state"]
    if damaged:
        raise UserError(
            f"{checkpoint}: {', '.join(sorted(damaged))} missing or cut short; going on would start the optimizer or "
            "the schedule from nothing. Restore it, or remove this checkpoint's folder to go on from the one before"
        )
    state = read_json(checkpoint / "trainer_state.json")
    if not isinstance(state, dict) or any(type(state.get(key)) is not int for key in ("global_step", "max_steps")):
        raise UserError(f"{checkpoint / 'trainer_state.json'}: was not written by transformers; remove the checkpoint")
    check_parts(checkpoint)
    if "processes" in there and there["processes"] is None:  # made for any number: `for_any_number`
        there, origin = ({k: v for k, v in side.items() if k != "processes"} for side in (there, origin))
    changed = differences(there, origin)
    if changed:
        raise UserError(
            f"{checkpoint}: belongs to another run:",
            *(f"  {line}" for line in changed),
            "Restore these to go on, or choose another run.output_dir",
        )


def _sealed(checkpoint: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """A complete checkpoint's files with their sizes, and what it belongs to. UserError if it says neither."""
    if not (checkpoint / SEAL).is_file():
        raise UserError(f"{checkpoint}: no complete checkpoint of soren-align ({SEAL} is missing)")
    record = read_json(checkpoint / SEAL)
    files, origin = (record.get(key) if isinstance(record, dict) else None for key in ("files", "origin"))
    if not isinstance(files, dict) or not isinstance(origin, dict) or not all(_is_within(name) for name in files):
        raise UserError(f"{checkpoint / SEAL}: was not written by soren-align, or is damaged; remove the checkpoint")
    return files, origin


def _is_within(name: str) -> bool:
    return all(is_component(part) for part in name.split("/"))


def for_any_number(checkpoint: Path) -> None:
    """Let a complete checkpoint be resumed from by any number of processes. Later ones are bound to a number again."""
    _, origin = _sealed(checkpoint)
    if (checkpoint / "latest").is_file():  # DeepSpeed's; those of DDP are whole already
        check_parts(checkpoint)
        try:
            to_universal(checkpoint)
        except pickle.UnpicklingError as error:
            raise UserError(f"{checkpoint}: {PICKLED}") from error
    seal(checkpoint, origin | {"processes": None})


def step_of(checkpoint: Path) -> int:
    """The optimizer step in a checkpoint's name; -1 for a name of another kind."""
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1
