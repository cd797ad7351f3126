"""Run folders and adapters that a stranger could have left: whole ones, then tampered with."""

import contextlib
import json
import random
import re
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from soren_align.core.files import contents
from tests.fuzz import mutate
from tests.fuzz.box import BOX
from tests.support.run_folders import add_results, finished_run
from tests.support.study_runs import end_all, study_of

Files = dict[str, Any]
Mutator = Callable[[random.Random, Any], bytes]

ORIGIN = {
    "training": {"task": "sft"}, "processes": 1, "data": {"path": "x"}, "start": None, "chat_template_sha256": "0",
}  # fmt: skip
CHECKPOINT = {"optimizer.pt": b"state", "scheduler.pt": b"schedule",
              "trainer_state.json": b'{"global_step": 100, "max_steps": 600}'}  # fmt: skip
OUTSIDE = [
    "../outside", "../../outside", "../../../outside", f"{BOX}/outside", f"{BOX}/outside/deep", "../../../../outside",
]  # fmt: skip
NAMES = [
    *OUTSIDE, "../../../outside/deep", f"{BOX}/outside/base", "..", ".", "", "/", "a/b", "x" * 300, "~", "\0",
    "\x1b[2J", "SFT",
]  # fmt: skip
FOREIGN = {"out/results.json": b'{"accuracy": 0.9}', "out/table.md": b"# mine\n", "out/samples/base/mine.txt": b"mine"}
FOREIGN |= {"summary.json": b'{"mine": true}', "out/scores.png": b"a photo"}

MUTATED = ["config.json"] * 5 + ["tokenizer.json"] * 3 + ["tokenizer_config.json"] * 3
MUTATED += ["generation_config.json", "special_tokens_map.json", "chat_template.jinja", "model.safetensors.index.json"]
MUTATED += ["model.safetensors"]
"""The files of a model, the one that has more keys more often."""


@cache
def whole(kind: str) -> Files:
    """The files of a run folder `run` that is as our own commands leave it; kind: finished, adapter, training or ""; or
    of a folder `study`."""
    if not kind:
        return {}
    with tempfile.TemporaryDirectory() as root, contextlib.chdir(root):
        if kind == "study":
            end_all(study_of(root), lambda run: 1 + run.number + run.seed / 1000)
        else:
            run = finished_run("run", BATCH, adapter_of=f"{root}/run/start" if kind == "adapter" else None)
            _fill(run, kind)
        found = {str(f.relative_to(root)): f.read_bytes() for f in sorted(Path(root).rglob("*")) if f.is_file()}
    placed = {name: data.replace(root.encode(), f"{BOX}/work".encode()) for name, data in found.items()}
    # Without the hash of run.json, as one that a stranger made: with it, every mutation of it would be refused at once.
    return {name: re.sub(rb',\s*"record_sha256": "\w+"', b"", data) if name.endswith("run.json") else data
            for name, data in placed.items()}  # fmt: skip


def _fill(run: Any, kind: str) -> None:
    run.start.mkdir()
    for name, text in {"config.json": "{}", "model.safetensors": "start", "tokenizer_config.json": "{}"}.items():
        (run.start / name).write_text(text)
    fixed = {"started": "2026-01-01T00:00:00+00:00", "commit": "c" * 40, "platform": "here"}
    fixed["versions"] = dict.fromkeys(run.read()["versions"], "1")
    start = {"path": str(run.start.resolve()), "sha256_or_revision": None}
    run.update(**fixed, start=start, status="training" if kind == "training" else "finished")
    run.metrics.write_text("".join(json.dumps({"step": i, "loss": 1.0 / i}) + "\n" for i in (50, 100, 150)))
    for step in (100, 200):
        folder = run.checkpoints / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        for name, data in CHECKPOINT.items():
            (folder / name).write_bytes(data)
    checkpoint = run.checkpoints / "checkpoint-100"
    sealed = dict(zip(CHECKPOINT, contents(checkpoint / name for name in CHECKPOINT), strict=True))
    (checkpoint / "soren_align.json").write_text(json.dumps({"step": 100, "origin": ORIGIN, "files": sealed}))
    add_results(run)
    for row in ("base", "SFT"):
        folder = run.evaluation("quickstart") / "samples" / row
        folder.mkdir(parents=True)
        (folder / "zoo_mc.jsonl").write_text("{}\n")
    (run.evaluation("quickstart") / "table.md").write_text("# a table\n")
    if kind == "adapter":
        run.merged.mkdir()
        (run.merged / "model.safetensors").write_text("merged")
        (run.merged / "merged_from.json").write_text(json.dumps(run.adapter()))


RECIPES = ["quickstart/sft", "quickstart/sft", "run/recipe.yaml"]
BATCH = "run.global_batch_size=64"
OUTPUT = ["--set", "run.output_dir=run", "--set", BATCH]


def _command(rng: random.Random, kind: str) -> list[str]:
    train = ["sft", rng.choice(RECIPES), *OUTPUT]
    commands = [
        train,
        [*train, "--set", "run.overwrite=true"],
        [*train, "--no-eval"],
        [*train, "--set", "run.resume=never"],
        [*train, "--set", "run.resume=run/checkpoints/checkpoint-100"],
        [*train, "--set", "eval.limit=3"],
        ["eval", "run"],
        ["eval", "run"],
        ["eval", "run", "run/model", "--output", "out"],
        ["eval", "run", "--output", "out", "--summary", "summary.json"],
        ["eval", "run", "--suite",
         rng.choice(["..", "quickstart", ".", "run", "run/eval", "nowhere", "run/suite.yaml"])],
        ["eval", "run", "--limit", "2"],
        ["eval", "run/model"],
        ["reshard", "run"],
        ["merge", "run"],
        ["push", "run", "me/it"],
        ["push", "run", "me/it", "--merged"],
        ["recipes", "copy", "run/recipe.yaml", "copy.yaml"],
        ["import", "run/recipe.yaml", "imported.yaml"],
    ]  # fmt: skip
    if kind == "training":
        commands += [train] * 8 + [["reshard", "run"]] * 2
    return rng.choice(commands)


def tampered(rng: random.Random, as_json: Mutator, as_yaml: Mutator) -> tuple[Files, dict[str, Any], str]:
    """(changed files, arguments, base) of a run folder that was tampered with, and of a command on it."""
    kind = rng.choice(["finished", "finished", "adapter", "training"])
    files = dict(whole(kind))
    command = _command(rng, kind)
    foreign = dict(rng.sample(sorted(FOREIGN.items()), rng.randrange(1, 4))) if rng.random() < 0.3 else {}
    for _ in range(rng.choice((1, 1, 2, 3))):
        _tamper(rng, files, as_json, as_yaml)
    files |= foreign
    base = whole(kind)
    changed = {name: content for name, content in files.items() if base.get(name) != content}
    gone = dict.fromkeys(sorted(base.keys() - files.keys()))
    return changed | gone, {"command": command, "foreign": sorted(foreign)}, kind


def _tamper(rng: random.Random, files: Files, as_json: Mutator, as_yaml: Mutator) -> None:
    texts = sorted(name for name, data in files.items() if isinstance(data, bytes))
    if not texts:
        return
    entries = _folders(files) + texts
    told = [name for name in texts if name.endswith(("run.json", "results.json", "recipe.yaml", "soren_align.json"))]
    told += [name for name in texts if name.endswith(("adapter_config.json", "merged_from.json", "metrics.jsonl"))]
    match rng.choices(("tree", "names", "bytes", "delete", "link", "kind", "foreign"), (6, 4, 2, 2, 4, 1, 1))[0]:
        case "tree":
            _retell(rng, files, rng.choice(told or texts), as_json, as_yaml)
        case "names":
            _rename(rng, files)
        case "bytes":
            name = rng.choice(told if told and rng.random() < 0.8 else texts)
            files[name] = mutate.content(rng, files[name])
        case "delete":
            _drop(files, rng.choice(entries))
        case "link":
            name = rng.choice([*entries, "run/.lock", "run/start.part", "run/model.part", "run/merged.part"])
            _drop(files, name)
            file = rng.choice(("victim.txt", "results.json", "README.md"))
            files[name] = {"link": rng.choice([*OUTSIDE, f"{BOX}/outside/{file}", "loop"])}
        case "kind":
            name = rng.choice([*entries, "run/.lock", "run/run.json.4711.part", "run/model.part", "run/start.part"])
            _drop(files, name)
            files[name] = rng.choice([{}, {}, b"", b"x", {"fifo": True}])
        case "foreign":
            name = rng.choice(
                ["run/run.json", "run/eval/quickstart/results.json", "run/recipe.yaml", "run/metrics.jsonl"]
            )
            files[name] = rng.choice(
                [b"{}", b"[]", b"null", b"3", b'"x"', b"", b'{"status": "done"}', b"[" * 3000, b"task: sft"]
            )


def _retell(rng: random.Random, files: Files, name: str, as_json: Mutator, as_yaml: Mutator) -> None:
    if name.endswith(".yaml"):
        is_ours = files[name].startswith(b"task:") and files[name].isascii()
        files[name] = as_yaml(rng, files[name]) if is_ours else files[name][:-1]
        return
    try:
        if name.endswith(".jsonl"):
            rows = files[name].splitlines()
            at = rng.randrange(len(rows))
            rows[at] = as_json(rng, json.loads(rows[at]))
            files[name] = b"\n".join(rows)
        else:
            files[name] = as_json(rng, json.loads(files[name]))
    except (ValueError, RecursionError):  # of an earlier change
        files[name] = mutate.content(rng, files[name])


def _rename(rng: random.Random, files: Files) -> None:
    """A name in a JSON file that is joined to a path somewhere."""
    evil = rng.choice(NAMES)
    name = rng.choice([name for name in files if name.endswith("results.json")] or ["run/run.json"])
    try:
        said = json.loads(files[name])
        match rng.randrange(5):
            case 0 | 1 | 2 if "rows" in said:
                rng.choice(said["rows"])[rng.choice(["name", "name", "model"])] = evil
            case 3 if "suite" in said:
                said["suite"] = evil
            case _:
                name = "run/run.json"
                said = json.loads(files[name])
                key = rng.choice(["start", "start", "task", "status", "processes", "parallel"])
                said[key] = {"path": evil, "sha256_or_revision": None} if key == "start" else evil
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return
    files[name] = json.dumps(said).encode()


def _folders(files: Files) -> list[str]:
    found = {str(parent) for name in files for parent in Path(name).parents}
    return sorted(found - {"."})


def _drop(files: Files, name: str) -> None:
    for other in [f for f in files if f == name or f.startswith(name + "/")]:
        del files[other]
    for parent in Path(name).parents:  # what was made a file or a link has nothing below it any more
        files.pop(str(parent), None)


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A file of tensors, {name: (dtype, shape, bytes)}."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


WIDTH = 8
"""Of the tiny model under the adapters; see `tiny_model`."""
CONFIG = {"base_model_name_or_path": "base", "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4}
CONFIG |= {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0, "bias": "none", "inference_mode": True}
CONFIG |= {"modules_to_save": None, "use_dora": False, "revision": None, "fan_in_fan_out": False, "rank_pattern": {}}


@cache
def _factors() -> dict[str, tuple[str, list[int], bytes]]:
    rng = random.Random(0)
    found = {}
    for module in CONFIG["target_modules"]:
        for factor, shape in (("lora_A", [2, WIDTH]), ("lora_B", [WIDTH, 2])):
            numbers = [rng.uniform(-0.1, 0.1) for _ in range(2 * WIDTH)]
            name = f"base_model.model.model.layers.0.self_attn.{module}.{factor}.weight"
            found[name] = ("F32", shape, struct.pack(f"<{2 * WIDTH}f", *numbers))
    return found


def small_adapter(rng: random.Random) -> Files:
    """An adapter's folder, as it stands beside a recipe."""
    base = rng.choice(
        ["shipped:recipes/quickstart/base", "base", "adapter", "nobody/nothing", ["x"], None, "~nosuchuser/x", "a\0b"]
    )
    more = rng.choice([{}, {}, {"peft_type": "IA3"}, {"modules_to_save": 3}])
    said = CONFIG | {"base_model_name_or_path": base} | more
    return {"adapter_config.json": json.dumps(said).encode(), "adapter_model.safetensors": b"x"}


def adapter(rng: random.Random, as_json: Mutator) -> tuple[Files, dict[str, Any]]:
    """(files, arguments) of an adapter of the tiny model, and whether it is loaded too."""
    said: Any = dict(CONFIG)
    files: Files = {"base": {"shared": "tiny"}}
    tensors = dict(_factors())
    if rng.random() < 0.7:
        key = rng.choice(
            [*CONFIG, "rank_pattern", "alpha_pattern", "layers_to_transform", "auto_mapping", "exclude_modules"]
        )
        said[key] = rng.choice(
            [None, 0, -1, "x", [], ["q_proj"], {"a": 1}, 10**9, "(.*)*x(.*)*y", "adapter", True, ["x" * 300], 1.5]
        )
    data = as_json(rng, said) if rng.random() < 0.3 else json.dumps(said).encode()
    if rng.random() < 0.5:
        name = rng.choice(sorted(tensors))
        dtype, shape, content = tensors.pop(name)
        new = rng.choice([name, name, name.replace("self_attn", "attn"), "x", name + ".weight", "__metadata__"])
        changed = [
            (dtype, [WIDTH * 2], content), (dtype, shape[::-1], content), ("F16", shape, content[: len(content) // 2]),
        ]  # fmt: skip
        changed += [
            ("I32", shape, content), (dtype, [0, 4], b""), ("F99", shape, content), (dtype, shape, content[:-4]),
        ]  # fmt: skip
        changed += [(dtype, shape, b"\xff" * len(content)), (dtype, [2**62, 2], content), (dtype, [-1, 16], content)]
        if rng.random() < 0.8:
            tensors[new] = rng.choice(changed)
    weights = safetensors(tensors)
    if rng.random() < 0.2:
        weights = mutate.content(rng, weights)
    files |= {"adapter/adapter_config.json": data, "adapter/adapter_model.safetensors": weights}
    if rng.random() < 0.1:
        files.pop("adapter/adapter_model.safetensors")
        files["adapter/adapter_model.bin"] = b"\x80\x04cos\nsystem\n"
    return files, {"loaded": rng.choice([None, None, "training", "evaluation"])}


@cache
def tiny_model() -> Path:
    """A folder with a random Llama of one layer and the quickstart's tokenizer; lives as long as the process."""
    import torch
    from soren_align.core import shipped
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = Path(_shared().name) / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(shipped.ROOT / "recipes/quickstart/base")
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def journal(rng: random.Random, as_json: Mutator) -> Files:
    """The journal of `whole("study")`, with some of its lines changed, or all of it as bytes."""
    name = "study/trials.jsonl"
    lines = whole("study")[name].splitlines()
    if rng.random() < 0.2:
        return {name: mutate.content(rng, b"\n".join([*lines, b""]))}
    for at in sorted(rng.sample(range(len(lines)), rng.choice((1, 1, 2))), reverse=True):
        match rng.randrange(6):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, rng.choice(lines))
            case 2:
                lines[at] = mutate.content(rng, lines[at])
            case _:
                lines[at] = as_json(rng, json.loads(lines[at]))
    return {name: b"\n".join([*lines, b""])}


@cache
def model_files() -> Files:
    """The files of `tiny_model`, and the index of a model in several files."""
    found = {f.name: f.read_bytes() for f in sorted(tiny_model().iterdir())}
    header = json.loads(found["model.safetensors"][8 : 8 + struct.unpack("<Q", found["model.safetensors"][:8])[0]])
    weight_map = {name: "model.safetensors" for name in header if name != "__metadata__"}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    return found | {"model.safetensors.index.json": json.dumps(index).encode(),
                    "special_tokens_map.json": json.dumps(special).encode()}  # fmt: skip


def model(rng: random.Random, as_json: Mutator) -> tuple[Files, dict[str, Any]]:
    """(files, arguments) of a model's folder `model`, one or two of its files changed, and what is done with it."""
    files = dict(model_files())
    if rng.random() < 0.7:
        files.pop("special_tokens_map.json")  # no longer read where tokenizer_config.json has the same
    index = "model.safetensors.index.json"
    if index in (changed := rng.sample(MUTATED, rng.choice((1, 1, 2)))):
        files["model-00001.safetensors"] = files.pop("model.safetensors")
        files[index] = files[index].replace(b"model.saf", b"model-00001.saf")
    else:
        files.pop(index)
    for name in dict.fromkeys(changed):
        written = files.get(name, b"{}")
        if name.endswith(".jinja"):
            files[name] = mutate.text(rng, written.decode()).encode("utf-8", "surrogatepass")
        elif name.endswith(".json"):
            files[name] = as_json(rng, json.loads(written))
        else:
            files[name] = mutate.content(rng, written)
    done = rng.choice(["plan", "chat", "evaluation", "training"])
    return {f"model/{name}": data for name, data in files.items()}, {"done": done}


@cache
def _shared() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="fuzz-shared-")
