"""Ten steps of one process, which any number of ranks must take too."""

import functools
import json
import math
import re
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file
from soren_align.run.folder import RunFolder, read_metrics
from soren_align.spectral import iterate

from tests.support import trainer_jobs
from tests.support.tiny_run import TinyRun, spectra
from tests.support.trainer_jobs import GLOBAL, PARITY, without_bfloat16


def ranks_do(pool, job, folder):
    """The results of a job of trainer_jobs.py, one per rank."""
    return pool.run(trainer_jobs.run, job, folder, seconds=1800)


def weights(folder, name="model"):
    """What the run in `folder` ended with; name: adapter_model of an adapter."""
    return load_file(folder / "model" / f"{name}.safetensors")


def logged(run):
    """What every log of a resumed run repeats exactly."""
    exact = ("step", "loss", "learning_rate", "update_rms", "relative_change", "grad_norm", "num_out_of_range")
    exact += ("num_tokens",)
    return [{key: line[key] for key in exact} for line in read_metrics(run.metrics) if "loss" in line]


def assert_own_references(results):
    """What `trainer_jobs.references` returned on each rank: no log-probabilities of another model, or all stop."""
    (rewards, refusal), *others = results
    assert rewards == pytest.approx([0] * 4, abs=1e-5)  # beta times the rounding of 20 tokens
    assert refusal.startswith("step 1: the reference model is not the starting model")
    assert others == [(rewards, refusal)] * len(others)


def assert_resumed(folder, mode, ranks):
    """That the killed run of `trainer_jobs.resumed` has ended as the uninterrupted one, bit for bit; returns it."""
    whole, killed = RunFolder(folder / f"whole-{mode}"), RunFolder(folder / f"killed-{mode}")
    _assert_verified(whole, ranks)
    assert killed.read()["resumed_from_steps"] == [2]
    assert killed.read()["identity"] == whole.read()["identity"]
    assert _displacements(killed) == _displacements(whole)
    _assert_same_displacements(whole)
    assert furthest(weights(whole.path), weights(killed.path)) == 0
    assert logged(whole) == logged(killed)
    return killed


def _assert_verified(run, ranks):
    """That the ranks of `trainer_jobs.resumed` have hashed what they wrote, and together refused what was damaged."""
    sealed = json.loads((run.complete_checkpoints()[0] / "soren_align.json").read_text())["files"]
    first, second = (rank["hashed"] for rank in ranks)

    def without_steps(names):  # DeepSpeed's folders are named by the step, and the oldest checkpoint is removed
        return sorted(re.sub(r"global_step\d+", "global_step", name) for name in names)

    assert without_steps(first + second) == without_steps(sealed)
    assert "rng_state_1.pth" in second
    assert second == [name for name in second if re.search(r"rank_1_|__1_0\.distcp|rng_state_1\.pth", name)]
    assert not any(re.search(r"rank_1_|__1_0\.distcp", name) for name in first)
    for rank in ranks:
        message = r"/checkpoint-2: \S+: the content differs from what .*; remove this checkpoint's folder"
        assert re.search(message, rank["refusal"])


def _displacements(run):
    """{step: [kl_to_start, retention_loss]} of a run's evaluations."""
    lines = (line for line in read_metrics(run.metrics) if "kl_to_start" in line)
    return {line["step"]: [line["kl_to_start"], line["retention_loss"]] for line in lines}


def _assert_same_displacements(run):
    """Those of `trainer_jobs.resumed` on ranks, against one process."""
    measured, alone = _displacements(run), _displacements_of_one_process()
    assert [*measured] == [*alone] == [0, 2, 4, 6]
    for step, values in measured.items():
        # float32 sums in another order: the weights differ by 1e-7, their logits by 1e-5
        assert values == pytest.approx(alone[step], rel=1e-3, abs=1e-7)


@functools.cache
def _displacements_of_one_process():
    with tempfile.TemporaryDirectory() as folder:
        run = TinyRun(Path(folder) / "run", "sft", *GLOBAL, *trainer_jobs.DISPLACED)
        assert run.train()
        return _displacements(run.folder)


def furthest(a, b):
    return max(float((a[k] - b[k]).abs().max()) for k in a.keys() | b.keys())


def one_process(name, task, *overrides):
    """The weights after the ten steps."""
    return _ten_steps(name, task, *overrides)[0]


def assert_same_measurements(run, folder, logs):
    """The spectra in a run's folder and every rank's last log, against those of `run` in one process."""
    _, alone, records, _ = _ten_steps(*run)
    # float32 sums in another order: the weights of step 2 differ by 1e-7
    assert _furthest_spectra(records, spectra(folder)) < 1e-5
    for log in logs:
        assert log["map_error_matrix"] == 10  # one fixed matrix of the 14, by the step alone
        assert log["map_error"] == pytest.approx(alone["map_error"], rel=1e-3)
        for key in ("map_max_singular_value", "map_contrast", "map_cosine_to_muon", "map_cosine_to_momentum"):
            assert log[key] == pytest.approx(alone[key], rel=1e-3), key  # of the same matrices, each on its owner rank


def _furthest_spectra(a, b):
    """The largest difference of the singular values in two lists of records, relative to each matrix's largest.

    Infinite if the records are not of the same matrices.
    """
    if [(x["step"], x["name"], x["shape"]) for x in a] != [(x["step"], x["name"], x["shape"]) for x in b]:
        return math.inf
    pairs = [(x["singular_values"], y["singular_values"]) for x, y in zip(a, b, strict=True)]
    return max(abs(x - y) / one[0] for one, other in pairs for x, y in zip(one, other, strict=True))


def one_process_logs(name, task, *overrides):
    """The last step's log."""
    return _ten_steps(name, task, *overrides)[1]


def assert_same_perplexity(validations):
    """Those of the ranks after the ten steps of PRETRAINED, against one process."""
    name, task, overrides = trainer_jobs.PRETRAINED
    *_, alone = _ten_steps(name, task, *overrides)
    for validation in validations:
        assert validation["num_tokens"] == alone["num_tokens"]
        assert validation["perplexity"] == pytest.approx(alone["perplexity"], rel=2e-6)


@functools.cache
def _ten_steps(name, task, *overrides):
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(iterate, "newton_schulz", iterate.newton_schulz):
        without_bfloat16()
        run = TinyRun(Path(folder) / name, task, *PARITY, *GLOBAL, *overrides)
        trainer = run.trainer()
        trainer.train()
        validation = trainer.validation() if task == "pretrain" else None
        records = spectra(run.folder)
    assert trainer.args.gradient_accumulation_steps == 4
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    assert task == "dpo" or min(norms) > 1, "the clip must bind"
    return ({k: v.detach() for k, v in trainer.model.named_parameters()}, trainer.state.log_history[-2], records,
            validation)  # fmt: skip
