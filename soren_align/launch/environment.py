"""What launchers leave in the environment of the processes that they start.

torchrun, accelerate and deepspeed set RANK and WORLD_SIZE; srun has words of its own. No torch here.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UserError

# srun's word for torch's. The batch script itself has SLURM_PROCID too, but no SLURM_STEP_NUM_TASKS.
_SRUN = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
}
_NAMES = {*_SRUN, "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_NAMES |= {"ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"}
_NAMES |= {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"}  # accelerate looks at these as well


@dataclass(frozen=True)
class Launched:
    """This process among those that a launcher started."""

    rank: int
    num_ranks: int


def launched() -> Launched | None:
    """Which of how many processes this is; None if nobody launched it. UserError where a launcher is half-hearted."""
    env = environment()
    if "WORLD_SIZE" in env and "RANK" in env:
        return Launched(int(env["RANK"]), int(env["WORLD_SIZE"]))
    if int(env.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"WORLD_SIZE is {env['WORLD_SIZE']} and RANK is not set: nobody can tell which process this is. Start it "
            "with --processes N or torchrun, or unset WORLD_SIZE"
        )
    # accelerate sets MASTER_ADDR for more than one process, and with --cpu starts a single one all the same.
    if env.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_ADDR" in env:
        raise UserError(
            "accelerate launch --cpu starts one process whatever --num_processes says; leave accelerate out and write "
            "--processes N"
        )
    return None


def environment() -> dict[str, str]:
    """This process's environment, in torch's words if srun started it."""
    env = dict(os.environ)
    if "RANK" in env or int(env.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return env
    for ours, theirs in _SRUN.items():
        env[ours] = env[theirs]
    if "MASTER_ADDR" not in env and int(env.get("SLURM_STEP_NUM_NODES", "1")) > 1:
        raise UserError(
            "srun on several machines: set MASTER_ADDR to the first one's name, "
            "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
        )
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    # The same port for all tasks of a job, and hardly ever that of another job on the machine.
    env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 10000))
    return env


def without_ranks(env: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process that is alone."""
    return {name: value for name, value in env.items() if name not in _NAMES}
