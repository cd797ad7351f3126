"""The optimizers, the routing of parameters to their rules, and `build_optimizer` for a whole model."""

from .eight_bits import norm
from .layout import OneProcess, local, matrices_of, names_of_matrices
from .optimizer import OPTIMIZERS, AppliedMap, OptimizerFactory, SpectralOptimizer, build_optimizer
from .optimizers import AdamW, HTMuon, Muon, Soren
from .rounding import CHUNK, Sums, chunks, copied_to_cpu, master_weights, ulp
from .routing import Route, param_groups, route, routing_table, share_notices, spectral_share
from .state import momentum_of
from .step import ADAMW_RMS, PendingUpdate, decay_and_add_

__all__ = [
    "ADAMW_RMS",
    "CHUNK",
    "OPTIMIZERS",
    "AdamW",
    "AppliedMap",
    "HTMuon",
    "Muon",
    "OneProcess",
    "OptimizerFactory",
    "PendingUpdate",
    "Route",
    "Soren",
    "SpectralOptimizer",
    "Sums",
    "build_optimizer",
    "chunks",
    "copied_to_cpu",
    "decay_and_add_",
    "local",
    "master_weights",
    "matrices_of",
    "momentum_of",
    "names_of_matrices",
    "norm",
    "param_groups",
    "route",
    "routing_table",
    "share_notices",
    "spectral_share",
    "ulp",
]
