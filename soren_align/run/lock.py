"""Lock files that end with the process that holds them.

flock: the kernel releases these locks when a process ends, also after SIGKILL, and they survive
exec. The filelock library (4.2) is not used: its flock is exclusive only, while several evaluations
share a run folder, and on a file system without flock it creates a marker file instead, which a
killed process leaves behind.

Some file systems have no flock (Lustre mounted with noflock). There, SOREN_ALIGN_LOCKS=off leaves
it to the user to start one command per folder.
"""

import errno
import fcntl
import json
import os
from pathlib import Path

from ..core.errors import UserError

_INHERITED = "SOREN_ALIGN_HELD_LOCKS"
_descriptors: list[int] = json.loads(os.environ.pop(_INHERITED, "[]"))
"""The lock files that this process holds, with those that it held before exec."""


class LockedError(UserError):
    """Another process holds the lock file."""


def acquire(file: Path, *, shared: bool = False) -> None:
    """Hold a lock file until `release`, or until this process ends.
    Nothing is done if this process holds it already.

    shared: other processes may hold it too, if theirs is shared. Raises LockedError if another
    process holds it, and UserError if the file system has no locks.
    """
    # Held already: a rank after exec, or a command within another.
    if is_held(file):
        return
    # Permissions from the umask: a group may share a run folder. O_NOFOLLOW: a link could name a
    # file elsewhere.
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        if os.environ.get("SOREN_ALIGN_LOCKS") != "off":
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise LockedError(
            f"{file.parent}: another process is training or evaluating this run; wait until that "
            "process has ended"
        ) from None
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EIO, errno.ESTALE):  # of a network file system that has locks
            raise OSError(error.errno, error.strerror, str(file)) from None
        raise UserError(
            f"{file.parent}: the file system has no locks ({error.strerror}); choose another "
            "folder, or set SOREN_ALIGN_LOCKS=off and never start two commands on this folder"
        ) from None
    _descriptors.append(descriptor)


def release(file: Path) -> None:
    """Release a lock file if this process holds it."""
    for descriptor in [number for number in _descriptors if _is_open(number, file)]:
        _descriptors.remove(descriptor)
        os.close(descriptor)


def is_held(file: Path) -> bool:
    """Whether this process holds the lock file. Not if the file was removed."""
    return any(_is_open(descriptor, file) for descriptor in _descriptors)


def keep_through_exec() -> dict[str, str]:
    """Let the program that replaces this process hold its locks; return the variable that its
    environment needs.
    """
    for descriptor in _descriptors:
        os.set_inheritable(descriptor, True)
    return {_INHERITED: json.dumps(_descriptors)}


def _is_open(descriptor: int, file: Path) -> bool:
    # By inode and not by name: a lock file that was removed, and made again by another command, is
    # not held by this process.
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat(follow_symlinks=False))
    except OSError:  # a child process has the variable without the descriptor; the file may be gone
        return False
