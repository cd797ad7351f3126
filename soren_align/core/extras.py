"""Packages that only some commands need, by the extras of soren-align that install them.

The one place for the message about a missing one. Call it before anything expensive: it looks for
the package and imports nothing, so that the answer comes within a second.
"""

import importlib.util

from .errors import UserError

EXTRAS = {
    "lm_eval": ("lm-eval", "eval"),
    "deepspeed": ("DeepSpeed", "deepspeed"),
    "bitsandbytes": ("bitsandbytes", "quantize"),
    "liger_kernel": ("liger-kernel", "liger"),
    "vllm": ("vLLM", "vllm"),
    "openpyxl": ("openpyxl", "spreadsheets"),
    "gguf": ("gguf", "gguf"),
}
"""Module -> (name of the package, the extra that installs it)."""


def is_installed(module: str) -> bool:
    """Whether a module can be found; it is not imported."""
    return importlib.util.find_spec(module) is not None


def install_command(extra: str) -> str:
    """Return the command that installs an extra, in backquotes."""
    return f'`pip install "soren-align[{extra}]"`'


def missing(module: str, alternative: str = "") -> str | None:
    """Return the problem "needs lm-eval, which is not installed; run ..., or ..."; None if the
    module is installed.

    alternative: what else the user can do; empty for nothing.
    """
    if is_installed(module):
        return None
    name, extra = EXTRAS[module]
    remedy = f"run {install_command(extra)}" + (f", or {alternative}" if alternative else "")
    return f"needs {name}, which is not installed; {remedy}"


def require(module: str, place: str, alternative: str = "") -> None:
    """Raise UserError if a module is not installed.

    place: the key, file or command that needs it. alternative: as in `missing`.
    """
    if problem := missing(module, alternative):
        raise UserError(f"{place}: {problem}")
