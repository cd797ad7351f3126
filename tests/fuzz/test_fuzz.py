"""Any input is accepted or refused in one sentence: exit code 0 or 2, no traceback, nothing written elsewhere.

A sample runs in `make test-rest`; `make fuzz SEED=7` tries a hundred times as many. Hypothesis prints the smallest input
that fails, and a line that tries it again.
"""

import contextlib
import copy
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from unittest import mock

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from soren_align import data, recipe
from soren_align.cli import app
from soren_align.core import shipped
from soren_align.core.errors import UserError
from tests.fuzz import strategies
from transformers import AutoTokenizer

pytestmark = [pytest.mark.rest, pytest.mark.filterwarnings("ignore")]  # of YAML that was changed
CANARY = {"victim.txt": "keep me", "run.json": '{"results": "of another program"}', "deep/photo.png": "a picture"}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
THOROUGH = "FUZZ" in os.environ
"""Whether `make fuzz` runs: many examples, of the seed that --hypothesis-seed names."""


def tried(number):
    """Try so many examples, always the same ones; a hundred times as many in `make fuzz`."""
    return settings(
        max_examples=number * (100 if THOROUGH else 1), deadline=None, derandomize=not THOROUGH, database=None,
        print_blob=True, suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@contextlib.contextmanager
def box(files):
    """Make `files` the working directory; at the end, nothing beside it has changed."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        for place, content in CANARY.items():
            (root / "outside" / place).parent.mkdir(parents=True, exist_ok=True)
            (root / "outside" / place).write_text(content)
        (root / "work").mkdir()
        for place, content in files.items():
            path = root / "work" / place
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content.replace(b"@ROOT@", bytes(root)))
            elif content:
                path.symlink_to(content["link"].replace("@ROOT@", str(root)))
            else:
                path.mkdir()
        own = {"HOME": str(root / "home"), "SOREN_ALIGN_CACHE": str(root / "cache")}
        examples = mock.patch.object(datasets.config, "HF_DATASETS_CACHE", root / "cache")
        with mock.patch.dict(os.environ, own), examples, contextlib.chdir(root / "work"):
            yield
        found = {path.relative_to(root / "outside") for path in (root / "outside").rglob("*") if path.is_file()}
        assert {str(path): (root / "outside" / path).read_text() for path in found} == CANARY
        assert {path.name for path in root.iterdir()} <= {"work", "outside", "cache"}


@contextlib.contextmanager
def refusals():
    """Allow a UserError that is short and plain, and no other exception."""
    text = "accepted"
    try:
        yield
    except UserError as error:
        text = str(error)
    assert 0 < len(text) < 60_000
    assert not CONTROL.search(text)


def command(capfd, *words):
    """Run a command: it succeeds, or is refused, in plain text."""
    code = app.main(list(words))
    output = "".join(capfd.readouterr())
    assert code in (0, 2), (code, output)
    assert "Traceback" not in output
    assert not CONTROL.search(output)
    assert len(output) < 60_000


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(shipped.ROOT / "recipes/quickstart/base")


@tried(25)
@given(strategies.recipes(), st.sampled_from([None, None, "sft"]))
def test_a_recipe(content, task):
    with box({"recipe.yaml": content, "loop": {"link": "loop"}}), refusals():
        loaded = recipe.load("recipe.yaml", task=task)
        again = recipe.load_text(recipe.to_yaml(loaded))
        assert repr(again.model_dump()) == repr(loaded.model_dump())  # nan equals nan


@tried(25)
@given(st.sampled_from(strategies.recipe_names()), strategies.overrides())
def test_an_override(name, texts):
    with box({}), refusals():
        recipe.load(name, texts)


@tried(30)
@given(strategies.data_files(), st.sampled_from(["refuse", "drop"]), st.booleans())
def test_a_data_file(file, bad_examples, only_assistant):
    task, name, content, template = file
    with box({name: content, **({"own.jinja": template.encode()} if template else {})}), refusals():
        split = recipe.DataSplit.model_validate({"path": name, "bad_examples": bad_examples})
        loaded = data.load_split(split, task)
        own = copy.deepcopy(tokenizer())
        data.set_template(own, "own.jinja" if template else None, None)
        data.check_template(own, task, only_assistant, loaded.dataset)
        stats = data.dataset_stats(loaded.dataset, task, own, max_length=64, assistant_only_loss=only_assistant)
        if stats.num_kept:
            data.show_example(stats)


COMMANDS = [["show", "run"], ["show", "run", "--full"], ["merge", "run"], ["plan", "run/recipe.yaml"],
            ["recipes", "copy", "run/recipe.yaml", "copy.yaml"], ["import", "run/recipe.yaml", "imported.yaml"],
            ["eval", "run"], ["stats", "run/eval/quickstart"]]  # fmt: skip


@tried(8)
@given(strategies.folders(strategies.whole_run()), st.sampled_from(COMMANDS))
def test_a_run_folder(capfd, files, words):
    with box({**files, "loop": {"link": "loop"}}):
        command(capfd, *words)
