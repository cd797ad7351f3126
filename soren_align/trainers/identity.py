"""What must be equal for runs that are compared at one seed, as hashes and plain data: `identity` in run.json.

Starting weights, the batches in their order, precision, data, recipe, processes and versions. `soren-align compare`
checks them (docs/comparison.md).
"""

import hashlib
import json
import zlib
from typing import Any

import torch
import transformers
import trl
from peft import PeftModel
from torch import Tensor
from transformers import TrainerCallback

from ..quantized_weights import quantization_of
from ..recipe import Recipe, global_batch, recipe_hash
from ..sharding.ranks import Ranks
from ..spectral.precision import BACKENDS
from ..version import __version__
from .training_setup import TrainingSetup

MAX_HASHED = 2**24
"""Elements of the starting weights that are hashed, of larger models evenly spaced rows: 64 MB, 0.05 s on one core."""
LIBRARIES = {package.__name__: package.__version__ for package in (torch, transformers, trl)}
# Odd, from SplitMix64 (Steele et al. 2014), as signed 64-bit numbers.
_STEP, _MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


class BatchHash(TrainerCallback):
    """An order-sensitive hash of all batches that a training has seen: token ids, labels and masks.

    The hash is a number of 64 bits per rank, computed on the device of the batches and read at checkpoints and at the
    end only. Checkpoints contain it: a resumed run has the hash of an uninterrupted one.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.num_batches = 0
        self._value: Tensor | int = 0
        self._keys = position_keys(0)
        self._is_complete = True

    def on_train_begin(self, args, state, control, **kwargs):
        """Restore the hash of the checkpoint. One of another number of processes has no order to continue."""
        saved = (state.stateful_callbacks or {}).get(type(self).__name__, {})  # pyright: ignore (a dict)
        values, self.num_batches = saved.get("values", [0] * self.ranks.num_ranks), saved.get("batches", 0)
        self._is_complete = values is not None and len(values) == self.ranks.num_ranks
        self._value = values[self.ranks.rank] if values is not None and self._is_complete else 0

    def add(self, inputs: dict[str, Any]) -> None:
        """Continue the hash with a micro-batch of this rank, without its tensors of floats (log-probabilities)."""
        tensors = sorted((k, v) for k, v in inputs.items() if torch.is_tensor(v) and not v.is_floating_point())
        layout = zlib.crc32(str([(name, *tensor.shape) for name, tensor in tensors]).encode())
        values = torch.cat([tensor.reshape(-1).long() for _, tensor in tensors])
        if self._keys.numel() < values.numel() or self._keys.device != values.device:
            self._keys = position_keys(2 * values.numel(), values.device)
        before = self._value if torch.is_tensor(self._value) else torch.tensor(self._value, device=values.device)
        self._value = before * _STEP + (mixed_sum(values, self._keys[: values.numel()]) + layout)
        self.num_batches += 1

    def state(self) -> dict[str, Any]:
        """Return the content for a checkpoint, plain data. Collective."""
        values = self.ranks.gather(int(self._value))
        return {"values": values if self._is_complete else None, "batches": self.num_batches}

    def record(self) -> dict[str, Any]:
        """Return the hash over all ranks in their order, None after a resume with another number. Collective.

        {"batches": the hash, "num_batches": micro-batches of one rank}
        """
        values = self.state()["values"]
        return {"batches": None if values is None else _short_hash(values), "num_batches": self.num_batches}


def position_keys(number: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a key for each position: int64, multiples of an odd number modulo 2^64."""
    return torch.arange(1, number + 1, device=device) * _STEP


def mixed_sum(values: Tensor, keys: Tensor) -> Tensor:
    """Return the sum of mixed pairs (value, key) modulo 2^64: int64 vectors, and a scalar on their device.

    Integers, which wrap around: the sum does not depend on the order in which a device adds.
    """
    mixed = (values * _MIX).bitwise_xor_(keys)
    return mixed.bitwise_xor_(mixed >> 32).mul_(_MIX).sum()


def weights_hash(model: torch.nn.Module, ranks: Ranks) -> str:
    """Return the hash of a model's parameters: names, shapes, dtypes and evenly spaced rows. Collective.

    Of the first rank's whole model, which DDP and FSDP2 distribute; under ZeRO 3 of the shards of all ranks in their
    order, so that runs with different numbers of processes differ.
    """
    is_sharded = any(hasattr(parameter, "ds_tensor") for parameter in model.parameters())
    if not is_sharded:
        return _local_hash(model, ranks.rank) if ranks.is_first else ""
    return _short_hash(ranks.gather(_local_hash(model, ranks.rank)))


def _local_hash(model: torch.nn.Module, rank: int) -> str:
    parts = [(name, parameter, _shard(parameter, rank)) for name, parameter in model.named_parameters()]
    stride = max(1, -(-sum(part.numel() for *_, part in parts) // MAX_HASHED))
    digest = hashlib.sha256()
    for name, parameter, part in parts:
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        digest.update(f"{name} {shape} {parameter.dtype}\n".encode())
        rows = part[::stride] if part.ndim else part
        digest.update(rows.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:16]


def _shard(parameter: Any, rank: int) -> Tensor:
    """Return the part of a parameter that this rank holds, without ZeRO's padding, which is not initialized."""
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None:
        return parameter.detach()
    length = min(shard.numel(), max(parameter.ds_numel - rank * shard.numel(), 0))
    return shard.detach().reshape(-1)[:length]


def precision(trainer: Any) -> dict[str, Any]:
    """Return the dtypes of weights and arithmetic. `updated` is known only once the optimizer is made."""
    model = trainer.model
    parameters = list(model.parameters())
    record = {
        "weights": _dtypes(parameters),
        "trained": _dtypes(p for p in parameters if p.requires_grad),
        "autocast": trainer.accelerator.mixed_precision,
        "float32_products": {name: backend.fp32_precision for name, backend in BACKENDS.items()},
        "attention": model.config._attn_implementation,
        "adapter": _dtypes(p for p in parameters if p.requires_grad) if isinstance(model, PeftModel) else None,
        "quantization": (quantization_of(model) or {}).get("quantize"),
    }
    if trainer.attached is not None:
        compensated = trainer.optimizer_settings.get("compensation") == "kahan"
        dtypes = _dtypes(tensor for group in trainer.attached.tensors for tensor in group)
        record["updated"] = [f"{dtype}, compensated" if compensated else dtype for dtype in dtypes]
    return record


def identity(setup: TrainingSetup, trainer: Any, ranks: Ranks) -> dict[str, Any]:
    """Return what is known before training; see manifest.Identity. Collective."""
    recipe: Recipe = setup.recipe
    device = trainer.args.device
    sources = [setup.splits[name] and setup.splits[name].source for name in ("train", "eval")]
    return {
        "starting_weights": weights_hash(trainer.model, ranks),
        "data": _short_hash(_without_paths(sources)),
        "recipe": recipe_hash(recipe),
        "precision": precision(trainer),
        "processes": ranks.num_ranks,
        "global_batch_size": global_batch(recipe, ranks.num_ranks)[0],
        "versions": LIBRARIES | {"soren-align": __version__},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def _without_paths(source: Any) -> Any:
    """Return plain data without the keys `path`: contents are hashed, not places."""
    if isinstance(source, dict):
        return {key: _without_paths(value) for key, value in source.items() if key != "path"}
    return [_without_paths(value) for value in source] if isinstance(source, list | tuple) else source


def _dtypes(tensors: Any) -> list[str]:
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})


def _short_hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]
