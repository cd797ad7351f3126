"""Disk space: checked before each checkpoint and before the model is saved, and errors of writing as one sentence."""

import contextlib
import errno
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import REMEDIES, ResumableError, free_bytes, from_os_error
from ..files import remove
from ..run_folder import COMPLETE_MARKER, step_of
from ..sharding import CheckpointException, local
from ..terminal import with_prefix
from .attached_optimizer import AttachedOptimizer

TORCH_WRITE_ERRORS = re.compile(r"inline_container|PytorchStreamWriter|iostream error|unexpected pos")
"""In the RuntimeErrors of torch.save on a full disk, which have no errno (torch 2.13)."""


def model_bytes(model: Any, *, adapter_only: bool, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of the saved weights, in `dtype` or their own. adapter_only: the frozen ones are not saved."""
    saved = [p for p in model.parameters() if p.requires_grad or not adapter_only]
    return sum(getattr(p, "ds_numel", p.numel()) * (dtype or p.dtype).itemsize for p in saved)


def checkpoint_bytes(model: Any, attached: AttachedOptimizer, *, adapter_only: bool) -> int:
    """Return the bytes of a checkpoint: the weights, and the optimizer's states of all ranks. Collective.

    Under DDP the first rank saves all. Under ZeRO each rank saves its float32 masters too, and DeepSpeed a second copy
    of the weights, unless they are sharded (stage 3).
    """
    weights = model_bytes(model, adapter_only=adapter_only)
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
    """Raise ResumableError on all ranks if the disk of `folder` has less than `needed` bytes free. Collective.

    purpose: such as "a checkpoint", for the message, which also names the last complete checkpoint.
    """
    problem = None
    if attached.ranks.is_first and (free := free_bytes(folder)) < needed:
        space = f"{with_prefix(free, 'B')} free, and {purpose} needs {with_prefix(needed, 'B')}"
        problem = f"{folder}: {space} ({free:,} and {needed:,} bytes). {_remedy(folder)}"
    if problem := attached.ranks.broadcast(problem):
        raise ResumableError(problem)


@contextlib.contextmanager
def write_errors(folder: Path, remedy: str | None = None) -> Iterator[None]:
    """Within the block, raise ResumableError for an error of writing `folder`, which is then incomplete and removed.

    It names the folder, the free space of its disk, and `remedy`: by default the last complete checkpoint beside it.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        # torch.distributed.checkpoint has the errors of all ranks in one.
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        problem = next(filter(None, (_problem_of_writing(cause, folder) for cause in causes)), None)
        if problem is None:
            raise
        with contextlib.suppress(OSError):
            remove(folder)
        finding, number = problem
        raise ResumableError(f"{finding}. {remedy or _remedy(folder.parent, number)}") from error


def _problem_of_writing(error: BaseException, folder: Path) -> tuple[str, int] | None:
    """Return the finding and its errno; None for an error that is not about writing."""
    free = f"{free_bytes(folder):,} bytes free"
    if isinstance(error, OSError):
        number = error.errno or 0
        if error.filename is None and number in (errno.EIO, errno.EFBIG, errno.ESTALE):
            return f"{folder}: {error.strerror} ({free})", number
        problem = from_os_error(error, folder)
        return (str(problem).partition(";")[0], number) if problem else None
    if isinstance(error, SafetensorError):
        match = re.search(r"I/O error: (.*?)(?: \(os error (\d+)|$)", str(error))
        return (f"{folder}: {match[1]} ({free})", int(match[2] or 0)) if match else None
    if not TORCH_WRITE_ERRORS.search(str(error)):
        return None
    # torch does not name the reason.
    is_limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    return f"{folder}: cannot be written completely ({free})", errno.EFBIG if is_limited else errno.ENOSPC


def _remedy(folder: Path, number: int = errno.ENOSPC) -> str:
    """Return the last complete checkpoint below or beside `folder`, and the way on. number: the errno."""
    complete = [seal.parent for seal in folder.glob(f"**/checkpoint-*/{COMPLETE_MARKER}")]
    state = f"{max(complete, key=step_of).name} is complete" if complete else "No checkpoint is complete"
    action = REMEDIES.get(number, REMEDIES[errno.ENOSPC])
    way = "resume" if complete else "start again"
    return f"{state}: {action}, then rerun the same command to {way}; or choose another run.output_dir"
