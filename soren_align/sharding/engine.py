"""A run under DeepSpeed or FSDP2: how it starts, what its checkpoints need, and the whole weights at its end."""

import argparse
import contextlib
import importlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from ..errors import UserError
from ..optim import SpectralOptimizer
from .attach import FlatShards
from .pickles import refuse_pickles


def start_deepspeed(on_cpu: bool) -> None:
    """Have DeepSpeed use the process group that is there.

    To be called before its first config is made: at stage 3 that one asks for the number of ranks. Repeatable.
    """
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.pop("ACCELERATE_USE_CPU", None)  # with it accelerate leaves DeepSpeed out, without a word
    import deepspeed  # pyright: ignore[reportMissingImports]

    refuse_pickles()
    deepspeed.utils.logger.setLevel("ERROR")
    if on_cpu:
        # It would compile, for three minutes and without a word, an extension that only inference uses. The attribute
        # deepspeed.comm.torch is the package torch, hence the long way.
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # pyright: ignore
    accelerator: Any = deepspeed.get_accelerator()
    deepspeed.init_distributed(accelerator.communication_backend_name(), auto_mpi_discovery=False, verbose=False)


def with_second_moments(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook of `state_dict`: DeepSpeed makes universal checkpoints only of what looks like Adam. It adds no bytes."""
    state = {
        number: {"exp_avg_sq": kept["exp_avg"].new_zeros(1).expand(kept["exp_avg"].shape), **kept}
        for number, kept in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def is_universal(checkpoint: Path) -> bool:
    """Whether `to_universal` has made a checkpoint readable for any number of ranks."""
    return (checkpoint / "latest_universal").is_file()


def to_universal(checkpoint: Path) -> None:
    """Put a copy of DeepSpeed's parts into the checkpoint's folder that any number of ranks can read."""
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
        makes_folders_in(checkpoint),
    ):
        ds_to_universal.main(options)


@contextlib.contextmanager
def makes_folders_in(checkpoint: Path) -> Iterator[None]:
    """While in it, os.makedirs makes folders below the checkpoint only, and raises UserError for any other.

    DeepSpeed makes one for each parameter, whose name stands in the checkpoint, before it writes a file there.
    """
    make, root = os.makedirs, checkpoint.resolve()

    def make_inside(name: Any, *args: Any, **kwargs: Any) -> None:
        if not Path(name).resolve().is_relative_to(root):
            raise UserError(f"{checkpoint}: names a parameter whose files would be written to {name}")
        make(name, *args, **kwargs)

    os.makedirs = make_inside
    try:
        yield
    finally:
        os.makedirs = make


def settle(optimizer: SpectralOptimizer, settings: Sequence[dict[str, Any]], rates: Sequence[float]) -> None:
    """Undo what loading a universal checkpoint does beside loading.

    DeepSpeed gives all groups of stage 3 the first one's settings, and matrices a second moment, of zeros.
    settings: the groups as they should be; rates: their present learning rates.
    """
    for group, right, rate in zip(optimizer.param_groups, settings, rates, strict=True):
        group.update({key: value for key, value in right.items() if key not in ("params", "param_names")}, lr=rate)
    if isinstance(optimizer.placement, FlatShards):
        for tensor in optimizer.placement.tensors:
            optimizer.state[tensor].pop("exp_avg_sq", None)


def sum_in_float32(fsdp: Any) -> None:
    """Let accelerate's FSDP plugin sum gradients in float32 and leave a model's results as they are.

    It would take the dtype of the passes for these too: in bfloat16 the first loss of DPO, log(2) = 0.6931, came out
    as 0.691, the second as 0.707 in place of 0.687.
    """
    policy = fsdp.mixed_precision_policy
    if policy is not None:
        fsdp.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=policy.param_dtype, reduce_dtype=torch.float32)


def full_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and float32 weights of a model under ZeRO or FSDP2, whole, in the first rank's CPU memory; none elsewhere.

    Collective: to be walked to its end on every rank. One parameter at a time is put together, on all ranks.
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
