"""The recipe: what one run is, in one YAML file, checked before anything expensive starts.

`models` says which keys there are, `trl_config` what TRL's own namespace under `trainer:` accepts, `checks` what
must exist, `adapters` what an adapter's folder says, and `load` turns a file into a Recipe or a list of sentences.
`foreign` makes a recipe of TRL's, the alignment handbook's or Axolotl's file. Nothing here imports torch.
"""

from . import trackers
from .adapters import adapter_config, refuse_unquantizable
from .batch import accumulation, refuse_no_batch, rows_per_step, trainer_value
from .checks import evaluation_problems
from .foreign_file import import_file
from .load import find, load, load_resolved, load_text, task_of, to_yaml
from .models import (
    ADAPTER,
    DataSplit,
    Eval,
    Lora,
    OutOfReach,
    Recipe,
    TrainSplit,
    UserError,
    differences,
    json_schema,
    training_part,
    trains_adapter,
)
from .parallel import Parallel, parallel
from .references import is_local

__all__ = [
    "ADAPTER",
    "DataSplit",
    "Eval",
    "Lora",
    "OutOfReach",
    "Parallel",
    "Recipe",
    "TrainSplit",
    "UserError",
    "accumulation",
    "adapter_config",
    "differences",
    "evaluation_problems",
    "find",
    "import_file",
    "is_local",
    "json_schema",
    "load",
    "load_resolved",
    "load_text",
    "parallel",
    "refuse_no_batch",
    "refuse_unquantizable",
    "rows_per_step",
    "task_of",
    "to_yaml",
    "trackers",
    "trainer_value",
    "training_part",
    "trains_adapter",
]
