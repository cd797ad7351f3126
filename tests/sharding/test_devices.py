"""Steps of optimizers whose parameters are on a GPU: no kernel and no collective gets a tensor of the CPU."""

import pytest
from tests.support import fake_gpu_jobs as gpu_jobs
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two ranks of their own: a device from outside stays in a process."""
    started = RankPool(2, tmp_path_factory.mktemp("gpu"))
    yield started
    started.stop()


@pytest.mark.parametrize(("name", "compensation", "lr"), [
    ("Soren", "none", "float"), ("Soren", "kahan", "on the GPU"), ("Muon", "none", "on the CPU"),
    ("HTMuon", "none", "float"), ("AdamW", "kahan", "float"), ("AdamW", "none", "on the GPU"),
])  # fmt: skip
def test_a_step_of_one_process_has_the_bits_of_one_on_the_cpu(pair, name, compensation, lr):
    assert pair.run(gpu_jobs.one_process, name, compensation, lr) == [True, True]


@pytest.mark.parametrize("name", ["Soren", "AdamW"])
def test_replicas_step_in_a_group_of_nccl_alone(pair, name):
    assert pair.run(gpu_jobs.replicas, name) == [True, True]


STEPS = {
    "Soren": ("Soren", {}), "Soren 0.01": ("Soren", {"map": {"name": "minimax", "resolution": 0.01}}),
    "Soren sns": ("Soren", {"map": "sns"}), "Soren released": ("Soren", {"map": "released"}),
    "Soren measured RMS": ("Soren", {"adjust_lr_fn": "match_rms_measured"}),
    "Soren one by one": ("Soren", {"workspace_mb": 0}), "tensor lr": ("Soren", {"tensor_lr": True}),
    "Muon": ("Muon", {"tensor_lr": True}),
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
def test_the_host_reads_once_in_a_step_on_252_matrices(pair, step):
    name, settings = STEPS[step]
    assert pair.run(gpu_jobs.reads, name, settings, 0.02, False) == [["tolist"]] * 2


@pytest.mark.parametrize("name", ["Soren", "Muon"])
def test_the_host_reads_once_in_a_step_of_replicas(pair, name):
    assert pair.run(gpu_jobs.reads, name, {}, 0.02, True) == [["tolist"]] * 2


def test_a_norm_out_of_range_is_read_by_the_map(pair):
    """So the count above can rise."""
    (reads, _) = pair.run(gpu_jobs.reads, "Soren", {}, 0.02, False, 30.0)
    assert len(reads) > 1


def test_an_error_before_the_first_matrix_is_agreed_on_where_the_parameters_are(pair):
    assert pair.run(gpu_jobs.early_error) == ["another rank has", "a rank's own"]


@pytest.mark.parametrize("offload", [False, True])
def test_flat_shards_step_in_a_group_of_nccl_alone(pair, offload):
    assert pair.run(gpu_jobs.flat_shards, offload) == [True, True]


def test_the_fused_kernel_of_adamw_gets_steps_that_are_on_the_device(pair):
    assert pair.run(gpu_jobs.fused) == [True, True]


def test_measuring_a_run_mixes_no_devices(pair):
    for there, here in pair.run(gpu_jobs.measured):
        assert there[0] == pytest.approx(here[0], rel=1e-12)  # of sums of float64 numbers
        assert there[1:] == here[1:]


def test_the_device_refuses_what_cuda_and_nccl_refuse(pair):
    for refused in pair.run(gpu_jobs.refusals):
        assert all(refused.values()), refused


def test_replicas_that_do_not_know_their_device_fail_here(pair):
    """As they were: on the CPU until a matrix with a gradient is seen."""
    assert pair.run(gpu_jobs.replicas, "AdamW", True) == ["a group of NCCL alone"] * 2
