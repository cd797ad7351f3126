"""Checks of the libraries, the GPUs and the file system."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..core import files
from ..core.text import count, gibibytes, join_words
from ..launch.environment import has_gpu
from .findings import Finding, Machine, judged, skipped

ROOT = Path(__file__).resolve().parents[2]
FREE_BYTES = 5 << 30
SYNC_SECONDS = 1.0
OLDEST_GPU = (8, 0)
"""Compute capability with TF32 and bfloat16."""


def libraries(machine: Machine) -> Iterator[Finding]:
    """Versions against what soren-align declares, Python, torch's build, driver, GPUs and their
    interconnect.
    """
    # The versions in constraints.txt by canonical name; none in a wheel.
    file = ROOT / "constraints.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    pins = [line.partition("==") for line in lines if "==" in line and not line.startswith("#")]
    problems, tested, names = (
        [],
        {canonicalize_name(name): version.strip() for name, _, version in pins},
        [],
    )
    # The requirements that apply here: of the checkout that this code runs from, or of the wheel.
    if (file := ROOT / "pyproject.toml").is_file():
        lines = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        lines = metadata.requires("soren-align") or []
    parsed = map(Requirement, lines)
    for requirement in [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]:
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is not installed")
            continue
        names.append(requirement.name)
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(
                f"{requirement.name} is {version}, but soren-align needs {requirement.specifier}"
            )
    same = sum(metadata.version(name) == tested.get(canonicalize_name(name)) for name in names)
    measured = f"{len(names)} installed, {same} as tested" if tested else f"{len(names)} installed"
    reason = f"{'; '.join(problems)}; run pip install -c constraints.txt ."
    yield judged("libraries", measured, "in the declared ranges", not problems, reason)
    python = ".".join(map(str, sys.version_info[:3]))
    yield judged(
        "Python",
        python,
        ">= 3.11",
        sys.version_info >= (3, 11),
        f"Python is {python}; install 3.11 or later",
    )

    import torch

    build = f"{torch.__version__}, " + (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    )
    if not has_gpu():
        yield Finding("torch", build, "a build for the CPU is enough: no GPU")
        yield skipped("GPUs", "this machine has no GPU")
        return
    remedy = "this machine has a GPU, but torch cannot use it; install the build of torch for your driver (pytorch.org)"
    yield judged("torch", build, "CUDA is available", torch.cuda.is_available(), remedy)
    query = output_of(
        "nvidia-smi",
        "--query-gpu=driver_version,power.limit,clocks.max.sm",
        "--format=csv,noheader",
    )
    yield Finding(
        "driver", " ".join(query.splitlines()[:1]) or "no nvidia-smi", "driver, power limit, clock"
    )
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        capability = (properties.major, properties.minor)
        free, total = torch.cuda.mem_get_info(number)
        measured = f"{properties.name}, {gibibytes(free)} of {gibibytes(total)} free, capability {properties.major}."
        reason = "the GPU is older than capability 8.0 (no bfloat16, no TF32), or another process uses its memory"
        passes = capability >= OLDEST_GPU and free > 0.9 * total
        yield judged(
            f"GPU {number}", f"{measured}{properties.minor}", "90% free, >= 8.0", passes, reason
        )
    if torch.cuda.device_count() < 2:
        yield skipped("interconnect", "one GPU")
        return
    rows = [
        re.split(r"\s{2,}|\t", line.strip())
        for line in output_of("nvidia-smi", "topo", "-m").splitlines()
    ]
    links = [
        cell for row in rows if re.fullmatch(r"(\x1b\[\S*m)?GPU\d+", row[0]) for cell in row[1:]
    ]
    kinds = [
        kind for kind in dict.fromkeys(links) if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", kind)
    ]
    reason = "GPUs are connected by PCIe alone; ZeRO 3 and FSDP2 will be slow"
    has_links = not kinds or any(kind.startswith("NV") for kind in kinds)
    yield judged("interconnect", join_words(kinds) or "unknown", "NV (NVLink)", has_links, reason)


def output_of(*command: str) -> str:
    """The standard output of a command; empty if it is missing or fails."""
    try:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


LOCKER = """
import fcntl, sys
file = open(sys.argv[1], "w")
try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(3)
"""


def file_system(machine: Machine) -> Iterator[Finding]:
    """Locks between two processes, fsync, atomic rename and free space in the folder of the
    runs.
    """
    folder = machine.folder / "file_system"
    folder.mkdir(exist_ok=True)
    kind = output_of("stat", "-f", "-c", "%T", str(folder)).strip()
    try:
        # Whether a lock of this process keeps another one out, until it is released.
        remedy = (
            "choose another folder, or set SOREN_ALIGN_LOCKS=off and start one command at a time"
        )
        expected, codes, file = "1 of 2 processes holds it", [], folder / "lock"
        try:
            with file.open("w") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                codes.append(
                    subprocess.run(
                        [sys.executable, "-I", "-c", LOCKER, file], timeout=30
                    ).returncode
                )
            codes.append(
                subprocess.run([sys.executable, "-I", "-c", LOCKER, file], timeout=30).returncode
            )
        except OSError as error:
            reason = f"the file system has no locks ({error.strerror}); {remedy}"
            yield Finding("flock", kind, expected, "FAILED", reason)
        else:
            problem = (
                "two processes hold the same lock"
                if codes[0] != 3
                else "a released lock is not free"
            )
            reason = f"{problem}: flock has no effect; {remedy}"
            yield judged("flock", kind or "works", expected, codes == [3, 0], reason)
        begin = time.monotonic()
        try:
            for _ in range(5):
                files.write(folder / "synced", "content")
            files.sync_folder(folder)
        except OSError as error:
            reason = f"fsync fails ({error.strerror}); a checkpoint could be lost with the power; choose another folder"
            yield Finding("fsync", "an error", "no error", "FAILED", reason)
        else:
            seconds = (time.monotonic() - begin) / 5
            reason = f"fsync of a small file takes {seconds:.1f} s; a checkpoint has many files; choose another folder"
            measured, expected = (
                f"{1e3 * seconds:.1f} ms per file",
                f"< {SYNC_SECONDS:.0f} s per file",
            )
            yield judged("fsync", measured, expected, seconds < SYNC_SECONDS, reason)
        yield _rename(folder / "renamed")
        free = shutil.disk_usage(folder).free
        reason = f"{machine.folder} has {gibibytes(free)} left; checkpoints need more, see soren-align plan"
        yield judged(
            "free space", gibibytes(free), f">= {gibibytes(FREE_BYTES)}", free >= FREE_BYTES, reason
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rename(file: Path, num_writes: int = 50) -> Finding:
    """Whether a reader sees the old or the new content while a file is replaced."""
    contents, wrong, ended = [letter * 10_000 for letter in "ab"], [], threading.Event()
    file.write_text(contents[0])

    def read() -> None:
        while not ended.is_set():
            try:
                text = file.read_text()
            except OSError as error:
                wrong.append(str(error))
                continue
            if text not in contents:
                wrong.append(f"{len(text)} characters")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(num_writes):
            partial = file.with_suffix(".part")
            partial.write_text(contents[number % 2])
            os.replace(partial, file)
    finally:
        ended.set()
        reader.join()
    reason = (
        f"a reader sees a half-written file ({wrong[0] if wrong else ''}); choose another folder"
    )
    return judged(
        "atomic rename", count(num_writes, "replacement"), "old or new content", not wrong, reason
    )
