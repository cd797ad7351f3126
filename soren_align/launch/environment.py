"""Environment variables that launchers set for their ranks, and that torch and its libraries read.

torchrun, accelerate and deepspeed set RANK and WORLD_SIZE; srun has its own names. The libraries
read theirs when they are imported, so that `set_environment` comes before torch.
"""

import ctypes
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import UserError
from ..core.launchers import SRUN, without_ranks
from ..recipe import Recipe, trl
from ..recipe.model import estimated_parameters

# bitsandbytes warns as PEFT imports it, where it is installed.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
_ALLOCATOR_SETTINGS = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
"""Settings of torch's GPU memory; the first of them that is set counts alone."""


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process among those that a launcher started."""

    rank: int
    num_ranks: int


def rank_from_environment() -> RankInfo | None:
    """Return this process's rank, or None if no launcher started it.
    Raises UserError if variables are missing.
    """
    env = launcher_environment()
    if "WORLD_SIZE" in env and "RANK" in env:
        return RankInfo(int(env["RANK"]), int(env["WORLD_SIZE"]))
    if int(env.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"WORLD_SIZE is {env['WORLD_SIZE']}, but RANK is not set, so the rank of this process"
            " is unknown; start the command with --processes N or torchrun, or unset WORLD_SIZE"
        )
    # accelerate sets MASTER_ADDR for several processes, and with --cpu starts a single one all the
    # same.
    if env.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_ADDR" in env:
        raise UserError(
            "accelerate launch --cpu starts one process and ignores --num_processes; start the"
            " command without accelerate, and add --processes N"
        )
    return None


def refuse_ranks(command: str) -> None:
    """Raise UserError if a launcher started this process and others."""
    rank = rank_from_environment()
    if rank and rank.num_ranks > 1:
        raise UserError(
            f"{command} needs one process, but WORLD_SIZE is {rank.num_ranks}; start {command}"
            " without a launcher"
        )


def launcher_environment() -> dict[str, str]:
    """Return this process's environment, with torch's names for srun's variables."""
    env = dict(os.environ)
    if "RANK" in env or int(env.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return env
    for name, srun_name in SRUN.items():
        env[name] = env[srun_name]
    if "MASTER_ADDR" not in env and int(env.get("SLURM_STEP_NUM_NODES", "1")) > 1:
        raise UserError(
            "srun started processes on several machines, but MASTER_ADDR is not set; set"
            " MASTER_ADDR to the name of the first machine, $(scontrol show hostnames"
            " $SLURM_JOB_NODELIST | head -n 1)"
        )
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    # The same port for all tasks of a job, rarely that of another job on the machine.
    env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 10000))
    return env


def set_environment(
    recipe: Recipe | None, num_ranks: int = 1, num_gpus: int = 1, is_rank: bool = False
) -> None:
    """Set os.environ to `library_environment`. Comes before torch is imported."""
    env = library_environment(recipe, num_ranks, is_rank)
    gpus = _gpus()
    if num_ranks == num_gpus == 1 and len(gpus) > 1 and "CUDA_VISIBLE_DEVICES" not in env:
        # TRL refuses several visible GPUs in one process, and the batch must not depend on the
        # machine.
        env["CUDA_VISIBLE_DEVICES"] = "0"
        notice = (
            f"notice    {len(gpus)} GPUs are visible, but only one is used; add --processes"
            f" {len(gpus)} to use all"
        )
        print(notice, file=sys.stderr)  # noqa: T201
    # Cleared first: a launcher's variables, which `env` has not, must go too.
    os.environ.clear()
    os.environ.update(env)


def library_environment(
    recipe: Recipe | None, num_ranks: int = 1, is_rank: bool = False
) -> dict[str, str]:
    """Return the environment for torch and its libraries in one of `num_ranks` processes.
    The user's values stay.

    is_rank: whether a single process is a rank too, of ZeRO or FSDP2, which a launcher started.
    """
    env = launcher_environment() if num_ranks > 1 or is_rank else without_ranks(os.environ)
    # A checkpoint's pickle runs no code, whichever library loads it.
    env["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    env.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    env.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if not _ALLOCATOR_SETTINGS & env.keys():
        # The buffers of matrices and of ZeRO's buckets, of 0.2 to 2 GB and changing sizes, fragment
        # fixed segments.
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    # Threads. A model of the quickstart's size is as fast with one, and has the same bits on any
    # number of cores; torchrun would set one for all, and warn.
    if recipe and (num_threads := recipe.run.num_threads):
        env.setdefault("OMP_NUM_THREADS", str(num_threads))
    if recipe and trains_on_cpu(recipe):
        num_parameters = estimated_parameters(recipe.model.name_or_path)
        if num_parameters is not None and num_parameters <= SMALL_MODEL:
            env.setdefault("OMP_NUM_THREADS", "1")
        if "OMP_WAIT_POLICY" not in env:
            env.setdefault("GOMP_SPINCOUNT", str(SPINS))
    if num_ranks > 1:  # torchrun would set 1, and warn
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
        # For a lost rank, torch would print frames of C++.
        env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if recipe and recipe.trainer.get("use_cpu"):
        env.setdefault("ACCELERATE_USE_CPU", "true")
    if recipe and "tensorboard" in trl.named(recipe.trainer.get("report_to")):
        # transformers' default contains the host's name, and is a new folder after each resume.
        env.setdefault(
            "TENSORBOARD_LOGGING_DIR", str(Path(recipe.run.output_dir).expanduser() / "tensorboard")
        )
    if recipe and recipe.run.offline:
        env.setdefault("HF_HUB_OFFLINE", "1")
    if not has_gpu():
        env.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed prints that it found no GPU
    return env


# ms per step of Soren on 2 cores of an Intel Xeon, torch 2.13.0, medians of 3 to 6 seconds, for a
# model of 846,464 parameters (and of 3,273,984): alone 140 (569) with 1 thread and 86 (324) with 2.
# Beside 4 busy processes 138 with 1 thread; with 2 that spin as long as libgomp's default 2,500 to
# 2,600; with SPINS 420 to 440, and alone 88 (350). With OMP_WAIT_POLICY=passive 2 are as slow alone
# as 1: 143 (547).
SPINS = 1000
"""Iterations for which a thread on a CPU waits before it sleeps (GOMP_SPINCOUNT; libgomp's default
is 300,000)."""
SMALL_MODEL = 10**6
"""Parameters, up to which one thread trains a model: as fast beside other processes as alone, and
with the same bits on any number of cores."""


def trains_on_cpu(recipe: Recipe) -> bool:
    """Whether a run uses no GPU."""
    return bool(recipe.trainer.get("use_cpu")) or not has_gpu()


def has_gpu() -> bool:
    """Whether this machine has a GPU, hidden or not; found without torch."""
    if _gpus() or Path("/dev/kfd").exists():
        return True
    # CUDA may work without /dev/nvidia*, as under WSL2: torch needs this library too. It starts no
    # GPU.
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that processes started from here may use, for
    CUDA_VISIBLE_DEVICES.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [gpu.name.removeprefix("nvidia") for gpu in _gpus()]


def gpu_bytes() -> float | None:
    """Return the memory of this machine's smallest GPU, by nvidia-smi; None without one."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return min(float(line) * 2**20 for line in done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _gpus() -> list[Path]:
    return sorted(Path("/dev").glob("nvidia[0-9]*"))
