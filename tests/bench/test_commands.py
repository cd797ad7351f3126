"""`soren-align bench maps` and `bench step`, from the command line."""

import json

import pytest
import torch
from tests.support.command import imported, run


def test_maps_prints_json_alone_and_writes_the_page(tmp_path):
    options = ("--shapes", "16x16,8x24", "--device", "cpu", "--json", "--output", "page.md")
    done = run("bench", "maps", *options, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [shape["shape"] for shape in json.loads(done.stdout)["shapes"]] == [[16, 16], [8, 24]]
    assert f"torch {torch.__version__.partition('+')[0]}" in (tmp_path / "page.md").read_text()


def test_step_prints_tables_of_80_columns(tmp_path):
    done = run("bench", "step", "--shapes", "16x16,8x24", "--device", "cpu", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in done.stdout
    assert any(line.startswith("fused AdamW") and len(line.split()) == 10 for line in lines)
    assert any("thread" in line for line in lines)
    assert any(line.startswith("Python 3.") and "torch" in line for line in lines)


@pytest.mark.parametrize(("arguments", "message"), [
    (["maps", "--shapes", "qwen2.5-7b"], "did you mean 'qwen2.5-3b'?"),
    (["step", "--shapes", "0x5"], "write shapes with sides of at least 1"),
    (["maps", "--device", "cudaa"], "did you mean 'cuda'?"),
    (["maps", "--output", "nowhere/page.md"], "the folder of nowhere/page.md does not exist"),
    (["maps", "--output", "."], ". is a folder; write the path of a file, such as benchmarks.md"),
    (["step", "--tokens", "0"], "--tokens"),
])  # fmt: skip
def test_a_mistake_is_a_sentence_and_exit_code_2(tmp_path, arguments, message):
    refused = run("bench", *arguments, cwd=tmp_path, code=2)
    assert (message in refused.stderr, refused.stdout) == (True, "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_sentence(tmp_path):
    refused = run("bench", "maps", "--device", "cuda", cwd=tmp_path)
    message = "error: --device: found 'cuda', but torch finds no GPU on this machine; write cpu\n"
    assert (refused.returncode, refused.stderr) == (2, message)


@pytest.mark.process
def test_mistakes_are_seen_before_torch_loads():
    code = "from soren_align.cli.app import main; assert main(['bench', 'maps', '--shapes', '0x5']) == 2"
    assert not imported(code, ["torch"])
