"""The keys of a recipe's section `trainer`: the fields of TRL's SFTConfig and DPOConfig, and those
that a recipe sets elsewhere.
"""

import dataclasses
import enum
import functools
import importlib.util
import json
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from operator import gt, le, lt
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..core.errors import did_you_mean
from ..tasks import TASKS

_PROGRESS = "soren-align itself shows the progress; remove this key"
_PROCESSES = "soren-align sets this value for the processes that it starts; remove this key"
_PUSH = (
    "training uploads nothing; remove this key, and run `soren-align push RUN OWNER/NAME` after "
    "training"
)

# Keys of TRL that belong to another section of a recipe: one meaning, one place.
IN_SECTIONS = {
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
    "chat_template_path": (
        "write model.chat_template instead (qwen2.5, zephyr, or the path of a .jinja file)"
    ),
    "eos_token": "write model.eos_token",
    "dataset_text_field": (
        "write data.train.columns instead, if the column with the text is not named text"
    ),
    **dict.fromkeys(
        ("dataset_kwargs", "remove_unused_columns"), "write the keys of the data section"
    ),
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "parallelism_config"), "write run.parallel"
    ),
}
# Keys of TRL that a recipe has nowhere, with the reason.
REFUSED = {
    "trust_remote_code": (
        "soren-align does not run a model's remote code; use a model that transformers supports"
    ),
    **dict.fromkeys(("disable_tqdm", "log_level", "log_level_replica"), _PROGRESS),
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict"), "the command determines this value; remove this key"
    ),
    **dict.fromkeys(("accelerator_config", "local_rank"), _PROCESSES),
    "save_only_model": "a checkpoint without its optimizer cannot be resumed; remove this key",
    "ignore_data_skip": (
        "a resumed run must train on the same examples as an uninterrupted run; remove this key"
    ),
    "auto_find_batch_size": (
        "this key changes the batch size silently; write per_device_train_batch_size"
    ),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"), _PUSH
    ),
    "hub_token": (
        "every run folder has a copy of the recipe, also of the token; remove this key "
        "and set HF_TOKEN"
    ),
}
ELSEWHERE = IN_SECTIONS | REFUSED

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
# Each of these is a process, on every rank.
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
    """The default; None where it is made by a function or is no plain data."""
    help: str = ""


FILE = Path(__file__).with_name("trl.json")
"""The fields for the pinned versions, written by docs/make_trl_fields.py."""


@functools.cache
def recorded() -> dict[str, dict[str, Any]]:
    """The content of FILE: `versions`, and the fields of each config class."""
    return json.loads(FILE.read_text(encoding="utf-8"))


@functools.cache
def fields(task: str) -> dict[str, Field]:
    """The fields of the installed TRL's config class for a task, by name."""
    # Importing TRL takes ten seconds and torch, and a typo should be reported within one: so the
    # fields of the pinned versions lie in a file. Other versions' are read from their classes.
    config = TASKS[task].config
    rows = recorded()[config] if recorded()["versions"] == versions() else read_fields(config)
    return {
        name: Field(
            name, frozenset(row["types"]), tuple(row["choices"]), row["default"], row["help"]
        )
        for name, row in rows.items()
    }


def versions() -> dict[str, str]:
    """The installed versions of the packages that define the config classes."""
    return {package: version(package) for package in ("trl", "transformers")}


def read_fields(config: str) -> dict[str, dict[str, Any]]:
    """The fields of a config class of the installed TRL as plain data. Imports TRL."""
    import trl

    cls = getattr(trl, config)
    hints = get_type_hints(cls)
    rows = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        # The annotation as the names of plain types: JSON has no types, and a value of a recipe has
        # one of these only.
        parts = (
            get_args(hints[field.name]) if _is_union(hints[field.name]) else (hints[field.name],)
        )
        choices = [*field.metadata.get("choices", ())]
        types = set()
        for part in parts:
            if get_origin(part) is Literal:
                choices += [choice for choice in get_args(part) if isinstance(choice, str)]
                types |= {type(choice).__name__ for choice in get_args(part)}
            elif isinstance(part, type) and issubclass(part, enum.Enum):
                choices += [member.value for member in part]
                types.add(part.__name__)
            else:
                kind = get_origin(part) or part
                types.add("None" if kind is type(None) else getattr(kind, "__name__", str(kind)))
        # DPO's loss_type has its choices only in the docstring
        entry = re.search(
            rf"^ *{field.name} \(.*?(?=^ *\w+ \(|\Z)", cls.__doc__ or "", re.MULTILINE | re.DOTALL
        )
        if not choices and entry:
            listed = re.search(r"Possible values are:(.*?)(?:\.\s|\Z)", entry[0], re.DOTALL)
            choices = re.findall(r"`['\"](\w+)['\"]`", listed[1]) if listed else []
        default = field.default.value if isinstance(field.default, enum.Enum) else field.default
        is_plain = isinstance(default, str | int | float | list | dict)
        rows[field.name] = {
            "types": sorted(types),
            "choices": choices,
            "default": default if is_plain else None,
            "help": " ".join(str(field.metadata.get("help") or "").split()),
        }
    return rows


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def recipe_key(name: str) -> str | None:
    """The key of a recipe that another tool's option means: optimizer.lr for learning_rate; None if
    there is none.
    """
    # The remedy of a message is the one place where the other name stands: a second table of the
    # same names would come apart from it.
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
            "has an effect only with the tracker trackio; remove this key, and run `soren-align"
            " push RUN OWNER/NAME --private` after training"
        )
    return wrong


def _problem(task: str, key: str, value: Any) -> str | None:
    known, config = fields(task), TASKS[task].config
    if key in IN_SECTIONS:
        return f"a recipe sets this elsewhere; {IN_SECTIONS[key]}"
    if key in REFUSED:
        return REFUSED[key]
    # From the most certain answer to the least: a key of the other task's config, an older name, a
    # similar name.
    if key not in known:
        if other := next(
            (other.config for name, other in TASKS.items() if key in fields(name)), None
        ):
            return (
                f"is a key of TRL's {other}, but this is a recipe of the task {task}; remove"
                " this key"
            )
        if key in RENAMED:
            return f"is no key of TRL's {config}; {RENAMED[key]}"
        if key in recorded()[config]:
            installed, tested = versions(), recorded()["versions"].items()
            others = [
                f"{p} {v} ({installed[p]} is installed)" for p, v in tested if v != installed[p]
            ]
            return f"needs {' or '.join(others)}; remove this key, or install that version"
        return f"is no key of TRL's {config}{did_you_mean(key, known, 'remove this key')}"
    if key == "report_to" and _fits(value, known[key].types):
        return problem(value)
    if key == "truncation_mode" and value == "keep_end":
        return (
            "keep_end is deprecated in TRL, and its truncated examples could not be counted; remove"
            " this key"
        )
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
    # A bool is an int to Python.
    if isinstance(value, int | float) and not isinstance(value, bool):
        # Nor an integer that is no float; a comparison with NaN is false.
        if not abs(value) <= sys.float_info.max:
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
            return (
                "found 'all', which means other trackers on each machine; write a list of trackers,"
                " or none"
            )
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
