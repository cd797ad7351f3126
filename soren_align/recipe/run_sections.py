"""The sections inside `run`: measurements and samples during training, and its early end."""

from typing import Annotated, Any

from pydantic import Field, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

from .base import NonNegative, Section


class LogSpectra(Section):
    """Measurements of the spectral map during training; see `soren-align spectrum`."""

    steps: list[Annotated[int, Field(ge=1)]] = []
    """Optimizer steps at which the singular values of the map's inputs, the momenta, are written into spectra.jsonl:
    `[1, 100]`. Each matrix costs a decomposition at these steps."""
    matrices: Annotated[list[str], Field(min_length=1)] = ["*"]
    """Names of the matrices whose singular values are written; `*` matches anything: `["*.0.*q_proj*"]`. A name that
    matches no matrix is an error."""
    map_error: bool = True
    """Whether logging steps measure the distance of one matrix's map from the exact sigmoid: `map_error` in
    metrics.jsonl. For Soren with any map but `exact`."""


def _prompts(value: Any, check: Any) -> Any:
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError("prompts", "write a list of texts, or a .txt or .jsonl file") from None


class Samples(Section):
    """Prompts that the model answers during training, with the run's template, greedily. The answers are written into
    samples.jsonl and do not change the training. Not under ZeRO 3 and FSDP2, which shard the weights."""

    prompts: Annotated[
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | Annotated[str, Field(min_length=1)],
        WrapValidator(_prompts),
    ]
    """A list of texts, each a user's first message; or a file: .txt with one per line, or .jsonl of objects with a
    `prompt`, which is a text or a list of messages. For data without messages a prompt is the beginning of a text."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    """The length at which an answer is cut; less where the model has fewer positions."""


class EarlyStopping(Section):
    """The end of training when evaluations improve no longer, by transformers' EarlyStoppingCallback. Compared is
    `trainer.metric_for_best_model`, by default the loss; `trainer.load_best_model_at_end` saves the best checkpoint's
    model instead of the last one's."""

    patience: Annotated[int, Field(ge=1)] = 3
    """Evaluations in a row without an improvement after which training ends."""
    threshold: NonNegative = 0.0
    """An improvement is larger than this."""
