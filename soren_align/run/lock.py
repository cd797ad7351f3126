"""Lock files that end with the process that holds them.

flock: the kernel releases these locks when a process ends, also after SIGKILL, and they survive
exec. The filelock library (4.2) is not used: its flock is exclusive only, while several evaluations
share a run folder, and on a file system without flock it creates a marker file instead, which a
killed process leaves behind.

Some file systems have no flock (Lustre mounted with noflock), or one that other machines do not see
(Lustre's localflock, BeeGFS by default). There, SOREN_ALIGN_LOCKS=lease replaces it by a file
beside the lock file, which its holder renews. It is free again when its process has ended, or has
not renewed it for LEASE_SECONDS.
"""

import atexit
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from ..core.errors import UserError

LEASE_SECONDS = 300.0
"""After which a lease that was not renewed is free: caches of NFS (60 s) and differences between
clocks are smaller."""
RENEWAL_SECONDS = 30.0

_INHERITED = "SOREN_ALIGN_HELD_LOCKS"
_inherited = json.loads(os.environ.pop(_INHERITED, "[[], {}]"))
_descriptors: list[int] = _inherited[0]
"""The lock files that this process holds, with those that it held before exec."""
_leases: dict[str, str] = {}
"""Token of each lease that this process holds, by the absolute path of its lock file."""
_renewal: threading.Thread | None = None


class LockedError(UserError):
    """Another process holds the lock file."""


def acquire(file: Path, *, shared: bool = False) -> None:
    """Hold a lock file until `release`, or until this process ends.
    Nothing is done if this process holds it already.

    shared: other processes may hold it too, if theirs is shared; a lease is never shared. Raises
    LockedError if another process holds it, and UserError if the file system has no locks.
    """
    if is_held(file):
        return
    kind = os.environ.get("SOREN_ALIGN_LOCKS", "flock")
    if kind not in ("flock", "lease"):
        raise UserError(
            f"SOREN_ALIGN_LOCKS is {kind!r}; set this variable to lease, or unset it to use flock"
        )
    _refuse_leased(file)
    if kind == "lease":
        token = secrets.token_hex(16)
        try:
            descriptor = os.open(
                _lease(file), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
            )
        except FileExistsError:  # another process was quicker
            raise _locked(file) from None
        with os.fdopen(descriptor, "w") as stream:
            json.dump({**_this_process(), "token": token}, stream)
        _hold_leases({str(file.absolute()): token})
        return
    # Permissions from the umask: a group may share a run folder. O_NOFOLLOW: a link could name a
    # file elsewhere.
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise _locked(file) from None
    except OSError as error:
        os.close(descriptor)
        raise UserError(
            f"{file.parent}: the file system has no locks ({error.strerror}); set SOREN_ALIGN_LOCKS=lease for all "
            "commands that use this folder, or choose another folder"
        ) from None
    _descriptors.append(descriptor)


def release(file: Path) -> None:
    """Release a lock file if this process holds it."""
    for descriptor in [number for number in _descriptors if _is_open(number, file)]:
        _descriptors.remove(descriptor)
        os.close(descriptor)
    token = _leases.pop(str(file.absolute()), None)
    # not in a forked child, whose parent holds it
    if token and _read(_lease(file)).get("process") == os.getpid():
        _remove_lease(file, token)


def is_held(file: Path) -> bool:
    """Whether this process holds the lock file.
    Not if it was removed, or another process took over a lease.
    """
    token = _leases.get(str(file.absolute()))
    if token is not None:
        return _read(_lease(file)).get("token") == token
    return any(_is_open(descriptor, file) for descriptor in _descriptors)


def keep_through_exec() -> dict[str, str]:
    """Let the program that replaces this process hold its locks; return the variable that its
    environment needs.
    """
    for descriptor in _descriptors:
        os.set_inheritable(descriptor, True)
    return {_INHERITED: json.dumps([_descriptors, _leases])}


def _is_open(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat(follow_symlinks=False))
    except OSError:  # a child process has the variable without the descriptor; the file may be gone
        return False


def _locked(file: Path) -> LockedError:
    return LockedError(
        f"{file.parent}: another process is training or evaluating this run; wait until that process has ended"
    )


def _hold_leases(leases: dict[str, str]) -> None:
    global _renewal
    _leases.update(leases)
    if _renewal is None or not _renewal.is_alive():  # not in a forked child
        _renewal = threading.Thread(target=_renew_leases, daemon=True)
        _renewal.start()
    for path in leases:
        atexit.register(release, Path(path))


def _renew_leases() -> None:
    while True:
        time.sleep(RENEWAL_SECONDS)
        for path in list(_leases):
            with suppress(OSError):  # of a network; the next renewal may succeed
                if is_held(Path(path)):
                    os.utime(_lease(Path(path)))


def _refuse_leased(file: Path) -> None:
    """Raise LockedError if another process holds a lease; remove one whose process has ended, and
    an expired one.
    """
    lease = _lease(file)
    try:
        renewed = lease.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return
    holder, here = _read(lease), _this_process()
    # Both times are the file system's own: clocks of machines differ.
    probe = lease.with_name(f"{lease.name}.{secrets.token_hex(8)}")
    probe.touch()
    left = LEASE_SECONDS - (probe.stat().st_mtime - renewed)
    probe.unlink()
    process, has_ended = holder.get("process"), False
    if here["boot"] and holder.get("boot") == here["boot"]:
        try:
            os.kill(process if isinstance(process, int) and process > 0 else os.getpid(), 0)
        except OSError as error:  # a PermissionError is of another user's process, which is alive
            has_ended = isinstance(error, ProcessLookupError)
    if left > 0 and not has_ended:
        place = f"process {process} on {holder.get('host')}"
        raise LockedError(
            f"{_locked(file)} ({place}); if that process has ended already, wait {left:.0f} s"
        )
    _remove_lease(file, holder.get("token"))


def _remove_lease(file: Path, token: object) -> None:
    """Remove a lease that has this token.
    Renamed first: one that another process has just made is put back.
    """
    lease = _lease(file)
    aside = lease.with_name(f"{lease.name}.{secrets.token_hex(8)}")
    with suppress(FileNotFoundError):
        lease.rename(aside)
        if _read(aside).get("token") != token:
            # if a third process has made one: the second finds that at its next `is_held`
            with suppress(OSError):
                os.link(aside, lease)
        aside.unlink()


def _lease(file: Path) -> Path:
    return file.with_name(f"{file.name}.lease")


def _read(lease: Path) -> dict[str, object]:
    """Return a lease's content; empty if there is none, or if it is not one."""
    try:
        # The folder may come from anyone: no link is followed, and a pipe is not waited for.
        descriptor = os.open(lease, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            content = json.loads(stream.read(4096) or b"{}")
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _this_process() -> dict[str, object]:
    """Return what names this process on its machine; "boot" is empty where the system has no number
    of a boot.
    """
    boot = ""
    # containers of one machine share the boot, not the numbers of processes
    with suppress(OSError):
        boot = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return {"host": socket.gethostname(), "process": os.getpid(), "boot": boot}


if _inherited[1]:
    _hold_leases(_inherited[1])
