"""The sections of a recipe, as pydantic models: every key, its meaning and its default stand here and only here."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from .. import shipped
from . import trl_config

ADAPTER = "adapter_config.json"  # lies in an adapter's folder
Task = Literal["sft", "dpo"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


def _modules(value: Any, check: Any) -> Any:
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError("modules", "write all-linear, or a list of names") from None


class Lora(_Section):
    """Two small factors beside each linear layer are trained, instead of its weights."""

    r: Annotated[int, Field(ge=1)] = 16
    """The factors' rank."""
    alpha: Positive | None = None
    """Their product is added times alpha / r. null: r."""
    dropout: Beta = 0.0
    """On what goes into the factors."""
    target_modules: Annotated[
        Annotated[list[str], Field(min_length=1)] | Literal["all-linear"], WrapValidator(_modules)
    ] = "all-linear"
    """Names of layers, such as q_proj, or `all-linear`: all linear layers but the head."""
    modules_to_save: list[str] = []
    """Names of modules that are trained whole beside the factors, by AdamW, such as embed_tokens."""
    quantize: Literal["4bit"] | None = None
    """`4bit`: the frozen weights are held in bitsandbytes' NF4, doubly quantised (QLoRA). The factors stay float32."""


class Model(_Section):
    """The starting checkpoint."""

    name_or_path: Annotated[str, Field(min_length=1)]
    """A folder (`shipped:...` for a shipped one) or a model on the Hugging Face hub. A LoRA adapter's folder: training
    goes on with that adapter."""
    revision: str | None = None
    """The hub's branch, tag or commit; the commit it stood for is written into run.json."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The parameters' dtype. bfloat16 rounds most small updates away, unless `run.parallel` keeps float32 masters
    (ZeRO, FSDP2) or `optimizer.compensation` is kahan; for bfloat16 arithmetic over float32 parameters write
    `trainer: {bf16: true}`. With an adapter it is that of the frozen weights: what is trained is float32."""
    init_seed: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    """Instead of loading weights, make random ones from the folder's config.json with this seed."""
    chat_template: str | None = None
    """How turns become text: `qwen2.5` (its base models' own), `zephyr`, or the path of a .jinja file; saved with the
    model. null: the tokenizer's."""
    eos_token: Annotated[str, Field(min_length=1)] | None = None
    """What the model stops at, one token of the vocabulary: `<|im_end|>` for Qwen2.5's base models, whose own is not
    what their template ends answers with. null: the tokenizer's."""
    lora: Lora | None = None
    """A new LoRA adapter is trained, and the weights are not."""


class DataSplit(_Section):
    """Rows to train or evaluate on."""

    path: Annotated[str, Field(min_length=1)]
    """A .jsonl, .json or .parquet file (`shipped:...` for a shipped one) or a dataset on the Hugging Face hub."""
    split: str = "train"
    """The hub dataset's split, or a part of one (`train_sft[:10%]`); a file is always taken whole."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Only the first so many rows."""
    revision: str | None = None
    """The hub's branch, tag or commit."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """What becomes of rows that cannot be trained on (empty answers, equal pairs, ...): refuse the data, or drop them
    and say how many and why. For data that one cannot mend, such as the hub's."""


class TrainSplit(DataSplit):
    """Rows to train on, and how many times."""

    weight: Positive = 1.0
    """So many times the rows: 2 takes each twice, 0.25 a quarter, drawn by trainer.seed."""
    train_on_test: bool = False
    """Train on a split that is called a test split, although nothing measured on it afterwards means anything."""


# The words stand in the place of an error in a union, and are taken out of it again (load.py).
ONE, SEVERAL = "<one>", "<several>"


def _number(train: Any) -> str:
    return SEVERAL if isinstance(train, list | tuple) else ONE


class Data(_Section):
    """What is learned from. Columns are recognised: conversations (`messages`, ShareGPT's `conversations`), prompts
    with completions or with two answers, plain text."""

    train: Annotated[
        Annotated[TrainSplit, Tag(ONE)] | Annotated[Annotated[list[TrainSplit], Field(min_length=1)], Tag(SEVERAL)],
        Discriminator(_number),
    ]
    """One split, or a list of several that are shuffled together by trainer.seed."""
    eval: DataSplit | None = None
    """Held-out rows for the loss that `trainer.eval_strategy` asks for."""

    @property
    def sources(self) -> list[TrainSplit]:
        """What is trained on, as a list."""
        return self.train if isinstance(self.train, list) else [self.train]


class Optimizer(_Section):
    """Which optimizer steps, and how. One word, `name`, swaps it."""

    name: Literal["soren", "muon", "htmuon", "adamw"]
    """Matrices inside the blocks go to this one; embeddings, head, norms and biases always go to AdamW."""
    lr: Positive
    """Peak learning rate of the matrices."""
    aux_lr: Positive | None = None
    """Peak learning rate of everything else. Required, except for adamw, where null means `lr`, and where there is
    nothing else, as with LoRA."""
    weight_decay: NonNegative = 0.1
    """Decoupled, on the matrices, with the unadjusted learning rate."""
    aux_weight_decay: NonNegative = 0.0
    """Decoupled, on everything else."""
    momentum: Beta = 0.95
    """Of the matrices' exponential moving average."""
    nesterov: bool = True
    adjust_lr_fn: Literal["none", "original", "match_rms_adamw"] | None = None
    """Scale of a matrix update: `none`, `original` = sqrt(max(1, m/n)), or `match_rms_adamw` = 0.2 sqrt(max(m, n)),
    which makes learning rates comparable with AdamW's. null: `none` for soren (the paper's text), `original` for muon
    and htmuon (their code), `match_rms_adamw` for all three with LoRA."""
    spectral_map: Literal["minimax", "sns", "exact"] | None = None
    """soren only. `minimax`, a polynomial within 0.4% of the sigmoid; `sns`, the paper's, further off and dearer; or
    `exact`, the sigmoid itself. null: minimax."""
    resolution: float | None = None
    """soren's minimax only: the normalised singular value from which it is accurate, 0.01 or 0.001. null: 0.01."""
    ns_steps: Annotated[int, Field(ge=1, le=99)] | None = None
    """soren's sns only: steps of the paper's iteration. null: 15."""
    workspace_mb: NonNegative | None = None
    """soren only: MB (2^20 bytes) for mapping matrices of one shape in a batch; one that needs more is mapped alone.
    null: 16 on a CPU, 256 elsewhere."""
    p: Annotated[float, Field(gt=0, le=1)] | None = None
    """htmuon only: the power of the singular values. null: 0.125."""
    compensation: Literal["kahan", "none"] | None = None
    """For bfloat16 parameters. `kahan` keeps beside each, in 16 bits, what rounding takes from its updates: they then
    add up as in float32. `none` trains without. null: not asked, for float32 parameters and masters."""
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """AdamW's."""
    eps: Positive = 1e-8
    """AdamW's."""
    aux: list[str] = []
    """Names of further parameters for AdamW; `*` matches anything. One that matches nothing is an error."""


class Run(_Section):
    """Where the run lives and how it behaves."""

    output_dir: Annotated[str, Field(min_length=1)]
    """The run folder: recipe, run.json, metrics, checkpoints, model, evaluation."""
    resume: str = "auto"
    """`auto` goes on from the last complete checkpoint; `never` refuses a folder with an unfinished run; or the path
    of a checkpoint."""
    overwrite: bool = False
    """Throw away what the run folder holds and start afresh."""
    parallel: Annotated[str, Field(min_length=1)] = "ddp"
    """How several processes share the model. `ddp`: each has all of it. `zero1`, `zero2`, `zero3` (DeepSpeed) and
    `fsdp2` cut optimizer states, gradients, weights into parts; `zero2-offload` and `zero3-offload` keep the states in
    the CPU's memory. Or the path of a DeepSpeed config (.json) or of accelerate's for FSDP2 (.yaml)."""
    global_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Rows per optimizer step, whatever the number of processes: gradient_accumulation_steps follows from it. null:
    per_device_train_batch_size x gradient_accumulation_steps x processes."""
    lost_updates: Literal["stop", "warn"] = "stop"
    """What becomes of a run in which, at the peak learning rate, less than half of the wanted updates change what holds
    the weights: it stops at its first step, or says so and goes on."""
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype of the model folder. null: the starting checkpoint's own. The run's end says how much of the change
    survives in it. An adapter is always float32: there it is the dtype of what `soren-align merge` makes."""
    num_threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads (OMP_NUM_THREADS); tiny models are fastest, and repeatable everywhere, with 1."""
    offline: bool = False
    """Never ask the Hugging Face hub for anything."""


class Eval(_Section):
    """What is measured afterwards, on the starting checkpoint and on the trained model."""

    suite: Annotated[str, Field(min_length=1)]
    """A shipped suite's name, or the path of a suite.yaml."""
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Prompts in one forward pass. null: the suite's own. Halved, for all models of a table, where memory runs out."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights while they answer. null: the suite's own."""
    backend: Literal["hf", "vllm"] = "hf"
    """transformers, or vLLM (pip install 'soren-align[vllm]'); all models of a table are asked by the same."""
    processes: Annotated[int, Field(ge=1)] | None = None
    """Processes on this machine among which the questions are dealt, one per GPU. null: as many as trained."""
    data_root: str | None = None
    """A folder laid out as downloaded hub datasets (ROOT/allenai/ai2_arc, ...). null: the suite's own, or the hub."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Ask only the first questions of each task: a rehearsal."""
    strict: bool = False
    """An error, and not a count, where a prompt is longer than the model's context."""
    trust_suite: bool = False
    """Let the files of a suite that is not shipped run code (`!function`, scripts as metrics): read them first."""
    published: list[str] = []
    """Published scores to show under the table: a shipped table, such as `paper/sft`, or a YAML file of that form."""

    @property
    def name(self) -> str:
        """Of the folder of its results: the suite's name, and of a rehearsal its limit, lest it replace the result."""
        path = Path(os.path.abspath(self.suite))  # without the `..` that Path.absolute leaves
        suite = path.parent.name if path.suffix == ".yaml" else path.name
        return suite + (f"-limit{self.limit}" if self.limit else "")


class Recipe(_Section):
    """One run of SFT or DPO."""

    task: Task
    """The command that runs it: sft or dpo."""
    model: Model
    data: Data
    optimizer: Optimizer
    trainer: dict[str, Any] = {}
    """TRL's SFTConfig or DPOConfig, key for key, less what the other sections say."""
    run: Run
    eval: Eval | None = None
    """null: no evaluation after training."""


_ONLY = {"spectral_map": "soren", "resolution": "soren", "ns_steps": "soren", "workspace_mb": "soren", "p": "htmuon"}
_DEFAULT = {"spectral_map": "minimax", "resolution": 0.01, "ns_steps": 15, "workspace_mb": None, "p": 0.125}
_SCALE = {"soren": "none", "muon": "original", "htmuon": "original", "adamw": None}


def resolve(recipe: Recipe) -> Recipe:
    """Write out the defaults that depend on other keys, so that the run folder's recipe says everything."""
    o = recipe.optimizer
    update: dict[str, Any] = {}
    for key, owner in _ONLY.items():
        if o.name != owner:
            update[key] = None
        elif getattr(o, key) is None:
            update[key] = _DEFAULT[key]
    spectral_map = update.get("spectral_map", o.spectral_map)
    if spectral_map != "sns":
        update["ns_steps"] = None
    if spectral_map != "minimax":
        update["resolution"] = None
    if o.name == "adamw":
        update["adjust_lr_fn"] = None
        update["aux_lr"] = o.aux_lr or o.lr
    else:
        scale = "match_rms_adamw" if trains_adapter(recipe.model) else _SCALE[o.name]
        update["adjust_lr_fn"] = o.adjust_lr_fn or scale
    return recipe.model_copy(update={"optimizer": o.model_copy(update=update), "model": _resolved(recipe.model)})


def trains_adapter(model: Model) -> bool:
    """Whether an adapter is trained: a new one, or the one that lies where training starts."""
    return model.lora is not None or (shipped.resolve(model.name_or_path) / ADAPTER).is_file()


def _resolved(model: Model) -> Model:
    if model.lora is None:
        return model
    alpha = float(model.lora.r) if model.lora.alpha is None else model.lora.alpha
    return model.model_copy(update={"lora": model.lora.model_copy(update={"alpha": alpha})})


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors; `trainer` lists the keys of the installed TRL."""
    schema = Recipe.model_json_schema()
    names = {
        "int": "integer",
        "float": "number",
        "bool": "boolean",
        "str": "string",
        "dict": "object",
        "list": "array",
    }
    properties: dict[str, Any] = {}
    for task in trl_config.CLASSES:
        for field in trl_config.fields(task).values():
            if field.name in trl_config.ELSEWHERE:
                continue
            entry: dict[str, Any] = {"description": field.help}
            if field.choices:
                entry["enum"] = [*field.choices, *([None] if "None" in field.types else [])]
            elif field.types <= names.keys() | {"None"}:
                entry["type"] = sorted(names.get(t, "null") for t in field.types)
            properties[field.name] = entry
    schema["properties"]["extends"] = {
        "description": "A recipe, by file or shipped name, whose keys hold where this one says nothing.",
        "type": "string",
    }
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": ["extends"]}]
    schema["properties"]["trainer"] |= {"properties": properties, "additionalProperties": False}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


# What decides the weights that come out. The rest (paths, logging, evaluation) may change between two halves of a run.
_COSMETIC = {
    "logging_steps",
    "logging_first_step",
    "logging_strategy",
    "save_steps",
    "save_strategy",
    "save_total_limit",
}
_COSMETIC |= {
    "report_to",
    "run_name",
    "project",
    "trackio_space_id",
    "trackio_bucket_id",
    "trackio_static_space_id",
    "hub_private_repo",
    "eval_strategy",
    "eval_steps",
    "eval_on_start",
    "eval_delay",
}


def training_part(recipe: Recipe) -> dict[str, Any]:
    """What decides the weights that come out: a checkpoint goes on only under an equal one."""
    part = recipe.model_dump(include={"task", "model", "data", "optimizer", "trainer"})
    part["run"] = recipe.run.model_dump(include={"parallel", "global_batch_size"})
    part["data"].pop("eval")
    part["trainer"] = {k: v for k, v in part["trainer"].items() if k not in _COSMETIC}
    return part


def differences(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> list[str]:
    """Where two nested dicts differ: ['optimizer.lr: 0.003 there, 0.001 here', ...]."""
    found = []
    for key in sorted(there.keys() | here.keys()):
        a, b = there.get(key), here.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {a!r} there, {b!r} here")
    return found
