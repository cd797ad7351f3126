"""A split from the Hugging Face hub, or from its local cache, and its commit."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import datasets
from datasets import Dataset, DatasetBuilder, IterableDataset
from huggingface_hub import constants

from ..core.errors import OutOfReach, UserError
from ..recipe import FILE_KINDS
from .arrow import without_filled_keys


def fetch(
    path: str, split: str, revision: str | None, name: str | None = None
) -> tuple[Dataset, str]:
    """(the split, or a part of it as `train[:10%]`, memory-mapped; the commit of `revision`).

    name: of the configuration. Raises UserError if the hub has no such dataset, configuration,
    split or revision, OutOfReach if it is needed and unreachable.
    """
    with _builder(path, revision, name) as builder:
        builder.download_and_prepare()
    splits = list(builder.info.splits or {})
    # Before `datasets` reads the split: its own error for a missing one does not list those that
    # exist.
    names = [part.split("[")[0].strip() for part in split.split("+")]
    if missing := next((name for name in names if name not in splits), None):
        raise UserError(f"{path}: has no split '{missing}'; write one of {', '.join(splits)}")
    try:
        dataset = builder.as_dataset(split=split)
    except (ValueError, AssertionError) as error:  # train[:10], train[50%:] and the like
        remedy = "write a part such as train[:10%], or a limit"
        raise UserError(
            f"{path}: '{split}' is no valid part of a split: {error}; {remedy}"
        ) from None
    assert isinstance(dataset, Dataset)
    return dataset, str(builder.hash)


def stream(
    path: str, split: str, revision: str | None, name: str | None = None
) -> tuple[IterableDataset, str]:
    """Return what `fetch` does, without a download: (a whole split, read from the hub as it is
    iterated over; the commit).
    """
    with _builder(path, revision, name) as builder:
        dataset = builder.as_streaming_dataset(split=split)
    assert isinstance(dataset, IterableDataset)
    return dataset, str(builder.hash)


class StreamReader:
    """The records of a streamed split from a position, which is None for the first, and otherwise
    plain data.
    """

    def __init__(self, dataset: IterableDataset, place: str, position: Any = None):
        """dataset: from `stream`; not modified. place: for messages."""
        # A copy of all of it: a shallow one shares its position with the original (datasets 5.2;
        # test_stream.py).
        self.dataset, self.place = copy.deepcopy(dataset), place
        self.num_read = 0 if position is None else position["num_read"]
        if position is not None:
            self.dataset.load_state_dict(position["state"])

    @property
    def position(self) -> Any:
        """The position after the record that was returned last."""
        return {"num_read": self.num_read, "state": self.dataset.state_dict()}

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        records = iter(self.dataset)
        while True:
            try:
                record = next(records, None)
            except Exception as error:  # whatever is raised here comes from the hub or its data
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise UserError(
                    f"{self.place}: after {self.num_read} records the hub could no longer be read:"
                    f" {reason}; rerun the same command to resume"
                ) from None
            if record is None:
                return
            self.num_read += 1
            yield f"{self.place} record {self.num_read}", without_filled_keys(dict(record))


@contextmanager
def _builder(path: str, revision: str | None, name: str | None) -> Iterator[DatasetBuilder]:
    """The dataset's builder, within a context of which any exception comes from the hub or its
    data.
    """
    try:
        builder = datasets.load_dataset_builder(path, name, revision=revision)
        # Without the hub, `datasets` returns the newest cached copy, whatever the revision.
        from_cache = type(builder).__module__.startswith("datasets.packaged_modules.cache")
        if from_cache and revision is not None and builder.hash != revision:
            raise UserError(
                f"{path}: the hub cannot be reached, and the cached copy is revision"
                f" {builder.hash}, not '{revision}'; write the cached revision, or connect to"
                " the hub"
            )
        yield builder
    except UserError:
        raise
    except Exception as error:
        kind = (
            OutOfReach
            if isinstance(error, ConnectionError) or constants.HF_HUB_OFFLINE
            else UserError
        )
        reason, *others = (str(error).strip() or type(error).__name__).splitlines()
        # datasets raises a bare ValueError if a configuration is missing or unknown, and lists all
        # others in the first or second line
        if type(error) is ValueError:
            configurations = " ".join([reason, *others[:1]])
            message = f"{configurations}; add the key `name` with one of these configurations"
        elif kind is OutOfReach:
            message = (
                "is neither a file nor a cached dataset, and the Hugging Face hub cannot be"
                f" reached ({reason}). Write the path of a file ({FILE_KINDS}), or connect to the"
                " hub for the first run (without HF_HUB_OFFLINE)"
            )
        else:
            message = (
                f"cannot be loaded from the Hugging Face hub: {reason}; check the dataset's name"
            )
        raise kind(f"{path}: {message}") from None
