"""Complete checkpoints: sealed when all their files are on the disk, verified by content before
anything reads them.

transformers writes a checkpoint file by file, resumes from an incomplete one, and starts with an
empty optimizer state if that file is missing, all without a warning. Here a checkpoint is complete
once it contains the seal `soren_align.json`, written last: the size and the hash of every file, the
step, and the origin of the checkpoint (recipe, data, starting weights, template).

An error of writing, such as on a full disk, is one sentence, and leaves the last complete
checkpoint.
"""

import contextlib
import errno
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..core.errors import REMEDIES, ResumableError, UserError, free_bytes
from ..core.files import (
    CHANGED,
    chunk_digests,
    chunks_of,
    contents,
    remove,
    sync_folder,
    sync_folders,
    tree_sha256,
    write,
)
from ..recipe import differences
from ..run.folder import COMPLETE_MARKER, PREVIOUS, Seal, read_seal, step_of
from ..sharding import CheckpointException, check_parts, rank_of_file, to_universal
from ..sharding.ranks import Ranks

PICKLE_REFUSED = (
    "is not loaded, because it contains more than tensors and plain data, and such a pickle can "
    "run code; remove this checkpoint, or write run.overwrite: true"
)
STREAM_FILE = "stream.json"
_MAX_NAMED = 3
"""Files that a message names; the others are counted."""
PROBE_BYTES = 2**20
"""The bytes that `_refusal` writes: a disk that a checkpoint has filled has less."""


def seal(checkpoint: Path, origin: dict[str, Any], ranks: Ranks = Ranks()) -> None:
    """Write a checkpoint's files to the disk, and then its seal. Collective.

    Each rank syncs and hashes the files that it has written: on a network file system another rank
    may not see them yet. origin: identifies the run, plain data; see build.build_trainer.
    """
    # Sync and hash: a power cut after the seal must not find a file that was never on the disk. A
    # rank that fails here takes the others along; they would wait for it in `gather`.
    sealed = {}
    with ranks.shared_errors():
        written = [
            name for name in _names(checkpoint) if rank_of_file(name, ranks.num_ranks) == ranks.rank
        ]
        files = contents((checkpoint / name for name in written), settle=True)
        sealed = dict(zip(written, files, strict=True))
    files = {name: content for part in ranks.gather(sealed) for name, content in part.items()}
    # Seal: the names of the files in their folders first, then the seal, then the seal's own name.
    with ranks.shared_errors():
        if ranks.is_first:
            sync_folders(checkpoint)
            record = Seal(
                step=step_of(checkpoint), origin=origin, files=dict(sorted(files.items()))
            )
            write(checkpoint / COMPLETE_MARKER, json.dumps(record, indent=2) + "\n")
            sync_folder(checkpoint)
            sync_folder(checkpoint.parent)


def check(checkpoint: Path, origin: dict[str, Any]) -> None:
    """Raise UserError unless a checkpoint has all its files, and the origin `origin`.

    The content of the files is not read here; see `verify`.
    """
    actual_origin = _check_files(checkpoint)["origin"]
    check_parts(checkpoint)
    if actual_origin.get("processes", 0) is None:  # by `make_universal`
        origin = origin | {"processes": None}
    # Another recipe, start or data would continue silently with this optimizer state.
    changed = differences(actual_origin, origin)
    if changed:
        raise UserError(
            f"{checkpoint}: belongs to another run, because these values differ:",
            *(f"  {line}" for line in changed),
            "Restore the checkpoint's values to resume, or choose another run.output_dir",
        )


def verify(checkpoint: Path, ranks: Ranks = Ranks()) -> None:
    """Raise UserError on all ranks unless the files have the content that the seal lists.
    Collective.

    The ranks share the chunks of all files, so that a large file takes none of them longer than the
    others.
    """
    # Divide: 28 GB of a 7B model in float32 take one process 20 s at 1.5 GB/s, and eight 3 s.
    files, digests = {}, []
    with ranks.shared_errors():
        files = read_seal(checkpoint)["files"]
        chunks = [
            c
            for name, content in files.items()
            for c in chunks_of(checkpoint / name, content["num_bytes"])
        ]
        first, end = (
            len(chunks) * rank // ranks.num_ranks for rank in (ranks.rank, ranks.rank + 1)
        )
        digests = [*chunk_digests(chunks[first:end])]
    # Join: the chunks of all ranks in their order are those of the files.
    everything = (digest for part in ranks.gather(digests) for digest in part)
    hashes = {
        name: tree_sha256(everything, content["num_bytes"]) for name, content in files.items()
    }
    changed = [name for name, content in files.items() if hashes[name] != content["tree_sha256"]]
    if changed:
        raise UserError(f"{checkpoint}: {_listed(changed)}: {CHANGED}; {PREVIOUS}")


def _check_files(checkpoint: Path) -> Seal:
    """Return a checkpoint's seal.
    Raises UserError if a file is missing or of another size, or the folder was renamed.
    """
    seal = read_seal(checkpoint)
    # A renamed folder would resume at another step than that of its state.
    if (step := seal["step"]) != step_of(checkpoint):
        raise UserError(
            f"{checkpoint}: is the checkpoint of step {step}; rename this folder to "
            f"checkpoint-{step}"
        )
    # Sizes first: a truncated file is found without reading gigabytes, which `verify` does.
    expected = {name: content["num_bytes"] for name, content in seal["files"].items()}
    sizes = {
        name: (checkpoint / name).stat().st_size
        for name in expected
        if (checkpoint / name).is_file()
    }
    damaged = [name for name in expected if sizes.get(name) != expected[name]]
    if damaged:
        raise UserError(
            f"{checkpoint}: {_listed(damaged)} missing or truncated, so the state of training is "
            f"incomplete; restore the missing data, or {PREVIOUS}"
        )
    return seal


def _names(checkpoint: Path) -> list[str]:
    """Return the paths of all files below a checkpoint's folder but the seal, relative to it."""
    names = (
        path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()
    )
    return [name for name in names if name != COMPLETE_MARKER]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(sorted(names)[:_MAX_NAMED]) + more


def make_universal(checkpoint: Path) -> None:
    """Allow any number of processes to resume from a complete checkpoint.

    The checkpoints that they write are bound to their number again.
    """
    origin, latest_tag = read_seal(checkpoint)["origin"], checkpoint / "latest"
    # Clean: an interrupted conversion has left parts, which the seal does not list. DeepSpeed's
    # checkpoints alone have a tag.
    if origin.get("processes") is not None and latest_tag.is_file():
        check_parts(checkpoint)
        remove(checkpoint / "latest_universal")
        remove(checkpoint / f"{latest_tag.read_text().strip()}_universal")
    # Verify before converting: afterwards a damaged file would be sealed again.
    _check_files(checkpoint)
    verify(checkpoint)
    if origin.get("processes") is None:
        return
    # DDP's checkpoints are whole, and torch reads FSDP2's shards into any others: only their seal
    # binds these to a number of processes.
    if latest_tag.is_file():
        try:
            to_universal(checkpoint)
        except pickle.UnpicklingError as error:
            raise UserError(f"{checkpoint}: {PICKLE_REFUSED}") from error
    seal(checkpoint, origin | {"processes": None})


@contextlib.contextmanager
def write_errors(folder: Path, remedy: str | None = None) -> Iterator[None]:
    """Raise ResumableError for an error of writing `folder` within the block; the folder is then
    incomplete, and is removed.

    It names the folder, the free space of its disk, and `remedy`: by default the last complete
    checkpoint beside it.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        cause = _os_error(error) or _refusal(folder.parent)
        if cause is None or cause.errno not in REMEDIES:
            raise
        space = f" ({free_bytes(folder):,} bytes free)" if cause.errno == errno.ENOSPC else ""
        # The incomplete folder is removed: it takes the space that a rerun needs.
        with contextlib.suppress(OSError):
            remove(folder)
        raise ResumableError(
            f"{os.fsdecode(cause.filename or folder)}: {cause.strerror}{space}. "
            f"{remedy or _remedy(folder.parent, cause.errno)}"
        ) from error


def _os_error(error: BaseException) -> OSError | None:
    """Return the error of the system behind one of writing, if the library passes it on."""
    # torch.distributed.checkpoint has the errors of all ranks in one
    is_shared = isinstance(error, CheckpointException)
    causes = [cause for cause, _ in error.failures.values()] if is_shared else [error]
    return next((cause for cause in causes if isinstance(cause, OSError)), None)


def _refusal(folder: Path) -> OSError | None:
    """Return why the system refuses to write a small file into `folder`; None if it does not.

    torch.save and safetensors raise errors of their own on a full disk, without an errno (torch
    2.13, safetensors 0.8): after one, this asks the disk itself.
    """
    probe = folder / f".probe-{os.getpid()}"
    try:
        probe.write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        return error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


def _remedy(folder: Path, number: int = errno.ENOSPC) -> str:
    """Return the last complete checkpoint below or beside `folder`, and the way on.
    number: the errno.
    """
    complete = [seal.parent for seal in folder.glob(f"**/checkpoint-*/{COMPLETE_MARKER}")]
    last = max(complete, key=step_of).name if complete else None
    state = f"The last complete checkpoint is {last}" if last else "No checkpoint is complete"
    action = REMEDIES.get(number, REMEDIES[errno.ENOSPC])
    way = "resume" if complete else "start again"
    return (
        f"{state}; {action}, then rerun the same command to {way}; or choose another run.output_dir"
    )
