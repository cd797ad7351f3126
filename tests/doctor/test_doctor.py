"""`soren-align doctor`: it passes on a healthy machine, and each planted fault makes one line fail, by its name."""

import dataclasses
import fcntl
import json
import os
import shutil
import socket
import time
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from soren_align.doctor import maps, ranks, run, system
from soren_align.doctor.checks import CHECKS, Finding, Machine
from soren_align.sharding.capture import WAYS
from soren_align.spectral import MAPS
from tests.support import command
from torch.distributed.tensor import DTensor


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path, 2, num_gpus=0)


def failures(findings):
    return {finding.check: finding.reason for finding in findings if finding.verdict == "FAILED"}


def plant(monkeypatch, name, change):
    """Replace a map by change(its function) in the registry."""
    changed = dataclasses.replace(MAPS[name], function=change(MAPS[name].function))
    monkeypatch.setitem(MAPS, name, changed)


@pytest.mark.process
@pytest.mark.rest
def test_doctor_passes_on_a_healthy_machine(tmp_path):
    capture = tmp_path / "capture.json"
    options = ("--processes", 2, "--output", tmp_path, "--capture", capture)
    done = command.run_process("doctor", *options, timeout=900, is_fork=False)
    lines = json.loads((tmp_path / "doctor.json").read_text())["findings"]
    assert failures(Finding(**line) for line in lines) == {}
    assert done.returncode == 0
    names = {line["check"] for line in lines if line["verdict"] == "ok"}
    expected = {"libraries", "flock", "gloo all_reduce, 2 processes", "map minimax", "speed"}
    expected |= {"parity, gloo, 2 processes", "capture, gloo, 2 processes"}
    assert expected <= names
    text = capture.read_text()
    assert [*json.loads(text)] == ["torch", "deepspeed", "backend", "device", "bucket_mb", *WAYS]
    assert not any(private in text for private in ("/", socket.gethostname()))


@pytest.mark.process
def test_a_check_that_hangs_is_a_failure_and_no_stop(machine):
    begin = time.monotonic()
    (finding,) = run.run_check("libraries", machine, 0.2)
    assert finding.verdict == "FAILED"
    assert "had not ended after 0 s" in finding.reason
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("verdict", ["ok", "FAILED", "skipped"])
def test_the_exit_code_is_1_if_a_line_failed(tmp_path, monkeypatch, verdict):
    findings = {name: [Finding(name, "1", "2", verdict if name == "maps" else "ok")] for name in CHECKS}
    monkeypatch.setattr(run, "run_check", lambda name, machine, seconds: findings[name])
    assert "capture" not in command.run("doctor", "--output", tmp_path / "new").stdout
    done = command.run("doctor", "--output", tmp_path / "new", "--capture", "file.json")
    assert done.returncode == (verdict == "FAILED")
    assert all(name in done.stdout for name in CHECKS)


@pytest.mark.parametrize(("package", "ranges"), [("trl", "<1.17,>=1.15"), ("lm-eval", "<0.5,>=0.4.13")])
def test_a_wrong_version_is_named(machine, monkeypatch, package, ranges):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.3.0" if name == package else real(name))
    reason = failures(system.libraries(machine))["libraries"]
    assert f"{package} is 0.3.0, but soren-align needs {ranges}" in reason


@pytest.mark.process
def test_a_healthy_file_system_passes(machine):
    assert failures(system.file_system(machine)) == {}
    assert not list(machine.folder.iterdir())


def refused_fsync(descriptor):
    raise OSError(38, "Function not implemented")


FAULTS = {
    "flock": (fcntl, "flock", lambda *_: None, "flock has no effect, so that two commands could write one run"),
    "fsync": (os, "fsync", refused_fsync, "fsync fails (Function not implemented)"),
    "free space": (shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30), "1.00 GiB left"),
}


@pytest.mark.process
@pytest.mark.parametrize("check", FAULTS)
def test_a_fault_of_the_file_system_is_named(machine, monkeypatch, check):
    owner, name, fault, reason = FAULTS[check]
    monkeypatch.setattr(owner, name, fault)
    reasons = failures(system.file_system(machine))
    assert [*reasons] == [check]
    assert reason in reasons[check]


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """measured() -> what a rank without others writes."""
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for key, value in {**environment, "ACCELERATE_USE_CPU": "true"}.items():
        monkeypatch.setenv(key, value)

    def main():
        ranks.main(["cpu", str(tmp_path / "results")])
        return json.loads((tmp_path / "results").read_text())

    return main


@pytest.mark.parametrize("name", ["all_reduce", "all_to_all"])
def test_a_wrong_collective_is_named(measured, monkeypatch, name):
    collective = {"all_reduce": "all_reduce", "all_to_all": "all_to_all_single"}[name]
    real = getattr(dist, collective)

    def wrong(received, *arguments):
        real(received, *arguments)
        received[-1] += 1

    monkeypatch.setattr(dist, collective, wrong)
    reasons = failures(ranks.judged_results("gloo", "cpu", 2, measured()))
    assert [*reasons] == [f"gloo {name}, 2 processes"]
    assert f"{name} of gloo returns wrong sums or elements" in next(iter(reasons.values()))


def test_a_sharding_that_drops_a_shard_is_named(measured, monkeypatch):
    full_tensor = DTensor.full_tensor
    monkeypatch.setattr(
        DTensor, "full_tensor", lambda matrix: full_tensor(matrix) * (torch.arange(len(matrix)) > 0)[:, None]
    )
    reasons = failures(ranks.judged_results("gloo", "cpu", 2, measured()))
    assert [*reasons] == ["parity, gloo, 2 processes"]
    assert "10 steps with matrices sharded by gloo are others" in reasons["parity, gloo, 2 processes"]


def test_a_slow_network_is_named():
    results = {name: {"is_right": True, "bytes_per_second": 1e9} for name in ("all_reduce", "all_to_all")}
    reasons = failures(ranks.judged_results("gloo", "cpu", 2, {**results, "flag_seconds": 0.5}))
    assert [*reasons] == ["gloo latency"]
    assert "takes 500 ms" in reasons["gloo latency"]
    slow = [*failures(ranks.judged_results("NCCL", "cuda", 2, results))]
    assert slow == ["NCCL all_reduce, 2 processes", "NCCL all_to_all, 2 processes"]


def test_the_maps_of_this_machine_pass(machine):
    assert failures(maps.maps(machine)) == {}


def test_a_map_that_is_2_percent_off_is_named(machine, monkeypatch):
    def scaled(function):
        return lambda x, **settings: ((result := function(x, **settings))[0] * 1.02, result[1])

    plant(monkeypatch, "minimax", scaled)
    reason = failures(maps.maps(machine))["minimax's certificate"]
    assert "the map minimax in float32 is 2." in reason


def test_a_map_with_nan_or_an_error_is_named_and_the_others_are_checked(machine, monkeypatch):
    def failing(function):
        def fail(x, **settings):
            raise RuntimeError("no kernel image is available")

        return fail

    plant(monkeypatch, "soft_sign", lambda function: lambda x, **s: (function(x, **s)[0] + torch.nan, 0))
    plant(monkeypatch, "released", failing)
    monkeypatch.setattr(maps, "nan_stays", lambda device: Finding("NaN", "", ""))
    reasons = failures(maps.maps(machine))
    assert [*reasons] == ["map released", "map soft_sign"]
    assert "no kernel image" in reasons["map released"]


@pytest.mark.parametrize(("seconds", "is_slow"), [(1e-3, False), (1e3, True)])
def test_a_slow_map_is_named(machine, monkeypatch, seconds, is_slow):
    def timer(line, **_):
        median = 1e-3 if "factor" in line else seconds
        return SimpleNamespace(blocked_autorange=lambda: SimpleNamespace(median=median))

    monkeypatch.setattr("torch.utils.benchmark.Timer", timer)
    reasons = failures(maps.speed(machine))
    assert [*reasons] == ["speed"] * is_slow
    assert not is_slow or "the map takes 1e+06 ms" in reasons["speed"]
