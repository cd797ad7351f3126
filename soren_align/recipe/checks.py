"""What a schema cannot say about a recipe: files that must exist, and keys that need each other.

The checks look at the raw data, so that they find their mistakes in the same pass as wrong types.
"""

import difflib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import shipped
from ..files import Key
from .adapters import adapter_config, is_adapter, is_all_factors, lora_problems
from .models import UserError
from .parallel import parallel


def second_look(raw: dict[str, Any]) -> list[tuple[Key, str]]:
    """What a schema cannot say: files that must exist, and keys that need each other. On raw data, so that these are
    found in the same pass as wrong types."""
    found: list[tuple[Key, str]] = []

    def get(*keys: str) -> Any:
        node: Any = raw
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        return node

    model = get("model", "name_or_path")
    if isinstance(model, str) and model:
        found += [(("model", "name_or_path"), m) for m in _model_problems(model, get("model", "init_seed"))]
        lora = lora_problems(model, get("model", "lora"), get("run", "parallel"))
        found += [(("model", *key.split(".")), message) for key, message in lora]
    template = get("model", "chat_template")
    if isinstance(template, str):
        found += [(("model", "chat_template"), m) for m in _template_problems(template)]
    for at, split in _splits(get("data")):
        path = split.get("path")
        if isinstance(path, str) and path:
            found += [((*at, "path"), m) for m in _data_problems(path)]
            found += [((*at, "split"), m) for m in _split_problems(path, split, is_trained=at[1] == "train")]
    resolution = get("optimizer", "resolution")
    if isinstance(resolution, int | float) and resolution not in (0.01, 0.001):
        found.append((("optimizer", "resolution"), f"found {resolution!r}; write 0.01 or 0.001"))
    name = get("optimizer", "name")
    found += [(("optimizer", key), m) for key, m in _inert_keys(name, raw.get("optimizer"))]
    has_rest = not (isinstance(model, str) and is_all_factors(model, get("model", "lora")))
    if name in ("soren", "muon", "htmuon") and get("optimizer", "aux_lr") is None and has_rest:
        found.append(
            (
                ("optimizer", "aux_lr"),
                "is required: embeddings, norms and biases step with AdamW at this rate",
            )
        )
    found += _precision_problems(
        get("model", "dtype"),
        get("optimizer", "compensation"),
        get("run", "parallel"),
        get("trainer"),
        adapts=(adapts := isinstance(get("model", "lora"), dict) or (isinstance(model, str) and is_adapter(model))),
    )
    if adapts and has_rest and get("model", "dtype") == "bfloat16" and get("trainer", "bf16") is False:
        message = "modules_to_save are float32, and beside bfloat16 weights compute with `trainer: {bf16: true}` only"
        found.append((("model", "dtype"), message))
    if isinstance(get("trainer"), dict):
        strategy = get("trainer", "eval_strategy")
        if strategy not in (None, "no", False) and get("data", "eval") is None:
            found.append((("trainer", "eval_strategy"), "asks for evaluation during training; add data.eval"))
    if get("run", "global_batch_size") is not None and get("trainer", "gradient_accumulation_steps") is not None:
        message = "follows from run.global_batch_size and the number of processes; leave one of the two out"
        found.append((("trainer", "gradient_accumulation_steps"), message))
    shared = get("run", "parallel")
    if isinstance(shared, str) and shared:
        found += [(("run", "parallel"), message) for message in _parallel_problems(shared, get("trainer", "use_cpu"))]
    resume = get("run", "resume")
    if isinstance(resume, str) and resume not in ("auto", "never") and not Path(resume).expanduser().is_dir():
        found.append((("run", "resume"), f"found {resume!r}; write auto, never, or the folder of a checkpoint"))
    output = get("run", "output_dir")
    if isinstance(output, str) and Path(output).expanduser().is_file():
        found.append((("run", "output_dir"), f"{output} is a file; name a folder"))
    asked = {key: get("eval", key) for key in ("suite", "data_root", "quote", "backend")}
    found += [(("eval", key), message) for key, message in evaluation_problems(asked)]
    return found


def evaluation_problems(asked: dict[str, Any]) -> list[tuple[str, str]]:
    """(key, message) of each thing that an evaluation names and that is not there."""
    found: list[tuple[str, str]] = []
    for key, kind, known in (("suite", "suite", shipped.suites()), ("quote", "quoted table", shipped.quoted())):
        names = asked.get(key) or []
        for name in [names] if isinstance(names, str) else names:
            if isinstance(name, str) and name not in known and not shipped.resolve(name).exists():
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
                hint = f"did you mean '{close[0]}'?" if close else f"shipped are: {', '.join(known)}"
                found.append((key, f"no {kind} named {name!r}, nor such a file; {hint}"))
    if asked.get("backend") == "vllm" and importlib.util.find_spec("vllm") is None:
        found.append(("backend", "vLLM is not installed: pip install 'soren-align[vllm]', or write hf"))
    root = asked.get("data_root")
    if isinstance(root, str) and not Path(root).expanduser().is_dir():
        found.append(("data_root", f"there is no folder {root!r}"))
    return found


def _parallel_problems(name_or_path: str, use_cpu: Any) -> list[str]:
    try:
        found = parallel(name_or_path)
    except UserError as error:
        return list(error.problems)
    if found.kind == "fsdp2" and use_cpu:
        return [
            "accelerate shards on GPUs only, and under trainer.use_cpu would train by DDP without a word; write ddp or "
            "a ZeRO stage, or take use_cpu out"
        ]
    if found.kind == "zero" and importlib.util.find_spec("deepspeed") is None:
        return ["needs DeepSpeed, which is not installed: pip install 'deepspeed>=0.19.8,<0.20'"]
    return []


def _precision_problems(
    dtype: Any, compensation: Any, shared: Any, trainer: Any, adapts: bool
) -> list[tuple[Key, str]]:
    """bfloat16 parameters that would lose their updates unasked, and a compensation that nothing needs.

    adapts: whether an adapter is trained, whose factors are float32 beside frozen weights of any dtype.
    """
    try:
        masters = isinstance(shared, str) and parallel(shared).kind != "ddp"
    except UserError:  # told at run.parallel
        return []
    where: Key = ("optimizer", "compensation")
    if dtype != "bfloat16":
        inert = "is for bfloat16 parameters, and model.dtype is float32; leave it out, or write null"
        return [(where, inert)] if compensation == "kahan" else []
    if adapts and compensation == "kahan":
        return [(where, "an adapter's factors are float32, which lose nothing; leave it out, or write null")]
    if adapts and not masters:
        return []
    if not masters:
        message = (
            "bfloat16 parameters round most small updates away. Write float32 (with `trainer: {bf16: true}` the "
            "arithmetic is bfloat16 all the same), or `optimizer: {compensation: kahan}`, which keeps what is rounded "
            "off, or `compensation: none` to train without"
        )
        return [(("model", "dtype"), message)] if compensation is None else []
    if compensation == "kahan":
        return [(where, f"{shared} steps float32 masters, which lose nothing; leave it out, or write null")]
    settings = trainer if isinstance(trainer, dict) else {}
    if settings.get("bf16") is False and not settings.get("fp16"):
        message = (
            f"under {shared} bfloat16 weights have float32 masters with `trainer: {{bf16: true}}` only; write float32"
        )
        return [(("model", "dtype"), message)]
    return []


def _inert_keys(name: Any, optimizer: Any) -> list[tuple[str, str]]:
    """Settings that the named optimizer would not read: never dropped without a word."""
    if not isinstance(optimizer, dict) or name not in ("soren", "muon", "htmuon", "adamw"):
        return []
    spectral_map = (optimizer.get("spectral_map") or "minimax") if name == "soren" else None
    reads = {
        "spectral_map": (name == "soren", "soren"),
        "ns_steps": (spectral_map == "sns", "soren with spectral_map sns"),
        "resolution": (spectral_map == "minimax", "soren with spectral_map minimax"),
        "workspace_mb": (name == "soren", "soren"),
        "p": (name == "htmuon", "htmuon"),
    }
    return [
        (key, f"only {owner} reads it; leave it out, or write null")
        for key, (is_read, owner) in reads.items()
        if optimizer.get(key) is not None and not is_read
    ]


def is_local(path: str) -> bool:
    """Whether a model or dataset is meant as a path: the hub's names are `name` or `owner/name`, without a suffix."""
    given = Path(path).expanduser()
    return (
        path.startswith((shipped.PREFIX, "/", "./", "../", "~"))
        or path.count("/") > 1
        or given.suffix in (".jsonl", ".json", ".parquet")
        or given.exists()
    )


def _model_problems(path: str, init_seed: Any) -> list[str]:
    if not is_local(path):
        return [] if init_seed is None else ["init_seed needs a local folder with a config.json"]
    folder = shipped.resolve(path)
    if not folder.is_dir():
        hint = ""
        if folder.name == "model":  # <run folder>/model: what another recipe makes
            hint = "; it is what a run makes: run that recipe first"
        return [f"no folder {path}{hint}"]
    try:
        adapter = adapter_config(path)
    except UserError as error:
        return list(error.problems)
    if adapter is not None:
        return _base_problems(path, adapter, init_seed)
    missing = [n for n in ("config.json", "tokenizer_config.json") if not (folder / n).is_file()]
    if missing:
        return [f"{path} has no {' and no '.join(missing)}; is it a model folder?"]
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
    if init_seed is None and not weights:
        return [f"{path} has no weights (*.safetensors); for random ones set model.init_seed"]
    return []


def _template_problems(name_or_path: str) -> list[str]:
    known = shipped.templates()
    file = shipped.resolve(name_or_path)
    if name_or_path in known or (file.is_file() and file.suffix == ".jinja"):
        return []
    if file.suffix == ".jinja":
        return [f"no file {name_or_path}"]
    near = difflib.get_close_matches(name_or_path, known, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return [f"found {name_or_path!r}; write {', '.join(known)}, or the path of a .jinja file{hint}"]


def _base_problems(path: str, adapter: dict[str, Any], init_seed: Any) -> list[str]:
    """What is wrong with the model under an adapter."""
    if init_seed is not None:
        return [f"{path} is an adapter; random weights would not be those under it, leave init_seed out"]
    if adapter.get("peft_type") != "LORA":
        return [f"{path} is an adapter of type {adapter.get('peft_type')}; only LORA can be gone on with"]
    base = adapter["base_model_name_or_path"]
    if is_local(base) and not Path(base).is_dir():
        return [f"{path} is an adapter of {base}, which is not there"]
    return _model_problems(base, None)


def _data_problems(path: str) -> list[str]:
    if not is_local(path):
        return []
    file = shipped.resolve(path)
    if file.is_dir():
        return [f"{path} is a folder; name a .jsonl, .json or .parquet file"]
    if not file.is_file():
        near = difflib.get_close_matches(file.name, _names(file.parent), n=1, cutoff=0.6)
        return [f"no file {path}" + (f"; did you mean '{near[0]}'?" if near else "")]
    if file.suffix not in (".jsonl", ".json", ".parquet"):
        return [f"{path}: cannot read '{file.suffix}'; name a .jsonl, .json or .parquet file"]
    return [f"{path} is empty"] if file.stat().st_size == 0 else []


def _splits(data: Any) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Every split of the data section, and where it stands."""
    for name in ("train", "eval"):
        found = data.get(name) if isinstance(data, dict) else None
        several = enumerate(found) if isinstance(found, list) else [(None, found)]
        for i, split in several:
            if isinstance(split, dict):
                yield ("data", name) if i is None else ("data", name, i), split


def is_test_split(split: str) -> bool:
    """Whether a split's name says that it is there to measure on: test_sft, validation, eval."""
    return _TEST.search(split.lower()) is not None


_TEST = re.compile(r"(?<![a-z])(tests?|val|valid|validation|eval|evaluation|dev|held_?out)(?![a-z])")


def _split_problems(path: str, split: dict[str, Any], is_trained: bool) -> list[str]:
    name = split.get("split", "train")
    if not isinstance(name, str):
        return []
    if is_local(path):
        wants_part = "[" in name
        return [f"found {name!r}, but a file is always taken whole; write limit"] if wants_part else []
    if is_trained and is_test_split(name) and split.get("train_on_test") is not True:
        return [
            f"'{name}' is a test split, and what is trained on measures nothing any more; name another, or write "
            "train_on_test: true beside it"
        ]
    return []


def _names(folder: Path) -> list[str]:
    return [f.name for f in folder.iterdir()] if folder.is_dir() else []
