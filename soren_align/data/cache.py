"""Tokenized datasets in the user's cache folder, shared by plan, run and resume.

A folder per dataset, named by a hash of all that determines the tokens: the examples, tokenizer,
template, settings, versions and this package's own rules. It holds an Arrow file, which runs no
code when it is read and whose every offset is checked first. A folder appears whole or not at all;
those unused for a month are removed, and the oldest where all have more than 50 GB.
"""

import errno
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, List, Value
from datasets.table import MemoryMappedTable
from transformers import PreTrainedTokenizerBase

from ..core.errors import UserError
from ..core.silence import quiet_libraries
from ..tasks import TASKS, TaskName
from .arrow import cache_key
from .encode import BATCH_SIZE, encode
from .masks import token_columns

MAX_BYTES = 50 * 10**9
MAX_AGE_SECONDS = 30 * 86400
IN_USE_SECONDS = 2 * 86400
"""A folder used more recently is never removed: a run may read it."""
_FILE = "tokens.arrow"
_VERSIONS = ("transformers", "tokenizers", "jinja2", "datasets")
_IDS = List(Value("int32"))


def tokenize(
    dataset: Dataset,
    task: TaskName,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path | None,
    assistant_only_loss: bool = False,
    completion_only_loss: bool = True,
    on_examples: Callable[[int], object] | None = None,
) -> Dataset:
    """The examples of a dataset from `load_split` as columns of tokens, before truncation:
    `tokens.token_columns`.

    cache: the user's cache folder; None: a temporary folder, removed with the returned dataset.
    on_examples: called with the number of examples just tokenized or read. Raises UserError if the
    template fails on an example, or the folder cannot be written.
    """
    passed_on, report = TASKS[task].passed_on, on_examples or (lambda num_examples: None)
    features = Features(
        {**dict.fromkeys(TASKS[task].token_columns, _IDS), "left_out": List(Value("string"))}
    )
    features |= {name: Value(kind) for name, kind in passed_on.items()}
    settings = (task, assistant_only_loss, completion_only_loss)
    root = Path(tempfile.mkdtemp(prefix="soren-align-")) if cache is None else cache / "tokens"
    # All of the tokenizer that changes tokens, but not its place.
    whole: Any = tokenizer
    words = (
        whole.backend_tokenizer.to_str()
        if whole.is_fast
        else [repr(whole), sorted(whole.get_vocab().items())]
    )
    parts = [
        words,
        sorted(whole.special_tokens_map.items()),
        whole.chat_template,
        type(whole).__name__,
    ]
    versions = [metadata.version(package) for package in _VERSIONS]
    folder = root / cache_key(dataset._fingerprint, len(dataset), settings, parts, versions)
    tokens = _load(folder, features, len(dataset))

    def tokens_of(batch: Any) -> dict[str, list[Any]]:
        texts = {name: values for name, values in batch.items() if name not in passed_on}
        columns = token_columns(
            encode(texts, task, tokenizer, assistant_only_loss, completion_only_loss), task
        )
        report(len(columns["left_out"]))
        return columns | {name: batch[name] for name in passed_on}

    try:
        if tokens is not None:
            os.utime(folder)
            report(len(dataset))
        else:
            with quiet_libraries(), written_whole(folder) as part:
                dataset.map(
                    tokens_of,
                    batched=True,
                    batch_size=BATCH_SIZE,
                    remove_columns=dataset.column_names,
                    features=features,
                    new_fingerprint=folder.name,
                    cache_file_name=str(part / _FILE),
                )
                shutil.rmtree(folder, ignore_errors=True)  # one that `_load` refused
            tokens = _load(folder, features, len(dataset))
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"{root}: tokens cannot be cached in this folder: {reason}; free space, set SOREN_ALIGN_CACHE to another "
            "folder, or write `cache: false` under data to use a temporary folder"
        ) from None
    assert tokens is not None, "the tokens just written can be read"
    if cache is None:
        weakref.finalize(tokens, shutil.rmtree, root, ignore_errors=True)
    else:
        prune(root)
    return tokens


def prune(root: Path) -> None:
    """Remove folders unused for MAX_AGE_SECONDS, and the least recently used ones beyond
    MAX_BYTES.
    """
    now, total = time.time(), 0
    folders = [(f.stat().st_mtime, f) for f in root.iterdir() if f.is_dir() and not f.is_symlink()]
    for used, folder in sorted(folders, reverse=True):
        total += sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        age = now - used
        if age > IN_USE_SECONDS and (age > MAX_AGE_SECONDS or total > MAX_BYTES):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, which is renamed to `folder` when the block has filled it.

    If another process has written `folder` in the meantime, that one stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix="part-", dir=folder.parent))
    try:
        yield part
        part.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _load(folder: Path, features: Features, num_examples: int) -> Dataset | None:
    """The tokens in a folder; None if there are none, or others than expected, or damaged ones."""
    file = folder / _FILE
    try:
        table = MemoryMappedTable.from_file(str(file))
        table.table.validate(full=True)  # an offset out of bounds would read other memory
        tokens = Dataset(table, fingerprint=folder.name)
    except (OSError, ValueError, pa.ArrowException):
        return None
    return tokens if tokens.features == features and len(tokens) == num_examples else None
