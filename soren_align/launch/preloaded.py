"""Import and read once what every run of a study needs: the only module of the server that the
processes of runs fork from.

The order of the imports is one in which bitsandbytes prints no warning. No thread may run
afterwards, but for jemalloc's own: a fork copies none, and a lock that one holds would stay locked.
"""

import gc
from contextlib import suppress

from ..training import run, setup  # noqa: F401  # isort: skip
from . import commands, evaluation, show  # noqa: F401  # isort: skip
from ..core.extras import is_installed
from ..publish import card  # noqa: F401
from ..recipe import trl
from ..run import curves  # noqa: F401
from ..sharding import ranks  # noqa: F401
from ..tasks import TASKS

if is_installed("lm_eval"):
    from ..evaluate.run import lineage, stage  # noqa: F401

# accelerate imports DeepSpeed where a run saves its model, which takes a second. A broken one fails
# there, in the run.
with suppress(ImportError, OSError, RuntimeError, AttributeError):
    import deepspeed  # noqa: F401

for task in TASKS:
    trl.fields(task)  # cached: the names and types of TRL's settings

gc.collect()
gc.freeze()  # each of a run's three full collections took a third of a second
