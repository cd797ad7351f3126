"""Where the matrices of a distributed model lie, who maps which, and how they get there and back."""

from ..optim.spectral_step import local
from .attach import FlatShards, Replicas, RowBlocks
from .detection import Placed, chain_of, place
from .engine import full_weights, is_universal, settle, start_deepspeed, sum_in_float32, to_universal
from .geometry import Fragment, Layout, Matrix, flat_partitions, parameter_slices, replicas, row_blocks
from .ownership import assign_owners, loads, numbers_sent
from .pickles import check_parts
from .step_plan import ROUND_MB, Plan, make_plan
from .zero import attach_zero

__all__ = [
    "ROUND_MB",
    "FlatShards",
    "Fragment",
    "Layout",
    "Matrix",
    "Placed",
    "Plan",
    "Replicas",
    "RowBlocks",
    "assign_owners",
    "attach_zero",
    "chain_of",
    "check_parts",
    "flat_partitions",
    "full_weights",
    "is_universal",
    "loads",
    "local",
    "make_plan",
    "numbers_sent",
    "parameter_slices",
    "place",
    "replicas",
    "row_blocks",
    "settle",
    "start_deepspeed",
    "sum_in_float32",
    "to_universal",
]
