"""Complete checkpoints: marked after they are written, checked before a run resumes from them.

transformers writes a checkpoint file by file, resumes from an incomplete one, and starts with an empty optimizer state
if that file is missing, all without a warning. Here a checkpoint is complete once it contains the marker
`soren_align.json`, written last: it lists every file with its size, and the origin of the checkpoint (recipe, data,
starting weights, template).
"""

import json
import pickle
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import is_component, read_json, remove, write
from ..recipe import differences
from ..run_folder import COMPLETE_MARKER, step_of
from ..sharding import check_parts, to_universal

PICKLE_REFUSED = (
    "contains more than tensors and plain data, and is not loaded: a pickle can run code. Remove it, or write "
    "run.overwrite: true"
)
REQUIRED_FILES = ("scheduler.pt", "trainer_state.json")
_STREAM_FILE = "stream.json"


def latest(folder: Path, origin: dict[str, Any]) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint under `folder`, or None, and notices about incomplete ones, now removed.

    Raises UserError if the newest complete one is damaged or has another origin: an older one, or none, is never
    chosen silently.
    """
    notices = []
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=step_of, reverse=True):
        if not (checkpoint / COMPLETE_MARKER).is_file():  # the process was killed while writing it
            remove(checkpoint)
            notices.append(f"{checkpoint.name} is incomplete; removed")
            continue
        check(checkpoint, origin)
        return checkpoint, notices
    return None, notices


def mark_complete(checkpoint: Path, origin: dict[str, Any]) -> None:
    """Write the marker into a checkpoint. origin: identifies the run, plain data; see build.build_trainer."""
    paths = (path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != COMPLETE_MARKER)
    sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in paths}
    write(checkpoint / COMPLETE_MARKER, json.dumps({"origin": origin, "files": sizes}, indent=2) + "\n")


def check(checkpoint: Path, origin: dict[str, Any]) -> None:
    """Raise UserError unless all files of the checkpoint are there and complete, and its origin equals `origin`."""
    expected, actual_origin = _read_marker(checkpoint)
    sizes = {name: (checkpoint / name).stat().st_size for name in expected if (checkpoint / name).is_file()}
    damaged = [name for name in {*expected, *REQUIRED_FILES} if sizes.get(name) != expected.get(name, -1)]
    # optimizer.pt; under ZeRO each rank's *_optim_states.pt, under FSDP2 a folder optimizer_0
    if not damaged and not any("optim" in name for name in sizes):
        damaged = ["the optimizer's state"]
    if damaged:
        raise UserError(
            f"{checkpoint}: {', '.join(sorted(damaged))} missing or truncated; optimizer or schedule would start anew. "
            "Restore it, or remove this checkpoint's folder to resume from the previous one"
        )
    state = read_json(checkpoint / "trainer_state.json")
    if not isinstance(state, dict) or any(type(state.get(key)) is not int for key in ("global_step", "max_steps")):
        raise UserError(f"{checkpoint / 'trainer_state.json'}: was not written by transformers; remove the checkpoint")
    check_parts(checkpoint)
    if "processes" in actual_origin and actual_origin["processes"] is None:  # by `make_universal`
        sides = (actual_origin, origin)
        actual_origin, origin = ({k: v for k, v in side.items() if k != "processes"} for side in sides)
    changed = differences(actual_origin, origin)
    if changed:
        raise UserError(
            f"{checkpoint}: belongs to another run:",
            *(f"  {line}" for line in changed),
            "Restore these to resume, or choose another run.output_dir",
        )


def write_stream(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write the place in a stream (TokenStream.state) into a checkpoint."""
    write(checkpoint / _STREAM_FILE, json.dumps(state) + "\n")


def read_stream(checkpoint: Path) -> dict[str, Any]:
    """Return the place in a stream. Raises UserError if the checkpoint has none."""
    state = read_json(checkpoint / _STREAM_FILE)
    if not isinstance(state, dict):
        raise UserError(f"{checkpoint / _STREAM_FILE}: was not written by soren-align; remove the checkpoint")
    return state


def make_universal(checkpoint: Path) -> None:
    """Allow any number of processes to resume from a complete checkpoint.

    The checkpoints that they write are bound to their number again.
    """
    _, origin = _read_marker(checkpoint)
    if (checkpoint / "latest").is_file():  # DeepSpeed's; those of DDP are not sharded
        check_parts(checkpoint)
        try:
            to_universal(checkpoint)
        except pickle.UnpicklingError as error:
            raise UserError(f"{checkpoint}: {PICKLE_REFUSED}") from error
    mark_complete(checkpoint, origin | {"processes": None})


def _read_marker(checkpoint: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the sizes of a complete checkpoint's files, and its origin. Raises UserError for any other folder."""
    marker = checkpoint / COMPLETE_MARKER
    if not marker.is_file():
        raise UserError(f"{checkpoint}: no complete checkpoint of soren-align ({COMPLETE_MARKER} is missing)")
    record = read_json(marker)
    files, origin = (record.get(key) if isinstance(record, dict) else None for key in ("files", "origin"))
    if not isinstance(files, dict) or not isinstance(origin, dict) or not all(_is_within(name) for name in files):
        raise UserError(f"{marker}: was not written by soren-align, or is damaged; remove the checkpoint")
    return files, origin


def _is_within(name: str) -> bool:
    return all(is_component(part) for part in name.split("/"))
