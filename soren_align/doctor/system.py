"""Checks of the libraries, the GPUs and the file system."""

import fcntl
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

from ..core import files
from ..core.text import gibibytes
from ..launch.environment import has_gpu
from .checks import Finding, Machine, judged, skipped

ROOT = Path(__file__).resolve().parents[2]
FREE_BYTES = 5 << 30
SYNC_SECONDS = 1.0
OLDEST_GPU = (8, 0)
"""Compute capability with TF32 and bfloat16."""


def libraries(machine: Machine) -> Iterator[Finding]:
    """Versions against what soren-align declares, Python, torch's build, driver, GPUs and their
    interconnect.
    """
    # The requirements that apply here: of the checkout that this code runs from, or of the wheel.
    if (file := ROOT / "pyproject.toml").is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        lines, extras = project["dependencies"], project["optional-dependencies"].values()
    else:
        lines, extras = metadata.requires("soren-align") or [], []
    parsed, problems = list(map(Requirement, lines)), []
    required = [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]
    optional = [r for r in parsed if r not in required] + list(map(Requirement, chain(*extras)))
    for requirement in [*required, *optional]:
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            # What only extras need may be missing, but must not be another version.
            if requirement in required:
                problems.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            needed = f"but soren-align needs {requirement.specifier}"
            problems.append(f"{requirement.name} is {version}, {needed}")
    reason = f"{'; '.join(problems)}; run pip install -c constraints.txt ."
    yield judged(
        "libraries", f"{len(required)} needed", "in the declared ranges", not problems, reason
    )

    import torch

    build = f"{torch.__version__}, " + (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    )
    if not has_gpu():
        yield Finding("torch", build, "a build for the CPU is enough: no GPU")
        yield skipped("GPUs", "this machine has no GPU")
        return
    remedy = (
        "this machine has a GPU, but torch cannot use it; install the build of torch for your"
        " driver (pytorch.org)"
    )
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
        measured = (
            f"{properties.name}, {gibibytes(free)} of {gibibytes(total)} free, capability"
            f" {properties.major}."
        )
        reason = (
            "the GPU is older than capability 8.0 (no bfloat16, no TF32), or another process uses"
            " its memory"
        )
        passes = capability >= OLDEST_GPU and free > 0.9 * total
        yield judged(
            f"GPU {number}", f"{measured}{properties.minor}", "90% free, >= 8.0", passes, reason
        )
    if torch.cuda.device_count() < 2:
        yield skipped("interconnect", "one GPU")
        return
    # The words of nvidia-smi's matrix of connections: NV is NVLink, all others go over PCIe or the
    # CPUs' own link.
    kinds = set(
        re.findall(r"\b(NV\d+|PIX|PXB|PHB|NODE|SYS)\b", output_of("nvidia-smi", "topo", "-m"))
    )
    reason = "GPUs are connected by PCIe alone; ZeRO 3 and FSDP2 will be slow"
    has_links = not kinds or any(kind.startswith("NV") for kind in kinds)
    measured = ", ".join(sorted(kinds)) or "unknown"
    yield judged("interconnect", measured, "NV (NVLink)", has_links, reason)


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
    """Locks between two processes, fsync and free space in the folder of the runs."""
    folder = machine.folder / "file_system"
    folder.mkdir(exist_ok=True)
    kind = output_of("stat", "-f", "-c", "%T", str(folder)).strip()
    try:
        # Whether a lock of this process keeps another one out, until it is released.
        # Network file systems may accept flock and not enforce it: two commands would write one
        # run.
        codes, file, problem = [], folder / "lock", "flock has no effect"
        words = [sys.executable, "-I", "-c", LOCKER, file]
        try:
            with file.open("w") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                codes.append(subprocess.run(words, timeout=30).returncode)
            codes.append(subprocess.run(words, timeout=30).returncode)
        except OSError as error:
            problem = f"the file system has no locks ({error.strerror})"
        reason = f"{problem}, so that two commands could write one run; choose another folder, or "
        reason += "set SOREN_ALIGN_LOCKS=off and start one command at a time"
        expected = "1 of 2 processes holds it"
        yield judged("flock", kind or "works", expected, codes == [3, 0], reason)
        # A checkpoint is sealed by fsync; without it a power cut leaves files of zeros.
        begin, problem = time.monotonic(), ""
        try:
            for _ in range(5):
                files.write(folder / "synced", "content")
            files.sync_folder(folder)
        except OSError as error:
            problem = f"fails ({error.strerror}), so that a power cut could lose a checkpoint"
        seconds = (time.monotonic() - begin) / 5
        if not problem and seconds >= SYNC_SECONDS:
            problem = f"of a small file takes {seconds:.1f} s, and a checkpoint has many files"
        reason = f"fsync {problem}; choose another folder"
        expected = f"< {SYNC_SECONDS:.0f} s per file"
        yield judged("fsync", f"{1e3 * seconds:.1f} ms per file", expected, not problem, reason)
        free = shutil.disk_usage(folder).free
        reason = f"{machine.folder} has {gibibytes(free)} left; checkpoints need more, see plan"
        least, passes = f">= {gibibytes(FREE_BYTES)}", free >= FREE_BYTES
        yield judged("free space", gibibytes(free), least, passes, reason)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
