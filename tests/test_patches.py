"""Changes to other libraries end with their block, and their names exist in the installed versions."""

import ast
import importlib
import inspect
import os
import re
from pathlib import Path

import pytest
from soren_align.core.patches import PATCHES, PRIVATE, hub_offline, patched
from transformers import Trainer
from trl import DPOTrainer, KTOTrainer, SFTTrainer


@pytest.mark.parametrize("name", PATCHES)
def test_each_name_is_there_and_has_its_thread_and_its_end(name):
    module, _, attribute = name.rpartition(".")
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError:  # a class
        parent, _, name_of_class = module.rpartition(".")
        owner = getattr(importlib.import_module(parent), name_of_class)
    assert hasattr(owner, attribute)
    patch = PATCHES[name]
    assert patch.issue == "no issue found" or patch.issue.startswith("https://github.com/")
    assert patch.reason
    assert patch.until


TRAINING = sorted((Path(__file__).resolve().parent.parent / "soren_align/training").rglob("*.py"))


def private_names(files, source):
    """Names with one underscore that files read or define, and that the trainers of `source` have: self._x, def _x."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return {name for name in names if re.match("_[a-z]", name) and re.search(rf"(self\.|def ){name}\b", source)}


def test_every_private_name_of_the_trainers_has_its_reason_and_exists(tmp_path):
    source = "".join(inspect.getsource(trainer) for trainer in (Trainer, SFTTrainer, DPOTrainer, KTOTrainer))
    assert private_names(TRAINING, source) == {name.rpartition(".")[2] for name in PRIVATE}
    for name in PRIVATE:
        module, trainer, attribute = name.split(".")
        own = inspect.getsource(getattr(importlib.import_module(module), trainer))
        assert re.search(rf"self\.{attribute} = |def {attribute}\(", own), name
    (tmp_path / "planted.py").write_text("def f(trainer):\n    return trainer._signature_columns, trainer._own\n")
    assert private_names([tmp_path / "planted.py"], source) == {"_signature_columns"}


def test_a_change_ends_with_its_block_also_after_an_error():
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    with patched("huggingface_hub.constants.HF_HUB_OFFLINE", "changed") as original:
        assert (original, constants.HF_HUB_OFFLINE) == (before, "changed")
    assert constants.HF_HUB_OFFLINE is before

    def fail():
        with patched("huggingface_hub.constants.HF_HUB_OFFLINE", "changed"):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert constants.HF_HUB_OFFLINE is before
    with hub_offline():
        assert constants.HF_HUB_OFFLINE is True


def test_a_name_without_a_reason_is_not_changed():
    with pytest.raises(AssertionError, match=r"os\.getcwd has no entry"), patched("os.getcwd", None):
        pass
    assert callable(os.getcwd)
