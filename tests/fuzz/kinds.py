"""The inputs of each kind, made from what is shipped: the one of (seed, kind, index) is always the same.

An input is a kind, the files of a working directory and arguments for the kind's target. It can be written as JSON and
kept.
"""

import hashlib
import io
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from soren_align import recipe
from soren_align.core import shipped
from tests.fuzz import folders, mutate
from tests.fuzz.yaml_like import Pairs, Raw, dump, pairs, plain

FOREIGN = Path(__file__).resolve().parent.parent / "importers" / "foreign"
Files = dict[str, Any]


@dataclass(frozen=True)
class Input:
    """One input: `files` as Box.lay_out takes them."""

    kind: str
    files: Files = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    base: str = ""
    """A whole folder of `folders.whole`, which `files` changes; None there takes one away."""

    def all_files(self) -> Files:
        """Those of the base, changed."""
        return {k: v for k, v in ({**folders.whole(self.base)} | self.files).items() if v is not None}

    def to_json(self) -> dict[str, Any]:
        """As JSON: bytes as Latin-1, so that each is one character."""
        files = {k: v.decode("latin-1") if isinstance(v, bytes) else v for k, v in self.files.items()}
        return {"kind": self.kind, "base": self.base, "arguments": self.arguments, "files": files}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> "Input":
        """What `to_json` wrote."""
        files = {k: v.encode("latin-1") if isinstance(v, str) else v for k, v in said["files"].items()}
        return cls(said["kind"], files, said["arguments"], said["base"])

    def digest(self) -> str:
        """A short name."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:10]


def make(seed: int | str, kind: str, index: int) -> Input:
    """The input of this seed, kind and index."""
    return KINDS[kind](random.Random(f"{seed}/{kind}/{index}"))


# What a recipe's paths may meet in the working directory, beside the files that it needs.
CORNER: Files = {"loop": {"link": "loop"}, "dangling": {"link": "nowhere"}, "fifo": {"fifo": True}, "folder.json": {},
                 "link": {"link": "../outside"}, "bad.json": b'{"a": [', "bad.yaml": b"a: [\xff"}  # fmt: skip


@cache
def _recipes() -> list[tuple[str, Any, bytes]]:
    """(name, tree, text) of the shipped recipes."""
    found = []
    for name, file in shipped.recipes().items():
        written = file.read_bytes()
        for needed in (b"runs/quickstart/sft/model", b"runs/quickstart/sft-lora/model"):  # what other recipes make
            written = written.replace(needed, b"shipped:recipes/quickstart/base\n  init_seed: 0")
        written = written.replace(b"models/SmolLM2-135M-Instruct ", b"shipped:recipes/quickstart/base ")
        written = written.replace(b"data/train.jsonl}", b"shipped:recipes/quickstart/data/chat_train.jsonl}")
        found.append((name, pairs(YAML(typ="safe", pure=True).load(written.decode())), written))
    return found


@cache
def _known_values() -> dict[str, list[Any]]:
    """Values that are right somewhere, by the last part of their key."""
    found: dict[str, list[Any]] = {}
    for _, node, _ in _recipes():
        for where, i in mutate.spots(node):
            if isinstance(where, Pairs) and not isinstance(where[i][1], list):
                found.setdefault(where[i][0], []).append(where[i][1])
    found["parallel"] = ["ddp", "zero1", "zero2", "zero3", "zero2-offload", "fsdp2", "ds.json", "fsdp.yaml"]
    found["name"] = ["soren", "muon", "htmuon", "adamw"]
    found["map"] = ["minimax", "sns", "released", "exact"]
    found["chat_template"] = ["zephyr", "qwen2.5", "own.jinja"]
    found["extends"] = ["quickstart/sft", "quickstart/dpo", "qwen2.5-3b/soren", "recipe.yaml", "base.yaml", "bad.yaml"]
    found["compensation"], found["dtype"] = ["kahan", "none"], ["float32", "bfloat16"]
    return found


def a_recipe(rng: random.Random) -> Input:
    """A shipped recipe, mutated; some extend another, shard by a config of their own, or have an adapter."""
    _, node, written = rng.choice(_recipes())
    how = rng.random()
    files = dict(CORNER) if rng.random() < 0.3 else {}
    if how < 0.05:
        files["recipe.yaml"] = mutate.content(rng, written)
    elif how < 0.2:
        files["recipe.yaml"] = mutate.lines(rng, written.decode()).encode("utf-8", "surrogatepass")
    else:
        node = mutate.deepcopy(node)
        if rng.random() < 0.25:
            _set(node, ["run", "parallel"], rng.choice(_known_values()["parallel"]))
        if rng.random() < 0.1:
            _set(node, ["model", "lora"], Pairs([("r", rng.choice([4, 0, "x"])), ("modules_to_save", [])]))
        if rng.random() < 0.1:
            _set(node, ["model", "name_or_path"], "adapter")
        if rng.random() < 0.1:
            node = Pairs([("extends", rng.choice(_known_values()["extends"])), *rng.sample(node, 2)])
        if rng.random() < 0.5:  # likely to be accepted
            mutate.tree(rng, node, rng.choice((1, 1, 2)), make=_right_elsewhere)
            files["recipe.yaml"] = dump(node).encode("utf-8", "surrogatepass")
        else:
            mutate.tree(rng, node, make=_plausible)
            files["recipe.yaml"] = mutate.as_yaml(rng, node)
    text = files["recipe.yaml"]
    if b"ds.json" in text:
        files["ds.json"] = _json(rng, json.loads((shipped.ROOT / "configs/deepspeed/zero2.json").read_text()))
    if b"fsdp.yaml" in text:
        config = YAML(typ="safe", pure=True).load(shipped.ROOT / "configs/accelerate/fsdp2.yaml")
        mutate.tree(rng, config := pairs(config))
        files["fsdp.yaml"] = mutate.as_yaml(rng, config)
    if b"own.jinja" in text:
        files["own.jinja"] = b"{{ messages }}"
    if b"base.yaml" in text:
        files["base.yaml"] = b"extends: recipe.yaml\ntask: dpo\n"
    if b"adapter" in text:
        files |= {f"adapter/{name}": data for name, data in folders.small_adapter(rng).items()}
    return Input("recipe", files, {"task": rng.choice([None] * 9 + ["sft"]), "processes": rng.choice([1] * 5 + [2, 3])})


def _plausible(rng: random.Random, here: Any) -> Any:
    """A value that is now and then right somewhere."""
    return _right_elsewhere(rng, here) if rng.random() < 0.3 else mutate.value(rng, here)


def _right_elsewhere(rng: random.Random, here: Any) -> Any:
    known = _known_values()
    if rng.random() < 0.6:  # where such a value stands
        fits = [values for values in known.values() if here in values] if not isinstance(here, list) else []
        if fits:
            return rng.choice(rng.choice(fits))
    if isinstance(here, int | float) and not isinstance(here, bool):
        half = here / 2 if abs(here) < 1e300 else here  # an integer may be beyond every float
        return rng.choice([here * 2, here + 1, half, 1, 1e-5, 0.01])
    return rng.choice(rng.choice(list(known.values())))


def _set(node: Any, keys: list[str], item: Any) -> None:
    for i, (key, below) in enumerate(node):
        if key == keys[0]:
            if len(keys) == 1:
                node[i] = (key, item)
            elif isinstance(below, Pairs):
                _set(below, keys[1:], item)
            return
    node.append((keys[0], item if len(keys) == 1 else Pairs([(keys[1], item)])))


def _json(rng: random.Random, said: Any) -> bytes:
    """JSON of a mutated tree, now and then damaged as bytes."""
    node = pairs(said)
    mutate.tree(rng, node)
    try:
        written = json.dumps(plain(node)).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        written = b"[" * 3000
    return mutate.content(rng, written) if rng.random() < 0.15 else written


@cache
def _dotted() -> list[str]:
    """Every key of the shipped recipes and of the recipe's schema, as after --set."""
    found: set[str] = set()

    def walk(node: Any, prefix: str) -> None:
        for i, item in enumerate(node):
            key, below = item if isinstance(node, Pairs) else (i, item)
            found.add(f"{prefix}{key}")
            if isinstance(below, list):
                walk(below, f"{prefix}{key}.")

    for _, node, _ in _recipes():
        walk(node, "")
    schema = recipe.loader.json_schema()
    found |= {f"trainer.{key}" for key in schema["properties"]["trainer"]["properties"]}
    for name, section in (("model", "Model"), ("run", "Run"), ("eval", "Eval")):
        found |= {f"{name}.{key}" for key in schema["$defs"][section]["properties"]}
    for prefix, members in (("optimizer", recipe.OPTIMIZER_SECTIONS), ("optimizer.map", recipe.MAP_SECTIONS)):
        found |= {f"{prefix}.{key}" for member in members.values() for key in member.model_fields}
    return sorted(
        found | {"data.train.0.path", "data.train.-1.path", "data.train.9", "model.lora.r", "optimizer.betas.1"}
    )


def an_override(rng: random.Random) -> Input:
    """--set texts for a shipped recipe."""
    name, _, _ = rng.choice(_recipes())
    texts = ["model.name_or_path=shipped:recipes/quickstart/base", "model.init_seed=0"] if "/dpo" in name else []
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice(_dotted())
        if rng.random() < 0.2:
            key = rng.choice(
                [mutate.text(rng, key), key + ".x", key + ".0", key.upper(), "", ".", "a" * 5000, key + "."]
            )
        known = _known_values().get(key.rpartition(".")[2])
        item = rng.choice(known) if known and rng.random() < 0.6 else mutate.value(rng)
        written = mutate.as_yaml(rng, item).decode("utf-8", "surrogateescape").strip("\n")
        texts.append(
            rng.choice([f"{key}={written}"] * 8 + [key, f"={written}", f"{key}=={written}"]).replace("\0", "\\0")
        )
    return Input("override", dict(CORNER) if rng.random() < 0.3 else {}, {"name": name, "texts": texts})


@cache
def _foreign() -> list[tuple[str, Any, bytes]]:
    found = []
    for file in sorted(FOREIGN.glob("*.yaml")):
        found.append((file.name, pairs(YAML(typ="safe", pure=True).load(file.read_text())), file.read_bytes()))
    return found


def an_import(rng: random.Random) -> Input:
    """Another tool's file, mutated, or two of them as one."""
    name, node, written = rng.choice(_foreign())
    how = rng.random()
    if how < 0.1:
        data = mutate.content(rng, written)
    elif how < 0.25:
        data = mutate.lines(rng, written.decode()).encode("utf-8", "surrogatepass")
    else:
        node = mutate.deepcopy(node)
        if rng.random() < 0.2:
            node += rng.sample(other := rng.choice(_foreign())[1], min(3, len(other)))
        mutate.tree(rng, node)
        data = mutate.as_yaml(rng, node)
    return Input("import", {name: data}, {"name": name, "task": rng.choice([None, None, "sft", "dpo"])})


_ROLES = ["user", "assistant", "system", "human", "gpt", "tool", "function", ""]


def _turns(rng: random.Random, keys: tuple[str, str]) -> list[Any]:
    roles = (
        ["user", "assistant"] * rng.randrange(1, 3) if rng.random() < 0.7 else rng.choices(_ROLES, k=rng.randrange(4))
    )
    return [{keys[0]: role, keys[1]: f"what {i} says"} for i, role in enumerate(roles)]


def _row(rng: random.Random, form: str, i: int) -> dict[str, Any]:
    chat = [{"role": "user", "content": f"animal {i}?"}, {"role": "assistant", "content": f"a zebra {i}"}]
    match form:
        case "chat":
            return {"prompt": f"p{i}", "messages": chat if rng.random() < 0.7 else _turns(rng, ("role", "content"))}
        case "sharegpt":
            return {"conversations": _turns(rng, ("from", "value")), "id": i}
        case "pairs":
            other = [chat[0], {"role": "assistant", "content": "no idea"}]
            return {"prompt": f"p{i}", "chosen": chat, "rejected": other, "score_chosen": 8.0}
        case "plain pairs":
            return {"prompt": f"p{i}", "chosen": f"yes {i}", "rejected": f"no {i}"}
        case "completion":
            return {"prompt": f"p{i}", "completion": f"c{i}"}
        case "turned completion":
            return {"prompt": chat[:1], "completion": chat[1:]}
        case "alpaca":
            return {"instruction": f"do {i}", "input": "", "output": f"done {i}"}
    return {"text": f"a text {i}"}


FORMS = ("chat", "chat", "sharegpt", "pairs", "plain pairs", "completion", "turned completion", "alpaca", "text")
TEMPLATES = ["{{ messages }}", "{% for m in messages %}{{ m['content'] }}{% endfor %}", "{{ 1/0 }}", "{{ x.y.z }}", ""]
TEMPLATES += ["{% for a in range(99999999) %}{% for b in range(99999999) %}x{% endfor %}{% endfor %}", "{% for", "\xff"]
TEMPLATES += [
    "{{ 'x' * 10**9 }}", "{{ raise_exception('no') }}", "{% generation %}{% endgeneration %}", "{{ 9**9**9 }}",
]  # fmt: skip
TEMPLATES += ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages[0]['content'] * 10**8 }}",
              "{{ ''|center(10**10) }}"]  # fmt: skip
TEMPLATES += ["{% for m in messages %}{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}{% endfor %}"]


def a_data_file(rng: random.Random) -> Input:
    """A file of rows, some of them mutated."""
    form, suffix = rng.choice(FORMS), rng.choice(["jsonl", "jsonl", "json", "parquet"])
    rows = [_row(rng, form, i) for i in range(rng.choice([0, 1, 2, 3, 5, 60]))]
    share = rng.choice([0.0, 0.1, 0.5, 1.0])
    for i in range(len(rows)):
        if rng.random() < share:
            mutate.tree(rng, node := pairs(rows[i]), make=_a_cell)
            rows[i] = plain(node)
    spec = {"limit": rng.choice([None, None, None, 1, 2, 100]), "bad_examples": rng.choice(["refuse", "drop", "drop"])}
    files = {f"rows.{suffix}": _encoded(rng, rows, suffix)}
    arguments: dict[str, Any] = {
        "spec": spec, "task": "dpo" if ("pairs" in form) ^ (rng.random() < 0.1) else "sft", "file": f"rows.{suffix}",
    }  # fmt: skip
    arguments["weights"] = rng.choice([None, None, [1, 0.5], [2.0, 1e-9], [0.3]])
    if form in ("chat", "turned completion", "pairs", "sharegpt") and rng.random() < 0.5:
        template = rng.choice(TEMPLATES) if rng.random() < 0.5 else mutate.text(rng, _chat_template())
        files["own.jinja"] = template.encode("latin-1" if template == "\xff" else "utf-8", "surrogatepass")
    arguments["only_assistant"] = rng.random() < 0.3
    return Input("data", files, arguments)


@cache
def _chat_template() -> str:
    return shipped.templates()["zephyr"].read_text()


def _a_cell(rng: random.Random, here: Any) -> Any:
    item = mutate.value(rng, here)
    return str(item)[:4000] if isinstance(item, Raw) else item


def _encoded(rng: random.Random, rows: list[Any], suffix: str) -> bytes:
    if suffix == "parquet":
        return _parquet(rng, rows)
    try:
        texts = [json.dumps(row, ensure_ascii=rng.random() < 0.5) for row in rows]
    except (ValueError, RecursionError):
        texts = ["{}"]
    if rng.random() < 0.2 and texts:
        texts[rng.randrange(len(texts))] = rng.choice(
            ["[" * 5000, "NaN", '{"messages": 1e999}', "9" * 5000, "null", '"x"', "[1]"]
        )
    written = "\n".join(texts) if suffix == "jsonl" else f"[{','.join(texts)}]"
    data = written.encode("utf-8", "surrogatepass")
    return mutate.content(rng, data) if rng.random() < 0.15 else data


def _whole(text: str) -> str:
    """The text without halves of surrogate pairs, which Arrow cannot encode."""
    return text.encode("utf-8", "replace").decode()


def _parquet(rng: random.Random, rows: list[Any]) -> bytes:
    rows = [{_whole(key): cell for key, cell in row.items()} for row in rows]
    columns = sorted({key for row in rows for key in row})
    arrays = {}
    for column in columns:
        cells = [row.get(column) for row in rows]
        try:
            arrays[column] = pa.array(cells)
        except (pa.ArrowException, OverflowError, UnicodeError):
            arrays[column] = pa.array([str(cell).encode("utf-8", "replace") for cell in cells])
    if columns and rng.random() < 0.2:  # bytes that are no UTF-8, in a column that says that it is text
        broken = pa.array([rng.randbytes(5) for _ in rows], pa.binary())
        arrays[rng.choice(columns)] = pa.Array.from_buffers(pa.string(), len(rows), broken.buffers())
    if columns and rng.random() < 0.2:
        kinds = [pa.array([None] * len(rows)), pa.array(range(len(rows))),
                 pa.array([2**62] * len(rows), pa.timestamp("ns"))]  # fmt: skip
        kinds += [pa.array([[{"role": "user", "content": None}]] * len(rows)), pa.array([b"\xff"] * len(rows))]
        arrays[rng.choice(columns)] = rng.choice(kinds)
    stream = io.BytesIO()
    try:
        pq.write_table(pa.table(arrays), stream)
    except pa.ArrowException:  # a kind that Parquet does not know
        pq.write_table(pa.table({column: [_whole(str(row.get(column))) for row in rows] for column in columns}),
                       stream := io.BytesIO())  # fmt: skip
    return mutate.content(rng, stream.getvalue()) if rng.random() < 0.2 else stream.getvalue()


def a_run_folder(rng: random.Random) -> Input:
    """A run folder that somebody else made, and a command on it."""
    return Input("run", *folders.tampered(rng, _json, _yaml))


def _yaml(rng: random.Random, written: bytes) -> bytes:
    try:
        node = pairs(YAML(typ="safe", pure=True).load(written.decode()))
    except (YAMLError, ValueError, RecursionError):  # a file that was mutated once already
        return mutate.content(rng, written)
    mutate.tree(rng, node, rng.choice((1, 1, 1, 2, 4)), make=_plausible)
    return mutate.as_yaml(rng, node)


def an_adapter(rng: random.Random) -> Input:
    """An adapter's folder, of a tiny base."""
    return Input("adapter", *folders.adapter(rng, _json))


def a_model(rng: random.Random) -> Input:
    """A model's folder, and what is done with it."""
    return Input("model", *folders.model(rng, _json))


def a_journal(rng: random.Random) -> Input:
    """The journal of a study that has ended."""
    return Input("journal", folders.journal(rng, _json), base="study")


def a_suite(rng: random.Random) -> Input:
    """A suite's file and a quoted table."""
    suite = rng.choice([file for name, file in sorted(shipped.suites().items())])
    quoted = rng.choice([file for name, file in sorted(shipped.published().items())])
    files = {"suite/suite.yaml": _yaml(rng, suite.read_bytes()), "quoted.yaml": _yaml(rng, quoted.read_bytes())}
    if re.search(rb"task: zoo_mc", files["suite/suite.yaml"]):
        for file in (suite.parent / "tasks").glob("*.yaml") if (suite.parent / "tasks").is_dir() else ():
            files[f"suite/tasks/{file.name}"] = file.read_bytes()
    return Input("suite", files)


KINDS: dict[str, Callable[[random.Random], Input]] = {
    "recipe": a_recipe, "override": an_override, "import": an_import, "data": a_data_file, "run": a_run_folder,
    "adapter": an_adapter, "model": a_model, "journal": a_journal, "suite": a_suite,
}  # fmt: skip
