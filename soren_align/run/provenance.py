"""Identify code and weights by versions, commit and sha256, for run.json and results.json."""

import hashlib
import platform
import subprocess
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.files import digest, read_json
from ..core.version import __version__

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "datasets",
    "accelerate",
    "peft",
    "deepspeed",
    "lm-eval",
    "pydantic",
)
DECLARATION, DIGITS = "declaration.json", 12
"""A study's declaration: the file in its folder, and how much of its hash is shown."""
MAX_DECLARATION_BYTES = 64 << 20
"""A folder of 100,000 files has 10 MB of names and hashes."""


def provenance() -> dict[str, Any]:
    """Return versions, commit and platform: the environment in which another person can repeat a
    run.
    """
    # Those whose arithmetic or defaults can change a result; a run.json is not a list of all that
    # is installed.
    versions = {"python": platform.python_version(), "soren-align": __version__}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"versions": versions, "commit": commit(), "platform": platform.platform()}


@lru_cache
def software() -> str:
    """Return one line that changes with an update: the versions, and the commit of the checkout."""
    record = provenance()
    return ", ".join(
        [
            *(f"{name} {version}" for name, version in record["versions"].items()),
            str(record["commit"]),
        ]
    )


def commit() -> str | None:
    """Return the commit of the checkout that this code runs from, '-dirty' if edited; None in an
    installed wheel.
    """
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        # Edited code is not the commit's: results of a dirty tree cannot be repeated from it.
        head = _git(folder, "rev-parse", "HEAD").strip()
        return head + ("-dirty" if _git(folder, "status", "--porcelain").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", folder, *arguments], check=True, capture_output=True, text=True
    ).stdout


def read_declaration(folder: Path) -> dict[str, Any]:
    """Return the declaration in a study's folder.
    Raises UserError if it is missing, or not as it was written.
    """
    file = folder / DECLARATION
    remedy = "restore this file, or repeat the study in another folder"
    if not file.is_file():
        raise UserError(f"{file}: is missing; {remedy}")
    content = read_json(file, max_bytes=MAX_DECLARATION_BYTES)
    own = {key: value for key, value in content.items() if key != "sha256"}
    if content.get("sha256") != digest(own):
        raise UserError(f"{file}: was edited; {remedy}")
    return content


def declared_digits(run: Path) -> str | None:
    """Return the digits of the declaration of the study that a run folder is a final run of; None
    of any other run.
    """
    folders = run.resolve().parents  # STUDY/verdict/CANDIDATE
    if len(folders) > 2 and folders[1].name == "verdict":
        with suppress(UserError):  # missing, or edited: its digits would be those of another study
            return read_declaration(folders[2])["sha256"][:DIGITS]
    return None


def fingerprint(model: str) -> str | None:
    """Return the sha256 over the weights of a local model folder; None for a name on the hub."""
    if not Path(model).is_dir():
        return None
    files = weight_files(Path(model))
    # Sizes and times are the key of the cache: a file that changed is hashed again.
    return _sha256(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model folder that hold its weights: safetensors, and their indexes."""
    files = (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json"))
    return sorted(file for file in files if file.is_file())


@lru_cache
def _sha256(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Hash the concatenated files (path, size, mtime); cached while sizes and times stay equal (1.5
    GB/s).
    """
    digest = hashlib.sha256()
    for file, _, _ in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()
