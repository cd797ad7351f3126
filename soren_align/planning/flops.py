"""Activations and FLOPs of the forward and backward passes of a training step, measured on fake
tensors.

Fake tensors have shapes and no contents. Models of two and of three blocks run a batch as TRL would
run it; larger models are extrapolated linearly from these, with a pair of models for each kind of
block. No formula of an architecture is needed, and activation checkpointing, autocast and the
head's chunks are included as they are. tests/planning/test_passes.py compares the result with real
tensors.
"""

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..core.errors import as_user_error
from ..core.patches import patched
from ..core.silence import log_level
from ..data import DatasetStats
from ..recipe import Recipe, compute_dtype, parallel, trainer_value
from ..tasks import TASKS
from ..training.adapters import freeze
from ..training.build import trl_forward
from .padding import GROUPED, padded_tokens

UNBOUNDED_LENGTH = 4096
"""Tokens of an example where trainer.max_length is null and no example can be tokenized: a
guess."""
MAX_LOOP = 128
"""Tokens of an example up to which a Mamba is measured: 64 take 3 s for each pair of models (2 CPU
cores)."""
MEASURED_BLOCKS = (2, 3)
"""Numbers of blocks that are measured; with one block, the peak may come from another tensor than
with many."""
PEAKS: dict[str, dict[str, float]] = {
    "H100": {"float32": 67e12, "tf32": 494e12, "float16": 989e12, "bfloat16": 989e12},
    "A100": {"float32": 19.5e12, "tf32": 156e12, "float16": 312e12, "bfloat16": 312e12},
    "L40S": {"float32": 91.6e12, "tf32": 183e12, "float16": 362e12, "bfloat16": 362e12},
}
"""FLOP/s by the precision of the factors, dense, of NVIDIA's data sheets: SXM modules, and the
L40S, a PCIe card."""
UTILIZATION = 0.4
"""Share of the peak that models of billions of parameters reach: an assumption. The paper's 23
minutes for 5,000 steps of LLaMA-60M are 0.14 at most (recipes/llama-c4)."""
CORE_FLOPS = 40e9
"""FLOP/s of a CPU core in float32: LoRA on SmolLM2-135M, 477 GFLOP in 11 s of a core
(recipes/studies/README.md)."""

_CUSTOM_FLOPS = {
    # The head accumulates its gradients in place, which torch does not count.
    torch.ops.aten.addmm_: lambda _, a, b, **kwargs: 2 * a[0] * a[1] * b[1],
    # Products of each token with the weights of its experts, which have one row per pair of token
    # and expert.
    torch.ops.transformers.grouped_mm_fallback: lambda x, w, *_, **kwargs: 2 * x[0] * w[1] * w[2],
    torch.ops.transformers.grouped_mm_fallback_backward: lambda x, w, *_, **kwargs: (
        4 * x[0] * w[1] * w[2]
    ),
}


@dataclass(frozen=True)
class Compute:
    """Activations are of one process, FLOPs of a whole step on all processes."""

    max_tokens: int
    """Length of the longest example; activations are those of a micro-batch of such examples."""
    mean_tokens: float
    """Mean length of an example."""
    padded_tokens: float
    """The same in the batches, with padding; FLOPs are counted with it."""
    grouped_tokens: float
    """The same with examples grouped by length."""
    is_measured: bool
    """Whether both come from the data; otherwise they are max_length, an upper bound."""
    activation_bytes: int | None
    """The bytes at the peak, without weights, gradients and optimizer states."""
    activation_bytes_without_checkpointing: int | None
    flops_per_step: int | None
    failure: str | None = None
    """Why these three are None: the error of the architecture's code on fake tensors."""

    def as_json(self, recipe: Recipe, ranks: dict[str, Any], num_steps: int) -> dict[str, Any]:
        """The plan's section "compute". ranks: its section "processes".

        The hours of the run are those of one GPU, or one CPU core, from counted FLOPs and assumed
        rates.
        """
        # Passes and maps have their own precisions, and so their own peaks: float32 maps take 15
        # times as long per FLOP as bfloat16 passes on an H100 (PEAKS).
        maps = ranks["map_flops"] and ranks["map_flops"]["all_ranks"]
        num_examples, num_sides = (
            ranks["global_batch_size"] * num_steps,
            TASKS[recipe.task].num_sides,
        )
        hours = assumption = None
        if self.flops_per_step:
            of_passes, of_maps = self.flops_per_step * num_steps, (maps or 0) * num_steps
            if recipe.trainer.get("use_cpu"):
                hours = {"CPU core": (of_passes + of_maps) / CORE_FLOPS / 3600}
                assumption = f"{CORE_FLOPS / 1e9:g} GFLOP/s"
            else:
                parts = ((of_passes, compute_dtype(recipe)), (of_maps, ranks["map_precision"]))
                hours = {
                    name: (
                        sum(flops / (UTILIZATION * peaks[precision]) for flops, precision in parts)
                        / 3600
                    )
                    for name, peaks in PEAKS.items()
                }
                assumption = f"{UTILIZATION:.0%} of the peak"
        return {
            "tokens_per_example": round(self.mean_tokens, 1),
            "padding": 1 - self.mean_tokens / self.padded_tokens,
            "padding_if_grouped": 1 - self.mean_tokens / self.grouped_tokens,
            "tokens_are_measured": self.is_measured,
            "training_tokens": round(self.mean_tokens * num_sides * num_examples),
            "training_flops_per_step": self.flops_per_step,
            "training_flops": self.flops_per_step and self.flops_per_step * num_steps,
            "map_share": maps and self.flops_per_step and maps / (self.flops_per_step + maps),
            "maps_are_counted": bool(maps) or not ranks["num_matrices"],
            "hours": hours,
            "hours_assume": assumption,
        }


def compute(
    recipe: Recipe,
    build_model: Callable[[Sequence[int], torch.dtype], Any],
    kinds: Sequence[Sequence[int]],
    account: DatasetStats | None,
    batch_size: int,
    max_length: int | None,
) -> Compute:
    """Measured by running small models of the recipe's architecture.

    build_model: a model of these blocks and of that dtype. kinds: see `Passes`. batch_size: the
    global one.
    """
    num_sides, checkpointing = (
        TASKS[recipe.task].num_sides,
        trainer_value(recipe, "gradient_checkpointing"),
    )
    max_tokens = max_length or UNBOUNDED_LENGTH
    mean_tokens = in_batches = grouped = float(max_tokens)
    if account and not (recipe.trainer.get("packing") and max_length):  # packed sequences are full
        max_tokens = min(account.lengths["max"], max_length or account.lengths["max"])
        mean_tokens = account.num_tokens / (account.num_kept * num_sides)
        strategy = trainer_value(recipe, "train_sampling_strategy")
        in_batches, grouped = (
            padded_tokens(recipe, account.kept_lengths, batch_size, each)
            for each in (strategy, GROUPED)
        )
    known = (max_tokens, mean_tokens, in_batches, grouped, account is not None)

    def passes(checkpointing: bool) -> Passes:
        dtype = getattr(torch, compute_dtype(recipe))
        # ZeRO and FSDP2 compute with weights of that dtype
        is_sharded = parallel(recipe.run.parallel).kind != "ddp"

        def build(blocks: Sequence[int]) -> tuple[Any, Any]:
            model = build_model(blocks, dtype if is_sharded else getattr(torch, recipe.model.dtype))
            return model, trl_forward(model, checkpointing)

        return Passes(
            build, kinds, autocast=None if is_sharded or dtype == torch.float32 else dtype
        )

    try:
        if not kinds:
            raise ValueError(
                "the model's config does not state the number of blocks (num_hidden_layers)"
            )
        # Without torch's own traceback of an operation that fails on fake tensors.
        with log_level(logging.CRITICAL, "torch._subclasses.fake_tensor"):
            if max_tokens > MAX_LOOP:
                with torch.device("meta"):
                    block = build_model([0], torch.float32)
                if any(type(module).__name__.endswith("MambaMixer") for module in block.modules()):
                    raise ValueError(
                        "without a GPU the model takes one step per token, which is too slow to"
                        " measure"
                    )
            num_joined = joined_sequences(recipe)
            sequences = (
                trainer_value(recipe, "per_device_train_batch_size") * num_sides // num_joined
            )
            # FLOPs follow the mean length, and the peak of memory the longest example.
            length, longest = num_joined * max(2, round(in_batches)), num_joined * max_tokens
            mask = longest**2 if num_joined > 1 else 0  # a byte for each pair of tokens
            activations = passes(checkpointing).num_bytes(sequences, longest) + mask
            flops = passes(checkpointing).num_flops(1, length)
            # The reference model's passes, at each step or once before training.
            if num_forwards := TASKS[recipe.task].num_forwards:
                if recipe.trainer.get("loss_type") == "apo_zero_unpaired":
                    num_forwards = 1  # no answers to other prompts
                flops += num_forwards * passes(False).num_flops(1, length, backward=False)
            without = (
                passes(False).num_bytes(sequences, longest) + mask if checkpointing else activations
            )
    # An architecture's code need not run on fake tensors; training may work.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        return Compute(*known, None, None, None, failure=reason)
    per_step = round(flops / num_joined * batch_size * num_sides)
    return Compute(*known, activations, without, per_step)


def joined_sequences(recipe: Recipe) -> int:
    """The packed sequences, or examples without padding, that TRL joins into one sequence of a
    micro-batch.

    1 with flash attention, which computes each by itself; the others mask all pairs of tokens.
    """
    is_packed = (
        recipe.trainer.get("packing") and recipe.trainer.get("packing_strategy") != "wrapped"
    )
    if not (is_packed or recipe.trainer.get("padding_free")) or "flash" in (
        recipe.model.attn_implementation or ""
    ):
        return 1
    return (
        trainer_value(recipe, "per_device_train_batch_size")
        if TASKS[recipe.task].num_sides == 1
        else 1
    )


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of a model.

    build: returns a model of the given blocks, and a function of token ids [batch_size, length]
        that runs it and returns an output with a `loss`; called for MEASURED_BLOCKS of each kind,
        on the meta device.
    kinds: for each kind of block, the positions of its blocks in the whole model.
    autocast: its dtype; None to compute in the dtype of the weights.
    """

    build: Callable[[Sequence[int]], tuple[Any, Callable[[Tensor], Any]]]
    kinds: Sequence[Sequence[int]]
    autocast: torch.dtype | None

    def num_bytes(self, batch_size: int, length: int) -> int:
        """Peak of one pass, without weights and gradients (those of an earlier micro-batch exist
        already).
        """

        def peaks(blocks: Sequence[int]) -> tuple[int, int]:
            """Return the peaks of the forward and of the backward pass: each is linear in the
            blocks, their maximum may not be.
            """
            with self._fake_model(blocks, batch_size, length) as forward, Meter() as meter:
                loss = forward()
                forward_peak, meter.peak = meter.peak, 0
                loss.backward()
                return forward_peak, meter.peak

        return max(self._totals(peaks))

    def num_flops(self, batch_size: int, length: int, backward: bool = True) -> int:
        """Return the FLOPs of all matrix products of one pass; attention is counted without its
        mask.
        """

        def flops(blocks: Sequence[int]) -> tuple[int]:
            counter = FlopCounterMode(display=False, custom_mapping=_CUSTOM_FLOPS)
            # torch has no formula for the CPU's fused attention; unfused, it is two products.
            with (
                sdpa_kernel(SDPBackend.MATH),
                self._fake_model(blocks, batch_size, length) as forward,
                counter,
            ):
                with torch.set_grad_enabled(backward):
                    loss = forward()
                if backward:
                    loss.backward()
            return (counter.get_total_flops(),)

        return self._totals(flops)[0]

    def _totals(self, measure: Callable[[Sequence[int]], tuple[int, ...]]) -> list[int]:
        """Return for the whole model the numbers that `measure` returns for few blocks."""
        of_kinds = []
        for positions in self.kinds:
            # Several kinds: each alone, by one of its blocks.
            choices = (
                [0] * max(MEASURED_BLOCKS) if len(self.kinds) > 1 else range(max(MEASURED_BLOCKS))
            )
            blocks = [positions[choice % len(positions)] for choice in choices]
            of_kinds.append([measure(blocks[:number]) for number in MEASURED_BLOCKS])
        totals = []
        for numbers in zip(
            *(zip(fewer, more, strict=True) for fewer, more in of_kinds), strict=True
        ):
            # Two and three blocks give the cost of one more block, and of all else. With one block
            # another tensor would determine the peak (notes/log.md, 2026-11-21).
            slopes = [more - fewer for fewer, more in numbers]
            # Embeddings and head are in the measurement of every kind of block, and count once.
            rest = max(
                fewer - MEASURED_BLOCKS[0] * slope
                for (fewer, _), slope in zip(numbers, slopes, strict=True)
            )
            totals.append(
                rest + sum(slope * len(k) for slope, k in zip(slopes, self.kinds, strict=True))
            )
        return totals

    @contextlib.contextmanager
    def _fake_model(
        self, blocks: Sequence[int], batch_size: int, length: int
    ) -> Iterator[Callable[[], Tensor]]:
        """A function that computes the loss; the backward pass must run within this context too."""

        def drop_gradient(parameter: Tensor) -> None:
            """Free it, as if it had been added to that of an earlier micro-batch.
            Fake tensors leave cycles behind.
            """
            parameter.grad = None
            gc.collect()

        def forward() -> Tensor:
            with torch.autocast(
                "cpu", dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None
            ):
                return call(tokens).loss

        is_frozen = gc.get_freeze_count() > 0
        gc.collect()
        gc.freeze()  # so that the collections of `drop_gradient` visit young objects only
        try:
            with torch.device("meta"):
                model, call = self.build(blocks)
            with (
                FakeTensorMode(),
                patched(
                    "transformers.integrations.moe._can_use_grouped_mm", lambda *tensors: False
                ),
            ):
                _replace_meta_tensors(model)
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(drop_gradient)
                tokens = torch.zeros(batch_size, length, dtype=torch.long)
                yield forward
        finally:
            if not is_frozen:  # else this would unfreeze objects of the caller too
                gc.unfreeze()


def _replace_meta_tensors(model: torch.nn.Module) -> None:
    """Replace tensors on the meta device by fake ones on the CPU; tied parameters stay tied.

    Not by Module.to_empty, which swaps tensors in place and cannot do so with fake ones.
    """
    fakes: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (cast(dict[str, Any], module._parameters), module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if tensor not in fakes:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        fakes[tensor] = (
                            torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                        )
                    tensors[name] = fakes[tensor]


class Meter(TorchDispatchMode):
    """`peak`: the most bytes that tensors created within this context held at the same time, in
    this process.

    Counted by storage, independent of the allocator.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._num_bytes = {}  # of each living storage

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        inputs = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        # Views share the storage of an input: only new storages count.
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in inputs:
                # By weak references: the meter must not keep alive what it counts.
                storage = tensor.untyped_storage()
                self._num_bytes[StorageWeakRef(storage)] = storage.nbytes()
        self._num_bytes = {
            ref: num_bytes for ref, num_bytes in self._num_bytes.items() if not ref.expired()
        }
        self.peak = max(self.peak, sum(self._num_bytes.values()))
        return output


def build_model(
    config: Any,
    blocks: Sequence[int] | None,
    dtype: torch.dtype,
    frozen: Sequence[str] = (),
    attention: str | None = None,
) -> PreTrainedModel:
    """A model with random weights; blocks: positions in the whole model of those that it has, None:
    all.

    frozen: globs of the parameters that are not trained. attention: eager needs memory for the
    scores; the others are measured by transformers' own choice. Call it on the meta device: a model
    whose blocks are not the first ones is built whole before.
    """
    config = deepcopy(config)
    text_config = config.get_text_config()  # of a model of text and images
    num_blocks = getattr(text_config, "num_hidden_layers", 0)
    are_first = blocks is not None and [*blocks] == [i % num_blocks for i in range(len(blocks))]
    if blocks is not None and are_first:
        select_blocks(text_config, blocks)
    # transformers checks few of its values
    with as_user_error("no model can be built from config.json", Exception):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention if attention == "eager" else None
        )
    freeze(model, frozen)
    if blocks is None or are_first:
        return model
    # The config describes blocks by their positions, so that others than the first ones are cut out
    # of the whole model.
    path, chain = _chain_of_blocks(model, num_blocks)
    model.set_submodule(path, nn.ModuleList(deepcopy(chain[i]) for i in blocks))
    select_blocks(model.config.get_text_config(), blocks)
    return model


def kinds_of_blocks(model: PreTrainedModel) -> list[list[int]]:
    """The positions of the blocks of each kind; no kind if the model's config has no number of
    blocks.

    Blocks are of one kind if their parameters have the same names and shapes, and the same ones are
    frozen: DeepSeek-V3's first three have no experts, and one in four of Qwen3-Next has attention
    in place of a recurrence.
    """
    num_blocks = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    path, chain = _chain_of_blocks(model, num_blocks)
    kinds: dict[Any, list[int]] = {}
    for position in range(num_blocks):
        parameters = chain[position].named_parameters() if path else ()
        kinds.setdefault(
            tuple((name, p.shape, p.requires_grad) for name, p in parameters), []
        ).append(position)
    return list(kinds.values())


def _chain_of_blocks(model: nn.Module, num_blocks: int) -> tuple[str, nn.ModuleList]:
    """The list of the decoder's blocks, and its path; an empty path if there is none."""
    whole: Any = model
    # A model of text and images has lists of blocks in both parts; the decoder's are trained on
    # text.
    decoder = whole.get_decoder() if hasattr(whole, "get_decoder") else whole
    inside = {id(module) for module in decoder.modules()}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_blocks and id(module) in inside:
            return path, module
    return "", nn.ModuleList()


def select_blocks(config: Any, blocks: Sequence[int]) -> None:
    """Set the number of blocks, and in each list with an entry per block (`layer_types`, ...) those
    of `blocks`.
    """
    before = config.num_hidden_layers
    config.num_hidden_layers = len(blocks)
    # By length: such lists have many names (layer_types, mlp_layer_types, ...), and a config that
    # describes more blocks than it has is refused.
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == before:
            setattr(config, key, [value[i % before] for i in blocks])
