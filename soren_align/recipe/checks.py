"""Check what a schema cannot express: files that must exist, keys that depend on other keys.

The checks read the raw data, so that their mistakes are reported together with wrong types.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, get_args

from ..core import extras, shipped
from ..core.document import Problem, value_at
from ..core.errors import MissingError, UserError, did_you_mean
from ..core.files import local_path, resolve_path
from ..core.optimizer_settings import AUX_WEIGHT_DECAY, WEIGHT_DECAY, Precision
from ..core.yaml import Key
from ..spectral.maps import SOREN_MAPS
from ..tasks import TASKS
from .data_files import STDLIB, STDLIB_SPLITS, is_test_split, refuse_unusable_data
from .model import (
    adapter_config,
    attention_problems,
    is_adapter,
    is_local,
    recorded_quantization,
    refuse_unusable,
)
from .parallel import Parallel, parallel
from .schema import Quantize, trains_others

PROMPT_FILES = (".txt", ".jsonl")
TWO_WAYS = (
    "is already a LoRA adapter. To continue its training, remove model.lora. To train a new"
    " adapter, run `soren-align merge RUN` and start from RUN/merged"
)


class _Raw:
    """A recipe's raw data and its problems.
    Values of the wrong type read as missing: the schema reports them.
    """

    def __init__(self, data: dict[str, Any]):
        # Raw data and not the validated recipe: where one key has a wrong type there is no recipe,
        # and the mistakes of all other keys would come to light one command later.
        self.data = data
        self.problems: list[Problem] = []
        self.no_paths: dict[Key, Problem] = {}
        """Problems of texts that were read as paths and cannot be paths."""

    def report(self, key: Key, message: str, kind: str = UserError.kind) -> None:
        """Add a problem of a key."""
        self.problems.append(Problem(key, message, kind))

    @contextmanager
    def reporting(self, key: Key) -> Iterator[None]:
        """Report a UserError within this context as a problem of the key."""
        try:
            yield
        except UserError as error:
            for message in error.problems:
                self.report(key, message, error.kind)

    def get(self, *keys: str) -> Any:
        """The value at a key, of any type; None if missing."""
        return value_at(self.data, keys)

    def text(self, *keys: str) -> str | None:
        """The text at a key; None for anything else."""
        value = self.get(*keys)
        return value if isinstance(value, str) and value else None

    def path(self, *keys: str) -> str | None:
        """The text at a key, if it can be a path."""
        return self.as_path(keys, self.text(*keys))

    def as_path(self, key: Key, text: Any) -> str | None:
        """The text, if it is a text and can be a path."""
        # resolve_path refuses texts that no path can be, such as one with a NUL. Noted by key,
        # since several checks read the same path.
        try:
            if isinstance(text, str) and text:
                resolve_path(text)
                return text
        except UserError as error:
            self.no_paths[key] = Problem(key, str(error))
        return None

    def section(self, *keys: str) -> dict[str, Any]:
        """The section at a key; empty for anything else."""
        value = self.get(*keys)
        return value if isinstance(value, dict) else {}

    @cached_property
    def parallel(self) -> Parallel | None:
        """The configuration of run.parallel; None, and a problem, if it cannot be read or is not
        supported.
        """
        # Cached: several checks read it, and its problems are reported once.
        with self.reporting(("run", "parallel")):
            return parallel(self.path("run", "parallel") or "ddp")
        return None

    @cached_property
    def trains_adapter(self) -> bool:
        """Whether an adapter is trained, a new one or the one at model.name_or_path."""
        model = self.path("model", "name_or_path")
        return isinstance(self.get("model", "lora"), dict) or (
            model is not None and is_adapter(model)
        )


def problems_beyond_schema(data: dict[str, Any], *, reads_data: bool = True) -> list[Problem]:
    """(key, message) of each missing file and each conflict between keys.

    reads_data: whether the first lines of local data files are checked.
    """
    # The order of the checks is that of a recipe's sections; `loader` sorts problems by their
    # lines.
    raw = _Raw(data)
    _check_model(raw)
    for at, split in splits(raw.get("data")):  # the files of each, and its part of them
        # data.eval and data.retention may be test splits; what is trained on may be one only with a
        # key of its own.
        path, name = raw.as_path((*at, "path"), split.get("path")), split.get("split", "train")
        if path is None:
            continue
        is_trained, trains_on_test = at[1] == "train", split.get("train_on_test") is True
        if is_local(path):
            may_be_test, task = not is_trained or trains_on_test, raw.text("task")
            with raw.reporting((*at, "path")):
                refuse_unusable_data(
                    path, split, task, may_be_test=may_be_test, reads_data=reads_data
                )
        if not isinstance(name, str):
            continue
        if path == STDLIB and name not in STDLIB_SPLITS:
            raw.report(
                (*at, "split"),
                f"found {name!r}; write a split of {STDLIB}: {' or '.join(STDLIB_SPLITS)}",
            )
        elif path != STDLIB and is_local(path):
            # Slices such as `train[:10%]` are for splits of the hub: ignored for a file, one would
            # train on more than was meant.
            if "[" in name:
                raw.report(
                    (*at, "split"),
                    f"found {name!r}, but a file is always read whole; use the key limit",
                )
        elif is_trained and is_test_split(name) and not trains_on_test:
            remedy = "name another split, or add train_on_test: true to this section"
            raw.report(
                (*at, "split"),
                f"'{name}' is a test split, and scores on training data are meaningless; {remedy}",
            )
    for key, message in streaming_problems(raw.section("data"), raw.section("trainer")):
        raw.report(key, message)
    _check_optimizer(raw)
    _check_precision(raw)
    _check_training(raw)
    names = raw.get("eval", "published")
    paths = [
        raw.as_path(("eval", "published", i), n)
        for i, n in enumerate(names if isinstance(names, list) else [])
    ]
    settings: dict[str, Any] = {key: raw.path("eval", key) for key in ("suite", "data_root")}
    settings |= {
        "published": [path for path in paths if path],
        "backend": raw.text("eval", "backend"),
    }
    for problem in evaluation_problems(settings):
        raw.problems.append(problem._replace(key=("eval", *problem.key)))
    return [*raw.problems, *raw.no_paths.values()]


def _check_model(raw: _Raw) -> None:
    section, tokenizer = raw.section("model"), raw.get("model", "tokenizer")
    init_seed = raw.get("model", "init_seed")
    if (attention := raw.text("model", "attn_implementation")) is not None:
        for message in attention_problems(attention, raw.get("trainer", "use_cpu")):
            raw.report(("model", "attn_implementation"), message)
    if (template := raw.path("model", "chat_template")) is not None:
        # A name and a path are distinguished by the suffix alone, so that a misspelt name is
        # answered with the names.
        known, file = shipped.templates(), resolve_path(template)
        if template not in known and file.suffix != ".jinja":
            remedy = (
                f"write {', '.join(known)}, or the path of a .jinja"
                f" file{did_you_mean(template, known)}"
            )
            raw.report(("model", "chat_template"), f"found {template!r}; {remedy}")
        elif template not in known and not file.is_file():
            message = f"no file {template}; correct the path"
            raw.report(("model", "chat_template"), message, MissingError.kind)
    if tokenizer is not None and init_seed is None:
        reason = "applies only to random weights, because trained weights need their own tokenizer"
        raw.report(("model", "tokenizer"), f"{reason}; add model.init_seed, or remove this key")
    elif isinstance(tokenizer, str) and (
        not tokenizer or raw.path("model", "tokenizer") is not None
    ):
        file = resolve_path(tokenizer) / "tokenizer_config.json"
        if not tokenizer or (is_local(tokenizer) and not file.is_file()):
            remedy = "write a tokenizer's folder or hub name, or {vocab_size: N}"
            raw.report(
                ("model", "tokenizer"), f"{tokenizer!r} has no tokenizer_config.json; {remedy}"
            )
    if (model := raw.path("model", "name_or_path")) is None:
        return
    # First whether the model can be trained at all, then what the keys of adapters mean for it.
    with raw.reporting(("model", "name_or_path")):
        refuse_unusable(model, init_seed, tokenizer)
    _check_adapter(raw, model, section)


def _check_adapter(raw: _Raw, model: str, section: dict[str, Any]) -> None:
    """Check keys of adapters and of quantized weights against the starting model.
    section: `model`.
    """
    adapts, name = is_adapter(model), str(raw.get("run", "parallel") or "ddp")
    lora, quantize = section.get("lora"), section.get("quantize")
    if adapts and section.get("freeze"):
        message = (
            f"{model} is a LoRA adapter, of which only the factors are trained; remove model.freeze"
        )
        raw.report(("model", "freeze"), message)
    with suppress(UserError):  # reported at model.name_or_path
        adapter_config(model)
        if adapts and lora is not None:
            raw.report(("model", "lora"), f"{model} {TWO_WAYS}")
        # Where weights are sharded, adapters were never seen to work. By the name, since a config
        # that cannot be read is reported by `parallel`.
        is_sharded = name.startswith(("zero3", "fsdp2")) or name.endswith((".yaml", ".yml"))
        if is_sharded and (adapts or isinstance(lora, dict)):
            message = (
                f"an adapter needs ddp, zero1 or zero2, but run.parallel is {name}; change"
                " run.parallel"
            )
            raw.report(("model", "name_or_path" if adapts else "lora"), message)
    try:
        # A missing record is no problem; a damaged one must not load the adapter on weights that it
        # was not trained on.
        recorded = recorded_quantization(model)
    except UserError as error:
        raw.report(("model", "name_or_path"), str(error))
        return
    # The quantization of the frozen weights: the section's, or that which the adapter was trained
    # on.
    if quantize not in get_args(Quantize) and recorded is None:
        return
    exists = not is_local(model) or resolve_path(model).is_dir()
    if exists and not adapts and not isinstance(lora, dict):
        message = (
            "quantized weights cannot be trained; add `lora: {r: 16}` to train an adapter, or"
            " remove this key"
        )
        raw.report(("model", "quantize"), message)
    if recorded and quantize and quantize != recorded.quantize:
        message = (
            f"found {quantize!r}, but {model} was trained on {recorded.quantize} weights; remove"
            " this key"
        )
        raw.report(("model", "quantize"), message)
    # bitsandbytes' weights lie whole on every process
    # (test_a_quantized_base_lies_whole_on_every_process).
    if name != "ddp":
        message = f"quantized weights need ddp, but run.parallel is {name}; write run.parallel: ddp"
        raw.report(("model", "quantize" if quantize else "name_or_path"), message)


def _check_optimizer(raw: _Raw) -> None:
    section = raw.section("optimizer")
    # Decoupled weight decay that turns the sign of weights: W <- (1 - lr * weight_decay) * W - ...,
    # in any group.
    defaults = (
        ("lr", "weight_decay", WEIGHT_DECAY),
        ("aux_lr", "aux_weight_decay", AUX_WEIGHT_DECAY),
    )
    # A product of 1 or more is a slip of some powers of ten: each step would set a weight to zero
    # or beyond.
    for rate, decay, default in defaults:
        key = "lr" if section.get(rate) is None else rate  # aux_lr is lr where it is not set
        factors = section.get(key), section.get(decay, default)
        # Not an integer of hundreds of digits, which is no float: the schema refuses it.
        are_numbers = all(isinstance(f, int | float) and abs(f) < 1e100 for f in factors)
        if are_numbers and factors[0] * factors[1] >= 1:
            product = f"{factors[0]:g} times {decay} {factors[1]:g} is {factors[0] * factors[1]:g}"
            remedy = f"write a smaller learning rate or a smaller {decay}"
            raw.report(
                ("optimizer", key),
                f"{product}, so each step would change the signs of the weights; {remedy}",
            )
    # From here on: keys that would have no effect. A key that does nothing is a mistake that only
    # the results would show.
    if section.get("matrices") == "all-2d" and raw.trains_adapter:
        message = "has no effect on an adapter, whose matrices are its factors; remove this key"
        raw.report(("optimizer", "matrices"), message)
    if section.get("weight_decay_to") == "start":
        message = ""
        if not any(section.get(decay, default) for _, decay, default in defaults):
            message = "has no effect without weight decay; write weight_decay, or remove this key"
        if raw.section("model", "lora"):
            message = (
                "is not possible with a new adapter, whose product starts at zero; remove this"
                " key: weight_decay moves it there already"
            )
        if message:
            raw.report(("optimizer", "weight_decay_to"), message)
    if section.get("second_moment_beta") is not None and section.get("second_moment") in (
        None,
        "none",
    ):
        message = (
            "has no effect without a second moment; write `second_moment: rows` or `elements`, or"
            " remove this key"
        )
        raw.report(("optimizer", "second_moment_beta"), message)
    scale = section.get("adjust_lr_fn")
    if section.get("match_rms") is not None and scale in ("none", "original"):
        message = (
            f"has no effect with `adjust_lr_fn: {scale}`; write a match_rms_ scale, or remove"
            " this key"
        )
        raw.report(("optimizer", "match_rms"), message)
    precision, spectral_map = raw.text("optimizer", "precision"), section.get("map")
    name = (spectral_map.get("name") if isinstance(spectral_map, dict) else spectral_map) or next(
        iter(SOREN_MAPS)
    )
    # An unknown map is reported by the schema.
    known = SOREN_MAPS.get(name) if isinstance(name, str) else None
    if precision in get_args(Precision) and known and precision not in known.precisions:
        message = f"found {precision!r}; for the map {name!r} write {' or '.join(known.precisions)}"
        raw.report(("optimizer", "precision"), message)


def _check_precision(raw: _Raw) -> None:
    """Check the dtypes of parameters and of recorded gradients."""
    # An adapter's factors are float32, whatever the frozen dtype.
    trainer, adapts = raw.section("trainer"), raw.trains_adapter
    dtype, compensation = raw.text("model", "dtype"), raw.get("optimizer", "compensation")
    where, name = ("optimizer", "compensation"), raw.path("run", "parallel")
    start, lora = raw.path("model", "name_or_path"), raw.section("model", "lora")
    kind = raw.parallel.kind if raw.parallel else None
    of, key = raw.get("run", "log_spectra", "of"), ("run", "log_spectra", "of")
    if isinstance(of, list) and "gradient" in of:  # which are recorded whole and unscaled
        if kind not in (None, "ddp"):
            raw.report(
                key,
                "gradients are whole with run.parallel ddp alone; write ddp, or remove `gradient`",
            )
        if trainer.get("fp16") is True:
            raw.report(key, "fp16 scales the gradients; write trainer.bf16, or remove `gradient`")
    whole = lora.get("modules_to_save") if lora else start and trains_others(start, None)
    if dtype == "bfloat16" and adapts and whole and trainer.get("bf16") is False:
        message = (
            "modules_to_save are float32 beside bfloat16 weights; write `trainer: {bf16: true}`"
        )
        raw.report(("model", "dtype"), message)
    if kind is None:
        return
    # Under ZeRO and FSDP2 the optimizer updates float32 weights, whatever model.dtype is.
    has_masters, remedy = kind != "ddp", "remove this key, or write null"
    if dtype != "bfloat16":
        if compensation == "kahan":
            raw.report(
                where, f"applies only to bfloat16 parameters, but model.dtype is float32; {remedy}"
            )
    elif adapts and compensation == "kahan":
        raw.report(where, f"an adapter's factors are float32 and need no compensation; {remedy}")
    elif not has_masters and not adapts and compensation is None:
        message = (
            "rounding to bfloat16 loses most small updates. Write float32 (`trainer: {bf16: true}`"
            " still gives bfloat16 arithmetic), or add `optimizer: {compensation: kahan}`, which"
            " stores the rounding errors. To ignore these losses, add `optimizer: {compensation:"
            " none}`"
        )
        raw.report(("model", "dtype"), message)
    elif has_masters and compensation == "kahan":
        raw.report(
            where, f"{name} updates float32 master weights, which need no compensation; {remedy}"
        )
    elif has_masters and trainer.get("bf16") is False and not trainer.get("fp16"):
        message = (
            f"under {name}, bfloat16 weights get float32 master weights only with `trainer: {{bf16:"
            " true}`"
        )
        raw.report(("model", "dtype"), f"{message}; write that, or `dtype: float32`")


def _check_training(raw: _Raw) -> None:
    """Check the keys of `trainer` and `run` against others."""
    trainer, run = raw.section("trainer"), raw.section("run")
    if (
        run.get("global_batch_size") is not None
        and trainer.get("gradient_accumulation_steps") is not None
    ):
        message = (
            "is computed from run.global_batch_size, which this recipe sets too; remove one of the"
            " two keys"
        )
        raw.report(("trainer", "gradient_accumulation_steps"), message)
    is_packed = trainer.get("packing") is True
    if is_packed and trainer.get("max_length", 0) is None:
        message = "found null, but packing needs a length; write a number, or packing: false"
        raw.report(("trainer", "max_length"), message)
    if trainer.get("eval_packing") is True and not is_packed:
        message = (
            "without `packing: true`, TRL gives packed held-out examples no position ids, so that"
            " the examples would attend to each other; remove this key, or write packing: true"
        )
        raw.report(("trainer", "eval_packing"), message)
    strategy = trainer.get("train_sampling_strategy")
    if raw.get("task") in ("dpo", "kto") and strategy == "batch_rebalance":
        message = "needs one length for each example, which only those of SFT have; remove this key"
        raw.report(("trainer", "train_sampling_strategy"), message)
    elif raw.get("task") == "kto" and trainer.get("loss_type") != "apo_zero_unpaired":
        _check_kto(raw)
    message = extras.missing("liger_kernel", "remove this key")
    if trainer.get("use_liger_kernel") is True and message:
        raw.report(("trainer", "use_liger_kernel"), message)
    _check_evaluations(raw)
    _check_parallel(raw)
    config, where = raw.parallel, raw.path("run", "parallel")
    if (prompts := raw.path("run", "samples", "prompts")) is not None:
        file, key = resolve_path(prompts), ("run", "samples", "prompts")
        if file.suffix not in PROMPT_FILES:
            raw.report(
                key,
                f"found {prompts!r}; write a list of texts, or a file"
                f" ({' or '.join(PROMPT_FILES)})",
            )
        elif not file.is_file():
            raw.report(key, f"there is no file {prompts!r}; correct the path", MissingError.kind)
    # Generation calls the layers token by token: under sharded weights every rank would have to
    # join in each of these calls.
    shards_weights = config and (config.kind == "fsdp2" or config.stage == 3)
    if run.get("async_save") is True and config and not config.has_sharded_checkpoints:
        message = (
            f"writes only the sharded checkpoints of FSDP2 in the background, but run.parallel is"
            f" {where or 'ddp'}; write run.parallel: fsdp2, or remove this key"
        )
        raw.report(("run", "async_save"), message)
    if run.get("samples") is not None and shards_weights:
        message = (
            f"run.parallel {where} shards the weights, so no process can generate samples; remove"
            " run.samples"
        )
        raw.report(("run", "samples"), message)
    if run.get("benchmark") is not None:
        if raw.get("eval") is None:
            raw.report(("run", "benchmark"), "has no suite; add eval.suite, or remove this key")
        if shards_weights:
            message = (
                f"run.parallel {where} shards the weights, so a checkpoint is no model that can be"
                " evaluated; remove run.benchmark"
            )
            raw.report(("run", "benchmark"), message)
    resume = raw.path("run", "resume")
    if resume is not None and resume not in ("auto", "never") and not local_path(resume).is_dir():
        raw.report(
            ("run", "resume"), f"found {resume!r}; write auto, never, or the folder of a checkpoint"
        )
    _check_output_folder(raw)


def _check_kto(raw: _Raw) -> None:
    """Check what TRL's estimate of the KL divergence needs: the other answers of a batch."""
    reason = "KTO estimates a divergence from the other answers of a batch"
    if raw.get("trainer", "train_sampling_strategy") not in (None, "sequential"):
        message = f"{reason}, which is made before training; remove this key"
        raw.report(("trainer", "train_sampling_strategy"), f"{message} (the order is random)")
    if raw.get("trainer", "per_device_train_batch_size") == 1:
        key = ("trainer", "per_device_train_batch_size")
        raw.report(key, f"is 1, but {reason}; write 2 or more")
    if raw.get("data", "streaming") is not None:
        message = f"{reason}, which a stream does not have in advance; remove this key"
        raw.report(("data", "streaming"), message)


def _check_evaluations(raw: _Raw) -> None:
    """Check the keys that need evaluations during training, and the metric of the best model."""
    trainer, strategy = raw.section("trainer"), raw.get("trainer", "eval_strategy")
    # Three keys decide whether evaluations happen; all others that rely on evaluations are checked
    # against these.
    held_out = raw.get("data", "eval")
    if strategy not in (None, "no", False) and held_out is None:
        raw.report(
            ("trainer", "eval_strategy"),
            "needs held-out examples; add data.eval, or remove this key",
        )
    for key in (("run", "early_stopping"), ("run", "kl_to_start"), ("data", "retention")):
        remedy = (
            "add data.eval" if held_out is None else "write trainer.eval_strategy: steps or epoch"
        )
        if raw.get(*key) not in (None, 0) and (held_out is None or strategy in ("no", False)):
            raw.report(key, f"needs evaluations during training; {remedy}")
    # transformers looks the metric up after the first evaluation, and ends the run there if it is
    # unknown.
    task, metric = raw.get("task"), trainer.get("metric_for_best_model")
    metrics = TASKS[task].metrics if isinstance(task, str) and task in TASKS else ()
    name = metric.removeprefix("eval_") if isinstance(metric, str) else ""
    if metrics and name and name not in metrics:
        message = (
            f"found {metric!r}; write one of {', '.join(metrics)}{did_you_mean(name, metrics)}"
        )
        raw.report(("trainer", "metric_for_best_model"), message)


def _check_output_folder(raw: _Raw) -> None:
    """Check whether a run folder can be created; not write permission: a plan or an import may run
    on another machine.
    """
    if (output := raw.path("run", "output_dir")) is None:
        return
    folder, key = local_path(output).absolute(), ("run", "output_dir")
    # The nearest parent that exists: all folders below it would be created.
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if "\n" in output:
        raw.report(key, f"found {output!r}, which has a line break; remove the line break")
    elif folder.is_file():
        raw.report(key, f"{output} is a file; name a folder")
    elif not existing.is_dir():
        raw.report(key, f"{output} cannot be created: {existing} is a file; name another folder")
    elif existing.resolve().parts[1:2] in (("proc",), ("sys",)):
        raw.report(
            key, f"{output} cannot be written: {existing} takes no new files; name another folder"
        )


def _check_parallel(raw: _Raw) -> None:
    """Check whether this machine can shard so.
    A function of its own: tests of FSDP2 on CPUs replace it.
    """
    config = raw.parallel
    if config and config.kind == "fsdp2" and raw.get("trainer", "use_cpu"):
        reason = (
            "accelerate shards only on GPUs, and would silently train with DDP under"
            " trainer.use_cpu"
        )
        raw.report(
            ("run", "parallel"), f"{reason}; write ddp or a ZeRO stage, or remove trainer.use_cpu"
        )


def evaluation_problems(settings: dict[str, Any]) -> list[Problem]:
    """The problems of files, suites and packages of an evaluation that are missing."""
    problems: list[Problem] = []
    tables = ("published", "table of published scores", shipped.published())
    # Also for `soren-align eval`, whose settings are the same keys without a recipe.
    for key, kind, known in (("suite", "suite", shipped.suites()), tables):
        names = settings.get(key) or []
        for name in [names] if isinstance(names, str) else names:
            if name not in known and not (path := resolve_path(name)).exists():
                others = did_you_mean(name, known, f"write one of {', '.join(known)}")
                hint = shipped.suite_hint(name, path) if key == "suite" else others
                message = (
                    f"no shipped {kind} has the name {name!r}, and there is no file "
                    f"{path.absolute()}{hint}"
                )
                problems.append(Problem((key,), message, MissingError.kind))
    if settings.get("backend") == "vllm" and (message := extras.missing("vllm", "write hf")):
        problems.append(Problem(("backend",), message))
    if (root := settings.get("data_root")) and not local_path(root).is_dir():
        message = f"there is no folder {root!r}; correct the path"
        problems.append(Problem(("data_root",), message, MissingError.kind))
    return problems


def splits(data: Any) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Every split of the data section, with its key."""
    for name in ("train", "eval", "retention"):
        value = data.get(name) if isinstance(data, dict) else None
        # A bare path is no section: the schema reports it, with the section to write.
        splits = enumerate(value) if isinstance(value, list) else [(None, value)]
        for i, split in splits:
            if isinstance(split, dict):
                yield ("data", name) if i is None else ("data", name, i), split


_NEEDS_ALL = "needs all examples before training, but data.streaming reads them during training"
NOT_STREAMED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_train_epochs": (
        (None,),
        (
            "with data.streaming, the number of examples is unknown; remove this key and write"
            " max_steps"
        ),
    ),
    "dataloader_num_workers": (
        (None, 0),
        (
            "with data.streaming, the training process itself reads the data, so that a resumed run"
            " continues at the exact example; remove this key"
        ),
    ),
    "precompute_ref_log_probs": ((None, False), f"{_NEEDS_ALL}; remove this key"),
    "train_sampling_strategy": ((None, "random"), f"{_NEEDS_ALL}; remove this key"),
    "shuffle_dataset": (
        (None, False),
        "with data.streaming, data.streaming.shuffle_buffer sets the shuffling; remove this key",
    ),
    "save_strategy": (
        (None, "steps", "no", False, "best"),
        "with data.streaming, a run has no epochs; write steps, and set save_steps",
    ),
}
"""Keys of `trainer` -> the values that data.streaming allows, and the reason for others."""


def streaming_problems(data: dict[str, Any], trainer: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    """(key, message) of each setting that data.streaming does not allow.
    data, trainer: the raw sections.
    """
    if data.get("streaming") in (None, False):
        return
    # A stream has no length, from which the schedule could know where it ends.
    max_steps = trainer.get("max_steps")
    if not isinstance(max_steps, int) or max_steps < 1:
        reason = "is required with data.streaming, because the number of examples is unknown"
        yield ("trainer", "max_steps"), f"{reason}; write the number of optimizer steps"
    for key, (allowed, reason) in NOT_STREAMED.items():
        if trainer.get(key) not in allowed:
            yield ("trainer", key), reason
    if isinstance(evaluation := data.get("eval"), dict) and "examples" in evaluation:
        yield ("data", "eval"), f"{_NEEDS_ALL}; write {{fraction: 0.01}}, or a split"
    for at, split in splits(data):
        name, path = split.get("split"), split.get("path")
        is_part = isinstance(name, str) and ("[" in name or "+" in name)
        if at[1] == "train" and is_part and isinstance(path, str) and not is_local(path):
            message = (
                "only a whole split can be streamed; write a whole split and a limit, or a list of"
                " splits"
            )
            yield (*at, "split"), message
