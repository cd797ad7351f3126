"""A few steps of the quickstart, in this process or as one of several ranks."""

import io
import json
import os
import random
import shutil
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from soren_align import recipe
from soren_align.core.shipped import ROOT
from soren_align.launch.preparation import prepare
from soren_align.run.folder import RunFolder, read_seal
from soren_align.sharding.ranks import Ranks
from soren_align.training import build, checkpoints, run
from soren_align.training.lost_updates import LostUpdatesPolicy
from soren_align.training.setup import set_up_training
from soren_align.training.trained_optimizer import OptimizerCheck

SHORT = ("trainer.max_steps=6", "trainer.warmup_steps=2", "trainer.save_steps=2", "trainer.logging_steps=1")
SHORT += ("trainer.per_device_train_batch_size=8", "trainer.eval_strategy=no", "eval=null")


class TinyRun:
    """One run folder of a shortened quickstart recipe, or of the shipped recipe that `task` names; on several ranks,
    each has its TinyRun of the one folder."""

    def __init__(self, path, task="sft", *overrides, ranks=Ranks()):
        self.ranks = ranks
        where = [f"run.output_dir={path}"]
        if task in ("dpo", "kto") and not any(o.startswith("model.name") for o in overrides):
            where += ["model.name_or_path=shipped:recipes/quickstart/base", "model.init_seed=0"]
        if task == "pretrain":
            where += ["task=pretrain", "trainer.assistant_only_loss=false", f"data.train.path={texts(path.parent)}"]
        name = "sft" if task == "pretrain" else task
        name, short = (name, ()) if "/" in name else (f"quickstart/{name}", SHORT)
        self.recipe = recipe.load(name, [*short, *where, *overrides])
        self.folder = RunFolder(path)
        self.said = io.StringIO()
        self.console = Console(file=self.said, width=100)

    def prepare(self):
        with self.ranks.main_process_first():
            if self.ranks.is_first:
                prepare(self.folder, self.recipe, self.ranks.num_ranks)
            return set_up_training(self.recipe, self.folder, ranks=self.ranks)

    def train(self):
        return run.train(self.prepare(), self.folder, self.console, self.ranks)

    def metrics(self):
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]

    def losses(self):
        """The losses in metrics.jsonl, but for those of evaluations."""
        return [line["loss"] for line in self.metrics() if "loss" in line]

    def weights(self):
        """Those of the saved model, or of the saved adapter."""
        (file,) = self.folder.model.glob("*.safetensors")
        return load_file(file)

    def forget_the_end(self):
        """Leave the run as a kill after its last checkpoint but one does."""
        shutil.rmtree(self.folder.model)
        shutil.rmtree(self.folder.complete_checkpoints()[-1])
        self.folder.update(status="training")

    def trainer(self):
        policy = LostUpdatesPolicy("warn", lambda groups, warnings: None)
        return build.build_trainer(self.prepare(), self.folder, self.ranks, policy)


def texts(folder):
    """A file in `folder` with the quickstart's conversations as plain texts; on several ranks each may write it."""
    file = folder / "texts.jsonl"
    if not file.exists():
        chats = map(json.loads, (ROOT / "recipes/quickstart/data/chat_train.jsonl").read_text().splitlines())
        lines = [json.dumps({"text": " ".join(turn["content"] for turn in chat["messages"])}) for chat in chats]
        part = folder / f"texts.{os.getpid()}.part"
        part.write_text("\n".join(lines))
        part.rename(file)
    return file


def same(one, other):
    """Whether two models have the same weights, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_trained_alike(silent, measured):
    """Train two runs: they end with the same weights and the same random numbers to come."""
    ends = []
    for each in (silent, measured):
        assert each.train()
        ends.append((torch.rand(1).item(), random.random(), np.random.rand()))
    assert ends[0] == ends[1]
    assert same(silent.weights(), measured.weights())


class Kill(BaseException):
    """Ends a training as rudely as one process can."""


def die():
    raise Kill


@contextmanager
def after_step(number, act):
    """Within it, `act` is called once step `number` is complete: in the next one, when the optimizer has stepped."""
    original = OptimizerCheck.on_optimizer_step

    def acting(self, args, state, control, **kwargs):
        original(self, args, state, control, **kwargs)
        if state.global_step == number:
            act()

    with mock.patch.object(OptimizerCheck, "on_optimizer_step", acting):
        yield


def stop_after(run, step):
    """Train and die after `step`."""
    with after_step(step, die), pytest.raises(Kill):
        run().train()


def spectra(folder):
    """The records in a run's spectra.jsonl."""
    return [json.loads(line) for line in folder.spectra.read_text().splitlines() if line.endswith("}")]


def flip_bit(file):
    """Flip one bit in the middle of a file, as a defective disk does."""
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        (byte,) = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


def reseal(checkpoint):
    """Seal a checkpoint that has been changed, as a stranger could."""
    checkpoints.seal(checkpoint, read_seal(checkpoint)["origin"])


class Hostile:
    """Makes a folder where it is unpickled."""

    def __init__(self, made):
        self.made = str(made)

    def __reduce__(self):
        return os.mkdir, (self.made,)
