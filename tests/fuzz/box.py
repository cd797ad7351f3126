"""The box that one input is tried in: its files, the folders it may write to, and the proof that it stayed inside.

    work/       the working directory, made anew for each input from its files
    outside/    a canary: no input may change it
    cache/ tmp/ home/    what libraries and `~` write to

Python's audit hook sees every file that is opened for writing, made, renamed or removed, before it happens. Outside of
the folders that the input may write to, it is refused and noted.
"""

import hashlib
import os
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

BOX = "@BOX@"
"""Stands for the box's own path in an input's files, so that an input is the same on every machine."""
CANARY = {"victim.txt": "keep me", "run.json": '{"results": "of another program"}', "recipe.yaml": "cake: true\n"}
CANARY |= {"results.json": '{"rows": "of another program"}', "README.md": "# Mine\n", "model.safetensors": "weights"}
CANARY |= {"deep/er/photo.png": "a picture", "checkpoint-9/optimizer.pt": "state", "base/notes.txt": "years of work"}

# Audit events -> which of their arguments are entries of a folder that would change, and where the folder's fd stands.
_ENTRIES = {"os.mkdir": ((0, 2),), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.rename": ((0, 2), (1, 3)),
            "os.link": ((1, 3),), "os.symlink": ((1, 2),), "os.truncate": ((0, None),), "os.chmod": ((0, 2),),
            "os.utime": ((0, 3),), "shutil.rmtree": ((0, 1),)}  # fmt: skip
_FOLLOWED = {"os.truncate", "os.chmod", "os.utime"}
_PROCESSES = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass
class Watch:
    """What may be written to, and what was tried beside it."""

    allowed: list[str]
    breaches: list[str] = field(default_factory=list)

    def see(self, event: str, arguments: tuple) -> None:
        """Refuse the event, and note it, where it would change anything outside."""
        if event == "subprocess.Popen" and arguments[0] == sys.executable:
            return  # where soren_align itself tries something that may not end
        if event in _PROCESSES:
            self._refuse(f"{event} {str(arguments[0])[:80]}")
        elif event == "open":
            path, _, flags = arguments
            if flags & _WRITES and not isinstance(path, int):
                path = os.fspath(path)
                follows = not flags & (os.O_NOFOLLOW | os.O_EXCL)
                self._check("open", os.path.realpath(path) if follows else _entry(path))
        elif event in _ENTRIES:
            for entry, folder in _ENTRIES[event]:
                path = arguments[entry]
                if isinstance(path, int):
                    continue
                path = os.fsdecode(path)
                fd = arguments[folder] if folder is not None and folder < len(arguments) else -1
                if isinstance(fd, int) and fd >= 0:
                    path = os.path.join(os.readlink(f"/proc/self/fd/{fd}"), path)
                if (event == "os.mkdir") == os.path.lexists(path) and event != "os.symlink":
                    continue  # it will fail: made where something is, or changed where nothing is
                self._check(event, os.path.realpath(path) if event in _FOLLOWED else _entry(path))

    def _check(self, event: str, path: str | bytes) -> None:
        path = os.fsdecode(path)
        if not any(path == root or path.startswith(root + "/") for root in self.allowed):
            self._refuse(f"{event} {path}")

    def _refuse(self, what: str) -> None:
        self.breaches.append(what)
        raise PermissionError(13, "Permission denied", what)


def _entry(path: str | bytes) -> str:
    """Where the entry itself stands, be it a link."""
    parent, name = os.path.split(os.path.abspath(os.fsdecode(path)))
    return os.path.join(os.path.realpath(parent), name)


_watch: Watch | None = None
_is_hooked = False


def _hook(event: str, arguments: tuple) -> None:
    global _watch
    watch = _watch
    if watch is not None and (event == "open" or event in _ENTRIES or event in _PROCESSES):
        _watch = None  # what is looked up here is not looked at
        try:
            watch.see(event, arguments)
        finally:
            _watch = watch


@contextmanager
def watched(allowed: list[str]):
    """Refuse and note every change outside of `allowed` while in it."""
    global _watch, _is_hooked
    if not _is_hooked:
        sys.addaudithook(_hook)
        _is_hooked = True
    _watch = watch = Watch([os.path.realpath(path) for path in allowed] + ["/dev/null", "/dev/tty"])
    try:
        yield watch
    finally:
        _watch = None


class Box:
    """A folder for one input after another."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self.work, self.outside = self.root / "work", self.root / "outside"
        self.own = [self.root / name for name in ("cache", "tmp", "home")]
        self.fresh()

    def fresh(self) -> None:
        """Empty all folders, and set the canary up."""
        for folder in (self.work, self.outside, *self.own):
            _remove(folder)
            folder.mkdir(parents=True)
        for name, text in CANARY.items():
            file = self.outside / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        self.before = self._digest()

    def lay_out(self, files: dict) -> None:
        """Make the working directory of files: bytes, {"link": target}, {"fifo": true}, or {} for a folder."""
        os.chdir(self.root)
        for folder in (self.work, *self.own):
            if not folder.is_dir() or folder.is_symlink() or any(folder.iterdir()):
                _remove(folder)
                folder.mkdir()
        os.chdir(self.work)
        box = str(self.root)
        for name, content in files.items():
            path = self.work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(path):  # two names of one entry
                continue
            if isinstance(content, bytes):
                path.write_bytes(content.replace(BOX.encode(), box.encode()))
            elif "link" in content:
                path.symlink_to(content["link"].replace(BOX, box))
            elif "fifo" in content:
                os.mkfifo(path)
            else:
                path.mkdir(exist_ok=True)

    def told(self, text: str) -> str:
        """A text of an input, with this box's path in it."""
        return text.replace(BOX, str(self.root))

    def changes_outside(self) -> bool:
        """Whether anything outside of the working directory is another than before; if so, it is put right again."""
        if self._digest() == self.before and len(os.listdir(self.root)) == 5:
            return False
        self.fresh()
        return True

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for folder, names, files in os.walk(self.outside):
            for name in sorted(names + files):
                path = os.path.join(folder, name)
                digest.update(f"{path} {os.path.islink(path)}\n".encode("utf-8", "surrogateescape"))
                if name in files and os.path.isfile(path):
                    with open(path, "rb") as stream:
                        digest.update(stream.read())
        return digest.hexdigest()


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
