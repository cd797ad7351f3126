"""The fields of TRL's SFTConfig and DPOConfig, read from their source without importing them.

Importing TRL takes ten seconds and torch; a typo should be reported within one. So the dataclasses
of the *installed* TRL and transformers are parsed, never executed. tests/recipe/test_trl_config.py
compares the result with `dataclasses.fields` of the real classes, so that an upgrade which changes
their style is noticed.
"""

import ast
import functools
import importlib.util
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from operator import gt, le, lt
from pathlib import Path
from typing import Any

from ..core.errors import did_you_mean
from ..tasks import TASKS

_PROGRESS = "soren-align itself shows the progress; remove this key"
_PROCESSES = "soren-align sets this value for the processes that it starts; remove this key"
_PUSH = "training uploads nothing; remove this key, and run `soren-align push RUN OWNER/NAME` after training"

# Keys of TRL that belong to another section of a recipe, or to none: one meaning, one place.
ELSEWHERE = {
    "learning_rate": "write optimizer.lr (and optimizer.aux_lr)",
    "weight_decay": "write optimizer.weight_decay",
    "optim": "write optimizer.name",
    "optim_args": "write the keys of the optimizer section",
    "optim_target_modules": "write optimizer.matrices or optimizer.aux",
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "write optimizer.betas"),
    "adam_epsilon": "write optimizer.eps",
    "output_dir": "write run.output_dir",
    "resume_from_checkpoint": "write run.resume",
    "model_init_kwargs": "write the keys of the model section",
    "chat_template_path": "write model.chat_template instead (qwen2.5, zephyr, or the path of a .jinja file)",
    "eos_token": "write model.eos_token",
    "trust_remote_code": "soren-align does not run a model's remote code; use a model that transformers supports",
    "dataset_text_field": "write data.train.columns instead, if the column with the text is not named text",
    **dict.fromkeys(
        ("dataset_kwargs", "remove_unused_columns"), "write the keys of the data section"
    ),
    **dict.fromkeys(("disable_tqdm", "log_level", "log_level_replica"), _PROGRESS),
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict"), "the command determines this value; remove this key"
    ),
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "parallelism_config"), "write run.parallel"
    ),
    **dict.fromkeys(("accelerator_config", "local_rank"), _PROCESSES),
    "save_only_model": "a checkpoint without its optimizer cannot be resumed; remove this key",
    "ignore_data_skip": "a resumed run must train on the same examples as an uninterrupted run; remove this key",
    "auto_find_batch_size": "this key changes the batch size silently; write per_device_train_batch_size",
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"), _PUSH
    ),
    "hub_token": "every run folder has a copy of the recipe, also of the token; remove this key and set HF_TOKEN",
}

# Keys of older recipes, with TRL's present name.
RENAMED = {
    "warmup_ratio": "write warmup_steps, in which a number below 1 is a ratio",
    **dict.fromkeys(("max_seq_length", "seq_length", "max_seq_len"), "write max_length"),
    "max_prompt_length": "write max_length, the limit of prompt and answer together",
    **dict.fromkeys(("torch_dtype", "dtype"), "write model.dtype"),
    "evaluation_strategy": "write eval_strategy",
    "overwrite_output_dir": "write run.overwrite",
    "chat_template": "write model.chat_template",
    "dataset_name": "write data.train.path",
    "model_name_or_path": "write model.name_or_path",
    "optimizer": "write optimizer.name",
    "lora_r": "write model.lora.r",
    "lora_alpha": "write model.lora.alpha",
    "lora_dropout": "write model.lora.dropout",
    "lr": "write optimizer.lr",
    **dict.fromkeys(("epochs", "num_epochs"), "write num_train_epochs"),
    "steps": "write max_steps",
    "batch_size": "write per_device_train_batch_size, or run.global_batch_size",
    "micro_batch_size": "write per_device_train_batch_size",
}

# Bounds that TRL and transformers check late, or not at all.
AT_LEAST: dict[str, int] = dict.fromkeys(
    ("per_device_train_batch_size", "per_device_eval_batch_size"), 1
)
AT_LEAST |= {
    "gradient_accumulation_steps": 1,
    "max_length": 2,
    "save_total_limit": 1,
    "max_steps": -1,
}
AT_LEAST |= dict.fromkeys(("seed", "warmup_steps", "max_grad_norm", "dataloader_num_workers"), 0)
AT_MOST: dict[str, int] = dict.fromkeys(("seed", "data_seed"), 2**32 - 1)  # numpy's
# each is a process, of every rank
AT_MOST |= dict.fromkeys(("dataloader_num_workers", "dataset_num_proc"), 256)
ABOVE = {"num_train_epochs": 0, "logging_steps": 0, "save_steps": 0, "eval_steps": 0, "beta": 0}
_LIMITS = ((AT_LEAST, lt, "of at least"), (AT_MOST, gt, "of at most"), (ABOVE, le, "above"))


@dataclass(frozen=True)
class Field:
    """One field of a TRL config class."""

    name: str
    types: frozenset[str]
    """Names of plain types that the annotation admits, e.g. {'int', 'None'}."""
    choices: tuple[str, ...] = ()
    default: Any = None
    """The default where it is a literal, else None."""
    help: str = ""


@functools.cache
def fields(task: str) -> dict[str, Field]:
    """The fields of the installed TRL's config class for a task, by name."""
    transformers, trl, config = _source("transformers"), _source("trl"), TASKS[task].config
    enums: dict[str, Any] = {}  # string enums: class name -> its values
    for module in ("trainer_utils", "training_args"):
        for node in _tree(transformers / f"{module}.py").body:
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(base) == "ExplicitEnum" for base in node.bases
            ):
                values = [s.value for s in node.body if isinstance(s, ast.Assign)]
                enums[node.name] = tuple(v.value for v in values if isinstance(v, ast.Constant))
    known: dict[str, Field] = {}
    for path, name in (
        (transformers / "training_args.py", "TrainingArguments"),
        (trl / "trainer/base_config.py", "_BaseConfig"),
        (trl / f"trainer/{config.removesuffix('Config').lower()}_config.py", config),
    ):
        known |= _class_fields(path, name, enums)
    return known


def recipe_key(name: str) -> str | None:
    """The key of a recipe that another tool's option means: optimizer.lr for learning_rate; None if
    there is none.
    """
    if meant := re.match(r"write ([\w.]*\w)", (ELSEWHERE | RENAMED).get(name, "")):
        name = meant[1]
    elif name in ELSEWHERE:
        return None
    return (
        name
        if "." in name
        else next((f"trainer.{name}" for task in TASKS if name in fields(task)), None)
    )


def problems(task: str, values: dict[str, Any]) -> dict[str, str]:
    """The problems of a recipe's `trainer` section: key -> message."""
    wrong = {
        key: message for key, value in values.items() if (message := _problem(task, key, value))
    }
    if values.get("hub_private_repo") is not None and "trackio" not in named(
        values.get("report_to")
    ):
        wrong["hub_private_repo"] = (
            "has an effect only with the tracker trackio; remove this key, and run `soren-align push RUN OWNER/NAME "
            "--private` after training"
        )
    return wrong


def _problem(task: str, key: str, value: Any) -> str | None:
    known, config = fields(task), TASKS[task].config
    if key in ELSEWHERE:
        message = ELSEWHERE[key]
        return (
            f"a recipe sets this elsewhere; {message}" if message.startswith("write ") else message
        )
    if key not in known:
        if other := next(
            (other.config for name, other in TASKS.items() if key in fields(name)), None
        ):
            return f"is a key of TRL's {other}, but this is a recipe of the task {task}; remove this key"
        if key in RENAMED:
            return f"is no key of TRL's {config}; {RENAMED[key]}"
        return f"is no key of TRL's {config}{did_you_mean(key, known, 'remove this key')}"
    if key == "report_to" and _fits(value, known[key].types):
        return problem(value)
    if key == "truncation_mode" and value == "keep_end":
        return "keep_end is deprecated in TRL, and its truncated examples could not be counted; remove this key"
    field = known[key]
    if field.choices:
        values = value if isinstance(value, list) else [value]
        bad = [
            v
            for v in values
            if v not in field.choices and not (v is None and "None" in field.types)
        ]
        if bad:
            hint = did_you_mean(bad[0], field.choices)
            return f"found {bad[0]!r}; write one of {', '.join(field.choices)}{hint}"
    elif not _fits(value, field.types):
        hint = " (for no value, write null)" if value == "None" else ""
        words = [_WORDS.get(kind, kind) for kind in sorted(field.types - {"None"})] + ["null"] * (
            "None" in field.types
        )
        return f"found {value!r}; write {' or '.join(words)}{hint}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            return f"found {value!r}; write a finite number"
        for limits, is_outside, words in _LIMITS:
            if key in limits and is_outside(value, limits[key]):
                return f"found {value!r}; write a number {words} {limits[key]}"
    return None


def _fits(value: Any, types: frozenset[str]) -> bool:
    if not types or "Any" in types:
        return True
    kind = "None" if value is None else type(value).__name__
    return kind in types or (kind == "int" and "float" in types)


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "dict": "a mapping",
    "list": "a list",
}


def _source(package: str) -> Path:
    spec = importlib.util.find_spec(package)  # finds the folder; runs nothing of it
    if spec is None or spec.origin is None:
        remedy = f"run `pip install soren-align`, which installs {package}"
        raise ModuleNotFoundError(f"{package} is not installed; {remedy}")
    return Path(spec.origin).parent


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _class_fields(path: Path, name: str, enums: dict[str, tuple[str, ...]]) -> dict[str, Field]:
    cls = next(n for n in _tree(path).body if isinstance(n, ast.ClassDef) and n.name == name)
    document = ast.get_docstring(cls) or ""
    fields = {}
    for node in cls.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        field = node.target.id
        call = (
            {k.arg: k.value for k in node.value.keywords}
            if isinstance(node.value, ast.Call)
            else {}
        )
        meta = call.get("metadata")
        items = zip(meta.keys, meta.values, strict=True) if isinstance(meta, ast.Dict) else ()
        metadata = {_literal(key): _literal(value) for key, value in items}
        names = {n.id for n in ast.walk(node.annotation) if isinstance(n, ast.Name)}
        choices = next((enums[n] for n in sorted(names & enums.keys())), metadata.get("choices"))
        # the docstring lists them after 'Possible values are:', as for DPO's loss_type
        if not choices:
            entry = re.search(
                rf"^ *{field} \(.*?(?=^ *\w+ \(|\Z)", document, re.MULTILINE | re.DOTALL
            )
            listed = (
                re.search(r"Possible values are:(.*?)(?:\.\s|\Z)", entry[0], re.DOTALL)
                if entry
                else None
            )
            choices = re.findall(r"`['\"](\w+)['\"]`", listed[1]) if listed else ()
        default, help_text = _literal(call.get("default", node.value)), metadata.get("help") or ""
        fields[field] = Field(
            field, frozenset(_types(node.annotation)), tuple(choices), default, str(help_text)
        )
    return fields


def _types(annotation: ast.expr) -> set[str]:
    """Top-level alternatives of `a | b[c] | None`: {'a', 'b', 'None'}."""
    if isinstance(annotation, ast.BinOp):
        return _types(annotation.left) | _types(annotation.right)
    if isinstance(annotation, ast.Subscript):
        if ast.unparse(annotation.value) == "Literal":
            return {type(_literal(annotation.slice)).__name__}
        return _types(annotation.value)
    return {ast.unparse(annotation)}


def _literal(node: ast.expr | None) -> Any:
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None


# Trackers besides metrics.jsonl: name in `trainer.report_to` -> (required modules, package to
# install). tests/recipe/test_trackers.py compares the names with those of the installed
# transformers, which reports a missing package only after the model is loaded; here it is reported
# before.
_SAME_NAME = (
    "clearml",
    "codecarbon",
    "dvclive",
    "mlflow",
    "neptune",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
)
_TRACKERS: dict[str, tuple[tuple[str, ...], str]] = {
    **{name: ((name,), name) for name in _SAME_NAME},
    "azure_ml": (("azureml.core",), "azureml-core"),
    "comet_ml": (("comet_ml",), "comet-ml"),
    "dagshub": (("dagshub", "mlflow"), "dagshub mlflow"),
    "flyte": (("flytekit",), "flytekit"),
    "kubeflow": ((), ""),
}
TRACKERS = dict(sorted(_TRACKERS.items()))


def named(report_to: Any) -> list[Any]:
    """The trackers in `trainer.report_to`."""
    names = report_to if isinstance(report_to, list) else [report_to]
    return [] if names in ([None], ["none"]) else names


def problem(report_to: Any) -> str | None:
    """The problem of `trainer.report_to`; None if there is none."""
    for name in named(report_to):
        if not isinstance(name, str):
            return f"found {name!r}; write none, or one of {', '.join(TRACKERS)}"
        if name == "all":
            return "found 'all', which means other trackers on each machine; write a list of trackers, or none"
        if name == "none":
            return "found 'none' beside other trackers; write none alone, or remove none"
        if name not in TRACKERS:
            hint = did_you_mean(name, [*TRACKERS, "none"])
            return f"found {name!r}; write none, or one of {', '.join(TRACKERS)}{hint}"
        modules, install = TRACKERS[name]
        missing = []
        for module in modules:
            with suppress(ModuleNotFoundError):
                spec = importlib.util.find_spec(module)
                # wandb's log folder `wandb` is importable too
                if spec is not None and spec.origin is not None:
                    continue
            missing.append(module)
        if missing:
            return f"{name} needs {', '.join(missing)}; run `pip install {install}`, or write none"
    return None
