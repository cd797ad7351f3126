"""The optimizers, which parameter goes where, and how a model gets its optimizer."""

from .chunks import CHUNK, Sums, chunks, copied_to_cpu
from .factory import OptimizerFactory, build_optimizer
from .rounding import Proposal, move_, spacing, summed
from .routing import Route, param_groups, route, routing_table
from .soren import AdamW, HTMuon, Muon, Soren
from .spectral_optimizer import SpectralOptimizer
from .spectral_step import GroupStep, Piece, Placement, Update, Whole
from .state import momentum_dtype

__all__ = [
    "CHUNK",
    "AdamW",
    "GroupStep",
    "HTMuon",
    "Muon",
    "OptimizerFactory",
    "Piece",
    "Placement",
    "Proposal",
    "Route",
    "Soren",
    "SpectralOptimizer",
    "Sums",
    "Update",
    "Whole",
    "build_optimizer",
    "chunks",
    "copied_to_cpu",
    "momentum_dtype",
    "move_",
    "param_groups",
    "route",
    "routing_table",
    "spacing",
    "summed",
]
