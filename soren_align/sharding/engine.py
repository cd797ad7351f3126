"""Runs under DeepSpeed or FSDP2: their start, their checkpoints, and the full weights at their end."""

import argparse
import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from ..core.errors import UserError
from ..core.patches import patched
from ..optim import SpectralOptimizer
from .pickles import refuse_pickles
from .strategies import FlatShards


def start_deepspeed(on_cpu: bool) -> None:
    """Initialize DeepSpeed with the existing process group. Repeatable.

    Call it before the first DeepSpeed config is constructed: at stage 3 that reads the number of ranks.
    """
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.pop("ACCELERATE_USE_CPU", None)  # with it accelerate silently ignores DeepSpeed
    import deepspeed  # pyright: ignore[reportMissingImports]

    refuse_pickles()
    deepspeed.utils.logger.setLevel("ERROR")
    accelerator: Any = deepspeed.get_accelerator()
    backend = accelerator.communication_backend_name()
    with patched("deepspeed.comm.torch.build_shm_op", lambda: None) if on_cpu else contextlib.nullcontext():
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)


def with_second_moments(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state_dict hook that adds `exp_avg_sq`, which DeepSpeed's universal checkpoints need. It adds no bytes."""
    state = {
        number: {"exp_avg_sq": saved["exp_avg"].new_zeros(1).expand(saved["exp_avg"].shape), **saved}
        for number, saved in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def is_universal(checkpoint: Path) -> bool:
    """Whether `to_universal` has made a checkpoint readable for any number of ranks."""
    return (checkpoint / "latest_universal").is_file()


def to_universal(checkpoint: Path) -> None:
    """Add to the checkpoint's folder a copy of DeepSpeed's shards that any number of ranks can load."""
    from deepspeed.checkpoint import ds_to_universal  # pyright: ignore[reportMissingImports]

    refuse_pickles()
    parts = checkpoint / (checkpoint / "latest").read_text().strip()
    options = argparse.Namespace(
        input_folder=str(parts),
        output_folder=f"{parts}_universal",
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        folders_confined_to(checkpoint),
    ):
        ds_to_universal.main(options)


@contextlib.contextmanager
def folders_confined_to(checkpoint: Path) -> Iterator[None]:
    """A context in which `ds_to_universal` raises UserError for any folder that is not below the checkpoint.

    DeepSpeed creates one per parameter, whose name is read from the checkpoint, before it writes a file there.
    """
    root = checkpoint.resolve()

    def make_inside(name: Any, *args: Any, **kwargs: Any) -> None:
        if not Path(name).resolve().is_relative_to(root):
            raise UserError(f"{checkpoint}: names a parameter whose files would be written to {name}")
        os.makedirs(name, *args, **kwargs)

    confined = SimpleNamespace(**{**vars(os), "makedirs": make_inside})
    with patched("deepspeed.checkpoint.ds_to_universal.os", confined):
        yield


def restore_groups_(optimizer: SpectralOptimizer, settings: Sequence[dict[str, Any]], rates: Sequence[float]) -> None:
    """Undo the side effects of loading a universal checkpoint.

    DeepSpeed gives all groups of stage 3 the first one's settings, and matrices a second moment of zeros.
    settings: the groups' correct settings; rates: their current learning rates.
    """
    for group, right, rate in zip(optimizer.param_groups, settings, rates, strict=True):
        group.update({key: value for key, value in right.items() if key not in ("params", "param_names")}, lr=rate)
    if isinstance(optimizer.placement, FlatShards):
        for tensor in optimizer.placement.tensors:
            optimizer.state[tensor].pop("exp_avg_sq", None)


def sum_in_float32(fsdp: Any) -> None:
    """Set accelerate's FSDP plugin to reduce gradients in float32 and not to cast the model's outputs.

    It would use the dtype of the forward pass for both: in bfloat16 the first loss of DPO, log(2) = 0.6931, was 0.691,
    the second 0.707 instead of 0.687.
    """
    policy = fsdp.mixed_precision_policy
    if policy is not None:
        fsdp.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=policy.param_dtype, reduce_dtype=torch.float32)


def full_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and full float32 weights of a model under ZeRO or FSDP2, on the first rank's CPU; nothing on other ranks.

    Collective: iterate to the end on every rank. One parameter at a time is gathered, on all ranks.
    """
    if isinstance(model, FSDPModule):
        # Not from the parameters: after an evaluation some are still whole, in the dtype of the forward pass.
        whole: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        once = {name for name, _ in model.named_parameters()}
        twice = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
        for name in [*whole]:
            tensor = whole.pop(name)
            if name not in twice:  # a tied head is its embedding
                yield name, tensor
        return
    from deepspeed import zero  # pyright: ignore[reportMissingImports]
    from deepspeed.utils import safe_get_full_fp32_param  # pyright: ignore[reportMissingImports]

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = safe_get_full_fp32_param(parameter)
        else:  # it has no float32 copy
            with zero.GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
                whole = parameter.detach().float().clone()
        if dist.get_rank() == 0:
            yield name, whole.detach().to("cpu", copy=True)
        del whole
