"""Checkpoints of DeepSpeed and FSDP2: read without running code, and made readable for any number
of ranks.

They are pickles, of which only tensors and plain data are loaded: a run folder may come from
someone else, and unpickling calls any function that the file names.
"""

import argparse
import contextlib
import io
import os
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import save

from ..core.errors import UserError
from ..core.files import is_component
from ..core.patches import patched

TAGS = ("latest", "latest_universal")  # DeepSpeed's files that name the folder of its shards
_RANK = re.compile(
    r"zero_pp_rank_(\d+)_mp_rank_|(?:^|/)__(\d+)_\d+\.distcp$|^rng_state_(\d+)\.pth$"
)
"""The rank in names of files that every rank writes: DeepSpeed's, those of
torch.distributed.checkpoint, transformers'."""
_METADATA = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": (
        "Size",
        *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    ),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # its name since Python 3.13
}
"""The classes in a .metadata file of torch 2.13's torch.distributed.checkpoint, by module."""


def refuse_pickles() -> None:
    """Make torch.load in this process load tensors and plain data only, whatever its arguments are.

    DeepSpeed 0.19.8 passes weights_only=False in all of its 30 calls. Of its own classes, its
    checkpoints hold the loss scalers and the addresses of fragments.
    """
    from deepspeed.runtime.fp16 import loss_scaler  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.zero.config import ZeroStageEnum  # pyright: ignore[reportMissingImports]
    from deepspeed.utils.tensor_fragment import fragment_address  # pyright: ignore[reportMissingImports]

    # The variable overrides the argument; with both variables set, torch raises at every load.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    scalers: list[Any] = [loss_scaler.LossScaler, loss_scaler.DynamicLossScaler]
    torch.serialization.add_safe_globals([*scalers, ZeroStageEnum, fragment_address])


def rank_of_file(name: str, num_ranks: int) -> int:
    """Return the rank, among `num_ranks`, that writes a checkpoint's file of this name: by default
    the first.
    """
    match = _RANK.search(name)
    rank = int(match[match.lastindex or 0]) if match else 0
    return rank if rank < num_ranks else 0


def check_parts(checkpoint: Path) -> None:
    """Raise UserError if the shards of a checkpoint are outside of its folder, or if FSDP2's
    metadata contains code.
    """
    for name in TAGS:
        if not (checkpoint / name).is_file():
            continue
        # The tag becomes a part of a path: "../other" would lead out of the checkpoint.
        tag = (checkpoint / name).read_text(encoding="utf-8", errors="replace").strip()
        if not is_component(tag) or not (checkpoint / tag).is_dir():
            raise UserError(
                f"{checkpoint / name}: names a folder that this checkpoint does not have; restore "
                "this file from a copy"
            )
    # torch reads this file by pickle.load, whatever the variable above is: it is read here first,
    # by an unpickler that knows the classes of such a file and no others.
    for file in checkpoint.rglob(".metadata"):
        try:
            with file.open("rb") as stream:
                _Metadata(stream).load()
        except (
            pickle.UnpicklingError,
            EOFError,
            ValueError,
            TypeError,
            AttributeError,
            IndexError,
            KeyError,
        ) as error:
            reason = str(error).splitlines()[0] or type(error).__name__
            raise UserError(f"{file}: is not loaded: {reason}; restore the file") from None


class _Metadata(pickle.Unpickler):
    """A restricted reader of the metadata of torch.distributed.checkpoint, which itself uses
    pickle.load.
    """

    def find_class(self, module: str, name: str) -> Any:
        """A class of checkpoints' metadata, by name. Raises UnpicklingError for anything else."""
        if name in _METADATA.get(module, ()):
            return PosixPath if name == "PosixPath" else super().find_class(module, name)
        raise pickle.UnpicklingError(f"the file contains code ({module}.{name})")


@contextlib.contextmanager
def staged_saves(fsdp: Any, group: Any) -> Iterator[list[Callable[[], Any]]]:
    """A context in which FSDP2's shards are only copied to the host's memory.

    fsdp: accelerate's plugin. Yields functions to call in their order, later and in any thread:
    each writes one of the copies, by collectives of `group`. As torch's async_save, of which each
    call has a thread of its own, so that weights and optimizer states would need two groups.
    """
    writes = []

    def stage(state_dict: Any, storage_writer: Any, planner: Any) -> None:
        staged = storage_writer.stage(state_dict)
        writes.append(
            partial(
                save, staged, storage_writer=storage_writer, planner=planner, process_group=group
            )
        )

    # Otherwise accelerate would copy what lies on a GPU before: the host would have it twice.
    settings, fsdp.state_dict_config.offload_to_cpu = fsdp.state_dict_config.offload_to_cpu, False
    try:
        with patched("torch.distributed.checkpoint.save", stage):
            yield writes
    finally:
        fsdp.state_dict_config.offload_to_cpu = settings


def is_universal(checkpoint: Path) -> bool:
    """Whether `to_universal` has made a checkpoint readable for any number of ranks."""
    return (checkpoint / "latest_universal").is_file()


def to_universal(checkpoint: Path) -> None:
    """Add to the checkpoint's folder a copy of DeepSpeed's shards that any number of ranks can
    load.
    """
    from deepspeed.checkpoint import ds_to_universal  # pyright: ignore[reportMissingImports]

    refuse_pickles()
    parts = checkpoint / (checkpoint / "latest").read_text().strip()
    # The arguments of DeepSpeed's script. One worker each: all of it is then done in this process,
    # where the replacements below hold.
    options = argparse.Namespace(
        input_folder=str(parts),
        output_folder=f"{parts}_universal",
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    dump: Any = ds_to_universal.dump_param_fragment

    # Its loop over shards cannot narrow a sparse tensor, so that the part is made dense here.
    def dump_dense(*arguments: Any) -> None:
        *places, values, name, offset, numel = arguments
        # The moments of the rows, see `zero.with_second_moments`.
        if isinstance(values, torch.Tensor) and values.is_sparse:
            values, offset = torch.narrow_copy(values, 0, offset, numel).to_dense(), 0
        dump(*places, values, name, offset, numel)

    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        folders_confined_to(checkpoint),
        patched("deepspeed.checkpoint.ds_to_universal.dump_param_fragment", dump_dense),
    ):
        ds_to_universal.main(options)


@contextlib.contextmanager
def folders_confined_to(checkpoint: Path) -> Iterator[None]:
    """A context in which `ds_to_universal` raises UserError for any folder that is not below the
    checkpoint.

    DeepSpeed creates one per parameter, whose name is read from the checkpoint, before it writes a
    file there.
    """
    root = checkpoint.resolve()

    def make_inside(name: Any, *args: Any, **kwargs: Any) -> None:
        if not Path(name).resolve().is_relative_to(root):
            raise UserError(
                f"{checkpoint}: has a parameter whose file would be {name}, outside of it; use "
                "another checkpoint"
            )
        os.makedirs(name, *args, **kwargs)

    confined = SimpleNamespace(**{**vars(os), "makedirs": make_inside})
    with patched("deepspeed.checkpoint.ds_to_universal.os", confined):
        yield
