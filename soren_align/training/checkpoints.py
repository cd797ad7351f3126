"""Complete checkpoints: sealed when all their files are on the disk, verified by content before
anything reads them.

transformers writes a checkpoint file by file, resumes from an incomplete one, and starts with an
empty optimizer state if that file is missing, all without a warning. Here a checkpoint is complete
once it contains the seal `soren_align.json`, written last: the size and the hash of every file, the
step, and the origin of the checkpoint (recipe, data, starting weights, template).

Disk space is checked before each checkpoint and before the model is saved; an error of writing is
one sentence.
"""

import contextlib
import errno
import json
import pickle
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from peft import PeftModel
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from ..core.errors import REMEDIES, ResumableError, UserError, free_bytes, from_os_error
from ..core.files import (
    CHANGED,
    chunk_digests,
    chunks_of,
    contents,
    read_json,
    remove,
    sync_folder,
    sync_folders,
    tree_sha256,
    write,
)
from ..core.text import with_prefix
from ..recipe import differences
from ..run.folder import COMPLETE_MARKER, PREVIOUS, Seal, read_seal, step_of
from ..run.record import Count, form
from ..sharding import CheckpointException, check_parts, local, rank_of_file, to_universal
from ..sharding.ranks import Ranks
from .trained_optimizer import AttachedOptimizer

PICKLE_REFUSED = (
    "is not loaded, because it contains more than tensors and plain data, and such a pickle can run code; remove this "
    "checkpoint, or write run.overwrite: true"
)
REQUIRED_FILES = ("scheduler.pt", "trainer_state.json")
STREAM_FILE = "stream.json"
_MAX_NAMED = 3
"""Files that a message names; the others are counted."""
TORCH_WRITE_ERRORS = re.compile(
    r"inline_container|PytorchStreamWriter|iostream error|unexpected pos"
)
"""In the RuntimeErrors of torch.save on a full disk, which have no errno (torch 2.13)."""
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Pair = Annotated[list[Count], Field(min_length=2, max_length=2)]
STREAM = form(
    {
        # of STREAM_FILE: the place in a stream; see packing.TokenStream, and data.stream about
        # blocks
        "block": {
            "number": Count,
            "num_read": Count,
            "dropped": dict[str, Count],
            "splits": [
                {"passes": Count, "num_read": Count, "position": _Pair | dict[str, Any] | None}
            ],
        },
        **dict.fromkeys(("num_rows", "num_kept", "num_trained"), Count),
        "dropped": dict[str, Count],
        "counts": dict[str, Any],
    }
)
_TRAINER_STATE = form(
    {
        # of trainer_state.json: see transformers' TrainerState
        "epoch?": _Number,
        "global_step": Count,
        "max_steps": Count,
        **dict.fromkeys(("logging_steps?", "eval_steps?", "save_steps?"), _Number),
        "train_batch_size?": Count | None,
        **dict.fromkeys(("num_train_epochs?", "num_input_tokens_seen?"), Count),
        "total_flos?": _Number,
        "log_history?": [{"step": Count}],  # and measurements
        "best_metric?": float | None,
        "best_global_step?": Count | None,
        "best_model_checkpoint?": str | None,
        **dict.fromkeys(
            ("is_local_process_zero?", "is_world_process_zero?", "is_hyper_param_search?"), bool
        ),
        "trial_name?": str | None,
        "trial_params?": dict[str, Any] | None,
        "stateful_callbacks?": {
            # those that a resumed run reads; transformers' own are not restored
            "BatchHash?": {"values": list[_Int64] | None, "batches": Count},
            "OptimizerCheck?": {"maps_per_step?": Count, "num_skipped_steps?": Count},
            "EarlyStopping?": {"args": dict[str, Any], "attributes": dict[str, Count]},
            "num_tokens?": _Number,
        },
    }
)


def seal(checkpoint: Path, origin: dict[str, Any], ranks: Ranks = Ranks()) -> None:
    """Write a checkpoint's files to the disk, and then its seal. Collective.

    Each rank syncs and hashes the files that it has written: on a network file system another rank
    may not see them yet. origin: identifies the run, plain data; see build.build_trainer.
    """
    sealed = {}
    with ranks.shared_errors():
        written = [
            name for name in _names(checkpoint) if rank_of_file(name, ranks.num_ranks) == ranks.rank
        ]
        files = contents((checkpoint / name for name in written), settle=True)
        sealed = dict(zip(written, files, strict=True))
    files = {name: content for part in ranks.gather(sealed) for name, content in part.items()}
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
    """Raise UserError unless a checkpoint has all its files, plausible counts, and the origin
    `origin`.

    The content of the files is not read here; see `verify`.
    """
    actual_origin = _check_files(checkpoint)["origin"]
    state_file = checkpoint / "trainer_state.json"
    state = read_form(state_file, _TRAINER_STATE)
    step, max_steps = state["global_step"], state["max_steps"]
    if step != step_of(checkpoint) or step > max_steps:
        raise UserError(
            f"{state_file}: contains step {step} of {max_steps}, but lies in the folder {checkpoint.name}; {PREVIOUS}"
        )
    check_parts(checkpoint)
    if actual_origin.get("processes", 0) is None:  # by `make_universal`
        origin = origin | {"processes": None}
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
    everything = (digest for part in ranks.gather(digests) for digest in part)
    hashes = {
        name: tree_sha256(everything, content["num_bytes"]) for name, content in files.items()
    }
    changed = [name for name, content in files.items() if hashes[name] != content["tree_sha256"]]
    if changed:
        raise UserError(f"{checkpoint}: {_listed(changed)}: {CHANGED}; {PREVIOUS}")


def _check_files(checkpoint: Path) -> Seal:
    """Return the seal.
    Raises UserError if a file is missing, of another size or not listed, or the folder renamed.
    """
    seal = read_seal(checkpoint)
    if (step := seal["step"]) != step_of(checkpoint):
        raise UserError(
            f"{checkpoint}: is the checkpoint of step {step}; rename this folder to checkpoint-{step}"
        )
    expected = {name: content["num_bytes"] for name, content in seal["files"].items()}
    sizes = {
        name: (checkpoint / name).stat().st_size
        for name in expected
        if (checkpoint / name).is_file()
    }
    damaged = [
        name for name in {*expected, *REQUIRED_FILES} if sizes.get(name) != expected.get(name, -1)
    ]
    # optimizer.pt; under ZeRO each rank's *_optim_states.pt, under FSDP2 a folder optimizer_0
    if not damaged and not any("optim" in name for name in sizes):
        damaged = ["the optimizer's state"]
    if damaged:
        raise UserError(
            f"{checkpoint}: {_listed(damaged)} missing or truncated, so the state of training is incomplete; restore "
            f"the missing data, or {PREVIOUS}"
        )
    # Libraries choose among files by their names: beside a pytorch_model.bin, model.safetensors
    # would not be read. None reads the hidden files of a file system or a desktop (.nfs000,
    # .DS_Store).
    unknown = [name for name in _names(checkpoint) if name not in expected]
    if unknown := [
        n for n in unknown if not (last := Path(n).name).startswith(".") or last == ".metadata"
    ]:
        added = _listed(unknown)
        raise UserError(
            f"{checkpoint}: contains {added}, which training did not save; remove {added}"
        )
    return seal


def read_form(file: Path, kind: Any) -> dict[str, Any]:
    """Return the content of a JSON file.
    Raises UserError, with the key, if it is missing or not of this kind.
    """
    try:
        return TypeAdapter(kind).validate_python(read_json(file), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}; {PREVIOUS}"
        ) from None


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
    # DeepSpeed's; those of DDP have none
    origin, latest_tag = read_seal(checkpoint)["origin"], checkpoint / "latest"
    # parts of a conversion that was interrupted
    if origin.get("processes") is not None and latest_tag.is_file():
        check_parts(checkpoint)
        remove(checkpoint / "latest_universal")
        remove(checkpoint / f"{latest_tag.read_text().strip()}_universal")
    _check_files(checkpoint)
    verify(checkpoint)
    if origin.get("processes") is None:
        return
    if latest_tag.is_file():
        try:
            to_universal(checkpoint)
        except pickle.UnpicklingError as error:
            raise UserError(f"{checkpoint}: {PICKLE_REFUSED}") from error
    seal(checkpoint, origin | {"processes": None})


def model_bytes(model: Any, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of the saved weights, in `dtype` or their own; with an adapter, of the
    trained ones.
    """
    saved = [p for p in model.parameters() if p.requires_grad or not isinstance(model, PeftModel)]
    return sum(getattr(p, "ds_numel", p.numel()) * (dtype or p.dtype).itemsize for p in saved)


def checkpoint_bytes(model: Any, attached: AttachedOptimizer) -> int:
    """Return the bytes of a checkpoint: the weights, and the optimizer's states of all ranks.
    Collective.

    Under DDP the first rank saves all. Under ZeRO each rank saves its float32 masters too, and
    DeepSpeed a second copy of the weights, unless they are sharded (stage 3).
    """
    weights = model_bytes(model)
    states = sum(_nbytes(state) for state in attached.optimizer.state.values())
    if attached.parallel == "ddp":
        return weights + states
    is_zero = attached.parallel == "zero"
    (shards,) = attached.ranks.sums([states + sum(map(_nbytes, attached.tensors)) * is_zero])
    is_copied = is_zero and not any(hasattr(p, "ds_numel") for p in model.parameters())
    return weights * (2 if is_copied else 1) + int(shards)


def _nbytes(values: Any) -> int:
    values = values.values() if isinstance(values, dict) else values
    return sum(local(value).nbytes for value in values if isinstance(value, Tensor))


def refuse_full_disk(folder: Path, needed: int, purpose: str, attached: AttachedOptimizer) -> None:
    """Raise ResumableError on all ranks if the disk of `folder` has less than `needed` bytes free.
    Collective.

    purpose: such as "a checkpoint", for the message, which also names the last complete checkpoint.
    """
    with attached.ranks.shared_errors():
        if attached.ranks.is_first and (free := free_bytes(folder)) < needed:
            space = (
                f"{with_prefix(free, 'B')} are free, but {purpose} needs {with_prefix(needed, 'B')}"
            )
            raise ResumableError(
                f"{folder}: {space} ({free:,} and {needed:,} bytes). {_remedy(folder)}"
            )


@contextlib.contextmanager
def write_errors(folder: Path, remedy: str | None = None) -> Iterator[None]:
    """Within the block, raise ResumableError for an error of writing `folder`, which is then
    incomplete and removed.

    It names the folder, the free space of its disk, and `remedy`: by default the last complete
    checkpoint beside it.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        finding, number, free = None, 0, f"{free_bytes(folder):,} bytes free"
        # torch.distributed.checkpoint has the errors of all ranks in one.
        causes = (
            [cause for cause, _ in error.failures.values()]
            if isinstance(error, CheckpointException)
            else [error]
        )
        for cause in causes:
            if isinstance(cause, OSError):
                number = cause.errno or 0
                if cause.filename is None and number in (errno.EIO, errno.EFBIG, errno.ESTALE):
                    finding = f"{folder}: {cause.strerror} ({free})"
                elif problem := from_os_error(cause, folder):
                    finding = str(problem).partition(";")[0]
            elif isinstance(cause, SafetensorError):
                if match := re.search(r"I/O error: (.*?)(?: \(os error (\d+)|$)", str(cause)):
                    finding, number = f"{folder}: {match[1]} ({free})", int(match[2] or 0)
            elif TORCH_WRITE_ERRORS.search(str(cause)):  # torch does not name the reason
                finding = f"{folder}: cannot be written completely ({free})"
                is_limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
                number = errno.EFBIG if is_limited else errno.ENOSPC
            if finding is not None:
                break
        else:
            raise
        with contextlib.suppress(OSError):
            remove(folder)
        raise ResumableError(f"{finding}. {remedy or _remedy(folder.parent, number)}") from error


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
