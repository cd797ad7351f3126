"""What a schema cannot say about a recipe: files that must exist, and keys that need each other.

The checks look at the raw data, so that they find their mistakes in the same pass as wrong types.
"""

import difflib
import importlib.util
from collections.abc import Iterator
from typing import Any

from .. import shipped
from ..errors import UserError
from ..files import local_path
from ..yaml_reader import Key
from .lora import is_adapter, is_all_factors, lora_problems
from .parallel import parallel
from .references import data_problems, is_local, is_test_split, model_problems, template_problems

Problems = list[tuple[Key, str]]


class Raw:
    """A recipe's raw data, through which only values of the right type are seen: the schema reports the others.

    problems: of the paths that were looked at and can be none.
    """

    def __init__(self, data: dict[str, Any]):
        self.data = data
        self.problems: Problems = []

    def get(self, *keys: str) -> Any:
        """Whatever stands there; None for nothing."""
        node: Any = self.data
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        return node

    def text(self, *keys: str) -> str | None:
        """The text that stands there; None for anything else."""
        value = self.get(*keys)
        return value if isinstance(value, str) and value else None

    def path(self, *keys: str) -> str | None:
        """The text that stands there, if it can be a path."""
        return self.as_path(keys, self.text(*keys))

    def as_path(self, key: Key, text: Any) -> str | None:
        """The text, if it is one and can be a path."""
        try:
            if isinstance(text, str) and text:
                shipped.resolve(text)
                return text
        except UserError as error:
            self.problems.append((key, str(error)))
        return None

    def section(self, *keys: str) -> dict[str, Any]:
        """The section that stands there; empty for anything else."""
        value = self.get(*keys)
        return value if isinstance(value, dict) else {}


def second_look(data: dict[str, Any]) -> Problems:
    """What a schema cannot say: files that must exist, and keys that need each other. On raw data, so that these are
    found in the same pass as wrong types."""
    raw = Raw(data)
    checks = (_model, _template, _data, _optimizer, _precision, _trainer, _run, _evaluation)
    return [problem for check in checks for problem in check(raw)] + list(dict(raw.problems).items())


def _model(raw: Raw) -> Iterator[tuple[Key, str]]:
    model = raw.path("model", "name_or_path")
    if model is None:
        return
    missing = model_problems(model, raw.get("model", "init_seed"))
    yield from ((("model", "name_or_path"), message) for message in missing)
    lora = lora_problems(model, raw.get("model", "lora"), raw.get("run", "parallel"))
    yield from ((("model", *key.split(".")), message) for key, message in lora)


def _template(raw: Raw) -> Iterator[tuple[Key, str]]:
    if (template := raw.path("model", "chat_template")) is not None:
        yield from ((("model", "chat_template"), message) for message in template_problems(template))


def _data(raw: Raw) -> Iterator[tuple[Key, str]]:
    for at, split in _splits(raw.get("data")):
        if (path := raw.as_path((*at, "path"), split.get("path"))) is not None:
            yield from (((*at, "path"), message) for message in data_problems(path))
            problems = _split_problems(path, split, is_trained=at[1] == "train")
            yield from (((*at, "split"), message) for message in problems)


def _optimizer(raw: Raw) -> Iterator[tuple[Key, str]]:
    name, resolution = raw.text("optimizer", "name"), raw.get("optimizer", "resolution")
    if isinstance(resolution, int | float) and resolution not in (0.01, 0.001):
        yield ("optimizer", "resolution"), f"found {resolution!r}; write 0.01 or 0.001"
    yield from ((("optimizer", key), message) for key, message in _inert_keys(name, raw.section("optimizer")))
    if name in ("soren", "muon", "htmuon") and raw.get("optimizer", "aux_lr") is None and _has_rest(raw):
        yield (
            ("optimizer", "aux_lr"),
            "is required: embeddings, norms and biases step with AdamW at this rate",
        )


def _has_rest(raw: Raw) -> bool | None:
    """Whether anything is trained beside factors of linear layers; None where the model names a folder that is not
    there yet, as another recipe's run."""
    model = raw.path("model", "name_or_path")
    if model is None:
        return True
    if is_local(model) and not shipped.resolve(model).is_dir():
        return None
    return not is_all_factors(model, raw.get("model", "lora"))


def _precision(raw: Raw) -> Iterator[tuple[Key, str]]:
    model, trainer = raw.path("model", "name_or_path"), raw.section("trainer")
    adapts = isinstance(raw.get("model", "lora"), dict) or (model is not None and is_adapter(model))
    dtype, shared = raw.text("model", "dtype"), raw.path("run", "parallel")
    yield from _precision_problems(dtype, raw.get("optimizer", "compensation"), shared, trainer, adapts)
    if adapts and _has_rest(raw) and dtype == "bfloat16" and trainer.get("bf16") is False:
        message = "modules_to_save are float32, and beside bfloat16 weights compute with `trainer: {bf16: true}` only"
        yield ("model", "dtype"), message


def _trainer(raw: Raw) -> Iterator[tuple[Key, str]]:
    if raw.get("trainer", "eval_strategy") not in (None, "no", False) and raw.get("data", "eval") is None:
        yield ("trainer", "eval_strategy"), "asks for evaluation during training; add data.eval"
    if (
        raw.get("run", "global_batch_size") is not None
        and raw.get("trainer", "gradient_accumulation_steps") is not None
    ):
        message = "follows from run.global_batch_size and the number of processes; leave one of the two out"
        yield ("trainer", "gradient_accumulation_steps"), message
    if raw.get("trainer", "use_liger_kernel") is True and importlib.util.find_spec("liger_kernel") is None:
        yield ("trainer", "use_liger_kernel"), "is not installed: pip install liger-kernel, or leave it out"


def _run(raw: Raw) -> Iterator[tuple[Key, str]]:
    if (shared := raw.path("run", "parallel")) is not None:
        problems = _parallel_problems(shared, raw.get("trainer", "use_cpu"))
        yield from ((("run", "parallel"), message) for message in problems)
    resume = raw.path("run", "resume")
    if resume is not None and resume not in ("auto", "never") and not local_path(resume).is_dir():
        yield ("run", "resume"), f"found {resume!r}; write auto, never, or the folder of a checkpoint"
    if (output := raw.path("run", "output_dir")) is not None and (problem := _output_problem(output)):
        yield ("run", "output_dir"), problem


def _output_problem(output: str) -> str | None:
    """Why no run folder can be made there. Nothing is made, so that only making it tells all."""
    folder = local_path(output).absolute()
    if folder.is_file():
        return f"{output} is a file; name a folder"
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        return f"{output} cannot be made: {there} is a file; name another folder"
    # Whether the user may write there is found out where it is written: a plan or an import may be on another machine.
    if there.resolve().parts[1:2] in (("proc",), ("sys",)):
        return f"{output} cannot be written: {there} takes no new files; name another folder"
    return None


def _evaluation(raw: Raw) -> Iterator[tuple[Key, str]]:
    section = raw.section("eval")
    names = section.get("quote")
    paths = [raw.as_path(("eval", "quote", i), name) for i, name in enumerate(names if isinstance(names, list) else [])]
    asked: dict[str, Any] = {key: raw.path("eval", key) for key in ("suite", "data_root")}
    asked |= {"quote": [path for path in paths if path], "backend": raw.text("eval", "backend")}
    yield from ((("eval", key), message) for key, message in evaluation_problems(asked))


def evaluation_problems(asked: dict[str, Any]) -> list[tuple[str, str]]:
    """(key, message) of each thing that an evaluation names and that is not there."""
    found: list[tuple[str, str]] = []
    for key, kind, known in (("suite", "suite", shipped.suites()), ("quote", "quoted table", shipped.quoted())):
        names = asked.get(key) or []
        for name in [names] if isinstance(names, str) else names:
            if name not in known and not shipped.resolve(name).exists():
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
                hint = f"did you mean '{close[0]}'?" if close else f"shipped are: {', '.join(known)}"
                found.append((key, f"no {kind} named {name!r}, nor such a file; {hint}"))
    if asked.get("backend") == "vllm" and importlib.util.find_spec("vllm") is None:
        found.append(("backend", "vLLM is not installed: pip install 'soren-align[vllm]', or write hf"))
    if (root := asked.get("data_root")) and not local_path(root).is_dir():
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
    dtype: str | None, compensation: Any, shared: str | None, settings: dict[str, Any], adapts: bool
) -> Problems:
    """bfloat16 parameters that would lose their updates unasked, and a compensation that nothing needs.

    adapts: whether an adapter is trained, whose factors are float32 beside frozen weights of any dtype.
    """
    try:
        masters = shared is not None and parallel(shared).kind != "ddp"
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
    if settings.get("bf16") is False and not settings.get("fp16"):
        message = (
            f"under {shared} bfloat16 weights have float32 masters with `trainer: {{bf16: true}}` only; write float32"
        )
        return [(("model", "dtype"), message)]
    return []


def _inert_keys(name: str | None, optimizer: dict[str, Any]) -> list[tuple[str, str]]:
    """Settings that the named optimizer would not read: never dropped without a word."""
    if name not in ("soren", "muon", "htmuon", "adamw"):
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


def _splits(data: Any) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Every split of the data section, and where it stands."""
    for name in ("train", "eval"):
        found = data.get(name) if isinstance(data, dict) else None
        several = enumerate(found) if isinstance(found, list) else [(None, found)]
        for i, split in several:
            if isinstance(split, dict):
                yield ("data", name) if i is None else ("data", name, i), split


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
