"""`run.parallel`: how several processes share a model, and which configs are refused.

A DeepSpeed or FSDP config determines how tensors are sharded. Optimizer, clipping, accumulation and
schedule belong to the recipe; a config that sets them too is refused, because DeepSpeed would
silently use its own values.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ..core import shipped
from ..core.errors import UserError, did_you_mean
from ..core.files import parse_json, read_text, resolve_path
from ..core.yaml import parse_yaml
from ..tasks import TASKS
from . import trl
from .schema import Recipe

NAMES = ("ddp", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload", "fsdp2")

AUTO = "auto"
"""The fastest of NAMES that fits, chosen before the processes start (launch.commands)."""

# DeepSpeed's names of settings in the recipe: with "auto" transformers fills them in.
_FILLED = {
    "train_batch_size": "run.global_batch_size",
    "train_micro_batch_size_per_gpu": "trainer.per_device_train_batch_size",
    "gradient_accumulation_steps": "trainer.gradient_accumulation_steps",
    "gradient_clipping": "trainer.max_grad_norm",
}
_ELSEWHERE = {
    "optimizer": (
        "the recipe's optimizer section sets the optimizer, and DeepSpeed would use its own"
        " optimizer instead"
    ),
    "scheduler": "trainer.lr_scheduler_type sets the schedule",
    "pipeline": "soren-align divides only data among the processes, not layers",
    "tensor_parallel": "soren-align divides only data among the processes, not matrices",
    "amp": "trainer.bf16 sets the precision",
    "datastates_ckpt": "a checkpoint would be sealed before its files are on the disk",
}
_OFF = {"mics_shard_size": -1, "zero_hpz_partition_size": 1}
_ZERO_UNSUPPORTED = {
    "round_robin_gradients": (
        "with this key DeepSpeed writes wrong numbers into universal checkpoints"
    ),
    **dict.fromkeys(
        ("zenflow", "super_offload"), "this key updates parameters outside of the optimizer"
    ),
    **dict.fromkeys(
        _OFF, "this key shards matrices over several groups of processes, which is untested"
    ),
    **dict.fromkeys(("zero_quantized_weights", "zero_quantized_gradients"), "this key is untested"),
}

# The keys of accelerate's `fsdp_config` that transformers reads for FSDP2; it silently ignores all
# others.
_FSDP_READ = {
    "version",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "min_num_params",
    "state_dict_type",
}
_FSDP_READ |= {
    "reshard_after_forward",
    "offload_params",
    "activation_checkpointing",
    "cpu_ram_efficient_loading",
}
_COMMUNICATION = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Parallel:
    """How several processes share a model."""

    kind: Literal["ddp", "zero", "fsdp2"]
    config: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed's config for zero, accelerate's `fsdp_config` for fsdp2."""

    @property
    def stage(self) -> int:
        """ZeRO's stage; 0 without ZeRO."""
        return self.config["zero_optimization"]["stage"] if self.kind == "zero" else 0

    @property
    def offloads(self) -> bool:
        """Whether optimizer states are in the CPU's memory."""
        offload = self.config.get("zero_optimization", {}).get("offload_optimizer") or {}
        return offload.get("device", "none") != "none"

    @property
    def has_sharded_checkpoints(self) -> bool:
        """Whether torch.distributed.checkpoint writes checkpoints, each rank its shards."""
        kind = str(self.config.get("state_dict_type") or "SHARDED_STATE_DICT")
        return self.kind == "fsdp2" and kind.upper() == "SHARDED_STATE_DICT"

    def gradient_dtype(self, compute_dtype: str) -> str:
        """The dtype in which ZeRO and FSDP2 average gradients over the processes."""
        if self.kind == "fsdp2":
            return "float32"  # sharding.engine.sum_in_float32
        return _COMMUNICATION.get(
            str(self.config.get("communication_data_type")).lower(), compute_dtype
        )


def gradient_notice(name_or_path: str, compute_dtype: str) -> list[str]:
    """A notice if a DeepSpeed config averages gradients over the processes in a dtype narrower than
    float32.
    """
    shared = parallel(name_or_path)
    if shared.kind != "zero" or (dtype := shared.gradient_dtype(compute_dtype)) == "float32":
        return []
    return [
        f"run.parallel: {name_or_path} averages the gradients of all processes in {dtype}. The"
        " rounding errors grow with the number of processes, and the maps amplify these errors;"
        f' write "communication_data_type": "fp32" into {name_or_path} (docs/distributed.md)'
    ]


def parallel(name_or_path: str) -> Parallel:
    """The configuration of `run.parallel`: one of NAMES, a DeepSpeed config (.json), or
    accelerate's for FSDP (.yaml).

    Raises UserError, with every mistake, for a file that cannot be read or has settings that are
    not supported.
    """
    if name_or_path in ("ddp", AUTO):
        return Parallel("ddp")
    if name_or_path in NAMES:
        folder, suffix = (
            ("accelerate", "yaml") if name_or_path == "fsdp2" else ("deepspeed", "json")
        )
        path = shipped.ROOT / "configs" / folder / f"{name_or_path}.{suffix}"
    else:
        path = resolve_path(name_or_path)
    if path.suffix not in (".json", ".yaml", ".yml") or not path.is_file():
        hint = did_you_mean(
            name_or_path.lower(),
            (*NAMES, AUTO),
            f"write {', '.join((*NAMES, AUTO))}, or a file's path (.json, .yaml)",
        )
        raise UserError(f"found {name_or_path!r}, which is neither a known name nor a file{hint}")
    text = read_text(path)
    config = (
        parse_json(text, path.name) if path.suffix == ".json" else parse_yaml(text, path.name)[0]
    )
    if not isinstance(config, dict):
        raise UserError(
            f"{path.name}: is not a mapping of keys to values; write a config of DeepSpeed or"
            " accelerate"
        )
    # DeepSpeed's config: refused keys first, then what the recipe fills in. The defaults of a key
    # that the config leaves out are DeepSpeed's.
    if path.suffix == ".json":
        if wrong := list(_deepspeed_problems(config)):
            raise UserError(*(f"{path.name}: {problem}" for problem in wrong))
        zero = dict(config["zero_optimization"])
        if zero["stage"] == 3:
            # Otherwise the saved model is empty.
            zero.setdefault("stage3_gather_16bit_weights_on_model_save", True)
        # The keys that every config needs: "auto" for the recipe's settings, and no optimizer of
        # its own.
        filled = {
            **dict.fromkeys(_FILLED, "auto"),
            "bf16": {"enabled": "auto"},
            "zero_force_ds_cpu_optimizer": False,
        }
        return Parallel(
            "zero", {**filled, "steps_per_print": 10**9, **config, "zero_optimization": zero}
        )
    # accelerate's config: with or without the prefix fsdp_, as its own tools write both.
    kind, fsdp = config.get("distributed_type"), config.get("fsdp_config")
    if kind != "FSDP" or not isinstance(fsdp, dict):
        raise UserError(
            f"{path.name}: distributed_type is {kind!r}; write FSDP, and add an fsdp_config"
        )
    fsdp = {key.removeprefix("fsdp_"): value for key, value in fsdp.items()}
    if fsdp.get("version") != 2:
        raise UserError(f"{path.name}: fsdp_version is {fsdp.get('version')!r}; write 2")
    wrong = [
        f"fsdp_{key}: has no effect under FSDP2; remove this key"
        for key in fsdp
        if key not in _FSDP_READ
    ]
    if (mixed := config.get("mixed_precision")) not in (None, False, "no"):
        wrong.append(
            f"mixed_precision: found {mixed!r}, but trainer.bf16 sets the precision; write 'no'"
        )
    if wrong:
        raise UserError(*(f"{path.name}: {problem}" for problem in wrong))
    return Parallel("fsdp2", fsdp)


def _deepspeed_problems(config: dict[str, Any]) -> Iterator[str]:
    zero = config.get("zero_optimization")
    inside = zero if isinstance(zero, dict) else {}
    sections = {key: config.get(key) for key in ("bf16", "fp16")}
    sections |= {
        f"zero_optimization.{key}": inside.get(key)
        for key in ("offload_optimizer", "offload_param")
    }
    no_mappings = {
        key: value
        for key, value in sections.items()
        if value is not None and not isinstance(value, dict)
    }
    # Returned early: the checks below read inside of these sections.
    if no_mappings:
        yield from (
            f"{key}: found {value!r}; write a mapping" for key, value in no_mappings.items()
        )
        return
    for key, reason in _ELSEWHERE.items():
        if config.get(key):
            yield f"{key}: {reason}; remove this key"
    checkpoint = config.get("checkpoint")
    if isinstance(checkpoint, dict) and checkpoint.get("writer"):
        yield f"checkpoint.writer: {_ELSEWHERE['datastates_ckpt']}; remove this key"
    # "auto" is allowed, since published configs have it and mean the trainer's values.
    for key, where in _FILLED.items():
        if config.get(key, "auto") != "auto":
            yield f'{key}: {where} sets this value; write "auto"'
    for key in ("bf16", "fp16"):
        if (config.get(key) or {}).get("enabled", "auto") not in ("auto", False):
            yield f'{key}.enabled: trainer.{key} sets this value; write "auto"'
    sums_in = config.get("communication_data_type")
    if sums_in is not None and str(sums_in).lower() not in _COMMUNICATION:
        yield (
            f'communication_data_type: found {sums_in!r}; write "fp32", or'
            f" {' or '.join([*_COMMUNICATION][1:])}"
        )
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if not isinstance(zero, dict) or type(stage) is not int or stage not in (1, 2, 3):
        yield (
            f"zero_optimization.stage: found {stage!r}; write 1, 2 or 3 (without ZeRO, write"
            " run.parallel: ddp)"
        )
        return
    for key, reason in _ZERO_UNSUPPORTED.items():
        if zero.get(key) and zero[key] != _OFF.get(key):
            yield f"zero_optimization.{key}: is not supported, because {reason}; remove this key"
    yield from _offload_problems(zero)
    if Parallel("zero", config).offloads and config.get("zero_force_ds_cpu_optimizer"):
        yield (
            "zero_force_ds_cpu_optimizer: DeepSpeed's CPU Adam would replace the recipe's"
            " optimizer; write false"
        )


def _offload_problems(zero: dict[str, Any]) -> Iterator[str]:
    for key in ("offload_optimizer", "offload_param"):
        offload = zero.get(key) or {}
        where = f"zero_optimization.{key}"
        if offload.get("device") == "nvme":
            yield (
                f"{where}.device: nvme is not supported, because its tensors are empty between"
                " steps; write cpu"
            )
        if offload.get("ratio", 1) != 1:
            yield (
                f"{where}.ratio: found {offload['ratio']}, but only 1 (everything) is supported;"
                " remove this key"
            )
        if offload.get("super_offload"):
            reason = _ZERO_UNSUPPORTED["super_offload"]
            yield f"{where}.super_offload: is not supported, because {reason}; remove this key"


def accumulation(recipe: Recipe, num_ranks: int) -> int:
    """Micro-batches per optimizer step and process: of run.global_batch_size = micro-batch size x
    these x processes.

    With run.global_batch_size it follows from the number of processes. Raises UserError if that
    number does not fit.
    """
    batch = recipe.run.global_batch_size
    if batch is None:
        return trainer_value(recipe, "gradient_accumulation_steps")
    per_device = trainer_value(recipe, "per_device_train_batch_size")
    micro_batch = per_device * num_ranks
    if batch % micro_batch:
        processes = f"{num_ranks} processes" if num_ranks > 1 else "one process"
        # Two different remedies: a batch that the processes cannot share at all, and one that only
        # the size of a micro-batch does not divide.
        if batch % num_ranks:
            remedy = f"choose a multiple of {num_ranks}, or another number of processes"
        else:
            share = batch // num_ranks
            largest = max(d for d in range(1, min(share, per_device) + 1) if share % d == 0)
            remedy = (
                f"write trainer.per_device_train_batch_size: {largest}, or another divisor of"
                f" {share}"
            )
        raise UserError(
            f"run.global_batch_size: {batch} is not a multiple of {micro_batch} ({processes} with "
            f"trainer.per_device_train_batch_size {per_device}); {remedy}"
        )
    return batch // micro_batch


def global_batch(recipe: Recipe, num_ranks: int) -> tuple[int, str]:
    """Examples per optimizer step, or packed sequences, also as a product: (64, "2 processes x 16
    examples x accumulation 2")."""
    steps, per_device = (
        accumulation(recipe, num_ranks),
        trainer_value(recipe, "per_device_train_batch_size"),
    )
    processes = "1 process" if num_ranks == 1 else f"{num_ranks} processes"
    return (
        num_ranks * per_device * steps,
        f"{processes} x {per_device} {batch_unit(recipe)} x accumulation {steps}",
    )


def batch_unit(recipe: Recipe) -> str:
    """The elements of a batch: examples, or packed sequences of them."""
    return "sequences" if recipe.trainer.get("packing") else "examples"


FEW_STEPS = 10
"""Optimizer steps of a whole run below which a notice is given."""


def few_steps(recipe: Recipe, num_steps: int, num_ranks: int) -> str | None:
    """A notice about a run of less than FEW_STEPS optimizer steps; None if there are more, or
    max_steps sets them.
    """
    if num_steps >= FEW_STEPS or trainer_value(recipe, "max_steps") > 0:
        return None
    size, _ = global_batch(recipe, num_ranks)
    # The key that the recipe has already set: the reader changes a number, and does not learn
    # another key.
    key = (
        "run.global_batch_size"
        if recipe.run.global_batch_size
        else "trainer.gradient_accumulation_steps"
    )
    if (
        not recipe.run.global_batch_size
        and trainer_value(recipe, "gradient_accumulation_steps") == 1
    ):
        key = "trainer.per_device_train_batch_size"
    return (
        f"the whole run has only {num_steps} optimizer step{'s' * (num_steps != 1)} of {size}"
        f" {batch_unit(recipe)}, in which a model hardly changes. For more steps, lower {key} or"
        " raise trainer.num_train_epochs"
    )


def drops_last(recipe: Recipe, num_ranks: int) -> bool:
    """Whether an epoch ends without the examples that fill no micro-batch of all processes."""
    # Of a pair no label can be taken away: accelerate would repeat the epoch's first pairs.
    are_judged = TASKS[recipe.task].has_reference and not recipe.data.streaming
    return bool(recipe.trainer.get("dataloader_drop_last")) or (are_judged and num_ranks > 1)


def left_out(recipe: Recipe, num_examples: int, num_ranks: int) -> str | None:
    """A notice about the examples that `drops_last` leaves out of each epoch; None if all are used.

    num_examples: or packed sequences, of an epoch.
    """
    round_size = trainer_value(recipe, "per_device_train_batch_size") * num_ranks
    number = num_examples % round_size
    if not number or not drops_last(recipe, num_ranks):
        return None
    return (
        f"each epoch leaves out {number} of {num_examples:,} {batch_unit(recipe)}, others each"
        f" time, which fill no batch of {round_size} on {num_ranks} process{'es' * (num_ranks > 1)}"
    )


def trainer_value(recipe: Recipe, key: str) -> Any:
    """The value of `trainer.key`: the recipe's, or TRL's default."""
    return recipe.trainer.get(key, trl.fields(recipe.task)[key].default)
