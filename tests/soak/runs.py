"""The runs that faults fall on, and what must be equal after each fault: a few steps of tiny models, 1 to 3 seconds."""

import atexit
import hashlib
import json
import shutil
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soren_align.core.shipped import ROOT

STEPS, SAVED_EVERY = 8, 2
SHORT = (f"trainer.max_steps={STEPS}", f"trainer.save_steps={SAVED_EVERY}", "trainer.warmup_steps=2")
SHORT += ("trainer.logging_steps=1", "trainer.per_device_train_batch_size=8", "trainer.eval_steps=4")
DDP_TIMEOUT_SECONDS = 20
# Keys of run.json and results.json that differ between undisturbed runs in two folders, or that say what happened.
VOLATILE = {"path", "model", "started", "finished", "resumed_from_steps", "last_error", "diverged", "num_requests"}
VOLATILE |= {"seconds_since_start_or_resume", "peak_memory_bytes", "cpu_load", "commit", "record_sha256"}
VOLATILE |= {"metrics_sha256"}  # whose lines have times
TIMED = ("_runtime", "_per_second", "train_loss", "total_flos")
"""Ends of the keys of metrics.jsonl that are of this start alone, not of the run."""


@dataclass(frozen=True)
class Config:
    """A command, and how many processes share it."""

    recipe: str
    overrides: tuple[str, ...] = ()
    evaluates: bool = False
    ranks: int = 1
    """Forked, as srun starts them."""
    options: tuple[str, ...] = ()

    @property
    def is_study(self) -> bool:
        """Whether the command is compare."""
        return self.recipe == "study"


BASE = ("model.name_or_path=shipped:recipes/quickstart/base", "model.init_seed=0")
TEXTS = ("task=pretrain", "trainer.assistant_only_loss=false", "data.train.path=data/texts.jsonl")
TEXTS += ("data.eval={fraction: 0.02}",)
TWO = ("run.global_batch_size=16", f"trainer.ddp_timeout={DDP_TIMEOUT_SECONDS}", "data.eval.limit=16")
CONFIGS = {
    "sft": Config("sft"),
    "sft+eval": Config("sft", evaluates=True),
    "lora": Config("sft", ("model.lora={r: 4}", "optimizer.aux_lr=null")),
    "dpo": Config("dpo", (*BASE, "data.train.path=data/pairs.jsonl")),
    "dpo+reference": Config(
        "dpo", (*BASE, "data.train.path=data/pairs.jsonl", "trainer.precompute_ref_log_probs=true")),
    "pretrain": Config("pretrain", TEXTS),
    "extras": Config(
        "sft",
        (*("run.kl_to_start=8", "run.samples={prompts: [Hello], max_new_tokens: 4}", "run.log_spectra.steps=[2, 7]"),
         *("trainer.load_best_model_at_end=true", "trainer.save_steps=4"))),
    "stream": Config("sft", ("data.streaming={shuffle_buffer: 100}",)),
    "bf16-momentum": Config("sft", ("optimizer.momentum_dtype=bfloat16",)),
    "kahan": Config("sft", ("model.dtype=bfloat16", "optimizer.compensation=kahan")),
    **{mode: Config("sft", (f"run.parallel={mode}", *TWO), ranks=2) for mode in ("ddp", "zero2", "zero3", "fsdp2")},
    "fsdp2-async": Config("sft", ("run.parallel=fsdp2", "run.async_save=true", *TWO), ranks=2),
    "processes": Config("sft", (*TWO, "trainer.max_steps=24"), options=("--processes", "2")),
    "compare": Config("study"),
}  # fmt: skip
ONE_PROCESS = [name for name, config in CONFIGS.items() if config.ranks == 1 and not config.options][:-1]
RANKS = [name for name, config in CONFIGS.items() if config.ranks > 1]
STUDY = """\
recipe: quickstart/sft
set: {trainer.max_steps: 8, trainer.eval_steps: 4, trainer.save_steps: 2, trainer.warmup_steps: 2,
  trainer.logging_steps: 1, trainer.per_device_train_batch_size: 8, data.eval.limit: 32, eval: null}
candidates: {adamw: {set: {optimizer.name: adamw}}, soren: {}}
search: {space: {optimizer.lr: {low: 1.0e-3, high: 1.0e-1}, optimizer.aux_lr: =optimizer.lr}, trials: 2}
verdict: {seeds: [101, 102, 103]}
jobs: 1
output_dir: run
"""


def lay_out(case: Path, config: Config) -> None:
    """Make a case's folder anew."""
    shutil.rmtree(case, ignore_errors=True)
    case.mkdir(parents=True)
    write_inputs(case, config)


def write_inputs(case: Path, config: Config) -> None:
    """Write the files that a case's command reads."""
    (case / "data").mkdir()
    source = ROOT / "recipes/quickstart/data"
    chats = (source / "chat_train.jsonl").read_text(encoding="utf-8").splitlines()[:320]
    texts = [{"text": " ".join(turn["content"] for turn in json.loads(chat)["messages"])} for chat in chats]
    (case / "data/chat.jsonl").write_text("".join(f"{chat}\n" for chat in chats))
    (case / "data/texts.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    shutil.copy(source / "pairs_train.jsonl", case / "data/pairs.jsonl")
    if config.is_study:
        (case / "study.yaml").write_text(STUDY)


def arguments(config: Config, output: str = "run") -> list[str]:
    """Return the command's arguments; the case's folder is the working directory."""
    if config.is_study:
        return ["compare", "study.yaml", "--set", f"output_dir={output}"]
    task, recipe = config.recipe, "quickstart/dpo" if config.recipe == "dpo" else "quickstart/sft"
    sets = [*SHORT, "data.train.path=data/chat.jsonl", *config.overrides, f"run.output_dir={output}"]
    if not config.evaluates:
        sets.append("eval=null")
    return [task, recipe, *(part for text in sets for part in ("--set", text)), *config.options]


def environment(case: Path) -> dict[str, str]:
    """Return the variables of a case's processes: a cache of its own, so that no answer is cached by another case."""
    own = {"SOREN_ALIGN_CACHE": str(case / "cache"), "HF_HUB_OFFLINE": "1"}
    own |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TORCH_COMPILE_DISABLE": "1", "COLUMNS": "200"}
    return own | {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}


def allow_fsdp2_on_cpus() -> None:
    """Patch this process, a child, as the tests of FSDP2 are; see trainer_jobs.fsdp2_on_cpus."""
    from tests.support.trainer_jobs import fsdp2_on_cpus

    stack = ExitStack()
    stack.enter_context(fsdp2_on_cpus())
    atexit.register(stack.close)  # until the process ends


def write_slowly() -> None:
    """Let each rank of this process, a child, take half a second for its shards: about a step."""
    from torch.distributed.checkpoint import FileSystemWriter

    write = FileSystemWriter.write_data
    FileSystemWriter.write_data = lambda self, *arguments: time.sleep(0.25) or write(self, *arguments)


def prepare(name: str, case: Path) -> None:
    """What a process of this configuration does before its command; its examples are cached in the case's folder, too."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = case / "cache/examples"  # imported before the fork, with the soak's own
    if name.startswith("fsdp2"):
        allow_fsdp2_on_cpus()
    if name == "fsdp2-async":
        write_slowly()


def result(run: Path, config: Config) -> dict[str, Any]:
    """Return what an undisturbed run and a disturbed one must have in common; an empty dict before the end."""
    if config.is_study:
        return _result_of_study(run)
    record = _json(run / "run.json")
    if record.get("status") != "finished":
        return {}
    results = {file.parent.name: _stable(_json(file)) for file in sorted(run.glob("eval/*/results.json"))}
    return {
        "weights": {file.name: _sha256(file) for file in sorted(run.glob("model/*.safetensors"))},
        "record": _stable(record), "metrics": _metrics(run / "metrics.jsonl"), "samples": _lines(run / "samples.jsonl"),
        "spectra": _lines(run / "spectra.jsonl"), "results": results,
    }  # fmt: skip


def _result_of_study(study: Path) -> dict[str, Any]:
    runs = sorted(file.parent for file in study.glob("*/*/*/run.json") if file.parts[-4] != "earlier")
    if not (study / "study.json").is_file():
        return {}
    report = _json(study / "study.json")
    return {
        "weights": {str(run.relative_to(study)): _sha256(run / "model/model.safetensors") for run in runs
                    if (run / "model/model.safetensors").is_file()},
        "status": {str(run.relative_to(study)): _json(run / "run.json").get("status") for run in runs},
        "differences": report["differences"],
        "superseded": sorted(path.name for path in study.glob("earlier/*/*")),
    }  # fmt: skip


def differences(reference: dict[str, Any], other: dict[str, Any], ignored: tuple[str, ...] = ()) -> list[str]:
    """Return the keys in which two results differ; ignored: dotted beginnings of keys that a fault may change."""
    found: list[str] = []

    def walk(a: Any, b: Any, key: str) -> None:
        if any(key.startswith(name) for name in ignored):
            return
        if isinstance(a, dict) and isinstance(b, dict):
            for name in sorted(a.keys() | b.keys()):
                walk(a.get(name), b.get(name), f"{key}.{name}" if key else name)
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            for index, pair in enumerate(zip(a, b, strict=True)):
                walk(*pair, f"{key}.{index}")
        elif isinstance(a, list) and isinstance(b, list):
            found.append(f"{key}: {len(a)} -> {len(b)} entries")
        elif a != b:
            found.append(f"{key}: {_short(a)} -> {_short(b)}")

    walk(reference, other, "")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:40]} ... {text[-30:]}"


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _stable(v) for name, v in value.items() if name not in VOLATILE}
    return [_stable(v) for v in value] if isinstance(value, list) else value


def _metrics(file: Path) -> list[Any]:
    """The lines of metrics.jsonl but for times and the summary of each start."""
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.strip()] if file.is_file() else []
    stable = [{name: v for name, v in line.items() if not name.endswith(TIMED)} for line in lines]
    return [line for line, whole in zip(stable, lines, strict=True) if "train_runtime" not in whole]


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []


def _json(file: Path) -> dict[str, Any]:
    """The content of a file; an empty dict if it is not there or damaged."""
    with suppress(ValueError):
        return json.loads(file.read_text()) if file.is_file() else {}
    return {}


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
