"""`export optimizer`: a file of plain torch, whose steps have the package's bits on one process."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from soren_align import Muon, Soren
from soren_align.core import shipped
from soren_align.optim import one_file
from tests.support import command

SHAPES = [(8, 32), (48, 20), (64, 64), (100, 7), (33, 129)]
TRAINING = """
def train(optimizer_class, dtype, limit, nesterov, shapes, **settings):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    optimizer = optimizer_class(weights, lr=1e-2, nesterov=nesterov, **settings)
    for _ in range(20):
        for weight in weights:
            weight.grad = 3 * torch.randn(weight.shape).to(dtype)
        if limit:
            torch.nn.utils.clip_grad_norm_(weights, limit)
        optimizer.step()
    return [weight.detach() for weight in weights]
"""
exec(TRAINING)  # here, and in a process without the package
ALONE = f"""
import sys
sys.modules["soren_align"] = None
import torch
import soren
torch.set_num_threads({{threads}})
{TRAINING}
torch.save([train(getattr(soren, name), getattr(torch, dtype), limit, nesterov, {SHAPES}, max_grad_norm=limit)
            for name, dtype, limit, nesterov in {{cases}}], "weights.pt")
"""
CASES = [(name, dtype, limit, nesterov) for name in ("Soren", "Muon") for dtype in ("float32", "bfloat16", "float64")
         for limit in (1.0, None) for nesterov in (True, False)]  # fmt: skip


@pytest.mark.process
def test_the_file_takes_the_packages_steps_without_the_package(tmp_path):
    text = command.run("export", "optimizer", cwd=tmp_path, code=0).stdout
    assert len(text.splitlines()) <= 250
    (tmp_path / "soren.py").write_text(text)
    code = ALONE.format(cases=CASES, threads=torch.get_num_threads())
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    for case, alone in zip(CASES, torch.load(tmp_path / "weights.pt"), strict=True):
        name, dtype, limit, nesterov = case
        settings = {"momentum": 0.95, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_measured"}
        ours = globals()["train"]({"Soren": Soren, "Muon": Muon}[name], getattr(torch, dtype), limit, nesterov, SHAPES,
                                  **settings)  # fmt: skip
        assert all(map(torch.equal, alone, ours)), case


@pytest.mark.process
def test_the_example_trains_with_the_file(tmp_path):
    (tmp_path / "soren.py").write_text(Path(one_file.__file__).read_text())
    shutil.copy(shipped.ROOT / "recipes/one-file/train.py", tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 40)
    done = subprocess.run([sys.executable, "train.py", "text.txt", "20"], cwd=tmp_path, capture_output=True, text=True)
    first, last = (float(line.split()[-1]) for line in done.stdout.splitlines())
    assert last < first - 1, done.stderr


def test_a_closure_and_a_weight_without_gradient():
    weight, idle = (torch.nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    optimizer = one_file.Soren([weight, idle], lr=0.1, max_grad_norm=None)

    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 12
    assert weight.square().sum() < 12
    assert torch.equal(idle, torch.ones(3, 4))
