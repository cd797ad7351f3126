"""The identity of a run, and the reference model of DPO.

`identity` in run.json has, as hashes and plain data, all that must be equal for such runs: starting
weights, the batches in their order, precision, data, recipe, processes and versions; `soren-align
compare` checks it (docs/comparison.md). The cached log-probabilities of a DPO's reference have a
key of the same kind, and step 1 checks that they are of the starting model. Before the first update
the policy is its own reference: all rewards, beta times the change of an answer's log-probability,
are 0. Log-probabilities of another model, from a cache or from a reference that was loaded from
elsewhere, would silently train towards another goal.
"""

import hashlib
import json
import math
import socket
import zlib
from typing import Any

import torch
import transformers
import trl
from peft import PeftModel
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd
from transformers import TrainerCallback

from ..core.errors import UserError
from ..core.files import digest
from ..core.text import join_words
from ..core.version import __version__
from ..optim.layout import whole_shape
from ..recipe import Recipe, global_batch, recipe_hash
from ..run.quantized import quantization_of
from ..sharding.ranks import Ranks
from ..spectral.matrices import BACKENDS, FULL
from .setup import TrainingSetup

ROUNDING = {torch.float32: 2.0**-15, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
"""Root mean square of the rounding error of a token's log-probability. A Llama of 8 layers of 256
columns with random weights and logits of RMS 2.6 is 0.057 from float32 in bfloat16, 0.0070 in
float16, and in float32 5.9e-6 from float64; with logits of RMS 0.3 an eighth of each. Two kernels
differ by less. Float32 has a margin for the sums of wide layers.
"""
ROUTED = 2.0**-3
"""The same with experts: rounding changes a router's choice between two that are nearly equal."""
SIGMAS = 6.0
_PRECOMPUTED_BY = (
    "max_length",
    "truncation_mode",
    "ld_alpha",
    "bf16",
    "fp16",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "precompute_ref_batch_size",
    "world_size",
)
MAX_HASHED = 2**24
"""Elements of the starting weights that are hashed, of larger models evenly spaced rows: 64 MB,
0.05 s on one core."""
LIBRARIES = {package.__name__: package.__version__ for package in (torch, transformers, trl)}
# Odd, from SplitMix64 (Steele et al. 2014), as signed 64-bit numbers.
_STEP, _MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


def run_identity(setup: TrainingSetup, trainer: Any, ranks: Ranks) -> dict[str, Any]:
    """Return what is known before training; see run/record.py. Collective."""
    recipe: Recipe = setup.recipe
    device = trainer.args.device
    sources = [split and split.source for split in (setup.splits.train, setup.splits.eval)]
    return {
        "starting_weights": weights_digest(trainer.model, ranks),
        "data": digest(_without_paths(sources))[:16],
        "recipe": recipe_hash(recipe),
        "precision": precision(trainer),
        "processes": ranks.num_ranks,
        "global_batch_size": global_batch(recipe, ranks.num_ranks)[0],
        "versions": LIBRARIES | {"soren-align": __version__},
        "device": device_name(device),
    }


def refuse_other_inputs(setup: TrainingSetup, ranks: Ranks) -> None:
    """Raise UserError on all ranks if one has other data, another tokenizer or other libraries than
    the first. Collective.
    """
    if ranks.num_ranks == 1:  # a large vocabulary is not hashed for nothing
        return
    # Hosts read their own copies. With others they would train together without a word, and
    # run.json would have the first one's hash.
    sources = [split and split.source for split in (setup.splits.train, setup.splits.eval)]
    tokenizer = setup.tokenizer
    vocabulary = sorted(tokenizer.get_vocab().items())
    own = {
        "other data": digest(_without_paths(sources, sampled=False)),
        "another tokenizer": digest([tokenizer.chat_template, vocabulary]),
        join_words([f"{package} {version}" for package, version in LIBRARIES.items()]): "",
    }
    everyone = ranks.gather((socket.gethostname(), own))
    first_host, first = everyone[0]
    for rank, (host, inputs) in enumerate(everyone):
        for what in inputs:
            if inputs[what] != first.get(what):
                raise UserError(
                    f"rank {rank} on {host} has {what}, and rank 0 on {first_host} does not; give"
                    " every host the same files and packages"
                )


def device_name(device: torch.device) -> str:
    """The name of a GPU ("NVIDIA H200"), or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def precision(trainer: Any) -> dict[str, Any]:
    """Return the dtypes of weights and arithmetic.
    `updated` is known only once the optimizer is made.
    """
    model = trainer.model
    parameters = list(model.parameters())
    trained = _dtypes(p for p in parameters if p.requires_grad)
    record = {
        "weights": _dtypes(parameters),
        "trained": trained,
        "autocast": trainer.accelerator.mixed_precision,
        "float32_products": {name: backend.fp32_precision for name, backend in BACKENDS.items()},
        "attention": model.config._attn_implementation,
        "adapter": trained if isinstance(model, PeftModel) else None,
        "quantization": (quantization_of(model) or {}).get("quantize"),
    }
    if hasattr(trainer, "attached"):
        compensated = trainer.optimizer_settings.get("compensation") == "kahan"
        dtypes = _dtypes(tensor for group in trainer.attached.tensors for tensor in group)
        record["updated"] = [f"{dtype}, compensated" if compensated else dtype for dtype in dtypes]
    return record


class BatchHash(TrainerCallback):
    """An order-sensitive hash of all batches that a training has seen: token ids, labels and masks.

    The hash is a number of 64 bits per rank, computed on the device of the batches and read at
    checkpoints and at the end only. Checkpoints contain it: a resumed run has the hash of an
    uninterrupted one.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.num_batches = 0
        self._value: Tensor | int = 0
        self._keys = position_keys(0)
        self._is_complete = True

    def on_train_begin(self, args, state, control, **kwargs):
        """Restore the hash of the checkpoint.
        One of another number of processes has no order to continue.
        """
        saved = (state.stateful_callbacks or {}).get(type(self).__name__, {})  # pyright: ignore (a dict)
        values = saved.get("values", [0] * self.ranks.num_ranks)
        self.num_batches = saved.get("batches", 0)
        self._is_complete = values is not None and len(values) == self.ranks.num_ranks
        self._value = values[self.ranks.rank] if values is not None and self._is_complete else 0

    def add(self, inputs: dict[str, Any]) -> None:
        """Continue the hash with a micro-batch of this rank, without its tensors of floats
        (log-probabilities).
        """
        tensors = sorted(
            (k, v) for k, v in inputs.items() if torch.is_tensor(v) and not v.is_floating_point()
        )
        layout = zlib.crc32(str([(name, *tensor.shape) for name, tensor in tensors]).encode())
        # One flat vector: a single kernel per micro-batch, whatever the number of tensors.
        values = torch.cat([tensor.reshape(-1).long() for _, tensor in tensors])
        if self._keys.numel() < values.numel() or self._keys.device != values.device:
            self._keys = position_keys(2 * values.numel(), values.device)
        before = (
            self._value
            if torch.is_tensor(self._value)
            else torch.tensor(self._value, device=values.device)
        )
        # Integers wrap around modulo 2^64: the order of batches counts, the order of a device's sum
        # does not.
        self._value = before * _STEP + (mixed_sum(values, self._keys[: values.numel()]) + layout)
        self.num_batches += 1

    def state(self) -> dict[str, Any]:
        """Return the content for a checkpoint, plain data. Collective."""
        values = self.ranks.gather(int(self._value))
        return {"values": values if self._is_complete else None, "batches": self.num_batches}

    def record(self) -> dict[str, Any]:
        """Return the hash over all ranks in their order, None after a resume with another number.
        Collective.

        {"batches": the hash, "num_batches": micro-batches of one rank}
        """
        values = self.state()["values"]
        return {
            "batches": None if values is None else digest(values)[:16],
            "num_batches": self.num_batches,
        }


def position_keys(number: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a key for each position: int64, multiples of an odd number modulo 2^64."""
    return torch.arange(1, number + 1, device=device) * _STEP


def mixed_sum(values: Tensor, keys: Tensor) -> Tensor:
    """Return the sum of mixed pairs (value, key) modulo 2^64: int64 vectors, and a scalar on their
    device.

    Integers, which wrap around: the sum does not depend on the order in which a device adds.
    """
    mixed = (values * _MIX).bitwise_xor_(keys)
    return mixed.bitwise_xor_(mixed >> 32).mul_(_MIX).sum()


def weights_digest(model: torch.nn.Module, ranks: Ranks) -> str:
    """Return the hash of a model's parameters: names, shapes, dtypes and evenly spaced rows.
    Collective.

    Of the first rank's whole model, which DDP and FSDP2 distribute; under ZeRO 3 of the shards of
    all ranks in their order, so that runs with different numbers of processes differ.
    """
    # Gather: under DDP and FSDP2 the first rank has read the whole model; under ZeRO 3
    # no rank has it.
    is_sharded = any(hasattr(parameter, "ds_tensor") for parameter in model.parameters())
    if not (is_sharded or ranks.is_first):
        return ""
    parts = []
    parameter: Any
    for name, parameter in model.named_parameters():
        part = getattr(parameter, "ds_tensor", parameter).detach()
        if hasattr(parameter, "ds_tensor"):
            # Without ZeRO's padding, which is not initialized.
            ends = min(part.numel(), max(parameter.ds_numel - ranks.rank * part.numel(), 0))
            part = part.reshape(-1)[:ends]
        parts.append((name, parameter, part))
    # Evenly spaced rows of a large model: another start differs in nearly all rows, and 28 GB would
    # take 20 s to hash.
    stride = max(1, -(-sum(part.numel() for *_, part in parts) // MAX_HASHED))
    sha256 = hashlib.sha256()
    for name, parameter, part in parts:
        shape = whole_shape(parameter)
        sha256.update(f"{name} {shape} {parameter.dtype}\n".encode())
        rows = part[::stride] if part.ndim else part
        sha256.update(rows.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    own = sha256.hexdigest()[:16]
    return digest(ranks.gather(own))[:16] if is_sharded else own


def reference_key(trainer: Any, ranks: Ranks) -> str:
    """Return the key of the reference's cached log-probabilities: of all that they depend on but
    the examples.

    Collective. TRL's own key has the weights alone, and is the same for all models under ZeRO 3,
    whose state_dict is empty.
    """
    # All that can move a log-probability by a bit: another GPU or library has other kernels.
    model, device = trainer.ref_model or trainer.model, trainer.args.device
    parts = [
        trainer._precompute_model_hash,
        weights_digest(model, ranks) if trainer.is_deepspeed_enabled else None,
        {**trainer.model.config.to_dict(), "_name_or_path": None},
        trainer.origin,  # the start and the whole recipe: other settings may change the last bits
        [getattr(trainer.args, name, None) for name in _PRECOMPUTED_BY],
        [
            LIBRARIES,
            str(device.type),
            torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        ],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class ReferenceCheck(TrainerCallback):
    """Raises UserError, on every rank, at step 1 of a new run whose policy and reference are
    different models.

    Collective. For a DPO whose reference is its start. Training passes that draw random numbers,
    such as of dropout, are not checked.
    """

    def __init__(self, trainer: Any, ranks: Ranks):
        self.trainer, self.ranks = trainer, ranks
        self.is_pending = False
        self._counts: list[Tensor] = []

    def on_train_begin(self, args, state, control, **kwargs):
        """Check new runs only: a resumed run was checked at its own first step."""
        # Rates of noise and of dropout, in any layer. Attention has its own, under many names.
        rates = [self.trainer.args.neftune_noise_alpha]
        for module in self.trainer.model.modules():
            rates += [module.p] if isinstance(module, _DropoutNd) else []
            rates += [
                value for key, value in vars(module).items() if "drop" in key or "jitter" in key
            ]
        draws = any(isinstance(rate, float) and rate > 0 for rate in rates)
        self.is_pending = state.global_step == 0 and not draws

    def add(self, completion_mask: Tensor) -> None:
        """Note a micro-batch of this rank: its tokens and answers."""
        num_answers = completion_mask.new_tensor(len(completion_mask))
        self._counts.append(torch.stack([completion_mask.sum(), num_answers]))

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Compare the rewards of the first step, the only one that the host reads, with 0."""
        if not self.is_pending:
            return
        self.is_pending = False
        logged = self.trainer._metrics["train"]
        # Of labelled answers a step may have only good ones, or only bad ones.
        means = [
            sum(logged[key]) / max(1, len(logged[key]))
            for key in ("rewards/chosen", "rewards/rejected")
        ]
        counts = torch.stack(self._counts).sum(0).tolist()
        *rewards, num_tokens, num_answers = self.ranks.sums([*means, *counts])
        chosen, rejected = (reward / self.ranks.num_ranks for reward in rewards)
        limit = reward_limit(self.trainer, num_tokens / num_answers, num_answers / 2)
        # NaN and infinities are reported with the gradients that have them.
        if not any(limit < abs(reward) < math.inf for reward in (chosen, rejected)):
            return
        cause, remedy = "", "true, so that the starting model computes the log-probabilities once"
        if self.trainer.precompute_ref_logps:
            cause = "cached log-probabilities of another model; "
            remedy = "false, so that they are computed at every step"
        raise UserError(
            "step 1: the reference model is not the starting model: before any update, the "
            f"rewards are {chosen:.2g} (chosen) and {rejected:.2g} (rejected), not 0 +- "
            f"{limit:.1g}. Likely causes: {cause}a model folder that changed while the run "
            "started; a forward pass that differs in training (attention, kernels). Write "
            f"trainer.precompute_ref_log_probs: {remedy}"
        )


def reward_limit(trainer: Any, num_tokens: float, num_pairs: float) -> float:
    """Return the most by which rounding alone moves the absolute mean reward from 0.

    num_tokens: of an answer, on average; each of `num_pairs` pairs has two.

    The errors of a policy and its reference: independent ones of each token, and a bias of half the
    square, since the mean of a distorted model's log-probabilities is lower (Jensen).
    """
    # The dtypes of the arithmetic: bfloat16 for quantized weights and reduced float32 products.
    dtypes = {
        p.dtype if p.is_floating_point() else torch.bfloat16 for p in trainer.model.parameters()
    }
    if trainer.args.bf16 or any(
        backend.fp32_precision not in FULL for backend in BACKENDS.values()
    ):
        dtypes.add(torch.bfloat16)
    if trainer.args.fp16:
        dtypes.add(torch.float16)
    sigma = max(ROUNDING.get(dtype, ROUNDING[torch.float32]) for dtype in dtypes)
    if hasattr(trainer.model.config.get_text_config(), "output_router_logits"):
        sigma = ROUTED
    random = SIGMAS * sigma * math.sqrt(num_tokens / num_pairs)
    return trainer.beta * (random + sigma**2 * num_tokens)


def _without_paths(source: Any, sampled: bool = True) -> Any:
    """Return plain data without the keys `path`: contents are hashed, not places.

    sampled: with the hashes of large streams, in which the files' times are too.
    """
    if isinstance(source, dict):
        out = {"path"} if sampled or not source.get("sampled") else {"path", "tree_sha256"}
        return {k: _without_paths(value, sampled) for k, value in source.items() if k not in out}
    if isinstance(source, list | tuple):
        return [_without_paths(value, sampled) for value in source]
    return source


def _dtypes(tensors: Any) -> list[str]:
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
