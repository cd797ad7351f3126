"""Where a run's numbers may go besides metrics.jsonl: transformers' trackers, by the words of `trainer.report_to`.

transformers finds out that one is not installed when the model is loaded; here it is found by looking for its package.
"""

import difflib
import importlib.util
from typing import Any

# Word of report_to -> (modules that must be there, what to install). test_trackers.py compares the words with
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
    """The trackers that `trainer.report_to` asks for; empty for none."""
    asked = report_to if isinstance(report_to, list) else [report_to]
    return [] if asked in ([None], ["none"]) else asked


def problem(report_to: Any) -> str | None:
    """What is wrong with `trainer.report_to`; None when nothing is."""
    for name in named(report_to):
        if not isinstance(name, str):
            return f"found {name!r}; write none, {', '.join(TRACKERS)}"
        if name == "all":
            return "found 'all', which is another thing on another machine; name the trackers, or write none"
        if name == "none":
            return "found 'none' among others; write it alone, or leave it out"
        if name not in TRACKERS:
            close = difflib.get_close_matches(name, [*TRACKERS, "none"], n=1, cutoff=0.6)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            return f"found {name!r}; write none, {', '.join(TRACKERS)}{hint}"
        modules, install = TRACKERS[name]
        if missing := [module for module in modules if not _is_installed(module)]:
            return f"{name} is not installed ({', '.join(missing)}): pip install {install}, or write none"
    return None


def _is_installed(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None  # wandb leaves a folder `wandb`, which could be imported too
