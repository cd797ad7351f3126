"""The libraries that a training and an evaluation import, for the server that runs are forked from: see run_processes.

No thread may run in that server, but for jemalloc's own: a fork copies none, and a lock that one holds would stay
locked.
"""

from ..evaluate.run import lineage, stage
from ..publish.card import write_card as _card
from ..sharding import ranks
from ..training import run, setup

__all__ = ["_card", "lineage", "ranks", "run", "setup", "stage"]
