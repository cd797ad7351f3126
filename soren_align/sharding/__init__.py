"""Where the matrices of a distributed model lie, who maps which, and how they get there and back."""

from .attach import FlatShards, Replicas, RowBlocks
from .geometry import Fragment, Layout, Matrix, flat_partitions, parameter_slices, replicas, row_blocks
from .ownership import assign_owners, loads, numbers_sent
from .plan import ROUND_MB, Plan, make_plan
from .zero import attach_zero

__all__ = [
    "ROUND_MB",
    "FlatShards",
    "Fragment",
    "Layout",
    "Matrix",
    "Plan",
    "Replicas",
    "RowBlocks",
    "assign_owners",
    "attach_zero",
    "flat_partitions",
    "loads",
    "make_plan",
    "numbers_sent",
    "parameter_slices",
    "replicas",
    "row_blocks",
]
