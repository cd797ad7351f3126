"""`soren-align doctor`: it passes on a healthy machine, and each planted fault makes one line fail, by its name."""

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import time
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from soren_align.doctor import interruptions, maps, ranks, run, system, times, trainings
from soren_align.doctor.checks import CHECKS
from soren_align.doctor.findings import Finding, Machine
from soren_align.spectral import MAPS
from tests.support import command

LN2 = 0.693147


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path, 2, quick=True, num_gpus=0)


def failures(findings):
    return {finding.check: finding.reason for finding in findings if finding.verdict == "FAILED"}


def plant(monkeypatch, name, change):
    """Replace a map by change(its function) in the registry."""
    changed = dataclasses.replace(MAPS[name], function=change(MAPS[name].function))
    monkeypatch.setitem(MAPS, name, changed)


@pytest.mark.process
@pytest.mark.rest
def test_doctor_passes_on_a_healthy_machine(tmp_path):
    done = command.run_process("doctor", "--processes", 2, "--output", tmp_path, timeout=900, is_fork=False)
    lines = json.loads((tmp_path / "doctor.json").read_text())["findings"]
    assert failures(Finding(**line) for line in lines) == {}
    assert done.returncode == 0
    names = {line["check"] for line in lines if line["verdict"] == "ok"}
    expected = {"libraries", "flock", "gloo all_reduce, 2 processes", "map minimax", "parity zero2, 2 processes"}
    expected |= {"DPO's first step", "time muon bfloat16"}
    expected |= {"parity ddp, 2 processes", "parity zero3, 2 processes", "SIGTERM", "resume"}
    assert expected <= names
    assert not (tmp_path / "runs").exists()


@pytest.mark.process
def test_a_check_that_hangs_is_a_failure_and_no_stop(machine):
    begin = time.monotonic()
    (finding,) = run.run_check("libraries", machine, 0.2)
    assert finding.verdict == "FAILED"
    assert "had not ended after 0 s" in finding.reason
    assert time.monotonic() - begin < 60


@pytest.mark.process
def test_an_exception_in_a_check_is_a_failure_with_its_sentence(machine):
    (finding,) = run.run_check("no check", machine, 60)
    assert finding.verdict == "FAILED"
    assert "KeyError" in finding.reason


@pytest.mark.parametrize("verdict", ["ok", "FAILED", "skipped"])
def test_the_exit_code_is_1_if_a_line_failed(tmp_path, monkeypatch, verdict):
    findings = {name: [Finding(name, "1", "2", verdict if name == "maps" else "ok")] for name in CHECKS}
    monkeypatch.setattr(run, "run_check", lambda name, machine, seconds: findings[name])
    done = command.run("doctor", "--quick", "--output", tmp_path / "new")
    assert done.returncode == (verdict == "FAILED")
    for name, check in CHECKS.items():
        assert (name in done.stdout) == bool(check.quick_seconds or "--quick leaves it out" in done.stderr)


def test_a_wrong_version_is_named(machine, monkeypatch):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.15.0" if name == "trl" else real(name))
    reason = failures(system.libraries(machine))["libraries"]
    assert "trl is 1.15.0, but soren-align needs <1.17,>=1.16" in reason


def test_a_gpu_that_torch_cannot_use_is_named(machine, monkeypatch):
    monkeypatch.setattr(system, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "torch cannot use it" in failures(system.libraries(machine))["torch"]


@pytest.mark.process
def test_a_healthy_file_system_passes(machine):
    assert failures(system.file_system(machine)) == {}
    assert not list(machine.folder.iterdir())


def refused_fsync(descriptor):
    raise OSError(38, "Function not implemented")


def copied(source, target):
    with open(target, "w") as stream:
        time.sleep(0.01)
        stream.write(source.read_text())


FAULTS = {
    "flock": (fcntl, "flock", lambda *_: None, "two processes hold the same lock"),
    "fsync": (os, "fsync", refused_fsync, "fsync fails (Function not implemented)"),
    "atomic rename": (os, "replace", copied, "half-written file (0 characters)"),
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


@pytest.mark.parametrize("name", ["all_reduce", "all_to_all"])
def test_a_wrong_collective_is_named(tmp_path, monkeypatch, name):
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for key, value in {**environment, "ACCELERATE_USE_CPU": "true"}.items():
        monkeypatch.setenv(key, value)
    collective = {"all_reduce": "all_reduce", "all_to_all": "all_to_all_single"}[name]
    real = getattr(dist, collective)

    def wrong(received, *arguments):
        real(received, *arguments)
        received[-1] += 1

    monkeypatch.setattr(dist, collective, wrong)
    ranks.main(["cpu", str(tmp_path / "results")])
    results = json.loads((tmp_path / "results").read_text())
    reasons = failures(ranks.judged_results("gloo", "cpu", 2, results))
    assert [*reasons] == [f"gloo {name}, 2 processes"]
    assert f"{name} of gloo returns wrong sums or elements" in next(iter(reasons.values()))


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


def test_a_map_that_is_wrong_in_float32_alone_is_named(machine, monkeypatch):
    def scaled(function):
        return lambda x, **s: (function(x, **s)[0] * (1.02 if x.dtype == torch.float32 else 1), 0)

    plant(monkeypatch, "sns", scaled)
    reasons = failures(maps.maps(machine))
    assert [*reasons] == ["map sns"]
    assert "float32 is 0.02 from float64, and the limit is 0.001" in reasons["map sns"]


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


def test_a_nan_that_reaches_another_matrix_is_named(monkeypatch):
    plant(monkeypatch, "sns", lambda function: lambda x, **s: (function(x, **s)[0] + x.sum(), 0))
    (reason,) = failures([maps.nan_stays(torch.device("cpu"))]).values()
    assert "does not stay in it under sns (float32), sns (bfloat16)" in reason


@pytest.mark.parametrize("slow", [None, "sns float32"])
def test_a_slow_map_is_named(machine, monkeypatch, slow):
    def interleaved(subjects, make_argument, device, seconds):
        return {name: 10.0 if name == slow else 1e-3 for name in subjects}

    monkeypatch.setattr(times, "interleaved", interleaved)
    monkeypatch.setattr(times, "matmul_rates", lambda device: {"float32": 1e12, "bfloat16": 1e12})
    reasons = failures(times.times(machine))
    assert [*reasons] == [f"time {slow}"] * bool(slow)
    assert not slow or "the map sns in float32 takes 3e+04 ms" in reasons[f"time {slow}"]


@pytest.fixture
def stub(monkeypatch, machine):
    """stub(changes) replaces trainings: each run has a model of two numbers, with changes[its name] added."""

    def install(changes=None, **logs):
        def train(machine, name, *settings, processes=1, task="sft"):
            folder = trainings.folder_of(machine, name)
            (folder / "model").mkdir(parents=True)
            weight = torch.ones(2) + torch.tensor((changes or {}).get(name, [0.0, 0.0]))
            save_file({"weight": weight}, folder / "model" / "model.safetensors")
            (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, **logs}) + "\n")
            return folder

        for module in (trainings, interruptions):
            monkeypatch.setattr(module, "train", train)

    return install


@pytest.mark.parametrize("change", [1e-6, 1e-5])
def test_a_strategy_that_drops_a_shard_is_named(machine, stub, change):
    stub({"zero3-2": [-1.0, 0.0], "ddp-2": [0.0, change]})
    reasons = failures(trainings.parity(dataclasses.replace(machine, quick=False)))
    assert [*reasons] == [*["parity ddp, 2 processes"] * (change > 2e-6), "parity zero3, 2 processes"]
    assert "zero3 on 2 processes takes other steps than one process: a weight differs by 1 " in [*reasons.values()][-1]


def test_a_training_that_fails_is_named_and_the_others_are_checked(machine, stub, monkeypatch):
    stub()
    real = trainings.train

    def train(machine, name, *settings, **options):
        if name == "zero1-2":
            raise trainings.TrainingError("exit code 1: rank 1 was killed by SIGABRT")
        return real(machine, name, *settings, **options)

    monkeypatch.setattr(trainings, "train", train)
    findings = [*trainings.parity(dataclasses.replace(machine, quick=False))]
    assert "zero1 ends with exit code 1: rank 1 was killed" in failures(findings)["parity zero1, 2 processes"]
    assert len([finding for finding in findings if finding.verdict == "ok"]) == 4


@pytest.mark.parametrize(("loss", "reward"), [(LN2, 1e-6), (0.6913, 0.0), (LN2, 0.0999)])
def test_another_reference_of_dpo_is_named(machine, stub, loss, reward):
    stub(loss=loss, **{"rewards/chosen": reward, "rewards/rejected": 0.0})
    reasons = failures(trainings.dpo(machine))
    is_right, reason = (loss, reward) == (LN2, 1e-6), f"first loss is {loss:.4f}, and its rewards are {reward:.2g}"
    assert [*reasons] == ["DPO's first step"] * (not is_right)
    assert is_right or f"DPO's {reason}" in reasons["DPO's first step"]


@pytest.mark.parametrize(("peak", "is_right"), [(3.3e9, True), (2.7e9, True), (6.0e9, False), (1.5e9, False)])
def test_twice_the_planned_memory_is_named(machine, monkeypatch, peak, is_right):
    plan = {"processes": {"memory_total": {"device": {"training": 3.0e9, "export": 1.0e9}}}}
    (machine.folder / "run.json").write_text(json.dumps({"training": {"peak_memory_bytes": peak}}))
    monkeypatch.setattr(trainings, "planned_and_trained", lambda *_: (plan, machine.folder))
    reasons = failures(trainings.memory(dataclasses.replace(machine, num_gpus=1)))
    assert [*reasons] == ["memory"] * (not is_right)
    assert is_right or f"is {peak / 1e9:.2f} GB, and plan predicts 3.00 GB" in reasons["memory"]


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA L40S", "Tesla T4"])
def test_a_quarter_of_the_planned_speed_is_named(machine, monkeypatch, device):
    compute = {"training_tokens": 7_200_000, "hours": {"H100": 0.01, "A100": 0.1, "L40S": 0.02}}
    machine = dataclasses.replace(machine, num_gpus=1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    monkeypatch.setattr(trainings, "planned_and_trained", lambda *_: ({"compute": compute}, machine.folder))
    planned = {"H": 200_000, "L": 100_000}.get(device.removeprefix("NVIDIA ")[0])
    if planned is None:
        (finding,) = trainings.speed(machine)
        assert (finding.verdict, finding.reason) == ("skipped", "plan has no data sheet of Tesla T4")
        return
    for share in (0.26, 0.24):  # the first step, which compiles, does not count
        logs = [{"step": 1, "tokens_per_second": 1.0}, {"step": 2, "tokens_per_second": share * planned}]
        (machine.folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, logs)))
        reasons = failures(trainings.speed(machine))
        assert [*reasons] == ["speed"] * (share < 0.25)
    assert f"reaches {0.24 * planned:,.0f} tokens per second, and plan assumes {planned:,}" in reasons["speed"]


@pytest.mark.process
@pytest.mark.rest
def test_the_speed_is_that_of_full_sequences(machine, monkeypatch):
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = trainings.MODEL_CONFIG | small | {"num_key_value_heads": 2}
    monkeypatch.setattr(trainings, "MODEL_CONFIG", config)
    settings = ("trainer.bf16=false", "trainer.use_cpu=true", "trainer.max_steps=2", "trainer.logging_steps=1")
    plan, training = trainings.planned_and_trained(machine, "speed", *settings, *trainings.PACKED)
    assert plan["compute"]["training_tokens"] == 2 * 32 * 512
    logs = [json.loads(line) for line in (training / "metrics.jsonl").read_text().splitlines()]
    tokens = [log["num_tokens"] for log in logs if "loss" in log]
    assert tokens[-1] > 0.9 * 2 * 32 * 512
    assert any(log.get("tokens_per_second", 0) > 0 for log in logs)


ENDINGS = {signal.SIGKILL: (1, 2.0, "rank 1 was killed by SIGKILL"), signal.SIGTERM: (130, 2.0, "stopped")}


@pytest.mark.parametrize(("endings", "change", "line", "sentence"), [
    ({}, 0.0, None, ""),
    ({}, 1e-3, "resume", "has other weights: 0.001 from an undisturbed run's"),
    ({signal.SIGKILL: (-9, 120.0, "waiting")}, 0.0, "kill -9 of a rank", "exit code -9 after 120 s"),
    ({signal.SIGTERM: (1, 2.0, "Traceback")}, 0.0, "SIGTERM", "exit code 1 after 2 s: Traceback"),
], ids=["healthy", "other weights", "hangs after a kill", "no stop"])  # fmt: skip
def test_a_wrong_ending_is_named(machine, stub, monkeypatch, endings, change, line, sentence):
    results = iter({**ENDINGS, **endings}.values())
    stub({"interrupted": [0.0, change]})
    monkeypatch.setattr(interruptions, "_interrupt", lambda *_: next(results))
    monkeypatch.setattr(interruptions, "newest_step", lambda run: 4)

    monkeypatch.setattr(interruptions, "checked_output", lambda *_: interruptions.train(machine, "interrupted"))
    reasons = failures(interruptions.interruptions(machine))
    assert [*reasons] == [line] * bool(line)
    assert not line or sentence in reasons[line]
