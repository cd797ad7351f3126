"""What run.parallel names is found, completed and, where it does not go together with Soren, refused with a reason."""

import json

import pytest
from soren_align import recipe
from soren_align.core import shipped
from soren_align.core.errors import LostRankError, UserError, machine_failure
from soren_align.recipe import parallel
from soren_align.recipe.parallel import NAMES, gradient_notice

SHIPPED = sorted((shipped.ROOT / "configs" / "deepspeed").glob("*.json"))


def test_every_name_has_its_file_and_every_file_its_name():
    assert {f.stem for f in SHIPPED} == {name for name in NAMES if name.startswith("zero")}
    assert [parallel(name).stage for name in NAMES] == [0, 1, 2, 3, 2, 3, 0]
    assert [name for name in NAMES if parallel(name).offloads] == ["zero2-offload", "zero3-offload"]
    assert parallel("fsdp2").config["version"] == 2


@pytest.mark.parametrize("file", SHIPPED, ids=lambda f: f.stem)
def test_a_shipped_config_leaves_the_recipe_its_say(file):
    config = json.loads(file.read_text())
    assert "optimizer" not in config
    assert "scheduler" not in config
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert config["gradient_clipping"] == config["train_batch_size"] == config["bf16"]["enabled"] == "auto"
    assert parallel(file.stem).gradient_dtype("bfloat16") == "float32"
    # stage 1 would keep all of a float32 gradient on each rank
    assert (config.get("data_types") == {"grad_accum_dtype": "fp32"}) == (config["zero_optimization"]["stage"] > 1)


def test_a_config_of_ones_own_is_completed(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "sub_group_size": 1000}}))
    found = parallel(str(file))
    assert found.config["zero_optimization"]["sub_group_size"] == 1000
    assert found.config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
    assert found.config["zero_force_ds_cpu_optimizer"] is False
    assert found.config["gradient_accumulation_steps"] == "auto"


@pytest.mark.parametrize(("config", "precision", "dtype"), [
    ({}, "trainer.bf16=true", "bfloat16"), ({"communication_data_type": "bf16"}, "trainer.bf16=false", "bfloat16"),
    ({"communication_data_type": "fp32"}, "trainer.bf16=true", None), ({}, "trainer.bf16=false", None),
])  # fmt: skip
def test_a_config_that_averages_gradients_in_bfloat16_gets_a_notice(tmp_path, config, precision, dtype):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**zero(), **config}))
    mine = recipe.load("quickstart/sft", [f"run.parallel={file}", precision])
    notices = gradient_notice(mine.run.parallel, recipe.compute_dtype(mine))
    assert len(notices) == (dtype is not None)
    assert all(f"in {dtype}" in notice and '"communication_data_type": "fp32"' in notice for notice in notices)


def zero(**settings):
    return {"zero_optimization": {"stage": 2, **settings}}


@pytest.mark.parametrize(
    ("config", "message"),
    [({**zero(), "optimizer": {"type": "AdamW"}}, "optimizer: the recipe's optimizer section sets the optimizer"),
     ({**zero(), "scheduler": {"type": "WarmupLR"}}, "scheduler: trainer.lr_scheduler_type sets the schedule"),
     (zero(round_robin_gradients=True), "round_robin_gradients: is not supported, because .* universal checkpoints"),
     (zero(offload_optimizer={"device": "nvme"}), "offload_optimizer.device: nvme is not supported"),
     (zero(offload_param={"device": "nvme"}), "offload_param.device: nvme is not supported"),
     (zero(offload_optimizer={"device": "cpu", "ratio": 0.5}), "offload_optimizer.ratio: found 0.5, but only 1"),
     (zero(offload_optimizer={"device": "cpu", "super_offload": True}), "super_offload: is not supported"),
     (zero(zenflow={"topk_ratio": 0.1}), "zenflow: is not supported, because this key updates parameters"),
     (zero(mics_shard_size=2), "mics_shard_size: is not supported"),
     (zero(zero_hpz_partition_size=2), "zero_hpz_partition_size: is not supported"),
     ({**zero(offload_optimizer={"device": "cpu"}), "zero_force_ds_cpu_optimizer": True},
      "zero_force_ds_cpu_optimizer: DeepSpeed's CPU Adam would replace"),
     ({**zero(), "gradient_clipping": 0.5}, 'gradient_clipping: trainer.max_grad_norm sets this value; write "auto"'),
     ({**zero(), "bf16": {"enabled": True}}, 'bf16.enabled: trainer.bf16 sets this value; write "auto"'),
     ({**zero(), "communication_data_type": "float32"}, "communication_data_type: found 'float32'; write .fp32."),
     ({**zero(), "tensor_parallel": {"autotp_size": 2}}, "tensor_parallel: soren-align divides only data"),
     ({**zero(), "checkpoint": {"writer": {"decoupled": True}}}, "checkpoint.writer: a checkpoint would be sealed before"),
     ({**zero(), "datastates_ckpt": {"enabled": True}}, "datastates_ckpt: a checkpoint would be sealed before its files"),
     ({"zero_optimization": {"stage": 0}}, "stage: found 0; write 1, 2 or 3"),
     ({}, "stage: found None; write 1, 2 or 3")],
    ids=lambda value: None if isinstance(value, dict) else value.split(":")[0],
)  # fmt: skip
def test_what_does_not_go_together_with_soren_is_refused_before_torch_loads(tmp_path, config, message):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"--set run.parallel=.*mine.json: .*{message}"):
        recipe.load("quickstart/sft", [f"run.parallel={file}"])


@pytest.mark.parametrize("value", ["ddp", "zero3", "whole.yaml"])
def test_only_sharded_checkpoints_of_fsdp2_are_written_in_the_background(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    ours = (shipped.ROOT / "configs/accelerate/fsdp2.yaml").read_text()
    (tmp_path / "whole.yaml").write_text(ours.replace("SHARDED_STATE_DICT", "FULL_STATE_DICT"))
    (tmp_path / "mine.yaml").write_text(ours)
    settings = ["run.async_save=true", "trainer.use_cpu=false"]
    with pytest.raises(UserError, match=f"run.async_save: .* run.parallel is {value}; write run.parallel: fsdp2"):
        recipe.load("quickstart/sft", [*settings, f"run.parallel={value}"])
    for allowed in ("fsdp2", "mine.yaml"):
        assert recipe.load("quickstart/sft", [*settings, f"run.parallel={allowed}"]).run.async_save


def test_all_mistakes_of_a_config_are_told_at_once(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**zero(round_robin_gradients=True, zenflow={"a": 1}), "optimizer": {"type": "Adam"}}))
    with pytest.raises(UserError) as error:
        parallel(str(file))
    assert len(error.value.problems) == 3


@pytest.mark.parametrize(("value", "message"), [
    ("zero4", "did you mean 'zero3'"), ("ZERO3", "did you mean 'zero3'"), ("megatron", "write ddp, zero1"),
    ("missing.json", "neither a known name nor a file"),
    ("fsdp2", "would silently train with DDP under trainer.use_cpu"),
])  # fmt: skip
def test_an_unknown_name_is_refused_with_what_there_is(value, message):
    with pytest.raises(UserError, match=message):
        recipe.load("quickstart/sft", [f"run.parallel={value}"])


def test_files_that_are_no_configs_are_refused(tmp_path):
    for name, text, message in (
        ("a.json", "{", "cannot be read"),
        ("b.json", "[]", "is not a mapping of keys to values"),
        ("c.yaml", "distributed_type: MULTI_GPU", "distributed_type is 'MULTI_GPU'; write FSDP"),
        ("d.yaml", "{distributed_type: FSDP, fsdp_config: {fsdp_version: 1}}", "fsdp_version is 1; write 2"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=message):
            parallel(str(tmp_path / name))


def test_a_lost_process_is_told_from_other_errors():
    lost = machine_failure(RuntimeError("[/x/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"))
    assert isinstance(lost, LostRankError)
    assert machine_failure(RuntimeError("shape mismatch")) is None
    assert machine_failure(ValueError("NCCL")) is None
