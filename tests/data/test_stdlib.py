"""python:stdlib: the standard library's text, the same on every run, split by names."""

import sysconfig

import pytest
from soren_align.data import load_split, open_stream
from soren_align.data.files import StandardLibrary, is_validation
from soren_align.recipe import TrainSplit
from tests.support.conversations import split

NAMES = [f"pack/module{i}.py" for i in range(60)]
VALIDATION = [name for name in NAMES if is_validation(name)]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library; returns its folder."""
    root = tmp_path / "lib"
    files = {name: f"x = {name!r}\n" for name in NAMES}
    files |= {"test/test_a.py": "left = 1", "pack/tests/b.py": "left = 2", "site-packages/c.py": "left = 3"}
    files |= {"blank.py": " \n", "pydoc_data/topics.py": "topics = {'assert': 'Assert a\\nthing', 'with': 'Manage'}\n"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    return root


def texts(part):
    return list(load_split(split("python:stdlib", part), "sft").dataset["text"])


def test_each_module_and_each_topic_is_one_example_of_one_split(library):
    assert 0 < len(VALIDATION) < 10
    both = texts("train") + texts("validation")
    assert sorted(both) == sorted([*(f"x = {name!r}\n" for name in NAMES), "Assert a\nthing", "Manage"])
    assert set(texts("validation")) >= {f"x = {name!r}\n" for name in VALIDATION}


def test_a_copy_of_a_training_module_is_not_in_validation(library):
    name = VALIDATION[0]
    trained = next(other for other in NAMES if other not in VALIDATION)
    (library / name).write_text((library / trained).read_text())
    assert f"x = {trained!r}\n" not in texts("validation")
    assert len(StandardLibrary.of_split("validation").files) == len(texts("validation"))


def test_a_stream_has_the_examples_of_a_pass(library):
    preview, _ = open_stream([TrainSplit(path="python:stdlib")], "sft", block_size=1000, seed=0)
    block = next(preview.stream.blocks(preview.stream.start))
    assert sorted(example["text"] for example in block.examples) == sorted(texts("train"))
    assert preview.source["sha256"] == load_split(split("python:stdlib"), "sft").source["sha256"]
