"""Hypothesis strategies of inputs that nearly are right: what is shipped or written by a run, with a few changes.

A strategy of files is one of {name: bytes, {"link": target} or None for a folder}.
"""

import contextlib
import copy
import io
import json
import re
import tempfile
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from ruamel.yaml import YAML
from soren_align.core import shipped
from tests.support.run_folders import add_results, finished_run

OUTSIDE = ["../outside", "../../outside", "../outside/deep", "@ROOT@/outside", "@ROOT@/outside/victim.txt"]
"""Paths out of the working directory; @ROOT@ is the folder above it."""
WORDS = [*OUTSIDE, "..", ".", "", "/", "~", "~nosuchuser/x", "a/b", "a\0b", "x" * 300, "\x1b[2J", "\ud800", "é🦓"]
WORDS += ["nan", "1e-6", "on", "null", "ddp", "zero2", "fsdp2", "zephyr", "soren", "adamw", "minimax", "messages"]
NUMBERS = [0, -1, 1, 2, 2**31, 2**63, 10**400, 0.5, -0.0, 1e-9, 1e308, float("inf"), float("nan")]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(WORDS), st.integers(), st.floats(),
    st.text(max_size=20),
)  # fmt: skip
JUNK = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=8), SCALARS, max_size=3),
    st.sampled_from([[[[]]], {"a": {"b": [{}]}}, [{"role": "user"}], [{"from": "gpt", "value": "x"}]]),
)


def spots(tree):
    """(container, key or index) of every value in a tree."""
    for key, value in list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from spots(value)


@st.composite
def changed(draw, tree, most=3):
    """A tree of which up to `most` values are replaced, removed, renamed, moved or repeated."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, most))):
        places = list(spots(tree))
        if not places:
            break
        parent, key = draw(st.sampled_from(places))
        other_parent, other_key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["junk", "junk", "elsewhere", "removed", "added"])):
            case "junk":
                parent[key] = copy.deepcopy(draw(JUNK))  # which the next change may change
            case "elsewhere":  # a value that is right in another place
                parent[key] = copy.deepcopy(other_parent[other_key])
            case "removed":
                del parent[key]
            case "added" if isinstance(parent, dict):
                parent[draw(st.sampled_from(WORDS) | st.just(other_key).map(str))] = copy.deepcopy(draw(JUNK))
            case "added":
                parent.insert(key, copy.deepcopy(draw(JUNK)))
    return tree


@st.composite
def damaged(draw, content):
    """Bytes that are cut, or of which some are replaced or repeated."""
    start = draw(st.integers(0, len(content)))
    end = draw(st.integers(start, min(len(content), start + 40)))
    between = draw(st.sampled_from([b"", b"\0", b"\xff", b"[" * 3000, b"{", b"\n", b'"', content[start:end] * 2]))
    return content[:start] + between + draw(st.sampled_from([content[end:], b""]))


def as_json(tree):
    """JSON, which is YAML as well; texts that are no UTF-8 stay so."""
    return json.dumps(tree, ensure_ascii=False).encode("utf-8", "surrogatepass")


def yaml_files(files):
    """The content of one of these YAML files: its tree changed, or its bytes."""
    contents = {file.name: file.read_bytes() for file in files}
    trees = [YAML(typ="safe", pure=True).load(content.decode()) for content in contents.values()]
    changed_trees = st.sampled_from([tree for tree in trees if tree]).flatmap(changed).map(as_json)
    return st.one_of(changed_trees, changed_trees, st.sampled_from([*contents.values()]).flatmap(damaged))


@cache
def recipe_names():
    return sorted(shipped.recipes())


def recipes():
    """The content of a recipe."""
    return yaml_files(shipped.recipes().values())


@cache
def dotted_keys():
    """Every key of the shipped recipes, as after --set."""
    found = set()

    def walk(tree, prefix):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            found.add(f"{prefix}{key}")
            if isinstance(value, dict | list):
                walk(value, f"{prefix}{key}.")

    for file in shipped.recipes().values():
        walk(YAML(typ="safe", pure=True).load(file.read_text()), "")
    return sorted(found)


@st.composite
def overrides(draw):
    """Texts after --set."""
    keys = st.sampled_from(dotted_keys()) | st.sampled_from(["", ".", "a.b", "data.train.-1.path", "x" * 5000])
    values = JUNK.map(lambda value: as_json(value).decode("utf-8", "surrogatepass"))
    texts = [f"{draw(keys)}={draw(values)}" for _ in range(draw(st.integers(1, 3)))]
    return draw(st.sampled_from([texts, texts, texts, [texts[0].partition("=")[0]]]))


TURNS = [{"role": "user", "content": "Which animal?"}, {"role": "assistant", "content": "A zebra."}]
CALL = {"name": "feed", "arguments": {"animal": "zebra"}}
ROWS = {
    "messages": ("sft", {"messages": TURNS}),
    "tools": ("sft", {"messages": [TURNS[0], {"role": "assistant", "tool_calls": [CALL]},
                                   {"role": "tool", "content": "fed"}, TURNS[1]], "tools": [CALL]}),
    "ShareGPT": ("sft", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}),
    "completion": ("sft", {"prompt": "A zebra ", "completion": "runs."}),
    "turns and completion": ("sft", {"prompt": TURNS[:1], "completion": TURNS[1:]}),
    "Alpaca": ("sft", {"instruction": "Speak.", "input": "", "output": "Meow.", "system": "Be a cat."}),
    "text": ("sft", {"text": "A lynx."}),
    "pairs": ("dpo", {"chosen": TURNS, "rejected": [TURNS[0], {"role": "assistant", "content": "No."}]}),
    "plain pairs": ("dpo", {"prompt": "Why?", "chosen": "So.", "rejected": "No."}),
    "dialogues": ("dpo", {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}),
}  # fmt: skip
TEMPLATES = ["{{ messages }}", "{% for m in messages %}{{ m['content'] }}{% endfor %}", "{{ 1/0 }}", "{{ x.y.z }}", "",
             "{% for", "{{ raise_exception('no') }}", "{% generation %}{% endgeneration %}", "{% include 'x' %}",
             "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages.__class__.__mro__ }}",
             "{% for m in messages %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endfor %}"]  # fmt: skip


@st.composite
def data_files(draw):
    """(task, name, content, chat template or None) of a file of examples."""
    task, row = ROWS[draw(st.sampled_from(sorted(ROWS)))]
    rows = [copy.deepcopy(row) for _ in range(draw(st.integers(0, 4)))]
    rows += draw(st.lists(changed(row), max_size=2))
    kind = draw(st.sampled_from(["jsonl", "jsonl", "json", "parquet", "csv", "txt"]))
    content = b"\n".join(map(as_json, rows)) if kind != "json" else as_json(rows)
    if kind == "parquet":
        sink = io.BytesIO()
        with contextlib.suppress(pa.ArrowException, TypeError, ValueError, OverflowError):  # no table: an empty file
            pq.write_table(pa.Table.from_pylist(rows), sink)
        content = sink.getvalue()
    content = draw(st.one_of(st.just(content), st.just(content), damaged(content)))
    template = draw(st.none() | st.sampled_from(TEMPLATES))
    return draw(st.sampled_from([task] * 9 + ["dpo"])), f"rows.{kind}", content, template


@cache
def whole_run():
    """The files of a run folder `run` as our own commands leave it."""
    with tempfile.TemporaryDirectory() as root, contextlib.chdir(root):
        run = finished_run("run", "run.global_batch_size=64")
        run.start.mkdir()
        (run.start / "config.json").write_text("{}")
        run.metrics.write_text("".join(json.dumps({"step": i, "loss": 1 / i}) + "\n" for i in (50, 100, 150)))
        add_results(run)
        # Without the hash of run.json: with it, every change of it would be refused at once.
        return {name: re.sub(rb',\s*"record_sha256": "\w+"', b"", data) for name, data in _files(root).items()}


def _files(root):
    found = {str(file.relative_to(root)): file.read_bytes() for file in Path(root).rglob("*") if file.is_file()}
    return {name: data.replace(root.encode(), b"@ROOT@/work") for name, data in sorted(found.items())}


@st.composite
def folders(draw, files, pattern="."):
    """The files of a folder; up to three whose names match are changed, damaged, removed or links to elsewhere."""
    files = dict(files)
    names = [name for name in files if re.search(pattern, name)]
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        content = files[name]
        how = draw(st.sampled_from(["tree", "tree", "tree", "bytes", "removed", "link", "folder"]))
        lines = content.splitlines() if name.endswith(".jsonl") else [content]
        if how == "tree" and name.endswith((".json", ".jsonl")) and lines:
            at = draw(st.integers(0, len(lines) - 1))
            lines[at] = as_json(draw(changed(json.loads(lines[at]))))
            files[name] = b"\n".join(lines)
        elif how == "tree" and name.endswith(".yaml"):
            files[name] = as_json(draw(changed(YAML(typ="safe", pure=True).load(content.decode()))))
        elif how == "removed":
            del files[name]
        elif how == "link":
            files[name] = {"link": draw(st.sampled_from([*OUTSIDE, "loop"]))}
        elif how == "folder":
            files[name] = None
        else:
            files[name] = draw(damaged(content))
    return files
