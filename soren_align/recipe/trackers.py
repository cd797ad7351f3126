"""Trackers besides metrics.jsonl: transformers' integrations, by the names in `trainer.report_to`.

transformers reports a missing package only after the model is loaded; here it is reported before.
"""

import importlib.util
from typing import Any

from ..errors import did_you_mean

# Name in report_to -> (required modules, package to install). tests/recipe/test_trackers.py compares the names with
# those of the installed transformers.
TRACKERS: dict[str, tuple[tuple[str, ...], str]] = {
    "azure_ml": (("azureml.core",), "azureml-core"),
    "clearml": (("clearml",), "clearml"),
    "codecarbon": (("codecarbon",), "codecarbon"),
    "comet_ml": (("comet_ml",), "comet-ml"),
    "dagshub": (("dagshub", "mlflow"), "dagshub mlflow"),
    "dvclive": (("dvclive",), "dvclive"),
    "flyte": (("flytekit",), "flytekit"),
    "kubeflow": ((), ""),
    "mlflow": (("mlflow",), "mlflow"),
    "neptune": (("neptune",), "neptune"),
    "swanlab": (("swanlab",), "swanlab"),
    "tensorboard": (("tensorboard",), "tensorboard"),
    "trackio": (("trackio",), "trackio"),
    "wandb": (("wandb",), "wandb"),
}


def named(report_to: Any) -> list[Any]:
    """The trackers in `trainer.report_to`."""
    names = report_to if isinstance(report_to, list) else [report_to]
    return [] if names in ([None], ["none"]) else names


def problem(report_to: Any) -> str | None:
    """The problem of `trainer.report_to`; None if there is none."""
    for name in named(report_to):
        if not isinstance(name, str):
            return f"found {name!r}; write none, {', '.join(TRACKERS)}"
        if name == "all":
            return "found 'all', which depends on the machine; name the trackers, or write none"
        if name == "none":
            return "found 'none' among others; write it alone, or leave it out"
        if name not in TRACKERS:
            return f"found {name!r}; write none, {', '.join(TRACKERS)}{did_you_mean(name, [*TRACKERS, 'none'])}"
        modules, install = TRACKERS[name]
        if missing := [module for module in modules if not _is_installed(module)]:
            return f"{name} is not installed ({', '.join(missing)}): pip install {install}, or write none"
    return None


def _is_installed(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None  # wandb's log folder `wandb` would be importable too
