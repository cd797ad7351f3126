"""A run folder is begun, gone on with or refused, never written over silently."""

import os
from pathlib import Path

import pytest
import torch
from soren_align import recipe
from soren_align.core import shipped
from soren_align.core.errors import ResumableError, UserError
from soren_align.launch import commands, environment
from soren_align.launch.preparation import prepare
from soren_align.recipe.model import estimated_parameters
from soren_align.run.folder import STOPPED, RunFolder
from soren_align.training import run as training
from soren_align.training import setup
from transformers import AutoConfig, AutoModelForCausalLM


@pytest.fixture
def make(tmp_path):
    run = tmp_path / "run"
    return lambda *overrides: (recipe.load("quickstart/sft", [f"run.output_dir={run}", *overrides]), RunFolder(run))


def begin(made, checkpoint=False, processes=1):
    recipe_, folder = made
    prepare(folder, recipe_, processes)
    if checkpoint:
        (folder.checkpoints / "checkpoint-5").mkdir(parents=True, exist_ok=True)
        (folder.checkpoints / "checkpoint-5" / "soren_align.json").write_text("{}")
    return folder


def test_a_new_folder_holds_the_resolved_recipe_and_a_manifest(make):
    folder = begin(make())
    assert recipe.load(str(folder.recipe)) == make()[0]
    run = folder.read()
    assert run["status"] == "training"
    assert run["versions"]["torch"]


def test_the_same_command_goes_on_and_another_recipe_is_refused_with_its_differences(make):
    begin(make(), checkpoint=True)
    begin(make("trainer.logging_steps=3"))
    with pytest.raises(UserError) as error:
        begin(make("optimizer.lr=0.5", "trainer.seed=9"))
    assert "optimizer.lr: 0.5 instead of 0.005" in str(error.value)
    assert "trainer.seed: 9 instead of 0" in str(error.value)


def test_a_finished_run_is_not_overwritten_unless_told(make):
    folder = begin(make())
    folder.update(status="finished")
    folder.evaluation("quickstart").mkdir(parents=True)
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="contains a finished run"):
        begin(make())
    begin(make("run.overwrite=true"))
    assert folder.read()["status"] == "training"
    assert (folder.path / "notes.txt").read_text() == "mine"


def test_without_a_checkpoint_there_is_nothing_to_protect(make):
    """A mistake found before the first checkpoint is mended, and the same folder is used again."""
    begin(make()).update(last_error="5 of 6 rows cannot be used")
    folder = begin(make("data.train.bad_examples=drop"))
    assert recipe.load(str(folder.recipe)).data.train.bad_examples == "drop"
    assert "last_error" not in folder.read()


@pytest.mark.model
def test_a_run_that_goes_on_has_no_failure_on_record(make, monkeypatch):
    """What the last failure was must not be read as that of the next one, such as that it resumes."""
    folder = begin(make("eval=null"), checkpoint=True)
    folder.record_failure(ResumableError("no room"))
    assert folder.read()["resumable"]
    monkeypatch.setattr(setup, "set_up_training", lambda *_: None)
    monkeypatch.setattr(training, "train", lambda *_: False)  # a signal stopped it
    assert commands.train_here(folder, 10.0) == 130
    assert {"diverged", "resumable", "defect"}.isdisjoint(folder.read())
    assert folder.read()["last_error"] == STOPPED


def test_a_run_finished_without_evaluation_can_be_evaluated(make):
    folder = begin(make("eval=null"))
    folder.update(status="finished")
    begin(make())
    assert folder.read()["status"] == "trained"


def test_a_rehearsed_evaluation_is_not_rehearsed_again(make):
    folder = begin(make("eval.limit=5"))
    folder.update(status="finished")
    folder.evaluation("quickstart-limit5").mkdir(parents=True)
    with pytest.raises(UserError, match="contains a finished run"):
        begin(make("eval.limit=5"))
    begin(make())  # the whole of it is still to be done
    assert folder.read()["status"] == "trained"


@pytest.mark.parametrize("suite", ["mine", "./evals/mine", "evals/mine/suite.yaml"])
def test_a_suite_has_one_name_however_it_is_given(suite):
    assert recipe.Eval(suite=suite).name == "mine"


def test_a_run_goes_on_only_on_as_many_processes(make):
    folder = begin(make(), checkpoint=True, processes=2)
    with pytest.raises(UserError, match=r"unfinished run of 2 processes, not of 1. Resume with --processes 2"):
        begin(make())
    begin(make(), processes=2)
    folder.update(status="trained")  # only the evaluation is missing, and that is one process's work
    begin(make())


@pytest.mark.parametrize(("changes", "message"), [
    ("run.global_batch_size=64", r"run.global_batch_size: 64 instead of None"),
    ("run.resume=never", r"unfinished run, and run.resume is never"),
], ids=["another global batch", "resume never"])  # fmt: skip
def test_an_unfinished_run_is_refused_with_other_settings(make, changes, message):
    begin(make(), checkpoint=True)
    with pytest.raises(UserError, match=message):
        begin(make(changes))


@pytest.mark.parametrize(("checkpoint", "message"), [
    (True, r"has no run.global_batch_size, so another number of processes would change"),
    (False, "has no unfinished run with a complete checkpoint"),
], ids=["a batch that depends on the number", "no checkpoint"])  # fmt: skip
def test_a_run_that_cannot_be_freed_from_its_number_of_processes_is_refused(make, checkpoint, message):
    folder = begin(make(), checkpoint)
    with pytest.raises(UserError, match=message):
        commands.reshard(str(folder))


def test_starting_weights_are_not_converted_to_another_number_of_processes(make):
    keys = "run.parallel=zero2", "run.global_batch_size=64", "optimizer.weight_decay_to=start"
    with pytest.raises(UserError, match=r"whose starting weights DeepSpeed.* converts to no other number"):
        commands.reshard(str(begin(make(*keys), True, processes=2)))


@pytest.mark.parametrize(
    ("start", "rank", "of"),
    [({}, None, None), ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, 1, 2),
     ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "3"}, 3, 4),
     ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None, None),  # the batch script, not yet a task of srun
     ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "RANK": "8", "WORLD_SIZE": "16"}, 8, 16),  # srun torchrun
    ],
    ids=["nobody", "torchrun", "srun", "sbatch", "srun torchrun"],
)  # fmt: skip
def test_who_launched_this_process_is_known_from_its_environment(monkeypatch, start, rank, of):
    launcher_words = [k for k in os.environ if k.startswith("SLURM") or k in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]
    for name in launcher_words:
        monkeypatch.delenv(name)
    for name, value in start.items():
        monkeypatch.setenv(name, value)
    found = environment.rank_from_environment()
    assert (found and found.rank, found and found.num_ranks) == (rank, of)
    if "SLURM_STEP_NUM_TASKS" in start:
        env = environment.launcher_environment()
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), str(of))
    assert not {"RANK", "WORLD_SIZE"} & environment.without_ranks(environment.launcher_environment()).keys()


def test_srun_on_several_machines_needs_a_meeting_place(monkeypatch):
    two = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    for name, value in two.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="set MASTER_ADDR"):
        environment.rank_from_environment()


@pytest.mark.parametrize(
    ("rows", "per_device", "processes", "steps"), [(64, 8, 1, 8), (64, 8, 2, 4), (96, 16, 3, 2), (None, 8, 4, 5)]
)
def test_accumulation_follows_from_the_global_batch(make, rows, per_device, processes, steps):
    batch = f"run.global_batch_size={rows}" if rows else "trainer.gradient_accumulation_steps=5"
    made, _ = make(batch, f"trainer.per_device_train_batch_size={per_device}")
    assert recipe.accumulation(made, processes) == steps
    assert recipe.global_batch(made, processes)[0] == (rows or 5 * per_device * processes)


@pytest.mark.parametrize(("rows", "processes", "message"), [
    (96, 1, r"96 is not a multiple of 64 .one process with .*; write .*per_device_train_batch_size: 48"),
    (64, 2, r"64 is not a multiple of 128 .2 processes with .*; write .*per_device_train_batch_size: 32"),
    (64, 3, r"choose a multiple of 3"),
])  # fmt: skip
def test_a_global_batch_that_cannot_be_dealt_is_refused_with_the_numbers(make, rows, processes, message):
    with pytest.raises(UserError, match=message):
        recipe.accumulation(make(f"run.global_batch_size={rows}")[0], processes)


def test_two_ways_to_say_the_batch_are_one_too_many(make):
    with pytest.raises(UserError, match="remove one of the two keys"):
        make("run.global_batch_size=64", "trainer.gradient_accumulation_steps=2")


def test_a_folder_of_something_else_is_left_alone(make, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    for overrides in ((), ("run.overwrite=true",)):
        with pytest.raises(UserError, match="is neither empty nor a run folder"):
            begin(make(*overrides))


@pytest.mark.parametrize(("model", "settings", "threads"), [
    ("shipped:configs/models/tiny", (), "1"), ("shipped:configs/models/tiny", ("run.num_threads=3",), "3"),
    ("shipped:configs/models/llama-60m", (), None), ("org/of-unknown-size", (), None),
])  # fmt: skip
def test_a_small_model_has_one_thread_on_a_cpu(make, monkeypatch, model, settings, threads):
    """And threads that wait sleep soon: beside other processes two that spin take 20 times as long."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    loaded = make("run.num_threads=null", *settings)[0]
    loaded = loaded.model_copy(update={"model": loaded.model.model_copy(update={"name_or_path": model})})
    env = environment.library_environment(loaded)
    assert (env.get("OMP_NUM_THREADS"), env["GOMP_SPINCOUNT"]) == (threads, str(environment.SPINS))
    on_gpu = loaded.model_copy(update={"trainer": {**loaded.trainer, "use_cpu": False}})
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    env = environment.library_environment(on_gpu)
    assert (env.get("OMP_NUM_THREADS"), env.get("GOMP_SPINCOUNT")) == ("3" if threads == "3" else None, None)
    for name, own in (("OMP_NUM_THREADS", "7"), ("GOMP_SPINCOUNT", "9"), ("OMP_WAIT_POLICY", "active")):
        monkeypatch.setenv(name, own)
        assert environment.library_environment(loaded)[name] == own
    monkeypatch.delenv("GOMP_SPINCOUNT")
    assert "GOMP_SPINCOUNT" not in environment.library_environment(loaded), "it would replace the user's policy"


@pytest.mark.parametrize("model", ["configs/models/tiny", "configs/models/llama-60m", "recipes/quickstart/base"])
def test_the_number_of_parameters_is_known_without_torch(model):
    with torch.device("meta"):
        exact = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shipped.ROOT / model)).num_parameters()
    assert estimated_parameters(f"shipped:{model}") == pytest.approx(exact, rel=0.01)
    assert estimated_parameters("org/of-unknown-size") is None


@pytest.mark.parametrize("has_driver", [True, False])
def test_deepspeed_is_kept_to_the_cpu_only_where_cuda_cannot_be(make, monkeypatch, has_driver):
    """WSL2 has CUDA's driver and no /dev/nvidia*."""

    def load(name):
        assert name == "libcuda.so.1"
        if not has_driver:
            raise OSError(f"{name}: cannot open shared object file")

    loaded = make()[0]
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    monkeypatch.setattr(environment.ctypes, "CDLL", load)
    assert environment.library_environment(loaded).get("DS_ACCELERATOR") == (None if has_driver else "cpu")


def test_another_number_of_processes_goes_on_only_from_a_checkpoint_for_any(make):
    folder = begin(make(), checkpoint=True)
    with pytest.raises(UserError, match=r"of 1 process, not of 3.*soren-align reshard"):
        begin(make(), processes=3)
    folder.update(processes=None)
    begin(make(), processes=3)
    assert folder.read()["processes"] == 3


@pytest.mark.parametrize(
    ("variable", "said"), [("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"), ("ACCELERATE_USE_FSDP", "FSDP")]
)
def test_accelerate_configured_for_something_else_is_refused(make, monkeypatch, variable, said):
    monkeypatch.setenv(variable, "true")
    with pytest.raises(UserError, match=f"accelerate is configured for {said}, but run.parallel is ddp"):
        commands.train(make()[0])


def test_one_process_of_zero_has_a_launcher_too(make, monkeypatch):
    started = []
    monkeypatch.setattr(commands, "_start_ranks", lambda folder, num_ranks, _: started.append(num_ranks) or 0)
    assert commands.train(make("run.parallel=zero2")[0]) == 0
    assert started == [1]


@pytest.mark.parametrize(("parallel", "is_rank"), [("ddp", False), ("zero2", True)])
def test_a_single_rank_of_a_launcher_trains_as_the_recipe_demands(make, monkeypatch, parallel, is_rank):
    # torchrun --nproc-per-node 1 with zero2 once trained without ZeRO.
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    ranks = []
    monkeypatch.setattr(commands, "train_here", lambda *_: ranks.append(os.environ.get("RANK")) or 0)
    assert commands.train(make(f"run.parallel={parallel}")[0]) == 0
    assert ranks == ["0" if is_rank else None]
