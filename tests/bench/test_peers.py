"""Other packages' maps are measured where they are installed; a note tells where they are not, or are broken."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from soren_align.bench import maps as peers

GRAM = "gram-newton-schulz"
GRAM_MODULE = """
made = []

class GramNewtonSchulz:
    def __init__(self):
        made.append(self)

    def __call__(self, x):
        return 3 * x
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Folder of two stand-ins: a DeepSpeed whose Muon doubles, and an empty gram_newton_schulz."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "gram_newton_schulz.py").write_text("")
    muon = ModuleType("deepspeed.runtime.zero.muon.original_muon")
    muon.zeropower_via_newtonschulz5 = lambda x, steps: 2 * x
    monkeypatch.setitem(sys.modules, muon.__name__, muon)
    monkeypatch.delitem(sys.modules, "gram_newton_schulz", raising=False)
    yield tmp_path
    sys.modules.pop("gram_newton_schulz", None)


def test_only_the_maps_of_an_older_deepspeed_are_measured(packages):
    maps, notes = peers.peers(torch.device("cpu"))
    assert [*maps] == ["DeepSpeed"]
    assert maps["DeepSpeed"](torch.ones(2)).tolist() == [2, 2]
    assert notes == [f"{GRAM} is left out, because its kernels need a GPU"]


def test_kernels_for_a_gpu_are_loaded_at_the_first_call(packages):
    (packages / "gram_newton_schulz.py").write_text(GRAM_MODULE)
    maps, notes = peers.peers(torch.device("cuda"))
    made = sys.modules["gram_newton_schulz"].made
    assert (made, notes) == ([], [])
    assert [maps[GRAM](torch.ones(1)).item() for _ in range(2)] == [3, 3]
    assert len(made) == 1


def test_a_package_that_cannot_be_imported_or_is_not_installed_makes_a_note(packages, monkeypatch, capsys):
    (packages / "gram_newton_schulz.py").write_text("print('loading')\nraise RuntimeError('needs CUDA 13')\n")
    maps, notes = peers.peers(torch.device("cuda"))
    assert GRAM not in maps
    assert notes == [f"{GRAM} is installed, but cannot be imported: RuntimeError: needs CUDA 13"]
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(peers.importlib, "util", SimpleNamespace(find_spec=lambda name: None))
    assert peers.peers(torch.device("cuda")) == ({}, ["deepspeed is not installed", f"{GRAM} is not installed"])
