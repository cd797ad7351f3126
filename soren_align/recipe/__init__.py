"""The recipe: the definition of one run in one YAML file, checked before anything expensive starts.

`schema` and `optimizer` define the keys, `trl` those of TRL under `trainer:`. `loader` reads a file
over the recipe that it extends, and `checks` looks for missing files and conflicting keys. Nothing
here imports torch.
"""

from .checks import evaluation_problems
from .data_files import (
    FILE_KINDS,
    STDLIB,
    columns_text,
    csv_columns,
    data_files,
    data_suffix,
    example_of_names,
    refuse_wide_characters,
)
from .data_section import Data, DataSplit, HeldOut, HeldOutNumber, TrainSplit
from .loader import (
    OPTIONS,
    differences,
    find,
    load,
    load_for_model,
    load_resolved,
    load_text,
    recipe_hash,
    to_yaml,
    training_part,
)
from .model import (
    Quantization,
    adapter_config,
    compute_dtype,
    is_local,
    quantization,
    recorded_quantization,
    refuse_unusable,
)
from .optimizer import MAP_SECTIONS, OPTIMIZER_SECTIONS, MatrixOptimizer, OptimizerSection
from .parallel import (
    Parallel,
    accumulation,
    batch_unit,
    drops_last,
    few_steps,
    global_batch,
    left_out,
    parallel,
    trainer_value,
)
from .schema import Benchmark, Eval, Model, Recipe, Samples, trains_adapter
