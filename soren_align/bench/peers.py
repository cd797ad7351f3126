"""Newton-Schulz iterations of other packages, measured where these are installed. None of them is required.

`scheduled_quintic` stands for two that are not on every registry: it is written anew from their published coefficients.
"""

import contextlib
import functools
import importlib
import importlib.util
import io
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..spectral.matrices import from_wide, to_wide
from ..spectral.quintic import EPS, quintic_step

Map = Callable[[Tensor], Tensor]
STEPS = 5
# You Jiacheng's five steps, of microsoft/dion and of NVIDIA's Emerging-Optimizers ("quintic", its default).
SCHEDULE = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
DION = "dion, Emerging"


def peers(device: torch.device) -> tuple[dict[str, Map], list[str]]:
    """(name -> map, a note on each package that cannot run here)."""
    maps: dict[str, Map] = {}
    notes = []
    deepspeed = _load("deepspeed", "deepspeed.runtime.zero.muon.original_muon", notes)
    if deepspeed is not None:
        # Both are compiled by DeepSpeed itself, in its default setting.
        maps["DeepSpeed"] = lambda x: deepspeed.zeropower_via_newtonschulz5(x, STEPS)
        if hasattr(deepspeed, "zeropower_via_gram_newtonschulz"):
            maps["DeepSpeed gram"] = lambda x: deepspeed.zeropower_via_gram_newtonschulz(x, STEPS)
    if device.type != "cuda":
        notes.append("gram-newton-schulz is left out: its kernels are for a GPU")
    else:
        gram = _load("gram-newton-schulz", "gram_newton_schulz", notes)
        if gram is not None:
            build = functools.cache(
                gram.GramNewtonSchulz
            )  # loads its kernels at the first call; a failure counts as the map's
            maps["gram-newton-schulz"] = lambda x: build()(x)
    return maps, notes


def scheduled_quintic(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The iteration of dion and Emerging-Optimizers in `dtype`: a quintic whose coefficients change step by step."""
    y = to_wide(x, dtype)
    y = y / (torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True) + EPS)
    for a, b, c in SCHEDULE:
        y = quintic_step(y, a, b, c)
    return from_wide(y, x)


def _load(package: str, module: str, notes: list[str]) -> Any:
    """The module, or None and an additional note."""
    if importlib.util.find_spec(module.split(".")[0]) is None:
        notes.append(f"{package} is not installed")
        return None
    output = io.StringIO()
    level = logging.root.manager.disable
    try:
        logging.disable(logging.CRITICAL)
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return importlib.import_module(module)
    except Exception as error:  # whatever another package raises on import, the benchmark continues without it
        notes.append(f"{package} is installed and cannot be imported: {type(error).__name__}: {error}")
        return None
    finally:
        logging.disable(level)
