"""What run.json holds: the keys that are read again, with their types.

A run folder may be a stranger's, or of another version: what does not fit is named when the file is read, and not where
it is used. Keys beyond these are for people.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from .errors import UserError

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0)]


class Source(TypedDict):
    """A dataset, by the hub's commit or a file's sha256."""

    path: str
    split: str
    revision: NotRequired[str | None]
    sha256: NotRequired[str]
    weight: NotRequired[float]


class Mixture(TypedDict):
    """Several datasets."""

    sources: list[Source]


class Counted(TypedDict):
    """How many examples of a dataset were trained on, and why the others were not."""

    num_examples: Count
    dropped: dict[str, Count]


class Data(TypedDict):
    """What was learned from: Counted, and a Source or a Mixture."""

    train: Counted


class Start(TypedDict):
    """The checkpoint that training started from."""

    path: str
    sha256_or_revision: str | None


class Parameters(TypedDict):
    """Those of the model."""

    dtype: list[str]
    total: Count
    trainable: Count


class Survived(TypedDict):
    """How much of a change arrived in the model folder."""

    fraction_changed: float
    projection: float


class Survival(TypedDict):
    """By group."""

    dtype: str
    matrices: NotRequired[Survived]


class Training(TypedDict):
    """What training did."""

    steps: Count
    first_loss: float | None
    last_loss: float | None
    relative_change: NotRequired[float]
    aux_relative_change: NotRequired[float]
    change_after_saving: NotRequired[Survival]


Optimizer = TypedDict("Optimizer", {"class": NotRequired[str], "num_matrices": NotRequired[Count]})


class Manifest(TypedDict):
    """run.json."""

    status: Literal["training", "trained", "finished"]
    task: Literal["sft", "dpo"]
    versions: dict[str, str]
    extends: NotRequired[list[str]]
    processes: NotRequired[Annotated[int, Field(ge=1)] | None]
    processes_before: NotRequired[list[int | None]]
    resumed_from_steps: NotRequired[list[int]]
    parallel_config: NotRequired[dict[str, Any]]
    started: NotRequired[str]
    commit: NotRequired[str | None]
    last_error: NotRequired[str | None]
    optimizer: NotRequired[Optimizer]
    start: NotRequired[Start]
    data: NotRequired[Data]
    parallel: NotRequired[str]
    examples_per_step: NotRequired[Count]
    seeds: NotRequired[dict[str, int | None]]
    device: NotRequired[str]
    parameters: NotRequired[Parameters]
    training: NotRequired[Training]


OF_A_MODEL = ("start", "data", "parallel", "examples_per_step", "seeds", "device", "parameters", "training")
"""Keys of every run that has a model."""
_MANIFEST, _SOURCE, _MIXTURE = TypeAdapter(Manifest), TypeAdapter(Source), TypeAdapter(Mixture)


def checked(record: Any, file: Path, needed: Iterable[str] = ()) -> dict[str, Any]:
    """The record itself, if it is one of ours and has the keys that are needed. UserError otherwise."""
    versions = record.get("versions") if isinstance(record, dict) else None
    if not isinstance(versions, dict) or "soren-align" not in versions:
        raise UserError(f"{file}: was not written by soren-align; choose another folder")
    try:
        _MANIFEST.validate_python(record, strict=True)
        if "data" in record:
            train = record["data"]["train"]
            (_MIXTURE if "sources" in train else _SOURCE).validate_python(train, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        wrong = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
    else:
        missing = [key for key in needed if key not in record]
        if not missing:
            return record
        wrong = f"lacks {', '.join(missing)}"
    raise UserError(f"{file}: {wrong}; it was changed, or written by another version of soren-align")
