"""Optimizer steps of sharded or replicated matrices: layouts, owner ranks, and the exchange between
ranks.
"""

from torch.distributed.checkpoint.api import CheckpointException

from ..optim import local
from .checkpoints import check_parts, is_universal, rank_of_file, staged_saves, to_universal
from .ddp import DDPStrategy
from .engine import (
    chain_of,
    full_weights,
    restore_groups_,
    set_strategy,
    shard_reference,
    start_deepspeed,
    sum_in_float32,
)
from .fsdp import FSDP2Strategy
from .layout import RankShard, flat_partitions, parameter_slices, replicas, row_blocks
from .plan import assign_owners, elements_sent, make_exchange_plan
from .zero import ZeroStrategy, set_zero_strategy
