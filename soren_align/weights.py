"""Weights from files, whole: a model or an adapter is loaded as its files say it is, or refused.

transformers draws what is missing at random, and PEFT leaves a new adapter's zeros where no key fits; both only warn.
Training, evaluation and `merge` load by the two functions here.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import Any, cast

import torch
from accelerate.utils.memory import should_reduce_batch_size
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import deepspeed as hf_deepspeed

from .errors import UserError
from .recipe import adapter_config

MATCH_SECONDS = 3
"""Of CPU, for all of an adapter's patterns on all of a model's modules; those that adapters are published with take a
thousandth."""
PATTERNS = {
    "target_modules": "%s",
    "exclude_modules": "%s",
    "modules_to_save": r"(^|.*\.)%s($|\..*)",
    "layers_pattern": r"(?:^|.*?\.)%s\.(?P<idx>\d+)\..*",
    "rank_pattern": r"(.*\.)?(%s)$",
    "alpha_pattern": r"(.*\.)?(%s)$",
}
"""Of an adapter's config, and what PEFT makes of them to be matched against each module's name."""
_MASK = re.compile(r"(^|\.)attn(\.attention)?\.(masked_)?bias$")
"""Causal masks that old checkpoints of GPT-2 and GPT-Neo carry among their weights."""
_ADAPTER = "default"  # PEFT's name for the only one


def load_model(name: str, **how: Any) -> PreTrainedModel:
    """A causal language model from a folder or the hub, with every parameter from its files.

    how: keywords of `from_pretrained`. Raises UserError where keys are missing, unexpected or of another shape, naming
    the first ones.
    """
    # By one rank: it reads all files once more. If it refuses, its launcher stops the others.
    if hf_deepspeed.is_deepspeed_zero3_enabled() and os.environ.get("RANK", "0") == "0":
        _compare_before_sharding(name, how)
    loaded: Any = None
    try:
        # A pickle can run anything, and so can a model's own code.
        loaded = AutoModelForCausalLM.from_pretrained(
            name,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            use_safetensors=True,
            trust_remote_code=False,
            **how,
        )
    except (RuntimeError, SafetensorError) as error:
        if should_reduce_batch_size(cast(Exception, error)):
            raise
        raise UserError(f"{name}: not a model that can be loaded: {_in_short(error)}") from error
    model, info = loaded
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(f"model {name}: is an adapter on the hub; download it, and name its folder")
    mismatched = [key for key, *_ in info["mismatched_keys"]]
    refuse_other_keys(name, info["missing_keys"], info["unexpected_keys"], mismatched)
    return model


def load_adapter(model: PreTrainedModel, folder: str, *, is_trainable: bool = False) -> PeftModel:
    """The model with the LoRA adapter in `folder`, every factor from its file.

    Raises UserError where keys are missing, unexpected or of another shape, or its config cannot be applied.
    """
    try:
        refuse_slow_patterns(model, folder)
        adapted = PeftModel.from_pretrained(model, folder, is_trainable=is_trainable)
        # Once more, for what it returns: the first result is dropped within PEFT.
        result = adapted.load_adapter(folder, _ADAPTER, is_trainable=is_trainable)
    except UserError:
        raise
    except (AttributeError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        if should_reduce_batch_size(cast(Exception, error)):
            raise
        raise UserError(f"{folder}: not an adapter that can be loaded: {_in_short(error)}") from error
    refuse_other_keys(folder, result.missing_keys, result.unexpected_keys)
    return adapted


def refuse_other_keys(
    name: str, missing: Iterable[str], unexpected: Iterable[str], mismatched: Iterable[str] = ()
) -> None:
    """UserError, with the first keys and how many there are, unless files and model hold the same weights."""
    problems = []
    for what, keys in (
        ("weights are missing", missing),
        ("weights that the model does not have", [key for key in unexpected if not _MASK.search(key)]),
        ("weights of another shape", mismatched),
    ):
        some = sorted(keys)
        if some:
            problems.append(f"{name}: {what}: {', '.join(some[:3])} ({len(some)} in all)")
    if problems:
        raise UserError(*problems)


def refuse_slow_patterns(model: torch.nn.Module, folder: str) -> None:
    """UserError where a pattern in the config of the adapter in `folder` is no regular expression, or matches for ever.

    PEFT matches them against every module's name, and a stranger's may need centuries: tried in a process of its own.
    """
    config = adapter_config(folder) or {}
    patterns = []
    for key, form in PATTERNS.items():
        given = config.get(key) or []
        if isinstance(given, list) and form == "%s":
            continue  # names, which are compared as they are
        for pattern in [given] if isinstance(given, str) else given:
            if not re.fullmatch(r"[\w.-]*", pattern):  # a plain name, which takes no time
                patterns.append(form % pattern)
    if not patterns:
        return
    work = json.dumps([patterns, [name for name, _ in model.named_modules()]])
    try:
        tried = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _TRY], input=work, text=True, capture_output=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{folder}: a pattern in its config takes too long to match; name modules instead") from None
    if tried.returncode == -signal.SIGXCPU:
        raise UserError(f"{folder}: a pattern in its config takes too long to match; name modules instead")
    if tried.returncode:
        why = (tried.stderr.strip().splitlines() or ["?"])[-1][:200]
        raise UserError(f"{folder}: a pattern in its config is no regular expression: {why}")


_TRY = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({MATCH_SECONDS}, {MATCH_SECONDS + 1}))
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    for name in names:
        re.fullmatch(pattern, name)
"""


def _compare_before_sharding(name: str, how: dict[str, Any]) -> None:
    """Under ZeRO 3, compare keys and shapes alone: transformers does not, but for missing keys."""
    alive = hf_deepspeed._hf_deepspeed_config_weak_ref
    assert alive is not None
    config = alive()
    hf_deepspeed.unset_hf_deepspeed_config()
    try:
        load_model(name, **how, device_map={"": "meta"})
    finally:
        hf_deepspeed.set_hf_deepspeed_config(config)


def _in_short(error: BaseException) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) < 200 else f"{said[:200]}..."
