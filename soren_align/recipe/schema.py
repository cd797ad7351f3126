"""The sections of a recipe as pydantic models with meanings and defaults; those of data and
optimizer are imported.
"""

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, PrivateAttr, Tag

from ..core.document import Section
from ..core.errors import UserError
from ..core.files import read_json, resolve_path
from ..tasks import TASKS, TaskName
from . import trl
from .data_section import Data
from .optimizer import Coefficient, NonNegative, Optimizer, Positive, worded


class LogSpectra(Section):
    """Measurements, during training, of the map: the function that the optimizer applies to the
    singular values of the momentum. `soren-align spectrum` shows them."""

    steps: list[Annotated[int, Field(ge=1)]] = []
    """The optimizer steps at which the run writes the singular values of the momenta (the map's
    inputs) into spectra.jsonl, such as `[1, 100]`. Each of these steps needs one eigenvalue
    decomposition per matrix."""
    matrices: Annotated[list[str], Field(min_length=1)] = ["*"]
    """Names of the matrices whose singular values are written. `*` matches anything:
    `["*.0.*q_proj*"]`. A name that matches no matrix is an error."""
    of: Annotated[list[Literal["momentum", "gradient"]], Field(min_length=1)] = ["momentum"]
    """The matrices that are decomposed: the momenta (the map's inputs), and the gradients after
    clipping, as in the figures of the Soren paper. `gradient` works only if each process has whole
    gradients, so it is an error with ZeRO and FSDP2. It is also an error with fp16, which scales
    the gradients."""
    map_error: bool = True
    """At every logging step, measure the difference between the map's output and the exact
    sigmoid's output for one matrix. metrics.jsonl has this difference as `map_error`. `map_error`
    is measured only for Soren, with any map except `exact`."""


class Samples(Section):
    """Prompts that the model answers during training, with the run's chat template and greedy
    decoding. The answers are written into samples.jsonl and have no effect on the training. Samples
    are not available under ZeRO 3 and FSDP2, which shard the weights."""

    main_keys: ClassVar[dict[type, str]] = {str: "prompts", list: "prompts"}

    prompts: Annotated[
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
        | Annotated[str, Field(min_length=1)],
        worded("write a list of texts, or a .txt or .jsonl file"),
    ]
    """A list of texts, each the first message of a user; or a file: .txt with one prompt per line,
    or .jsonl with the key `prompt` in every object (a text or a list of messages). If the training
    data are plain texts, a prompt is the beginning of a text."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    """The maximum length of an answer, in tokens. An answer also ends when the model's context is
    full."""

    @classmethod
    def meant_by(cls, value: Any) -> dict[str, Any] | None:
        """A text that names no file is a prompt."""
        # By the suffix, not by whether a file exists: a misspelt path must not become a prompt.
        is_prompt = isinstance(value, str) and not value.endswith((".txt", ".jsonl"))
        return super().meant_by([value] if is_prompt else value)


class Benchmark(Section):
    """Score checkpoints with the suite of `eval` during the training. Another process evaluates
    them, one at a time, and the training does not wait for it. The scores are written into
    metrics.jsonl. Not available under ZeRO 3 and FSDP2, whose checkpoints have no whole weights."""

    main_keys: ClassVar[dict[type, str]] = {int: "every"}

    every: Annotated[int, Field(ge=1)] = 1
    """Score every n-th checkpoint (`trainer.save_steps`)."""
    command: list[Annotated[str, Field(min_length=1)]] = []
    """Words before the command of the evaluation, which give it another device:
    `[env, CUDA_VISIBLE_DEVICES=7]`, or `[srun, --overlap, --gpus=1]`. Without such words it shares
    the devices of the training, and slows it down."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Evaluate only the first `limit` questions of each task. null: as in `eval`."""


class EarlyStopping(Section):
    """End training when evaluations no longer improve (transformers' EarlyStoppingCallback).
    `trainer.metric_for_best_model` selects the metric (default: the loss).
    `trainer.load_best_model_at_end` saves the model of the best checkpoint instead of the last
    model."""

    main_keys: ClassVar[dict[type, str]] = {int: "patience"}

    patience: Annotated[int, Field(ge=1)] = 3
    """Training ends after this number of evaluations in a row without an improvement."""
    threshold: NonNegative = 0.0
    """A change counts as an improvement only if it is larger than this threshold."""


ADAPTER = "adapter_config.json"
"""The file that makes a folder an adapter's."""


class Recipe(Section):
    """One run of SFT, DPO, KTO or pre-training."""

    task: TaskName
    """The command that runs the recipe: sft, dpo, kto or pretrain."""
    extends: list[str] = []
    """Another recipe: a file, or the name of a recipe that comes with soren-align. If your recipe
    does not set a key, its value comes from the other recipe. In the recipe.yaml of a run folder,
    `extends` lists all recipes from which keys came: first the extended recipe, then the recipe
    that it extends, and so on."""
    model: "Model"
    data: Data
    optimizer: Optimizer
    trainer: dict[str, Any] = {}
    """The keys of TRL's SFTConfig (for SFT and pre-training), DPOConfig or KTOConfig, except those
    that belong to other sections."""
    run: "Run"
    eval: "Eval | None" = None
    """null: no evaluation after training."""
    _skipped_suite: str | None = PrivateAttr(default=None)
    """The suite of the recipe's evaluation, if a setting such as --no-eval leaves it out."""

    @classmethod
    def key_elsewhere(cls, name: str) -> list[str]:
        """The keys of this name, TRL's names among them: optimizer.lr for learning_rate."""
        # The message for a TRL name at a wrong place has the place that it has in a recipe.
        key = trl.recipe_key(name)
        return [key] if key else super().key_elsewhere(name)

    @property
    def data_task(self) -> TaskName:
        """The task in whose formats the examples are: pre-training takes the plain texts of SFT."""
        return TASKS[self.task].data


class Lora(Section):
    """Train a LoRA adapter (two small factors beside each linear layer) instead of the layers'
    weights.
    """

    main_keys: ClassVar[dict[type, str]] = {int: "r"}
    other_names: ClassVar[dict[str, str]] = {
        **{"rank": "r", "lora_r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout"},
        **{"lora_target_modules": "target_modules", "lora_modules_to_save": "modules_to_save"},
    }
    """PEFT's, TRL's and Axolotl's."""

    r: Annotated[int, Field(ge=1)] = 16
    """The rank of the factors."""
    alpha: Positive | None = None
    """The product of the factors is multiplied by alpha / r before it is added to the weights.
    null: alpha = r."""
    dropout: Coefficient = 0.0
    """Dropout on the input of the factors."""
    target_modules: Annotated[
        Annotated[list[str], Field(min_length=1)] | Literal["all-linear"],
        worded("write all-linear, or a list of the names of layers"),
    ] = "all-linear"
    """Names of the layers that get factors, such as q_proj; or `all-linear`: all linear layers
    except the output head."""
    modules_to_save: list[str] = []
    """Names of modules, such as embed_tokens, that AdamW trains in full, in addition to the
    factors."""


Quantize = Literal["4bit", "8bit"]


class TrainedTokenizer(Section):
    """Train a byte-level BPE tokenizer on the training examples (with streaming, on the first
    1,000). Its number of tokens becomes the model config's `vocab_size`."""

    main_keys: ClassVar[dict[type, str]] = {int: "vocab_size"}

    vocab_size: Annotated[int, Field(ge=258)]
    """The number of tokens: the 256 bytes, `<|endoftext|>`, `<|pad|>`, and the most frequent
    sequences of bytes."""


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
        "dtype": (
            ". Rounding to bfloat16 loses small updates; for bfloat16 arithmetic with float32"
            " parameters, write `trainer: {bf16: true}`"
        ),
    }

    name_or_path: Annotated[str, Field(min_length=1)]
    """A model's folder (`shipped:...` for one that comes with soren-align), or a model's name on
    the Hugging Face hub. If the folder contains a LoRA adapter, training continues with that
    adapter."""
    revision: str | None = None
    """The branch, tag or commit on the hub. run.json records the commit that was loaded."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the parameters. Rounding to bfloat16 loses most small updates, unless
    `run.parallel` keeps float32 master weights (ZeRO, FSDP2) or `optimizer.compensation` is
    `kahan`. For bfloat16 arithmetic with float32 parameters write `trainer: {bf16: true}`. With an
    adapter, `dtype` is the dtype of the frozen weights; the trained parameters are float32."""
    init_seed: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    """Start from random weights with this seed instead of loading weights. The folder's config.json
    determines the shapes."""
    tokenizer: (
        Annotated[
            Annotated[str, Tag("<name>")] | Annotated[TrainedTokenizer, Tag("<trained>")],
            # Without it, a wrong section would be reported as "no text" too.
            Discriminator(lambda value: "<name>" if isinstance(value, str) else "<trained>"),
        ]
        | None
    ) = None
    """The tokenizer of another model (a folder or a hub name), or `{vocab_size: 4096}` to train a
    tokenizer on the training examples. This key is allowed only with `init_seed`. The tokenizer may
    have at most as many tokens as the config's `vocab_size`. Added tokens beyond this number, such
    as T5's sentinel tokens, are left out. The end token and the padding token of the tokenizer are
    written into the model's config. null: the model's own tokenizer."""
    chat_template: str | None = None
    """The chat template: `qwen2.5` (of the Qwen2.5 base models), `zephyr`, or the path of a .jinja
    file. The template is saved with the model. null: the tokenizer's own template."""
    eos_token: Annotated[str, Field(min_length=1)] | None = None
    """The token at which the model stops. Qwen2.5's base models need `<|im_end|>`, because their
    EOS token differs from the token that ends a chat answer. null: the tokenizer's EOS token."""
    freeze: list[Annotated[str, Field(min_length=1)]] = []
    """Names of parameters that are not trained. `*` matches anything: `["model.vision_tower.*"]`
    freezes the image encoder of a model that is trained on text. With `lora`, `freeze` names the
    layers that get no factors."""
    lora: Lora | None = None
    """Train a new LoRA adapter. The weights of the model do not change."""
    attn_implementation: Annotated[str, Field(min_length=1)] | None = None
    """The attention implementation for training: `eager`, `sdpa`, `flex_attention`,
    `flash_attention_2`, `flash_attention_3`, `flash_attention_4`, or a kernel on the Hugging Face
    hub, such as `kernels-community/NAME`.
    null: sdpa, or eager if the architecture has no sdpa. Evaluations ignore this key and use the
    default, so that all models of a table have the same attention implementation."""
    quantize: Quantize | None = None
    """Quantize the frozen weights under an adapter with bitsandbytes. `4bit`: NF4 with double
    quantization (QLoRA).
    `8bit`: int8 (LLM.int8). With 4bit, matrix products are computed in the precision that `trainer`
    sets (bf16, fp16 or float32). The adapter's factors are float32. null: no quantization. If the
    starting checkpoint is an adapter that was trained on quantized weights, null means the same
    quantization."""


class Run(Section):
    """The run folder and the behaviour of the run."""

    main_keys: ClassVar[dict[type, str]] = {str: "output_dir"}

    output_dir: Annotated[str, Field(min_length=1)]
    """The run folder. A run writes all its files into this folder."""
    resume: str = "auto"
    """`auto`: resume an unfinished run from its last complete checkpoint. `never`: stop with an
    error if the folder has an unfinished run. A path of a checkpoint: resume from this
    checkpoint."""
    overwrite: bool = False
    """Delete the contents of the run folder and start afresh."""
    parallel: Annotated[str, Field(min_length=1)] = "ddp"
    """How several processes share the model. `ddp`: each process has a full copy. `zero1`
    (DeepSpeed) shards the optimizer states among the processes. `zero2` also shards the gradients.
    `zero3` also shards the gradients and the weights. `fsdp2` (torch) shards optimizer states,
    gradients and weights. `zero2-offload` and `zero3-offload` keep the optimizer states in CPU
    memory. `auto`: the fastest of these that fits, as `soren-align plan` finds it. You can
    also write the path of a DeepSpeed config (.json) or of an accelerate config for FSDP2
    (.yaml)."""
    global_batch_size: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Examples per optimizer step, for any number of processes. gradient_accumulation_steps is
    computed from this number. null: per_device_train_batch_size x gradient_accumulation_steps x
    number of processes."""
    lost_updates: Literal["stop", "warn"] = "stop"
    """What to do if rounding removes most of an update. At its first step, the run computes the
    update at the peak learning rate, and counts the weights that it changes. If fewer than half of
    the weights change, `stop` stops the run, and `warn` prints a warning."""
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype of the saved model. null: the dtype of the starting checkpoint. Rounding to this
    dtype can remove a part of what training has changed; at its end, the run reports how much. An
    adapter is always saved in float32. For an adapter, `save_dtype` is the dtype of the merged
    model that `soren-align merge` writes."""
    async_save: bool = False
    """Write checkpoints while the next steps are taken: training waits only for a copy in the
    host's memory. Needs `parallel: fsdp2`."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """The number of CPU threads, unless OMP_NUM_THREADS is set. null: one thread per core, divided
    among the processes. For a model of up to a million parameters on a CPU, null means 1 thread:
    other processes then do not slow down the training, and the weights are the same, bit for bit,
    on machines with other numbers of cores."""
    log_spectra: LogSpectra = LogSpectra()
    """Measurements, during training, of the map of singular values."""
    samples: Samples | None = None
    """Prompts that the model answers at the start, at every evaluation and at the end."""
    kl_to_start: Annotated[int, Field(ge=0, le=4096)] = 0
    """At every evaluation, measure the KL divergence of the model from the starting checkpoint, and
    write it into metrics.jsonl as `kl_to_start`. The value of the key, such as 256, is the number
    of answer tokens of held-out examples on which it is measured. 0: do not measure it."""
    benchmark: Benchmark | None = None
    """Score checkpoints during the training, by another process."""
    early_stopping: EarlyStopping | None = None
    """End training when evaluations no longer improve."""
    offline: bool = False
    """Never contact the Hugging Face hub."""


class Eval(Section):
    """The evaluation of the starting checkpoint and of the trained model, after training."""

    main_keys: ClassVar[dict[type, str]] = {str: "suite"}
    other_names: ClassVar[dict[str, str]] = {"torch_dtype": "dtype"}

    suite: Annotated[str, Field(min_length=1)]
    """The name of a suite that comes with soren-align, or the path of a suite.yaml."""
    batch_size: Annotated[int, Field(ge=1)] | None = None
    """Prompts per forward pass. If memory runs out, the batch size is halved for all models of a
    table. null: the suite's own batch size."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype of the weights during evaluation. null: the suite's own dtype."""
    backend: Literal["hf", "vllm"] = "hf"
    """The library that runs all models of a table: `hf` is transformers, `vllm` is vLLM (pip
    install 'soren-align[vllm]')."""
    processes: Annotated[int, Field(ge=1)] | None = None
    """The number of processes on this machine that share the questions, one per GPU. null: as many
    processes as the training has."""
    data_root: str | None = None
    """A folder with downloaded hub datasets, laid out as on the hub (ROOT/allenai/ai2_arc, ...).
    null: the `data_root` of the suite. If the suite has no `data_root`, null means the hub."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Evaluate only the first `limit` questions of each task, as a quick check."""
    strict: bool = False
    """true: stop with an error if a prompt is longer than the model's context. false: remove the
    beginning of such a prompt, and report the number of these prompts."""
    base_template: Literal["run", "own", "none"] = "own"
    """The chat template for the base model (the first row of the table), if the suite applies one.
    `own`: the base model's own template, or the run's template if the base model has no template.
    `run`: the run's template, so that the two models get equal prompts and can be compared. `none`:
    no template for the base model and for other models without a template."""
    omit: list[Annotated[str, Field(pattern=r"^\w[\w.-]*$")]] = []
    """The benchmarks of the suite that are not evaluated, by the names of their columns in the
    table. For example, omit `piqa` if the answers of PIQA are too long for the model's context."""
    trust_suite: bool = False
    """Whether to run the code in the files of a suite that does not come with soren-align
    (`!function`, metrics that are scripts). true: run the code; read it first. false: refuse a
    suite with such code."""
    published: list[str] = []
    """Scores that other authors published, to show under the table: the name of a table that comes
    with soren-align, such as `paper/sft`, or a YAML file of the same format."""

    @property
    def name(self) -> str:
        """The name of the results' folder: the suite's; with omitted columns and the limit of a
        rehearsal, so that they replace no full result."""
        # A rehearsal with `limit`, or with fewer columns, must not replace a full result, and is no
        # row of the same table.
        path = Path(os.path.abspath(self.suite))  # without the `..` that Path.absolute leaves
        suite = path.parent.name if path.suffix == ".yaml" else path.name
        omitted = "".join(f"-without-{column}" for column in self.omit)
        return suite + omitted + (f"-limit{self.limit}" if self.limit else "")


Recipe.model_rebuild()


def resolve(recipe: Recipe) -> Recipe:
    """The recipe with the defaults that depend on other keys written out."""
    # Written out at the end of loading and not by defaults of the fields, since each depends on
    # another key, which --set, a study or an extended recipe may still change. What is written out
    # here is in the run folder's recipe.yaml, and a later version's defaults do not change the run.
    model = recipe.model
    if model.lora is not None and model.lora.alpha is None:
        lora = model.lora.model_copy(update={"alpha": float(model.lora.r)})
        model = model.model_copy(update={"lora": lora})
    optimizer, trainer = recipe.optimizer, recipe.trainer
    # An adapter has no other parameters, unless whole modules are trained beside it: a value would
    # claim a learning rate that nothing uses
    # (test_aux_lr_is_null_where_there_are_no_other_parameters).
    if optimizer.aux_lr is None and (
        optimizer.name == "adamw" or trains_others(model.name_or_path, model.lora)
    ):
        optimizer = optimizer.model_copy(update={"aux_lr": optimizer.lr})
    # transformers' default is to evaluate never: held-out examples would cost training data for
    # nothing.
    if recipe.data.eval is not None and trainer.get("eval_strategy") is None:
        trainer = {**trainer, "eval_strategy": "steps" if trainer.get("eval_steps") else "epoch"}
    # transformers wants them equal
    if trainer.get("load_best_model_at_end") and trainer.get("save_strategy") is None:
        saves = {
            "save_strategy": trainer.get("eval_strategy"),
            "save_steps": trainer.get("eval_steps"),
        }
        trainer = {
            **trainer,
            **{key: value for key, value in saves.items() if value and trainer.get(key) is None},
        }
    if trainer.get("packing") and trainer.get("packing_strategy") is None:
        # TRL's own default cuts long examples short
        trainer = {**trainer, "packing_strategy": "bfd_split"}
    return recipe.model_copy(update={"optimizer": optimizer, "model": model, "trainer": trainer})


def trains_adapter(model: Model) -> bool:
    """Whether an adapter is trained: a new one, or the one in the folder that training starts
    from.
    """
    return model.lora is not None or (resolve_path(model.name_or_path) / ADAPTER).is_file()


def trains_others(start: str, lora: Lora | None) -> bool:
    """Whether parameters beside the matrices are trained: of adapters, only those with whole
    modules have some.

    start: model.name_or_path; lora: the new adapter.
    """
    file = resolve_path(start) / ADAPTER
    if not file.is_file():
        return lora is None or bool(lora.modules_to_save)
    try:
        config = read_json(file)
    except UserError:  # reported at model.name_or_path
        return True
    whole = ("modules_to_save", "trainable_token_indices", "use_dora")
    return not isinstance(config, dict) or any(config.get(key) for key in whole)
