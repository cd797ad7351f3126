"""Two random models on disk, with the quickstart's tokenizer: nothing learned, everything there."""

import shutil

import pytest
import torch
from soren_align.core import shipped
from tests.support.benchmark_data import write_datasets
from tests.support.edited_files import replace
from tests.support.tiny_models import make_model, make_reader, nudge


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


@pytest.fixture(scope="session")
def reader(readers):
    return readers[0]


@pytest.fixture
def own_suite(tmp_path):
    """The quickstart's suite with data of its own: its file, and the file of its questions."""
    suite = shutil.copytree(shipped.ROOT / "eval/quickstart", tmp_path / "suite") / "suite.yaml"
    data = shutil.copytree(shipped.ROOT / "recipes/quickstart/data", tmp_path / "data")
    replace(suite, "shipped:recipes/quickstart/data", str(data))
    (questions,) = (data / "zoo_questions").glob("*.jsonl")
    return suite, questions
