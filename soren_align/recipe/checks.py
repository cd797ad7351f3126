"""Checks that a schema cannot express: files that must exist, and keys that depend on each other.

The checks read the raw data, so that their mistakes are reported together with wrong types.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any, get_args

from ..core import shipped
from ..core.errors import UserError, did_you_mean
from ..core.files import local_path
from ..core.optimizer_settings import AUX_WEIGHT_DECAY, WEIGHT_DECAY, Precision
from ..core.yaml import Key
from ..spectral.maps import SOREN_MAPS
from ..tasks import TASKS
from .data_files import STDLIB, STDLIB_SPLITS, data_problems, first_line_problems, is_test_split
from .model import (
    attention_problems,
    freeze_problem,
    is_adapter,
    is_all_factors,
    is_local,
    lora_problems,
    model_problems,
    quantization_problems,
    template_problems,
    tokenizer_problems,
)
from .optimizer import OPTIMIZER_SECTIONS
from .parallel import parallel

Problems = list[tuple[Key, str]]


class Raw:
    """A recipe's raw data. Values of the wrong type read as missing: the schema reports them.

    problems: collects texts that were read as paths and cannot be paths. reads_data: see `problems_beyond_schema`.
    """

    def __init__(self, data: dict[str, Any], reads_data: bool = True):
        self.data, self.reads_data = data, reads_data
        self.problems: Problems = []

    def get(self, *keys: str) -> Any:
        """The value at a key, of any type; None if missing."""
        node: Any = self.data
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        return node

    def text(self, *keys: str) -> str | None:
        """The text at a key; None for anything else."""
        value = self.get(*keys)
        return value if isinstance(value, str) and value else None

    def path(self, *keys: str) -> str | None:
        """The text at a key, if it can be a path."""
        return self.as_path(keys, self.text(*keys))

    def as_path(self, key: Key, text: Any) -> str | None:
        """The text, if it is a text and can be a path."""
        try:
            if isinstance(text, str) and text:
                shipped.resolve(text)
                return text
        except UserError as error:
            self.problems.append((key, str(error)))
        return None

    def section(self, *keys: str) -> dict[str, Any]:
        """The section at a key; empty for anything else."""
        value = self.get(*keys)
        return value if isinstance(value, dict) else {}


def problems_beyond_schema(data: dict[str, Any], *, reads_data: bool = True) -> Problems:
    """(key, message) of each missing file and each conflict between keys.

    reads_data: whether the first lines of local data files are checked.
    """
    raw = Raw(data, reads_data)
    checks = (_model, _tokenizer, _template, _data, _optimizer, _precision, _trainer, _run, _evaluation)
    return [problem for check in checks for problem in check(raw)] + list(dict(raw.problems).items())


def _model(raw: Raw) -> Iterator[tuple[Key, str]]:
    if (attention := raw.text("model", "attn_implementation")) is not None:
        problems = attention_problems(attention, raw.get("trainer", "use_cpu"))
        yield from ((("model", "attn_implementation"), message) for message in problems)
    model = raw.path("model", "name_or_path")
    if model is None:
        return
    missing = model_problems(model, raw.get("model", "init_seed"), raw.get("model", "tokenizer"))
    yield from ((("model", "name_or_path"), message) for message in missing)
    conflicts = lora_problems(model, raw.get("model", "lora"), raw.get("run", "parallel"))
    conflicts += quantization_problems(model, raw.section("model"), raw.get("run", "parallel"))
    yield from ((("model", key), message) for key, message in conflicts)
    if (frozen := freeze_problem(model, raw.get("model", "freeze"))) is not None:
        yield ("model", "freeze"), frozen


def _tokenizer(raw: Raw) -> Iterator[tuple[Key, str]]:
    if raw.text("model", "tokenizer") is None or raw.path("model", "tokenizer") is not None:
        problems = tokenizer_problems(raw.get("model", "tokenizer"), raw.get("model", "init_seed"))
        yield from ((("model", "tokenizer"), message) for message in problems)


def _template(raw: Raw) -> Iterator[tuple[Key, str]]:
    if (template := raw.path("model", "chat_template")) is not None:
        yield from ((("model", "chat_template"), message) for message in template_problems(template))


def _data(raw: Raw) -> Iterator[tuple[Key, str]]:
    for at, split in splits(raw.get("data")):
        if (path := raw.as_path((*at, "path"), split.get("path"))) is not None:
            is_trained = at[1] == "train"
            may_be_test = not is_trained or split.get("train_on_test") is True
            missing = data_problems(path, may_be_test) if is_local(path) else []
            if raw.reads_data and is_local(path) and not missing:
                missing = first_line_problems(path, split, raw.text("task"))
            yield from (((*at, "path"), message) for message in missing)
            problems = split_problems(path, split, is_trained)
            yield from (((*at, "split"), message) for message in problems)
    yield from streaming_problems(raw.section("data"), raw.section("trainer"))


def _optimizer(raw: Raw) -> Iterator[tuple[Key, str]]:
    member = OPTIMIZER_SECTIONS.get(raw.text("optimizer", "name") or "")
    if member and member.needs_aux_lr and raw.get("optimizer", "aux_lr") is None and _trains_other_parameters(raw):
        yield ("optimizer", "aux_lr"), "is required: the AdamW learning rate of embeddings, norms and biases"
    yield from _decay_problems(raw.section("optimizer"))
    if raw.text("optimizer", "matrices") == "all-2d" and _adapts(raw):
        yield ("optimizer", "matrices"), "has no effect on an adapter, whose matrices are its factors; leave it out"
    mode = raw.text("run", "parallel") or "ddp"
    if raw.text("optimizer", "states") == "8bit" and (mode == "fsdp2" or mode.endswith((".yaml", ".yml"))):
        yield ("optimizer", "states"), f"8-bit states are for ddp and ZeRO; run.parallel is {mode}"
    precision, spectral_map = raw.text("optimizer", "precision"), raw.get("optimizer", "map")
    name = (spectral_map.get("name") if isinstance(spectral_map, dict) else spectral_map) or next(iter(SOREN_MAPS))
    known = SOREN_MAPS.get(name) if isinstance(name, str) else None
    if precision in get_args(Precision) and known and precision not in known.precisions:
        words = " or ".join(known.precisions)
        yield ("optimizer", "precision"), f"found {precision!r}; map {name!r} has {words}"


def _decay_problems(section: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    """Decoupled weight decay that turns the sign of weights: W <- (1 - lr * weight_decay) * W - ..., in any group."""
    for rate, decay, default in (
        ("lr", "weight_decay", WEIGHT_DECAY),
        ("aux_lr", "aux_weight_decay", AUX_WEIGHT_DECAY),
    ):
        # AdamW's aux_lr is its lr where it is not set
        key = "lr" if section.get("name") == "adamw" and section.get(rate) is None else rate
        factors = section.get(key), section.get(decay, default)
        if all(isinstance(each, int | float) for each in factors) and factors[0] * factors[1] >= 1:
            message = f"{factors[0]:g} times {decay} {factors[1]:g} is {factors[0] * factors[1]:g}: each step would "
            message += "turn the weights' signs (1 - lr * decay is not above 0); write a smaller rate or decay"
            yield ("optimizer", key), message


def _trains_other_parameters(raw: Raw) -> bool | None:
    """Whether parameters other than factors of linear layers are trained; None if the model is a folder that does not
    exist yet, such as the result of another recipe."""
    model = raw.path("model", "name_or_path")
    if model is None:
        return True
    if is_local(model) and not shipped.resolve(model).is_dir():
        return None
    return not is_all_factors(model, raw.get("model", "lora"))


def _adapts(raw: Raw) -> bool:
    """Whether an adapter is trained."""
    model = raw.path("model", "name_or_path")
    return isinstance(raw.get("model", "lora"), dict) or (model is not None and is_adapter(model))


def _precision(raw: Raw) -> Iterator[tuple[Key, str]]:
    trainer, adapts = raw.section("trainer"), _adapts(raw)
    dtype, parallel_name = raw.text("model", "dtype"), raw.path("run", "parallel")
    yield from _precision_problems(dtype, raw.get("optimizer", "compensation"), parallel_name, trainer, adapts)
    if adapts and _trains_other_parameters(raw) and dtype == "bfloat16" and trainer.get("bf16") is False:
        message = "modules_to_save are float32; beside bfloat16 weights they need `trainer: {bf16: true}`"
        yield ("model", "dtype"), message


def _trainer(raw: Raw) -> Iterator[tuple[Key, str]]:
    if raw.get("trainer", "eval_strategy") not in (None, "no", False) and raw.get("data", "eval") is None:
        yield ("trainer", "eval_strategy"), "evaluates during training; add data.eval"
    if (
        raw.get("run", "global_batch_size") is not None
        and raw.get("trainer", "gradient_accumulation_steps") is not None
    ):
        message = "follows from run.global_batch_size and the number of processes; leave one of the two out"
        yield ("trainer", "gradient_accumulation_steps"), message
    yield from _packing(raw.section("trainer"))
    if raw.get("trainer", "use_liger_kernel") is True and importlib.util.find_spec("liger_kernel") is None:
        yield ("trainer", "use_liger_kernel"), "is not installed: pip install liger-kernel, or leave it out"


def _packing(settings: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    is_packed = settings.get("packing") is True
    if is_packed and settings.get("max_length", 0) is None:
        yield ("trainer", "max_length"), "is the length of packed sequences; write a number, or packing: false"
    if settings.get("eval_packing") is True and not is_packed:
        message = (
            "without packing, TRL gives packed held-out examples no position ids, and they would attend to each other; "
            "leave it out, or write packing: true"
        )
        yield ("trainer", "eval_packing"), message


def _run(raw: Raw) -> Iterator[tuple[Key, str]]:
    if (name := raw.path("run", "parallel")) is not None:
        problems = _parallel_problems(name, raw.get("trainer", "use_cpu"))
        yield from ((("run", "parallel"), message) for message in problems)
    if raw.get("run", "samples") is not None:
        problems = sample_problems(raw.path("run", "samples", "prompts"), raw.path("run", "parallel"))
        yield from ((("run", "samples", *key), message) for key, message in problems)
    for key in (("run", "early_stopping"), ("run", "kl_to_start"), ("data", "retention")):
        if raw.get(*key) not in (None, 0) and (
            problem := evaluation_needed(raw.get("data", "eval"), raw.get("trainer", "eval_strategy"))
        ):
            yield key, problem
    metric = metric_problems(raw.get("task"), raw.get("trainer", "metric_for_best_model"))
    yield from ((("trainer", "metric_for_best_model"), message) for message in metric)
    resume = raw.path("run", "resume")
    if resume is not None and resume not in ("auto", "never") and not local_path(resume).is_dir():
        yield ("run", "resume"), f"found {resume!r}; write auto, never, or the folder of a checkpoint"
    if (output := raw.path("run", "output_dir")) is not None and (problem := _output_problem(output)):
        yield ("run", "output_dir"), problem


def _output_problem(output: str) -> str | None:
    """Why a run folder cannot be created there; None if nothing is known against it. Creates nothing."""
    folder = local_path(output).absolute()
    if folder.is_file():
        return f"{output} is a file; name a folder"
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        return f"{output} cannot be created: {existing} is a file; name another folder"
    # Write permission is not checked: a plan or an import may run on another machine.
    if existing.resolve().parts[1:2] in (("proc",), ("sys",)):
        return f"{output} cannot be written: {existing} takes no new files; name another folder"
    return None


def _evaluation(raw: Raw) -> Iterator[tuple[Key, str]]:
    section = raw.section("eval")
    names = section.get("published")
    names = names if isinstance(names, list) else []
    paths = [raw.as_path(("eval", "published", i), name) for i, name in enumerate(names)]
    settings: dict[str, Any] = {key: raw.path("eval", key) for key in ("suite", "data_root")}
    settings |= {"published": [path for path in paths if path], "backend": raw.text("eval", "backend")}
    yield from ((("eval", key), message) for key, message in evaluation_problems(settings))


def evaluation_problems(settings: dict[str, Any]) -> list[tuple[str, str]]:
    """(key, message) of each file, suite or package of an evaluation that is missing."""
    problems: list[tuple[str, str]] = []
    for key, kind, known in (
        ("suite", "suite", shipped.suites()),
        ("published", "table of published scores", shipped.published()),
    ):
        names = settings.get(key) or []
        for name in [names] if isinstance(names, str) else names:
            if name not in known and not shipped.resolve(name).exists():
                hint = did_you_mean(name, known, f"shipped are: {', '.join(known)}")
                problems.append((key, f"no {kind} named {name!r}, nor a file {shipped.resolve(name).absolute()}{hint}"))
    if settings.get("backend") == "vllm" and importlib.util.find_spec("vllm") is None:
        problems.append(("backend", "vLLM is not installed: pip install 'soren-align[vllm]', or write hf"))
    if (root := settings.get("data_root")) and not local_path(root).is_dir():
        problems.append(("data_root", f"there is no folder {root!r}"))
    return problems


def _parallel_problems(name_or_path: str, use_cpu: Any) -> list[str]:
    try:
        config = parallel(name_or_path)
    except UserError as error:
        return list(error.problems)
    if config.kind == "fsdp2" and use_cpu:
        return [
            "accelerate shards on GPUs only, and under trainer.use_cpu would silently train by DDP; write ddp or a "
            "ZeRO stage, or take use_cpu out"
        ]
    if config.kind == "zero" and importlib.util.find_spec("deepspeed") is None:
        return ["needs DeepSpeed, which is not installed: pip install 'deepspeed>=0.19.8,<0.20'"]
    return []


def _precision_problems(
    dtype: str | None, compensation: Any, parallel_name: str | None, settings: dict[str, Any], adapts: bool
) -> Problems:
    """Problems of bfloat16 parameters without compensation, and of compensation without bfloat16 parameters.

    adapts: whether an adapter is trained; its factors are float32, whatever the dtype of the frozen weights.
    """
    try:
        masters = parallel_name is not None and parallel(parallel_name).kind != "ddp"
    except UserError:  # reported at run.parallel
        return []
    where: Key = ("optimizer", "compensation")
    if dtype != "bfloat16":
        inert = "is for bfloat16 parameters, and model.dtype is float32; leave it out, or write null"
        return [(where, inert)] if compensation == "kahan" else []
    if adapts and compensation == "kahan":
        return [(where, "an adapter's factors are float32, which need none; leave it out, or write null")]
    if adapts and not masters:
        return []
    if not masters:
        message = (
            "bfloat16 parameters round most small updates away. Write float32 (with `trainer: {bf16: true}` the "
            "arithmetic is bfloat16 all the same), or `optimizer: {compensation: kahan}`, which stores the rounding "
            "errors, or `compensation: none` to train without"
        )
        return [(("model", "dtype"), message)] if compensation is None else []
    if compensation == "kahan":
        return [(where, f"{parallel_name} updates float32 masters, which need none; leave it out, or write null")]
    if settings.get("bf16") is False and not settings.get("fp16"):
        message = f"under {parallel_name} bfloat16 weights have float32 masters with `trainer: {{bf16: true}}` only"
        message += "; write float32"
        return [(("model", "dtype"), message)]
    return []


# ---
# Checks of keys inside `run` against other keys, and of the metric that runs are compared by.

PROMPT_FILES = (".txt", ".jsonl")


def evaluation_needed(evaluation: Any, strategy: Any) -> str | None:
    """The problem of a key that is for evaluations during training. evaluation: data.eval. strategy: eval_strategy."""
    if evaluation is None:
        return "needs evaluations during training; add data.eval"
    if strategy in ("no", False):
        return "needs evaluations during training; write trainer.eval_strategy: steps or epoch"
    return None


def metric_problems(task: Any, metric: Any) -> Iterator[str]:
    """The problems of trainer.metric_for_best_model."""
    known = TASKS[task].metrics if isinstance(task, str) and task in TASKS else ()
    if known and isinstance(metric, str) and metric.removeprefix("eval_") not in known:
        yield f"found {metric!r}; write one of {', '.join(known)}{did_you_mean(metric.removeprefix('eval_'), known)}"


def sample_problems(prompts: str | None, parallel_name: str | None) -> Iterator[tuple[Key, str]]:
    """(key in run.samples, message) for each problem. prompts: a file; None for a list."""
    if prompts is not None:
        file = shipped.resolve(prompts)
        if file.suffix not in PROMPT_FILES:
            yield ("prompts",), f"found {prompts!r}; write a list of texts, or a file ({' or '.join(PROMPT_FILES)})"
        elif not local_path(file).is_file():
            yield ("prompts",), f"there is no file {prompts!r}"
    try:
        config = parallel(parallel_name or "ddp")
    except UserError:  # reported at run.parallel
        return
    if config.kind == "fsdp2" or (config.kind == "zero" and config.stage == 3):
        yield (), f"run.parallel {parallel_name} shards the weights, and no process could answer; leave samples out"


# ---
# Checks of the splits of the data section, each of which may be one of several.


def splits(data: Any) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Every split of the data section, with its key."""
    for name in ("train", "eval", "retention"):
        value = data.get(name) if isinstance(data, dict) else None
        splits = enumerate(value) if isinstance(value, list) else [(None, value)]
        for i, split in splits:
            if isinstance(split, dict):
                yield ("data", name) if i is None else ("data", name, i), split


NOT_STREAMED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_train_epochs": ((None,), "the examples of a stream are not counted; leave it out, and write max_steps"),
    "dataloader_num_workers": (
        (None, 0),
        "a stream is read by the training process itself, so that a run can be resumed at the exact example; leave it "
        "out",
    ),
    "precompute_ref_log_probs": (
        (None, False),
        "needs the examples before training, and a stream's are read while training; leave it out",
    ),
    "train_sampling_strategy": ((None, "random"), "needs the examples before training; leave it out"),
    "shuffle_dataset": ((None, False), "a stream is shuffled by data.streaming.shuffle_buffer; leave it out"),
    "save_strategy": ((None, "steps", "no", False, "best"), "a stream has no epochs; write steps, and save_steps"),
}
"""Keys of `trainer` -> the values that data.streaming allows, and the reason for others."""


def streaming_problems(data: dict[str, Any], trainer: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    """(key, message) of each setting that data.streaming does not allow. data, trainer: the raw sections."""
    if data.get("streaming") in (None, False):
        return
    max_steps = trainer.get("max_steps")
    if not isinstance(max_steps, int) or max_steps < 1:
        yield (
            ("trainer", "max_steps"),
            "is required with data.streaming, as the number of examples is unknown; write the number of optimizer "
            "steps",
        )
    for key, (allowed, reason) in NOT_STREAMED.items():
        if trainer.get(key) not in allowed:
            yield ("trainer", key), reason
    if isinstance(evaluation := data.get("eval"), dict) and "examples" in evaluation:
        message = "the examples of a stream cannot be compared before training; write {fraction: 0.01}, or a split"
        yield ("data", "eval"), message
    for at, split in splits(data):
        name, path = split.get("split"), split.get("path")
        is_part = isinstance(name, str) and ("[" in name or "+" in name)
        if at[1] == "train" and is_part and isinstance(path, str) and not is_local(path):
            yield (*at, "split"), "only a whole split can be streamed; write limit for a part, or a list of splits"


def split_problems(path: str, split: dict[str, Any], is_trained: bool) -> list[str]:
    """The problems of a raw split's `split`. is_trained: it is one of data.train."""
    name = split.get("split", "train")
    if not isinstance(name, str):
        return []
    if path == STDLIB:
        if name not in STDLIB_SPLITS:
            return [f"found {name!r}; {STDLIB} has {' and '.join(STDLIB_SPLITS)}"]
    elif is_local(path):
        is_part = "[" in name
        return [f"found {name!r}, but a file is always taken whole; write limit"] if is_part else []
    if is_trained and is_test_split(name) and split.get("train_on_test") is not True:
        return [
            f"'{name}' is a test split, and scores on training data are meaningless; name another, or write "
            "train_on_test: true beside it"
        ]
    return []
