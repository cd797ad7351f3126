"""A finished run folder as training leaves it, made without training."""

import fcntl
import json
from contextlib import contextmanager

from soren_align import recipe
from soren_align.launch.preparation import prepare
from soren_align.run.folder import RunFolder

TRAINED = {"steps": 600, "first_loss": 4.7164, "last_loss": 0.0023, "relative_change": 0.0436}
TRAINED |= {
    "aux_relative_change": 0.02,
    "change_after_saving": {"dtype": "bfloat16", "matrices": {"fraction_changed": 0.9, "projection": 1}},
}
HUB = ("model.name_or_path=Qwen/Qwen2.5-0.5B", "model.init_seed=null", "model.revision=main")


def finished_run(path, *overrides, training=(), start=None, adapter_of=None):
    """A run folder at `path` of the shortened quickstart; training: what to change in what became of it."""
    made = recipe.load("quickstart/sft", [f"run.output_dir={path}", *overrides])
    folder = RunFolder(path)
    prepare(folder, made)
    on_hub = made.model.init_seed is None
    data = {"path": "HuggingFaceH4/ultrachat_200k", "split": "train_sft", "revision": "b" * 40}
    folder.update(
        status="finished",
        start={"path": start or (made.model.name_or_path if on_hub else str(folder.start.resolve())),
               "sha256_or_revision": "c" * (40 if on_hub else 64)},
        data={"train": data | {"num_kept": 958, "dropped": {"an empty answer": 2}, "layout": "chat messages"},
              "eval": None},
        parallel="ddp",
        global_batch_size=64,
        seeds={"trainer": 0, "init": made.model.init_seed},
        device="cpu",
        parameters={"dtype": ["float32"], "total": 102272, "trainable": 102272},
        optimizer={"class": "Soren", "num_matrices": 14},
        training=TRAINED | dict(training),
        last_error=None,
    )  # fmt: skip
    folder.model.mkdir()
    whole = {"config.json": "{}", "model.safetensors": "weights"}
    said = {"base_model_name_or_path": adapter_of, "peft_type": "LORA"}
    adapter = {"adapter_config.json": json.dumps(said), "adapter_model.safetensors": "factors"}
    rest = {"tokenizer.json": "{}", "tokenizer_config.json": "{}", "chat_template.jinja": "", "training_args.bin": "",
            "optimizer.pt": ""}  # fmt: skip
    for name, text in ((adapter if adapter_of else whole) | rest).items():
        (folder.model / name).write_text(text)
    folder.release()
    return folder


def record_run(folder, start, fingerprint=None, task="sft", status="finished"):
    """Write the run.json of a run from `start`, with no more than its lineage needs."""
    record = {"format_version": 2, "task": task, "status": status, "versions": {"soren-align": "0.1.0"}}
    record["start"] = {"path": str(start), "sha256_or_revision": fingerprint}
    (folder / "run.json").write_text(json.dumps(record))


@contextmanager
def lock_of_another_process(folder, name=".lock", *, shared=False):
    """Lock a run folder as another process would: the lock belongs to the open file, so this process can stand in."""
    with (folder.path / name).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def add_results(folder, suite="quickstart", data="hub", title="Quickstart zoo"):
    """Write the results of an evaluation where `soren-align eval` writes them; returns their file."""
    base = {"zoo_mc": {"value": 20.0, "stderr": 3.7, "n": 120}}
    gain = {"value": 80.0, "low": 71.1, "high": 86.3, "p": 1e-9, "p_holm": 1e-9}
    rows = [
        {"name": "base", "model": f"{folder.path.resolve()}/start", "scores": base},
        {"name": "SFT", "model": str(folder.model.resolve()),
         "scores": {"zoo_mc": {"value": 100.0, "stderr": 0.0, "n": 120}}, "differences": {"zoo_mc": gain}},
    ]  # fmt: skip
    results = {"format": 1, "title": title, "suite": suite, "rows": rows, "published": [], "notes": []}
    results["settings"] = {"versions": {"lm-eval": "0.4.13"}, "batch_size": 60, "data": data}
    file = folder.evaluation(suite) / "results.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(results))
    return file
