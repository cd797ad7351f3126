"""The sections of a recipe but the optimizer's, as pydantic models: every key, its meaning and its default."""

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, LiteralString

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from ..core import shipped
from ..core.document import Section
from ..core.errors import UserError
from ..core.files import read_json
from ..tasks import TASKS, Column, TaskName
from . import trl
from .optimizer import Coefficient, NonNegative, Optimizer, Positive


class DataSplit(Section):
    """Examples to train or evaluate on."""

    main_keys: ClassVar[dict[type, str]] = {str: "path"}
    other_names: ClassVar[dict[str, str]] = {"dataset": "path"}

    path: Annotated[str, Field(min_length=1)]
    """A .jsonl, .json, .csv or .txt file, each also as .gz, or a .parquet file; a folder of such files, or a pattern,
    `data/*.jsonl` (`shipped:...` for shipped ones); a dataset on the Hugging Face hub; or `python:stdlib`, the
    text of Python's own standard library (splits `train` and `validation`)."""
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
    """The dataset's own names: `{instruction: question, output: answer}`. Its other columns are then not read. `role`,
    `content` and `weight` name the keys of a turn."""
    roles: dict[str, Literal["system", "user", "assistant", "tool", "tool_call"]] = {}
    """The dataset's names of roles: `{student: user, teacher: assistant}`. Usual ones, as ShareGPT's human and gpt, are
    known. `tool_call` is an assistant's turn whose content is the calls as JSON text."""
    mask_history: bool = False
    """Whether only the last answer of each conversation is trained, as if the others had weight 0; for SFT."""


class TrainSplit(DataSplit):
    """Examples to train on, and how often."""

    hints: ClassVar[dict[str, str]] = {"streaming": "is of all of data.train together; write `data: {streaming: true}`"}

    weight: Positive = 1.0
    """Sampling weight: 2 uses each example twice; 0.25 uses a random quarter, drawn by trainer.seed. With
    `data.streaming`, the relative number of examples from each split: weights 3 and 1 give three quarters and one."""
    train_on_test: bool = False
    """Train on a split whose name is that of a test split, although its scores are then meaningless."""


class HeldOut(Section):
    """Part of the training examples, which is then not trained on."""

    main_keys: ClassVar[dict[type, str]] = {float: "fraction"}

    fraction: Annotated[float, Field(gt=0, lt=1)]
    """Of the examples of every training split. An example is chosen by a hash of itself alone: not by its place, other
    examples, or a seed, so that it stays where it is as the data grows, and equal ones are all on one side."""


class HeldOutNumber(Section):
    """A number of the training examples, which are then not trained on."""

    main_keys: ClassVar[dict[type, str]] = {int: "examples"}

    examples: Annotated[int, Field(ge=1)]
    """Of all training splits together: those with the smallest hashes, in the order of `fraction`. As the data grows,
    new examples take the place of some of them, which are then trained on; none that was trained on is held out."""


class Streaming(Section):
    """Training examples that are read while the model trains, for data larger than memory or disk: their number is
    unknown, and `trainer.max_steps` ends the training."""

    shuffle_buffer: Annotated[int, Field(ge=1)] = 10_000
    """Examples that are in memory, and shuffled with each other by trainer.seed, before the next ones are read. 1: in
    the order of the data."""


ONE, SEVERAL, SPLIT, PART, NUMBER = "<one>", "<several>", "a split", "a fraction", "a number"
"""Tags of the unions in `data.train` and `data.eval`; messages name the latter three."""


def kind_of_eval(evaluation: Any) -> str:
    """The tag of a value of `data.eval`."""
    keys = evaluation if isinstance(evaluation, dict) else getattr(evaluation, "model_fields_set", ())
    return PART if "fraction" in keys else NUMBER if "examples" in keys else SPLIT


class Data(Section):
    """The training data. Columns are recognised: conversations (`messages`, ShareGPT's `conversations`), Alpaca's
    instructions and outputs, prompts with completions or with two answers, plain text; others are named under
    `columns`."""

    main_keys: ClassVar[dict[type, str]] = {str: "train.path"}
    hints: ClassVar[dict[str, str]] = {"eval": "held-out examples are one split (data.train may be several)"}

    train: Annotated[
        Annotated[TrainSplit, Tag(ONE)] | Annotated[Annotated[list[TrainSplit], Field(min_length=1)], Tag(SEVERAL)],
        Discriminator(lambda train: SEVERAL if isinstance(train, list | tuple) else ONE),
    ]
    """One split, or a list of several that are shuffled together by trainer.seed."""
    eval: (
        Annotated[
            Annotated[DataSplit, Tag(SPLIT)] | Annotated[HeldOut, Tag(PART)] | Annotated[HeldOutNumber, Tag(NUMBER)],
            Discriminator(kind_of_eval),
        ]
        | None
    ) = None
    """Held-out examples for a loss during training: a split, or a part of the training examples, `{fraction: 0.05}` or
    `{examples: 500}`. `trainer.eval_strategy` sets when; without it, after every epoch."""

    eval_tokens: Annotated[int, Field(ge=1)] | None = None
    """Compute the evaluation loss on the first held-out examples that have this many tokens together. null: on all."""
    retention: DataSplit | None = None
    """Examples of what the model must not forget, in the forms of SFT also for DPO: at every evaluation metrics.jsonl
    gets `retention_loss`, of the answers of up to 64 of them. They are not trained on."""
    streaming: Annotated[
        Streaming | None, BeforeValidator(lambda value: ({} if value else None) if isinstance(value, bool) else value)
    ] = None
    """`true`: read the training examples while training, again from the start when they end; docs/data.md has the
    differences. Needs trainer.max_steps."""

    cache: bool = True
    """Whether the tokens are cached in the user's cache folder ($SOREN_ALIGN_CACHE), for the next plan, run or resume.
    false: in a temporary folder."""

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


def _worded(remedy: LiteralString) -> WrapValidator:
    """Give one message for all members of a union of plain types."""

    def validate(value: Any, check: Any) -> Any:
        try:
            return check(value)
        except ValidationError:
            raise PydanticCustomError("union", remedy) from None

    return WrapValidator(validate)


class Samples(Section):
    """Prompts that the model answers during training, with the run's template, greedily. The answers are written into
    samples.jsonl and do not change the training. Not under ZeRO 3 and FSDP2, which shard the weights."""

    main_keys: ClassVar[dict[type, str]] = {str: "prompts", list: "prompts"}

    prompts: Annotated[
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | Annotated[str, Field(min_length=1)],
        _worded("write a list of texts, or a .txt or .jsonl file"),
    ]
    """A list of texts, each a user's first message; or a file: .txt with one per line, or .jsonl of objects with a
    `prompt`, which is a text or a list of messages. For data without messages a prompt is the beginning of a text."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    """The length at which an answer is cut; less where the model has fewer positions."""

    @classmethod
    def meant_by(cls, value: Any) -> dict[str, Any] | None:
        """A text that names no file is a prompt."""
        is_prompt = isinstance(value, str) and not value.endswith((".txt", ".jsonl"))
        return super().meant_by([value] if is_prompt else value)


class EarlyStopping(Section):
    """The end of training when evaluations improve no longer, by transformers' EarlyStoppingCallback. Compared is
    `trainer.metric_for_best_model`, by default the loss; `trainer.load_best_model_at_end` saves the best checkpoint's
    model instead of the last one's."""

    main_keys: ClassVar[dict[type, str]] = {int: "patience"}

    patience: Annotated[int, Field(ge=1)] = 3
    """Evaluations in a row without an improvement after which training ends."""
    threshold: NonNegative = 0.0
    """An improvement is larger than this."""


ADAPTER = "adapter_config.json"
"""The file that makes a folder an adapter's."""


class Recipe(Section):
    """One run of SFT, DPO or pre-training."""

    task: TaskName
    """The command that runs the recipe: sft, dpo or pretrain."""
    extends: list[str] = []
    """Another recipe, by file or shipped name: its keys hold where this file has none, section by section. In a run
    folder's recipe, a list: the recipes that were merged into it, nearest first."""
    model: "Model"
    data: Data
    optimizer: Optimizer
    trainer: dict[str, Any] = {}
    """TRL's SFTConfig (for pretrain too) or DPOConfig, key for key, except for keys that belong to other sections."""
    run: "Run"
    eval: "Eval | None" = None
    """null: no evaluation after training."""

    @classmethod
    def key_elsewhere(cls, name: str) -> list[str]:
        """Also by TRL's names: optimizer.lr for learning_rate, trainer.max_steps."""
        key = trl.recipe_key(name)
        return [key] if key else super().key_elsewhere(name)

    @property
    def data_task(self) -> TaskName:
        """The task in whose forms the examples are: pre-training takes the plain texts of SFT."""
        return TASKS[self.task].data


class Lora(Section):
    """Two small factors beside each linear layer are trained, instead of its weights."""

    main_keys: ClassVar[dict[type, str]] = {int: "r"}
    other_names: ClassVar[dict[str, str]] = {
        **{"rank": "r", "lora_r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout"},
        **{"lora_target_modules": "target_modules", "lora_modules_to_save": "modules_to_save"},
    }
    """PEFT's, TRL's and Axolotl's."""

    r: Annotated[int, Field(ge=1)] = 16
    """The rank of the factors."""
    alpha: Positive | None = None
    """The product of the factors is added times alpha / r. null: r."""
    dropout: Coefficient = 0.0
    """Dropout on the input of the factors."""
    target_modules: Annotated[
        Annotated[list[str], Field(min_length=1)] | Literal["all-linear"],
        _worded("write all-linear, or a list of names"),
    ] = "all-linear"
    """Names of layers, such as q_proj, or `all-linear`: all linear layers but the head."""
    modules_to_save: list[str] = []
    """Names of modules, such as embed_tokens, that are trained whole beside the factors, by AdamW."""


Quantize = Literal["4bit", "8bit"]


class TrainedTokenizer(Section):
    """A byte-level BPE is trained on the training examples, and the config's `vocab_size` is its size. Of a stream, the
    first 1,000 examples."""

    main_keys: ClassVar[dict[type, str]] = {int: "vocab_size"}

    vocab_size: Annotated[int, Field(ge=258)]
    """Tokens: the 256 bytes, `<|endoftext|>`, `<|pad|>`, and the most frequent sequences of bytes."""


class Model(Section):
    """The starting checkpoint."""

    main_keys: ClassVar[dict[type, str]] = {str: "name_or_path"}
    other_names: ClassVar[dict[str, str]] = {
        **{"model_name_or_path": "name_or_path", "torch_dtype": "dtype"},
        **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "quantize"),
    }
    hints: ClassVar[dict[str, str]] = {
        "load_in_4bit": "unknown key; did you mean `quantize: 4bit`?",
        "load_in_8bit": "unknown key; did you mean `quantize: 8bit`?",
        "dtype": " (bfloat16 parameters round small updates away; for bfloat16 arithmetic with float32 parameters "
        "write trainer: {bf16: true})",
    }

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
    tokenizer: (
        Annotated[
            Annotated[str, Tag("<name>")] | Annotated[TrainedTokenizer, Tag("<trained>")],
            Discriminator(lambda value: "<name>" if isinstance(value, str) else "<trained>"),
        ]
        | None
    ) = None
    """For random weights: another model's tokenizer, a folder or a name on the hub, of at most the config's
    `vocab_size` tokens (added ones beyond, as T5's sentinels, are left out); or `{vocab_size: 4096}`, one trained on
    the training examples. The config's end and padding tokens follow it. null: the folder's."""
    chat_template: str | None = None
    """The chat template: `qwen2.5` (that of the Qwen2.5 base models), `zephyr`, or the path of a .jinja file. It is
    saved with the model. null: the tokenizer's."""
    eos_token: Annotated[str, Field(min_length=1)] | None = None
    """The token at which the model stops: `<|im_end|>` for Qwen2.5's base models, because their EOS token differs from
    the token that ends a chat answer. null: the tokenizer's."""
    freeze: list[Annotated[str, Field(min_length=1)]] = []
    """Names of parameters that are not trained; `*` matches anything: `["model.vision_tower.*"]` for a model of images
    and text that is trained on text. With `lora`, the layers that get no factors."""
    lora: Lora | None = None
    """Train a new LoRA adapter instead of the weights."""
    attn_implementation: Annotated[str, Field(min_length=1)] | None = None
    """The attention of training: `eager`, `sdpa`, `flex_attention`, `flash_attention_2`, `flash_attention_3`,
    `flash_attention_4`, or a kernel of the hub, `kernels-community/NAME`. null: sdpa, or eager for an architecture
    without it. Evaluation always takes that, so that all models of a table run alike."""
    quantize: Quantize | None = None
    """Store the frozen weights under an adapter in fewer bits, by bitsandbytes: `4bit` in NF4 with double quantization
    (QLoRA), computed in the precision of `trainer` (bf16, fp16, or float32); `8bit` in int8 (LLM.int8). The factors
    stay float32. null: not quantized; for an adapter that was trained on quantized weights, as there."""


class Run(Section):
    """The run folder, and how the run behaves."""

    main_keys: ClassVar[dict[type, str]] = {str: "output_dir"}

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
    global_batch_size: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Examples per optimizer step, for any number of processes: gradient_accumulation_steps follows from it. null:
    per_device_train_batch_size x gradient_accumulation_steps x processes."""
    lost_updates: Literal["stop", "warn"] = "stop"
    """Whether a run stops at its first step, or prints a warning, if at the peak learning rate less than half of the
    updates change the stored weights."""
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype of the model folder. null: the starting checkpoint's own. The end of the run reports how much of the
    change survives in it. An adapter is always float32: there it is the dtype of the result of `soren-align merge`."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads, unless OMP_NUM_THREADS is set. null: 1 for a model of up to a million parameters on a CPU, as fast
    beside other processes as alone, with the same bits on any number of cores; otherwise one per core, shared by the
    processes."""
    log_spectra: LogSpectra = LogSpectra()
    """Measurements of the spectral map during training."""
    samples: Samples | None = None
    """Prompts that the model answers at the start, at every evaluation and at the end."""
    kl_to_start: Annotated[int, Field(ge=0, le=4096)] = 0
    """Tokens of the held-out examples' answers at which every evaluation measures the divergence from the starting
    checkpoint, `kl_to_start` in metrics.jsonl: 256. 0: not measured."""
    early_stopping: EarlyStopping | None = None
    """End training when evaluations improve no longer."""
    offline: bool = False
    """Never contact the Hugging Face hub."""


class Eval(Section):
    """The evaluation after training, of the starting checkpoint and of the trained model."""

    main_keys: ClassVar[dict[type, str]] = {str: "suite"}
    other_names: ClassVar[dict[str, str]] = {"torch_dtype": "dtype"}

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
    contamination: bool = True
    """Count the questions that the training examples contain, and report the scores without them. It reads all examples
    once for each suite, 3,000 a second of UltraChat's length, and is cached."""
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
    optimizer, trainer = recipe.optimizer, recipe.trainer
    if optimizer.aux_lr is None and (optimizer.name == "adamw" or trains_others(model.name_or_path, model.lora)):
        optimizer = optimizer.model_copy(update={"aux_lr": optimizer.lr})
    if recipe.data.eval is not None and trainer.get("eval_strategy") is None:
        trainer = {**trainer, "eval_strategy": "steps" if trainer.get("eval_steps") else "epoch"}
    if trainer.get("load_best_model_at_end") and trainer.get("save_strategy") is None:  # transformers wants them equal
        saves = {"save_strategy": trainer.get("eval_strategy"), "save_steps": trainer.get("eval_steps")}
        trainer = {**trainer, **{key: value for key, value in saves.items() if value and trainer.get(key) is None}}
    if trainer.get("packing") and trainer.get("packing_strategy") is None:
        trainer = {**trainer, "packing_strategy": "bfd_split"}  # TRL's own default cuts long examples short
    return recipe.model_copy(update={"optimizer": optimizer, "model": model, "trainer": trainer})


def is_derived(recipe: Recipe, key: str) -> bool:
    """Whether a resolved recipe's key, dotted, has the value that it has where it is not set: `resolve` writes it, or
    it is a default."""
    values = recipe.model_dump()
    *sections, last = key.split(".")
    node: Any = values
    for section in sections:
        node = node.get(section) if isinstance(node, dict) else None
    if not isinstance(node, dict) or last not in node:
        return False
    value = node.pop(last)
    try:
        again: Any = resolve(Recipe.model_validate(values)).model_dump()
    except ValidationError:  # a required key
        return False
    for part in (*sections, last):
        again = again.get(part) if isinstance(again, dict) else None
    return again == value


def trains_adapter(model: Model) -> bool:
    """Whether an adapter is trained: a new one, or the one in the folder that training starts from."""
    return model.lora is not None or (shipped.resolve(model.name_or_path) / ADAPTER).is_file()


def trains_others(start: str, lora: Lora | None) -> bool:
    """Whether parameters beside the matrices are trained: of adapters, only those with whole modules have some.

    start: model.name_or_path; lora: the new adapter.
    """
    file = shipped.resolve(start) / ADAPTER
    if not file.is_file():
        return lora is None or bool(lora.modules_to_save)
    try:
        config = read_json(file)
    except UserError:  # reported at model.name_or_path
        return True
    whole = ("modules_to_save", "trainable_token_indices", "use_dora")
    return not isinstance(config, dict) or any(config.get(key) for key in whole)
