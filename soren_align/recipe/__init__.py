"""The recipe: the definition of one run in one YAML file, checked before anything expensive starts.

`sections` and `optimizers` define the keys, `trl_config` those of TRL under `trainer:`. `loader` reads a file,
`merging` puts it over the recipe that it extends, `checks` looks for missing files and conflicting keys, and `messages`
words the errors. Nothing here imports torch.
"""

from . import trackers
from .batch import accumulation, batch_unit, few_steps, global_batch, refuse_no_batch, trainer_value
from .checks import evaluation_problems
from .comparison import differences, recipe_hash, training_part
from .data_paths import FILE_KINDS, STDLIB, data_files, data_suffix
from .data_section import Column, Data, DataSplit, HeldOut, HeldOutNumber, Streaming, TrainSplit
from .first_lines import OPTIONS, REQUIRED_COLUMNS, columns_text, example_of_names
from .loader import find, load, load_resolved, load_text, task_of, to_yaml
from .lora import adapter_config
from .optimizers import MAPS, OPTIMIZERS, OptimizerSection, as_adamw
from .parallel import Parallel, gradient_notice, parallel
from .quantization import (
    QUANTIZATION_RECORD,
    Quantization,
    compute_dtype,
    quantization,
    recorded_quantization,
    refuse_unloadable,
    refuse_unquantizable,
)
from .references import is_local
from .run_sections import Samples
from .schema import (
    SCHEMA_COMMENT,
    SCHEMA_FILE,
    SCHEMA_VERSION,
    json_schema,
    schema_text,
    with_modeline,
    write_schema,
)
from .sections import ADAPTER, TASK_TITLES, Eval, Lora, Model, Recipe, TrainedTokenizer, is_derived, trains_adapter

__all__ = [
    "ADAPTER",
    "FILE_KINDS",
    "MAPS",
    "OPTIMIZERS",
    "OPTIONS",
    "QUANTIZATION_RECORD",
    "REQUIRED_COLUMNS",
    "SCHEMA_COMMENT",
    "SCHEMA_FILE",
    "SCHEMA_VERSION",
    "STDLIB",
    "TASK_TITLES",
    "Column",
    "Data",
    "DataSplit",
    "Eval",
    "HeldOut",
    "HeldOutNumber",
    "Lora",
    "Model",
    "OptimizerSection",
    "Parallel",
    "Quantization",
    "Recipe",
    "Samples",
    "Streaming",
    "TrainSplit",
    "TrainedTokenizer",
    "accumulation",
    "adapter_config",
    "as_adamw",
    "batch_unit",
    "columns_text",
    "compute_dtype",
    "data_files",
    "data_suffix",
    "differences",
    "evaluation_problems",
    "example_of_names",
    "few_steps",
    "find",
    "global_batch",
    "gradient_notice",
    "is_derived",
    "is_local",
    "json_schema",
    "load",
    "load_resolved",
    "load_text",
    "parallel",
    "quantization",
    "recipe_hash",
    "recorded_quantization",
    "refuse_no_batch",
    "refuse_unloadable",
    "refuse_unquantizable",
    "schema_text",
    "task_of",
    "to_yaml",
    "trackers",
    "trainer_value",
    "training_part",
    "trains_adapter",
    "with_modeline",
    "write_schema",
]
