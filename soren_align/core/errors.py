"""Errors that the user can fix, and printing text of unknown origin."""

import contextlib
import difflib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from typing import ClassVar

MAX_PROBLEMS = 20
"""Problems of one error that are printed, before the number of the others."""
MAX_CHARACTERS = 1000
"""Characters of one printed problem; our longest message, a list of TRL's choices, has about
600."""
MAX_REASON = 400
"""Characters of a library's message within ours."""

# Characters that move the cursor or recolor, clear or reorder a terminal's text: control characters
# except newline and tab, Unicode's line separators and bidirectional marks. Halves of surrogate
# pairs cannot be encoded at all.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: object, max_characters: int | None = None) -> str:
    """Return str(text) with control characters escaped, such as \\x1b; newlines and tabs stay.

    max_characters: a longer text loses its middle.
    """
    escaped = _CONTROL.sub(
        lambda match: (
            f"\\x{ord(match[0]):02x}" if ord(match[0]) < 256 else f"\\u{ord(match[0]):04x}"
        ),
        str(text),
    )
    if max_characters is None or len(escaped) <= max_characters:
        return escaped
    half = (max_characters - 5) // 2
    return f"{escaped[:half]} ... {escaped[-half:]}"


class UserError(ValueError):
    """An error that the user can fix.
    Printed line by line, without a traceback; the exit code is 2.

    problems: all messages, unchanged. str(error) is safe to print and bounded: control characters
    are escaped, a long line loses its middle, and many lines are shortened to the first ones and
    the last one.
    """

    kind: ClassVar[str] = "invalid"
    """The name by which code decides, in place of the message; run.json records it as `failure`."""

    def __init__(self, *problems: str):
        self.problems = problems
        lines = [
            printable(line, MAX_CHARACTERS) for problem in problems for line in problem.split("\n")
        ]
        if len(lines) > MAX_PROBLEMS + 1:  # the last line stays: it is the remedy
            lines[MAX_PROBLEMS - 1 : -1] = [f"... and {len(lines) - MAX_PROBLEMS} more lines"]
        super().__init__("\n".join(lines))


class MissingError(UserError):
    """A file or folder does not exist; it may exist on another machine."""

    kind = "missing"


class DivergedError(UserError):
    """A gradient has a NaN or an infinity, so that training cannot continue."""

    kind = "diverged"


class ResumableError(UserError):
    """The machine failed, not the run: a full disk, missing memory, a lost rank.
    The same command resumes later.
    """

    kind = "machine"


class NoMemoryError(ResumableError):
    """The memory of this machine or of its GPU is exhausted."""

    kind = "memory"


class LostRankError(ResumableError):
    """Another rank has ended or does not answer.
    There is nothing to remedy: the exit code is 1, as of a defect.
    """

    kind = "lost rank"


class SilentRankError(LostRankError):
    """Another rank does not answer; its process may still exist."""

    kind = "silent rank"


class OutOfReach(ResumableError):
    """A file is not on this machine, and the Hugging Face hub cannot be reached."""

    kind = "offline"


_OF_THE_MACHINE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
    errno.EFBIG,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EAGAIN,
)
"""Errors that name no file: a broken disk or network file system, and limits of files, memory and
processes."""
_NO_MEMORY = re.compile(
    "out of memory|[cC]an(no|')t allocate memory|CUBLAS_STATUS_ALLOC_FAILED|bad_alloc|killed by"
    " signal|can't start new thread|could not create a (primitive|memory)"
)
"""Texts in the RuntimeErrors of torch (2.13): OutOfMemoryError is one, that of a killed DataLoader
worker another. Threads are Python's; the last is oneDNN's, which has no message of its own for
it."""
_OTHERS_MEMORY = re.compile(" (Process [0-9]+ has|Including non-PyTorch|Of the allocated)")
"""The point at which CUDA's message begins to list the memory of each process (torch 2.11)."""
_GLOO_OR_NCCL = re.compile("gloo/|NCCL")
"""Texts in the RuntimeErrors of collectives that have no type of their own (torch 2.13)."""
_FILE_OF_TORCH = re.compile(r"unable to open file <(.+)> in .+ mode: .+ \((\d+)\)")
"""A RuntimeError of torch (2.13) that maps a file, with the errno."""
_TIMEOUT = re.compile(r"(?:waiting|imeout after|imed out after) ([\d.]+) ?(ms|s)", re.IGNORECASE)
REMEDIES = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "name another folder, or change the permissions of this one",
    ),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST), "remove the file that is in the way, or name another folder"
    ),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "check the disk, or the network file system"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    errno.EFBIG: "raise the limit of file sizes (ulimit -f, or the quota of the file system)",
    errno.ENOSPC: "free space on this disk",
    errno.EDQUOT: "free space of your quota, or raise the quota",
    errno.ENOENT: "restore this file or folder, or correct its name",
    errno.EINVAL: "name a folder on another file system, as this one refuses the operation",
    errno.EBUSY: "end the process that uses this file or folder",
}


def machine_failure(
    error: BaseException, folder: str | os.PathLike[str] | None = None
) -> ResumableError | None:
    """Return a ResumableError if the machine failed: files, disks, memory, other ranks; None for
    any other error.

    folder: as in `from_os_error`.
    """
    if isinstance(error, OSError):
        return from_os_error(error, folder)
    # torch raises a RuntimeError if it cannot map a file: the errno stands in its text alone
    # (notes/log.md).
    if isinstance(error, RuntimeError) and (match := _FILE_OF_TORCH.search(str(error))):
        return from_os_error(OSError(int(match[2]), os.strerror(int(match[2])), match[1]))
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))
    ):
        first = _OTHERS_MEMORY.split((str(error).strip().splitlines() or [""])[0])[0].removesuffix(
            "."
        )
        return NoMemoryError(
            f"out of memory{f' ({first})' if first else ''}; free some memory, or lower "
            "trainer.per_device_train_batch_size or trainer.max_length. Then rerun the command"
        )
    # A collective or the store failed because another rank has ended or does not answer. By name:
    # this module does not import torch. DistError has subclasses for the store, the network and the
    # backend.
    is_typed = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    if isinstance(error, RuntimeError) and (is_typed or _GLOO_OR_NCCL.search(str(error))):
        if match := _TIMEOUT.search(str(error)):
            return silent_rank("another rank", float(match[1]) / (1000 if match[2] == "ms" else 1))
        return LostRankError(
            f"another rank failed ({first_sentence(error)}); read that rank's output for the cause."
            " Rerun the same command to resume"
        )
    return None


def known_failure(
    error: BaseException, folder: str | os.PathLike[str] | None = None
) -> UserError | None:
    """Return a UserError as it is, and a failure of the machine as one; None for a defect.

    folder: as in `from_os_error`.
    """
    return error if isinstance(error, UserError) else machine_failure(error, folder)


def silent_rank(rank: str, seconds: float) -> SilentRankError:
    """Return the error of a rank that does not answer; `rank` names it."""
    return SilentRankError(
        f"{rank} did not answer for {seconds:g} s. Rerun the same command to resume"
    )


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of a library's error, without the C++ file of torch.distributed."""
    return (str(error).splitlines() or [type(error).__name__])[0].split("] ", 1)[-1].split(". ")[0]


def from_os_error(
    error: OSError, folder: str | os.PathLike[str] | None = None
) -> ResumableError | None:
    """Return a ResumableError that names the file or folder, the free space of a full disk, and the
    remedy.

    folder: where this process writes, for an error that names no file. Returns None if the error is
    not about a file of the user.
    """
    # A program that is missing (gcc, ninja): the traceback shows which library needs it.
    is_program = (
        error.errno == errno.ENOENT
        and isinstance(error.filename, str)
        and os.sep not in error.filename
    )
    if "Not enough disk space" in str(error):  # of datasets, with the needed bytes
        return ResumableError(str(error))
    if (error.filename is None or is_program) and error.errno not in _OF_THE_MACHINE:
        return None
    place = error.filename if isinstance(error.filename, str | bytes) else folder
    if place is None:  # of the folders that libraries write into, the one with the least space
        home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
        place = min((os.getcwd(), tempfile.gettempdir(), home), key=free_bytes)
    remedy, space = REMEDIES.get(error.errno or 0), ""
    if error.errno == errno.ENOSPC:
        space = f" ({free_bytes(place):,} bytes free)"
        remedy = f"{remedy}, or name a folder on another disk. Then rerun the command"
    return ResumableError(
        f"{os.fsdecode(place)}: {error.strerror or error}{space}{f'; {remedy}' if remedy else ''}"
    )


def in_one_line(error: BaseException, max_characters: int = 200) -> str:
    """Return an error's message, or its type if it has none, on one line; a longer one ends in
    "...".
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= max_characters else f"{text[:max_characters]}..."


@contextlib.contextmanager
def as_user_error(place: str, *kinds: type[Exception]) -> Iterator[None]:
    """Convert a library's errors within this context to UserError(f"{place}: {message}").

    place: the recipe's key, or the model or file that the error is about.
    kinds: the exceptions that are converted; ValueError and OSError if none are named. UserErrors
    are not changed. Raises LostRankError if another rank has ended, ResumableError if the machine
    failed, and OutOfReach for another OSError when the hub is offline.
    """
    from huggingface_hub import constants  # for the commands that need none of the heavy libraries

    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not isinstance(error, kinds or (ValueError, OSError)):
            raise
        # First whether it was the machine: a full disk while a model loads is no fault of the
        # model, and the same command resumes.
        failure = machine_failure(error)
        if isinstance(failure, LostRankError):
            raise failure from error
        is_offline = isinstance(error, OSError) and constants.HF_HUB_OFFLINE
        message = in_one_line(error, MAX_REASON)
        if isinstance(error, ArithmeticError | AttributeError | LookupError | TypeError):
            # A KeyError's text, for example, is the key alone.
            message = f"{type(error).__name__}: {message}"
        kind = type(failure) if failure else OutOfReach if is_offline else UserError
        raise kind(f"{place}: {message}") from error


def free_bytes(place: str | bytes | os.PathLike[str]) -> int:
    """Return the free bytes of the disk that `place` is on, or would be."""
    # Of the nearest folder that exists: a run folder may be new.
    path = os.path.abspath(os.fsdecode(place))
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


def closest(word: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most similar to `word`; None if the similarity of all (difflib's, 0 to 1) is
    below `cutoff`.
    """
    return next(iter(difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(word: object, known: Iterable[str], otherwise: str = "") -> str:
    """The remedy "; did you mean 'lr'?" for the closest known word.

    otherwise: the remedy where no word is similar; empty for none.
    """
    meant = closest(word, known)
    remedy = otherwise if meant is None else f"did you mean '{meant}'?"
    return f"; {remedy}" if remedy else ""
