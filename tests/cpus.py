"""The unit and model tiers on the instruction sets of older CPUs, which round otherwise: `make test-cpus`.

    python -m tests.cpus              all settings, one line for each; about 45 minutes on two cores
    python -m tests.cpus avx2-2       one of them: an instruction set, and a number of threads
    python -m tests.cpus rotating     the tests of rounding alone, in the one whose turn it is by the commit: .ci/run

The exit code is 1 if a test failed in any of them.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

LIMITS = {
    "default": ("default", "SSE4_2", "SSE41", "Nehalem"), "avx2": ("avx2", "AVX2", "AVX2", "Haswell"), "native": None,
}  # fmt: skip
"""Of torch, MKL (on Intel's CPUs alone), oneDNN and numpy's OpenBLAS; `native` is what the CPU has."""
VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE")

ROUNDING = ["optim", "research", "sharding", "spectral", "training", "quickstart", "evaluate", "test_docs.py"]
ALL: list[str] = []
SETTINGS = {"default-1": ALL, "avx2-2": ALL, "native-2": ALL, "default-2": ROUNDING, "avx2-1": ROUNDING}
"""What of tests/ each setting runs. `make test` runs all tests with the sixth, native-1."""


def environment(setting: str) -> dict[str, str]:
    """os.environ with the limits and the number of threads of a setting."""
    instructions, threads = setting.split("-")
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    limits = dict(zip(VARIABLES, LIMITS[instructions] or (), strict=False))
    # Two processes with two threads each on two cores: threads that wait must not take the others' time.
    return kept | limits | {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}


def passes(setting: str, names: list[str]) -> bool:
    """Run tests in a setting, and print one line: its time, and pytest's; before it the failed tests, if any."""
    files = [str(Path("tests") / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--tb=short"]
    command += ["-m", "(unit or model) and not slow", *files]
    start = time.monotonic()
    done = subprocess.run(command, env=environment(setting), capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr)
    summary = done.stdout.strip().splitlines()[-1:]
    print(f"{setting:<10} {'failed' if done.returncode else 'passed'} {time.monotonic() - start:5.0f} s", *summary)
    return not done.returncode


def rotating() -> str:
    """The setting of HEAD: its hash, taken as a number, modulo the number of settings."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    return list(SETTINGS)[int(commit, 16) % len(SETTINGS)]


if __name__ == "__main__":
    if sys.argv[1:] == ["rotating"]:
        sys.exit(not passes(rotating(), ROUNDING))
    settings = sys.argv[1:] or list(SETTINGS)
    if unknown := set(settings) - SETTINGS.keys():
        sys.exit(f"{', '.join(unknown)}: no such setting; write rotating, or some of {', '.join(SETTINGS)}")
    sys.exit(not all([passes(setting, SETTINGS[setting]) for setting in settings]))
