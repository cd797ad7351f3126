"""Changes to other libraries end with their block, and their names exist in the installed versions."""

import importlib
import os

import pytest
from soren_align.core.patches import OVERRIDDEN, PATCHES, hub_offline, patched
from soren_align.training.trainer import (
    ReferenceMixin,
    SorenDPOTrainer,
    SorenKTOTrainer,
    SorenPretrainer,
    SorenSFTTrainer,
    SorenTrainerMixin,
)
from transformers import Trainer
from trl import DPOTrainer, SFTTrainer


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


TRAINERS = (SorenTrainerMixin, ReferenceMixin, SorenSFTTrainer, SorenDPOTrainer, SorenKTOTrainer, SorenPretrainer)


def test_every_private_method_that_the_trainers_override_has_its_reason():
    overridden = set()
    for trainer in TRAINERS:
        for name in vars(trainer):
            is_private = name.startswith("_") and not name.startswith("__")
            if is_private and any(hasattr(library, name) for library in (Trainer, SFTTrainer, DPOTrainer)):
                overridden.add(name)
    assert overridden == {name.rpartition(".")[2] for name in OVERRIDDEN}
    for name in OVERRIDDEN:
        module, trainer, method = name.split(".")
        assert hasattr(getattr(importlib.import_module(module), trainer), method)


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
