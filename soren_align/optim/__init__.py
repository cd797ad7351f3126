"""The optimizers, which parameter goes where, and how a model gets its optimizer."""

from .factory import OptimizerFactory, build_optimizer
from .routing import Route, param_groups, route, routing_table
from .soren import AdamW, HTMuon, Muon, Soren
from .spectral_optimizer import SpectralOptimizer, Update

__all__ = [
    "AdamW",
    "HTMuon",
    "Muon",
    "OptimizerFactory",
    "Route",
    "Soren",
    "SpectralOptimizer",
    "Update",
    "build_optimizer",
    "param_groups",
    "route",
    "routing_table",
]
