"""The variables by which launchers make a process one of several ranks.

torchrun, accelerate and deepspeed set torch's names; srun has its own.
"""

from collections.abc import Mapping

SRUN = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
"""torch's name -> srun's. The batch script itself has SLURM_PROCID too, but no
SLURM_STEP_NUM_TASKS."""
_RANK_VARIABLES = {
    *SRUN,
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
_RANK_VARIABLES |= {"ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"}
# accelerate reads these as well
_RANK_VARIABLES |= {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"}


def without_ranks(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without the variables of launchers, for a single process."""
    return {name: value for name, value in env.items() if name not in _RANK_VARIABLES}
