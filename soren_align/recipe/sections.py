"""The sections of a recipe, as pydantic models: every key, its meaning and its default.

The optimizer section is in `optimizers`.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from .. import shipped
from .base import Coefficient, Positive, Section
from .optimizers import Optimizer

ADAPTER = "adapter_config.json"
"""The file that makes a folder an adapter's."""
Task = Literal["sft", "dpo"]


class Recipe(Section):
    """One run of SFT or DPO."""

    task: Task
    """The command that runs the recipe: sft or dpo."""
    extends: list[str] = []
    """Another recipe, by file or shipped name: its keys hold where this file has none, section by section. In a run
    folder's recipe, a list: the recipes that were merged into it, nearest first."""
    model: "Model"
    data: "Data"
    optimizer: Optimizer
    trainer: dict[str, Any] = {}
    """TRL's SFTConfig or DPOConfig, key for key, except for keys that belong to other sections."""
    run: "Run"
    eval: "Eval | None" = None
    """null: no evaluation after training."""


def _modules(value: Any, check: Any) -> Any:
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError("modules", "write all-linear, or a list of names") from None


class Lora(Section):
    """Two small factors beside each linear layer are trained, instead of its weights."""

    r: Annotated[int, Field(ge=1)] = 16
    """The rank of the factors."""
    alpha: Positive | None = None
    """The product of the factors is added times alpha / r. null: r."""
    dropout: Coefficient = 0.0
    """Dropout on the input of the factors."""
    target_modules: Annotated[
        Annotated[list[str], Field(min_length=1)] | Literal["all-linear"], WrapValidator(_modules)
    ] = "all-linear"
    """Names of layers, such as q_proj, or `all-linear`: all linear layers but the head."""
    modules_to_save: list[str] = []
    """Names of modules, such as embed_tokens, that are trained whole beside the factors, by AdamW."""
    quantize: Literal["4bit"] | None = None
    """`4bit`: the frozen weights are stored in bitsandbytes' NF4, doubly quantised (QLoRA). The factors stay
    float32."""


class Model(Section):
    """The starting checkpoint."""

    name_or_path: Annotated[str, Field(min_length=1)]
    """A folder (`shipped:...` for a shipped one) or a model on the Hugging Face hub. A LoRA adapter's folder: training
    continues with that adapter."""
    revision: str | None = None
    """The hub's branch, tag or commit; the commit that was loaded is recorded in run.json."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The parameters' dtype. bfloat16 rounds most small updates away, unless `run.parallel` keeps float32 masters
    (ZeRO, FSDP2) or `optimizer.compensation` is kahan; for bfloat16 arithmetic with float32 parameters write
    `trainer: {bf16: true}`. With an adapter it is the dtype of the frozen weights: trained parameters are float32."""
    init_seed: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    """Make random weights from the folder's config.json with this seed, instead of loading weights."""
    chat_template: str | None = None
    """How messages become text: `qwen2.5` (as its base models), `zephyr`, or the path of a .jinja file; saved with the
    model. null: the tokenizer's."""
    eos_token: Annotated[str, Field(min_length=1)] | None = None
    """The token at which the model stops: `<|im_end|>` for Qwen2.5's base models, whose own end token is not the one
    that their template ends answers with. null: the tokenizer's."""
    freeze: list[Annotated[str, Field(min_length=1)]] = []
    """Names of parameters that are not trained; `*` matches anything: `["model.vision_tower.*"]` for a model of images
    and text that is trained on text. With `lora`, the layers that get no factors."""
    lora: Lora | None = None
    """Train a new LoRA adapter instead of the weights."""


Column = Literal[
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "system",
    "prompt",
    "completion",
    "text",
    "chosen",
    "rejected",
    "role",
    "content",
]


class DataSplit(Section):
    """Examples to train or evaluate on."""

    path: Annotated[str, Field(min_length=1)]
    """A .jsonl, .json, .csv or .txt file, each also as .gz, or a .parquet file; a folder of such files, or a pattern,
    `data/*.jsonl` (`shipped:...` for shipped ones); or a dataset on the Hugging Face hub."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """The hub dataset's configuration (`SFT`). null: its default one."""
    split: str = "train"
    """The hub dataset's split, or a part of one (`train_sft[:10%]`); files are always taken
    whole."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Take only the first `limit` examples."""
    revision: str | None = None
    """The hub's branch, tag or commit."""
    bad_examples: Literal["refuse", "drop"] = "refuse"
    """Whether examples that cannot be trained on (empty answers, equal pairs, ...) are an error, or are dropped and
    counted. `drop` is for data that you cannot fix, such as the hub's."""
    columns: dict[Column, str] = {}
    """The dataset's own names: `{instruction: question, output: answer}`. Its other columns are then not read. `role`
    and `content` name the keys of a turn."""
    roles: dict[str, Literal["system", "user", "assistant"]] = {}
    """The dataset's names of roles: `{student: user, teacher: assistant}`. Usual ones, as ShareGPT's human and gpt, are
    known."""


class TrainSplit(DataSplit):
    """Examples to train on, and how often."""

    weight: Positive = 1.0
    """Multiple of the examples: 2 takes each twice, 0.25 a quarter of them, drawn by trainer.seed."""
    train_on_test: bool = False
    """Train on a split whose name is that of a test split, although its scores are then meaningless."""


class HeldOut(Section):
    """Part of the training examples, which is then not trained on."""

    fraction: Annotated[float, Field(gt=0, lt=1)]
    """Of the examples of every training split. An example is chosen by a hash of itself alone: not by its place, other
    examples, or a seed, so that it stays where it is as the data grows, and equal ones are all on one side."""


ONE, SEVERAL, SPLIT, PART = "<one>", "<several>", "a split", "a fraction"
"""Tags of the unions in `data.train` and `data.eval`; messages name the latter two."""


def _number_of_splits(train: Any) -> str:
    return SEVERAL if isinstance(train, list | tuple) else ONE


def _kind_of_eval(evaluation: Any) -> str:
    has_fraction = isinstance(evaluation, HeldOut) or (isinstance(evaluation, dict) and "fraction" in evaluation)
    return PART if has_fraction else SPLIT


class Data(Section):
    """The training data. Columns are recognised: conversations (`messages`, ShareGPT's `conversations`), Alpaca's
    instructions and outputs, prompts with completions or with two answers, plain text; others are named under
    `columns`."""

    train: Annotated[
        Annotated[TrainSplit, Tag(ONE)] | Annotated[Annotated[list[TrainSplit], Field(min_length=1)], Tag(SEVERAL)],
        Discriminator(_number_of_splits),
    ]
    """One split, or a list of several that are shuffled together by trainer.seed."""
    eval: (
        Annotated[Annotated[DataSplit, Tag(SPLIT)] | Annotated[HeldOut, Tag(PART)], Discriminator(_kind_of_eval)] | None
    ) = None
    """Held-out examples for a loss during training: a split, or a part of the training examples, `{fraction: 0.05}`.
    `trainer.eval_strategy` sets when; without it, after every epoch."""

    @property
    def sources(self) -> list[TrainSplit]:
        """The training splits, as a list."""
        return self.train if isinstance(self.train, list) else [self.train]


class LogSpectra(Section):
    """Measurements of the spectral map during training; see `soren-align spectrum`."""

    steps: list[Annotated[int, Field(ge=1)]] = []
    """Optimizer steps at which the singular values of the map's inputs, the momenta, are written into spectra.jsonl:
    `[1, 100]`. Each matrix costs a decomposition at these steps."""
    matrices: Annotated[list[str], Field(min_length=1)] = ["*"]
    """Names of the matrices whose singular values are written; `*` matches anything: `["*.0.*q_proj*"]`. A name that
    matches no matrix is an error."""
    map_error: bool = True
    """Whether logging steps measure the distance of one matrix's map from the exact sigmoid: `map_error` in
    metrics.jsonl. For Soren with any map but `exact`."""


class Run(Section):
    """The run folder, and how the run behaves."""

    output_dir: Annotated[str, Field(min_length=1)]
    """The run folder: recipe, run.json, metrics, checkpoints, model, evaluation."""
    resume: str = "auto"
    """`auto` resumes from the last complete checkpoint; `never` refuses a folder with an unfinished run; or the path
    of a checkpoint."""
    overwrite: bool = False
    """Delete the contents of the run folder and start afresh."""
    parallel: Annotated[str, Field(min_length=1)] = "ddp"
    """How several processes share the model. `ddp`: each has a whole copy. `zero1`, `zero2`, `zero3` (DeepSpeed) and
    `fsdp2` shard optimizer states, gradients and weights; `zero2-offload` and `zero3-offload` keep the states in the
    CPU's memory. Or the path of a DeepSpeed config (.json) or of accelerate's for FSDP2 (.yaml)."""
    global_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Examples per optimizer step, for any number of processes: gradient_accumulation_steps follows from it. null:
    per_device_train_batch_size x gradient_accumulation_steps x processes."""
    lost_updates: Literal["stop", "warn"] = "stop"
    """Whether a run stops at its first step, or prints a warning, if at the peak learning rate less than half of the
    updates change the stored weights."""
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype of the model folder. null: the starting checkpoint's own. The end of the run reports how much of the
    change survives in it. An adapter is always float32: there it is the dtype of the result of `soren-align merge`."""
    num_threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads (OMP_NUM_THREADS); tiny models are fastest, and reproducible on any machine, with 1."""
    log_spectra: LogSpectra = LogSpectra()
    """Measurements of the spectral map during training."""
    offline: bool = False
    """Never contact the Hugging Face hub."""


class Eval(Section):
    """The evaluation after training, of the starting checkpoint and of the trained model."""

    suite: Annotated[str, Field(min_length=1)]
    """A shipped suite's name, or the path of a suite.yaml."""
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Prompts in one forward pass. null: the suite's own. Halved, for all models of a table, when memory runs out."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype of the weights during evaluation. null: the suite's own."""
    backend: Literal["hf", "vllm"] = "hf"
    """transformers, or vLLM (pip install 'soren-align[vllm]'), for all models of a table."""
    processes: Annotated[int, Field(ge=1)] | None = None
    """Processes on this machine that share the requests, one per GPU. null: as many as in training."""
    data_root: str | None = None
    """A folder laid out as downloaded hub datasets (ROOT/allenai/ai2_arc, ...). null: the suite's own, or the hub."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Evaluate only the first `limit` questions of each task: a rehearsal."""
    strict: bool = False
    """Raise an error, instead of counting, when a prompt is longer than the model's context."""
    base_template: Literal["run", "own", "none"] = "own"
    """The chat template that the table's first model is evaluated with, if the suite applies one. `own`: its own, or
    the run's if it has none. `run`: the run's, so that both get equal prompts and are compared. `none`: no template,
    also for every other model that has none."""
    omit: list[Annotated[str, Field(pattern=r"^\w[\w.-]*$")]] = []
    """Columns of the suite to leave out, such as `piqa` for a model whose context is too short for its answers."""
    trust_suite: bool = False
    """Let the files of a suite that is not shipped run code (`!function`, scripts as metrics): read them first."""
    published: list[str] = []
    """Published scores to show under the table: a shipped table, such as `paper/sft`, or a YAML file of that form."""

    @property
    def name(self) -> str:
        """The name of the results' folder: the suite's; with omitted columns and the limit of a rehearsal, so that they
        replace no full result."""
        path = Path(os.path.abspath(self.suite))  # without the `..` that Path.absolute leaves
        suite = path.parent.name if path.suffix == ".yaml" else path.name
        omitted = "".join(f"-without-{column}" for column in self.omit)
        return suite + omitted + (f"-limit{self.limit}" if self.limit else "")


Recipe.model_rebuild()


def resolve(recipe: Recipe) -> Recipe:
    """The recipe with the defaults that depend on other keys written out."""
    model = recipe.model
    if model.lora is not None and model.lora.alpha is None:
        lora = model.lora.model_copy(update={"alpha": float(model.lora.r)})
        model = model.model_copy(update={"lora": lora})
    optimizer, trainer = recipe.optimizer.resolved(trains_adapter(model)), recipe.trainer
    if recipe.data.eval is not None and trainer.get("eval_strategy") is None:
        trainer = {**trainer, "eval_strategy": "steps" if trainer.get("eval_steps") else "epoch"}
    return recipe.model_copy(update={"optimizer": optimizer, "model": model, "trainer": trainer})


def trains_adapter(model: Model) -> bool:
    """Whether an adapter is trained: a new one, or the one in the folder that training starts from."""
    return model.lora is not None or (shipped.resolve(model.name_or_path) / ADAPTER).is_file()
