"""Start runs under DDP, DeepSpeed or FSDP2, and gather the full weights at the end."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate.utils import fsdp2_prepare_model
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ..core.patches import patched
from ..optim import SpectralOptimizer
from ..optim.second_moment import ROWS
from .checkpoints import refuse_pickles
from .ddp import DDPStrategy
from .fsdp import FSDP2Strategy
from .plan import BUCKET_MB
from .ranks import Ranks, current_ranks
from .zero import ZeroStrategy, row_places, set_zero_strategy


def start_deepspeed(on_cpu: bool) -> None:
    """Initialize DeepSpeed with the existing process group. Repeatable.

    Call it before the first DeepSpeed config is constructed: at stage 3 that reads the number of
    ranks.
    """
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.pop("ACCELERATE_USE_CPU", None)  # with it accelerate silently ignores DeepSpeed
    import deepspeed  # pyright: ignore[reportMissingImports]

    refuse_pickles()
    deepspeed.utils.logger.setLevel("ERROR")
    accelerator: Any = deepspeed.get_accelerator()
    backend = accelerator.communication_backend_name()
    with (
        patched("deepspeed.comm.torch.build_shm_op", lambda: None)
        if on_cpu
        else contextlib.nullcontext()
    ):
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)


def restore_groups_(
    optimizer: SpectralOptimizer, settings: Sequence[dict[str, Any]], rates: Sequence[float]
) -> None:
    """Undo the side effects of loading a universal checkpoint.

    DeepSpeed gives all groups of stage 3 the first one's settings, and matrices a second moment of
    zeros, or of their rows at their places (`zero.row_places`).
    settings: the groups' correct settings; rates: their current learning rates.
    """
    for group, right, rate in zip(optimizer.param_groups, settings, rates, strict=True):
        group.update(
            {key: value for key, value in right.items() if key not in ("params", "param_names")},
            lr=rate,
        )
    # All spectral groups have the same kind.
    kind = next(
        (group["second_moment"] for group in settings if group["rule"] == "spectral"), "none"
    )
    if not isinstance(optimizer.strategy, ZeroStrategy) or kind == "elements":
        return
    for tensor in optimizer.strategy.tensors:
        # A conversion to another number of ranks cuts tensors of the parameter's shape only: the
        # moments of the rows are within one (`with_second_moments`), and are picked out at their
        # places.
        moments = optimizer.state[tensor].pop("exp_avg_sq", None)
        if kind == "rows" and moments is not None:
            optimizer.state[tensor][ROWS] = moments[
                row_places(optimizer, tensor).to(moments.device)
            ]


def sum_in_float32(fsdp: Any) -> None:
    """Set accelerate's FSDP plugin to reduce gradients in float32 and not to cast the model's
    outputs.

    It would use the dtype of the forward pass for both: in bfloat16 the first loss of DPO, log(2) =
    0.6931, was 0.691, the second 0.707 instead of 0.687.
    """
    policy = fsdp.mixed_precision_policy
    if policy is not None:
        fsdp.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=policy.param_dtype, reduce_dtype=torch.float32
        )


def shard_reference(model: Any, accelerator: Any) -> torch.nn.Module:
    """Shard a model that is never trained as accelerate shards the trained one under FSDP2, block
    by block. Returns it, in evaluation mode.
    """
    model = fsdp2_prepare_model(accelerator, model.requires_grad_(False))
    # accelerate leaves the last layers whole for a backward pass, which never comes.
    model.set_reshard_after_forward(True)
    return model.eval()


def full_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and full float32 weights of a model under ZeRO or FSDP2, on the first rank's CPU;
    nothing on other ranks.

    Collective: iterate to the end on every rank. One parameter at a time is gathered, on all ranks.
    """
    if isinstance(model, FSDPModule):
        # Not from the parameters: after an evaluation some are still whole, in the dtype of the
        # forward pass.
        whole: Any = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        once = {name for name, _ in model.named_parameters()}
        twice = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
        for name in [*whole]:
            tensor = whole.pop(name)
            if name not in twice:  # a tied head is its embedding
                yield name, tensor
        return
    from deepspeed import zero  # pyright: ignore[reportMissingImports]
    from deepspeed.utils import safe_get_full_fp32_param  # pyright: ignore[reportMissingImports]

    # One parameter at a time: all ranks gather it, the first keeps a copy on its CPU.
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = safe_get_full_fp32_param(parameter)
        else:  # it has no float32 copy
            with zero.GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
                whole = parameter.detach().float().clone()
        if dist.get_rank() == 0:
            yield name, whole.detach().to("cpu", copy=True)
        del whole


def set_strategy(
    optimizer: Any, ranks: Ranks | None = None, bucket_mb: float = BUCKET_MB
) -> tuple[Literal["ddp", "zero", "fsdp2"], list[list[Tensor]]]:
    """Set the strategy of the SpectralOptimizer within accelerate's wrappers. Collective.

    ranks: None is those of the default process group. Returns the kind of sharding, "ddp" for one
    process too, and the tensors that this rank updates, by group. Raises ValueError, on every rank,
    for an unknown or unsupported sharding; see `set_zero_strategy`, `FSDP2Strategy`.
    """
    # The innermost optimizer steps; the wrapper around it shows who shards: DeepSpeed by its class,
    # FSDP2 by its tensors, and DDP by nothing at all, so that it comes last.
    *wrappers, inner = chain_of(optimizer)
    if not isinstance(inner, SpectralOptimizer):
        raise ValueError(
            f"{type(inner).__name__} is no optimizer of soren_align.optim; build one with "
            "soren_align.build_optimizer"
        )
    if wrappers and "deepspeed" in type(wrappers[-1]).__module__:
        return "zero", set_zero_strategy(wrappers[-1], bucket_mb)
    tensors = [list(group["params"]) for group in inner.param_groups]
    if any(isinstance(tensor, DTensor) for group in tensors for tensor in group):
        inner.strategy = FSDP2Strategy(bucket_mb)
        return "fsdp2", tensors
    if (ranks or current_ranks()).num_ranks > 1:
        inner.strategy = DDPStrategy(bucket_mb=bucket_mb)
    return "ddp", tensors


def chain_of(optimizer: Any) -> list[Any]:
    """The optimizer in all its wrappers, from the outermost to the innermost, which steps."""
    chain = [optimizer]
    while hasattr(chain[-1], "optimizer"):
        chain.append(chain[-1].optimizer)
    return chain
