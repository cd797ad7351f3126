"""The optimizers, the routing of parameters to their rules, and `build_optimizer` for a whole
model.
"""

from importlib import import_module
from typing import Any

from ..core import third_party
from .build import OptimizerFactory, build_optimizer, completed_settings
from .exchange import ShardingStrategy
from .layout import WeightLayout, local, matrices_of, names_of_matrices
from .optimizer import OPTIMIZERS, AppliedMap, MapContext, SpectralOptimizer
from .optimizers import AdamW, HTMuon, Muon, Soren
from .rounding import CHUNK, Sums, chunks, copied_to_cpu, master_weights, ulp
from .routing import Route, param_groups, route, routing_table, share_notices, spectral_share
from .step import PendingUpdate, decay_and_add_


def _import_module(section: Any, name: str) -> str:
    import_module(section.module)
    return (
        ""
        if name in OPTIMIZERS
        else f"{section.module} defines no SpectralOptimizer with the name {name!r}"
    )


for _ in third_party.objects(third_party.OPTIMIZERS, (), _import_module):
    pass  # each has registered itself in OPTIMIZERS
