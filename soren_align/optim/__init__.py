"""The optimizers, the routing of parameters to their rules, and `build_optimizer` for a whole model."""

from .chunks import CHUNK, Sums, chunks, copied_to_cpu
from .eight_bits import BLOCK, SMALL, Segment, SharedBlocks, norm
from .factory import OptimizerFactory, build_optimizer
from .optimizers import AdamW, HTMuon, Muon, Soren
from .pieces import Piece, Whole, local, staged
from .placement import Placement
from .rounding import master_weights, ulp
from .routing import Route, param_groups, route, routing_table, share_notices, spectral_share
from .spectral_optimizer import OPTIMIZERS, SpectralOptimizer
from .state import momentum_dtype, momentum_of
from .storage import matrices_of, names_of_matrices
from .update import ADAMW_RMS, GroupUpdate, decay_and_add_
from .update_records import AppliedMap, AppliedUpdate, PendingUpdate

__all__ = [
    "ADAMW_RMS",
    "BLOCK",
    "CHUNK",
    "OPTIMIZERS",
    "SMALL",
    "AdamW",
    "AppliedMap",
    "AppliedUpdate",
    "GroupUpdate",
    "HTMuon",
    "Muon",
    "OptimizerFactory",
    "PendingUpdate",
    "Piece",
    "Placement",
    "Route",
    "Segment",
    "SharedBlocks",
    "Soren",
    "SpectralOptimizer",
    "Sums",
    "Whole",
    "build_optimizer",
    "chunks",
    "copied_to_cpu",
    "decay_and_add_",
    "local",
    "master_weights",
    "matrices_of",
    "momentum_dtype",
    "momentum_of",
    "names_of_matrices",
    "norm",
    "param_groups",
    "route",
    "routing_table",
    "share_notices",
    "spectral_share",
    "staged",
    "ulp",
]
