"""Activations and FLOPs of the forward and backward passes of a training step."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..data import Account
from ..recipe import Recipe, compute_dtype, parallel, trainer_value
from ..silence import log_level
from ..trainers.build import trl_forward
from .hours import hours_of_run
from .passes import Passes

UNBOUNDED_LENGTH = 4096
"""Tokens of an example where trainer.max_length is null and no example can be tokenized: a guess."""
MAX_LOOP = 128
"""Tokens of an example up to which a Mamba is measured: 64 take 3 s for each pair of models (2 CPU cores)."""


@dataclass(frozen=True)
class Compute:
    """Activations are of one process, FLOPs of a whole step on all processes."""

    max_tokens: int
    """Of the longest example; activations are those of a micro-batch of such examples."""
    mean_tokens: float
    """Of an example; FLOPs are counted with it."""
    is_measured: bool
    """Whether both come from the data; otherwise they are max_length, an upper bound."""
    activation_bytes: int | None
    """At the peak, without weights, gradients and optimizer states."""
    activation_bytes_without_checkpointing: int | None
    flops_per_step: int | None
    failure: str | None = None
    """Why these three are None: the error of the architecture's code on fake tensors."""

    def as_json(self, recipe: Recipe, ranks: dict[str, Any], num_steps: int) -> dict[str, Any]:
        """The plan's section "compute". ranks: its section "processes"."""
        maps = ranks["map_flops"] and ranks["map_flops"]["all_ranks"]
        num_examples, num_sides = ranks["global_batch_size"] * num_steps, _num_sides(recipe)
        times: dict[str, Any] = {"hours": None, "hours_assume": None}
        if self.flops_per_step:
            passes = self.flops_per_step * num_steps, compute_dtype(recipe)
            of_maps = (maps or 0) * num_steps, ranks["map_precision"]
            times = hours_of_run(passes, of_maps, on_cpu=bool(recipe.trainer.get("use_cpu")))
        return {
            "tokens_per_example": round(self.mean_tokens, 1),
            "tokens_are_measured": self.is_measured,
            "training_tokens": round(self.mean_tokens * num_sides * num_examples),
            "training_flops_per_step": self.flops_per_step,
            "training_flops": self.flops_per_step and self.flops_per_step * num_steps,
            "map_share": maps and self.flops_per_step and maps / (self.flops_per_step + maps),
            "maps_are_counted": bool(maps) or not ranks["num_matrices"],
            **times,
        }


def compute(
    recipe: Recipe,
    build_model: Callable[[Sequence[int], torch.dtype], Any],
    kinds: Sequence[Sequence[int]],
    account: Account | None,
    batch_size: int,
    max_length: int | None,
) -> Compute:
    """Measured by running small models of the recipe's architecture on fake tensors; see `passes`.

    build_model: a model of these blocks and of that dtype. kinds: see `passes.Passes`. batch_size: the global one.
    """
    max_tokens, mean_tokens = _example_lengths(recipe, account, max_length)
    num_sides = _num_sides(recipe)
    checkpointing = trainer_value(recipe, "gradient_checkpointing")

    def measure() -> tuple[int, int, int]:
        if not kinds:
            raise ValueError("its config has no number of blocks (num_hidden_layers)")
        if max_tokens > MAX_LOOP and _loops_over_tokens(build_model):
            raise ValueError("without a GPU it takes one step per token, too many to be measured")
        passes, plain = (_passes(recipe, build_model, kinds, c) for c in (checkpointing, False))
        num_joined = joined_sequences(recipe)
        sequences = trainer_value(recipe, "per_device_train_batch_size") * num_sides // num_joined
        length, longest = num_joined * max(2, round(mean_tokens)), num_joined * max_tokens
        mask = longest**2 if num_joined > 1 else 0  # a byte for each pair of tokens
        activations = passes.num_bytes(sequences, longest) + mask
        flops = passes.num_flops(1, length)
        if recipe.task == "dpo":  # the reference model's pass, at each step or once before
            flops += plain.num_flops(1, length, backward=False)
        without = plain.num_bytes(sequences, longest) + mask if checkpointing else activations
        return activations, without, round(flops / num_joined * batch_size * num_sides)

    try:
        # Without torch's own traceback of an operation that fails on fake tensors.
        with log_level(logging.CRITICAL, "torch._subclasses.fake_tensor"):
            return Compute(max_tokens, mean_tokens, account is not None, *measure())
    except Exception as error:  # an architecture's code need not run on fake tensors; training may work
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        return Compute(max_tokens, mean_tokens, account is not None, None, None, None, failure=reason)


def _num_sides(recipe: Recipe) -> int:
    """Sequences of an example: of a preference pair both answers, each with the prompt."""
    return 2 if recipe.task == "dpo" else 1


def joined_sequences(recipe: Recipe) -> int:
    """The packed sequences, or examples without padding, that TRL joins into one sequence of a micro-batch.

    1 with flash attention, which computes each by itself; the others mask all pairs of tokens.
    """
    is_packed = recipe.trainer.get("packing") and recipe.trainer.get("packing_strategy") != "wrapped"
    if not (is_packed or recipe.trainer.get("padding_free")) or "flash" in (recipe.model.attn_implementation or ""):
        return 1
    return trainer_value(recipe, "per_device_train_batch_size") if recipe.task != "dpo" else 1


def _loops_over_tokens(build_model: Callable[[Sequence[int], torch.dtype], Any]) -> bool:
    with torch.device("meta"):
        model = build_model([0], torch.float32)
    return any(type(module).__name__.endswith("MambaMixer") for module in model.modules())


def _example_lengths(recipe: Recipe, account: Account | None, max_length: int | None) -> tuple[int, float]:
    """(tokens of the longest example, tokens of a mean one)."""
    upper_bound = max_length or UNBOUNDED_LENGTH
    if not account or (recipe.trainer.get("packing") and max_length):  # packed sequences are full
        return upper_bound, float(upper_bound)
    num_sides = _num_sides(recipe)
    longest = min(account.lengths["max"], max_length or account.lengths["max"])
    return longest, account.num_tokens / (account.num_kept * num_sides)


def _passes(
    recipe: Recipe,
    build_model: Callable[[Sequence[int], torch.dtype], Any],
    kinds: Sequence[Sequence[int]],
    checkpointing: bool,
) -> Passes:
    dtype = getattr(torch, compute_dtype(recipe))
    is_sharded = parallel(recipe.run.parallel).kind != "ddp"  # ZeRO and FSDP2 compute with weights of that dtype

    def build(blocks: Sequence[int]) -> tuple[Any, Any]:
        model = build_model(blocks, dtype if is_sharded else getattr(torch, recipe.model.dtype))
        return model, trl_forward(model, checkpointing)

    return Passes(build, kinds, autocast=None if is_sharded or dtype == torch.float32 else dtype)
