"""Optimizer steps of sharded or replicated matrices: layouts, owner ranks, and the exchange between ranks."""

from torch.distributed.checkpoint.api import CheckpointException

from ..optim import local
from .detection import Sharding, chain_of, set_placement
from .engine import full_weights, is_universal, restore_groups_, start_deepspeed, sum_in_float32, to_universal
from .exchange_plan import ROUND_MB, ExchangePlan, make_exchange_plan
from .geometry import Fragment, Layout, Matrix, flat_partitions, parameter_slices, replicas, row_blocks
from .ownership import assign_owners, elements_sent, flops_per_rank
from .pickles import check_parts, rank_of_file
from .strategies import FlatShards, Replicas, RowBlocks
from .zero import set_zero_placement

__all__ = [
    "ROUND_MB",
    "CheckpointException",
    "ExchangePlan",
    "FlatShards",
    "Fragment",
    "Layout",
    "Matrix",
    "Replicas",
    "RowBlocks",
    "Sharding",
    "assign_owners",
    "chain_of",
    "check_parts",
    "elements_sent",
    "flat_partitions",
    "flops_per_rank",
    "full_weights",
    "is_universal",
    "local",
    "make_exchange_plan",
    "parameter_slices",
    "rank_of_file",
    "replicas",
    "restore_groups_",
    "row_blocks",
    "set_placement",
    "set_zero_placement",
    "start_deepspeed",
    "sum_in_float32",
    "to_universal",
]
