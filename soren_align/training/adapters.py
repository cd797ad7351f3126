"""LoRA adapters and frozen parameters.

PEFT stores adapters and TRL trains them; which of their tensors are mapped is decided in
optim/routing.py.
"""

import json
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from ..core.errors import UserError, as_user_error
from ..core.files import remove, rename_durably, write
from ..recipe import Recipe, adapter_config, is_local, load_resolved, recorded_quantization
from ..run.folder import MERGED_FROM, RunFolder
from ..run.weights import (
    NO_PATTERN,
    load_adapter,
    load_config,
    load_model,
    load_tokenizer,
    make_savable_,
)
from .checkpoints import write_errors
from .trained_optimizer import AttachedOptimizer

MAMBA_TYPES = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Whose out_proj, conv1d and dt_proj cannot be adapted: their weights are read without calling the
layers."""


def base_model(start: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return (folder or hub name, revision) of the whole model to load: an adapter's base, or
    `start` itself.

    A folder is returned as an absolute path: adapters store it, and are loaded from other working
    directories.
    """
    config = adapter_config(start)
    name, revision = (
        (config["base_model_name_or_path"], config.get("revision")) if config else (start, revision)
    )
    return (str(Path(name).resolve()) if is_local(name) else name), revision


def lora_config(recipe: Recipe, model: PreTrainedModel) -> LoraConfig | None:
    """Return the recipe's new adapter as a config of PEFT; None if it has no `model.lora`."""
    lora = recipe.model.lora
    if lora is None:
        return None
    excluded = [
        name.removesuffix(".weight")
        for name, _ in model.named_parameters()
        if name.endswith(".weight") and _matches(name, recipe.model.freeze)
    ]
    # PEFT's all-linear takes routers, whose factors would get no gradient, and Mamba's layers that
    # are never called.
    if lora.target_modules == "all-linear":
        excluded += [
            name for name, module in model.named_modules() if "Router" in type(module).__name__
        ]
        if model.config.model_type in MAMBA_TYPES:
            ends = (".out_proj", ".conv1d", ".dt_proj")
            excluded += [name for name, _ in model.named_modules() if name.endswith(ends)]
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha or lora.r,  # pyright: ignore[reportArgumentType] (PEFT declares int, and divides it by r)
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        exclude_modules=excluded or None,
        modules_to_save=lora.modules_to_save or None,
        # Otherwise an embedding that is tied to the head would be trained as embedding and not as
        # head.
        ensure_weight_tying=bool(lora.modules_to_save) and bool(model.config.tie_word_embeddings),
        revision=getattr(model.config, "_commit_hash", None) or recipe.model.revision,
    )


def add_empty_adapter(model: PreTrainedModel, recipe: Recipe, start: str) -> Any:
    """Return the model with the adapter that training would add to it, without reading weights.

    For models on the meta device or of fake tensors, within their context.
    """
    config = (
        LoraConfig.from_pretrained(start) if adapter_config(start) else lora_config(recipe, model)
    )
    if config is None:
        return model
    config.inference_mode = False  # as saved adapters are
    with as_user_error(NO_PATTERN.format(start), re.error):
        return get_peft_model(model, cast(LoraConfig, config))


def merge(run: RunFolder) -> Path:
    """Write `run`/merged: the run's adapter merged with its base into one model, and its tokenizer.
    Return that folder.

    Merged in float32; saved in run.save_dtype, or else in the dtype of the base's config. If the
    base was quantized in training, it is quantized again and dequantized, to the weights that the
    adapter was trained on. An earlier merge of the same adapter is replaced. Raises UserError if
    anything else is in its place, or a file cannot be loaded.
    """
    target = run.merged
    if target.exists() and not run.is_merged():
        raise UserError(
            f"{target}: is not a merge of this run's adapter; remove or rename this folder"
        )
    # Load: the base as training had it, quantized or not, in float32, since bfloat16 would round
    # the sum of base and adapter once more than saving does.
    name, revision = base_model(str(run.model))
    with as_user_error(f"{run}: cannot be merged"):
        config = load_config(name, revision)
        quantization = recorded_quantization(run.model)
        base = load_model(name, quantization, revision=revision, dtype=torch.float32)
        make_savable_(base.generation_config, name)
        if quantization is not None:  # the numbers that the quantized weights stand for
            base: Any = base.dequantize(dtype=torch.float32).to(torch.float32)  # pyright: ignore
        model: Any = load_adapter(base, str(run.model))
        tokenizer = load_tokenizer(str(run.model))
    # Merge and save: under another name first, so that a killed merge leaves no half of a model.
    merged = model.merge_and_unload(safe_merge=True)
    partial = target.with_name("merged.part")
    remove(partial)
    save_dtype = load_resolved(run.recipe).run.save_dtype
    dtype = (
        getattr(torch, save_dtype)
        if save_dtype
        else getattr(config, "dtype", None) or torch.float32
    )
    with write_errors(partial, "Free space on this disk, then rerun the command"):
        merged.to(dtype).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write(partial / MERGED_FROM, json.dumps(run.adapter()) + "\n")
        remove(target)
        rename_durably(partial, target)
    return target


def freeze(model: nn.Module, globs: Sequence[str]) -> None:
    """Turn off the gradients of every parameter whose name matches one of `globs`, in place."""
    for name, parameter in model.named_parameters():
        if _matches(name, globs):
            parameter.requires_grad_(False)


def refuse_unmatched(model: nn.Module, globs: Sequence[str]) -> None:
    """Raise UserError for a glob that matches no parameter."""
    names = [name for name, _ in model.named_parameters()]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise UserError(
                f"model.freeze: {glob!r} matches no parameter; write names of parameters, such as "
                f"{names[0]}"
            )


class GradientCheck(TrainerCallback):
    """Raises UserError after the first step if a matrix had no gradient. Collective.

    Not before it: a gradient with a NaN is the better reason. Only where gradients are attributes
    of the parameters, which they are not under ZeRO.
    """

    def __init__(self, attached: AttachedOptimizer):
        self.attached, self._pending = attached, attached.parallel != "zero"

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Look for a gradient of every trained parameter, once."""
        if not self._pending:
            return
        self._pending = False
        # A matrix without a gradient would never learn, and no loss shows it.
        trained = [(name, p) for name, p in kwargs["model"].named_parameters() if p.requires_grad]
        missing = [name for name, parameter in trained if parameter.grad is None]
        groups = (
            group for group in self.attached.expected.param_groups if group["rule"] == "spectral"
        )
        matrices = set(missing).intersection(
            name for group in groups for name in group["param_names"]
        )
        if self.attached.ranks.any(bool(matrices)):
            # The message names what to freeze, by globs that spare all that is trained.
            reached = [name for name, parameter in trained if parameter.grad is not None]
            raise UserError(
                f"step 1: {len(missing)} of {len(trained)} trained parameters got no gradient, "
                f"such as {missing[0] if missing else 'on another process'}, because the training "
                "examples do not use these parameters: texts, for example, do not use a model's "
                "image encoder. To leave these parameters untrained, write model.freeze: "
                f"{common_globs(missing, reached)}"
            )


def common_globs(missing: Iterable[str], reached: Iterable[str]) -> list[str]:
    """Return the shortest globs, "a.b.*", that match the names in `missing` and none in `reached`.

    Matched are the names of the model without its adapter.
    """
    others, globs = {_without_adapter(name) for name in reached}, []
    for name in map(_without_adapter, missing):
        if not _matches(name, globs):
            # The shortest prefix that no parameter with a gradient has: one glob then names a whole
            # image encoder.
            prefixes = (name[: end + 1] for end, letter in enumerate(name) if letter == ".")
            prefix = next(
                (p for p in prefixes if not any(other.startswith(p) for other in others)), None
            )
            globs.append(f"{prefix}*" if prefix else name)
    return globs


def _without_adapter(name: str) -> str:
    """Return the name in the model without adapter: of a LoRA factor that of the weight which it
    belongs to.
    """
    return re.sub(r"\.lora_[AB]\.\w+", "", name.removeprefix("base_model.model."))


def _matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
