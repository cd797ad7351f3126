"""Two random models on disk, with the quickstart's tokenizer: nothing learned, everything there."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from soren_align import shipped

from .fixtures import write_datasets
from .tiny import make_reader, nudge

BASE = shipped.ROOT / "recipes" / "quickstart" / "base"


def make_model(folder, seed):
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BASE)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [make_model(root / f"seed{seed}", seed) for seed in (0, 1)]


@pytest.fixture(scope="session")
def data_root(tmp_path_factory):
    return write_datasets(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def readers(tmp_path_factory):
    """Two models that read any text, the second a neighbour of the first."""
    root = tmp_path_factory.mktemp("readers")
    first = make_reader(root / "first")
    return [first, nudge(first, root / "second")]
