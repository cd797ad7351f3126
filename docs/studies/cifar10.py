"""CIFAR-10 from a folder in its published binary format, cifar-10-batches-bin.
Nothing is downloaded.

    https://www.cs.toronto.edu/~kriz/cifar.html: "CIFAR-10 binary version", cifar-10-binary.tar.gz

Each of six files has 10,000 records of 3,073 bytes: a label from 0 to 9, then 32 x 32 red, green
and blue values, row by row. The Python version is not read: its files are pickles, which can run
code.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from soren_align.core.errors import UserError

TRAINING, TEST = [f"data_batch_{number}.bin" for number in range(1, 6)], ["test_batch.bin"]
NUM_RECORDS = 10_000
"""Of a file."""
NUM_CLASSES = 10
RECORD = 1 + 3 * 32 * 32
"""Bytes."""
REMEDY = "name a folder with the unpacked files of cifar-10-binary.tar.gz"
Images = tuple[Tensor, Tensor]
"""Pixels [number, 3, 32, 32], float32 from -1 to 1, and labels [number]."""


def load(folder: Path) -> tuple[Images, Images]:
    """The training images and the test images.

    Raises UserError for a folder that does not have exactly the files of CIFAR-10: their sizes,
    labels, and equally many images of each class.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; {REMEDY}")
    if not (folder / TRAINING[0]).exists() and (folder / "data_batch_1").exists():
        raise UserError(
            f"{folder}: has the Python version of CIFAR-10, whose pickles can run code; {REMEDY}"
        )
    for name in (*TRAINING, *TEST):  # before one of them is read
        if not (folder / name).is_file():
            raise UserError(f"{folder}: has no file {name}; {REMEDY}")
        num_bytes, expected = (folder / name).stat().st_size, NUM_RECORDS * RECORD
        if num_bytes != expected:
            raise UserError(
                f"{folder / name}: has {num_bytes:,} bytes, not {expected:,}; unpack the archive again"
            )
    return _images(folder, TRAINING), _images(folder, TEST)


def _images(folder: Path, names: list[str]) -> Images:
    records = np.concatenate([read(folder / name) for name in names])
    labels = torch.from_numpy(records[:, 0].astype(np.int64))
    counts = labels.bincount(minlength=NUM_CLASSES).tolist()
    if len({*counts}) > 1:
        raise UserError(
            f"{folder}: {', '.join(names)}: {min(counts):,} to {max(counts):,} images per class, but CIFAR-10 has "
            f"{len(labels) // NUM_CLASSES:,} of each; {REMEDY}"
        )
    pixels = torch.from_numpy(records[:, 1:]).view(-1, 3, 32, 32)
    return pixels.float().div_(127.5).sub_(1), labels


def read(file: Path) -> np.ndarray:
    """The records of a file, uint8 [NUM_RECORDS, RECORD]. Raises UserError for a label above 9."""
    records = np.fromfile(file, dtype=np.uint8).reshape(NUM_RECORDS, RECORD)
    if (invalid := records[:, 0] >= NUM_CLASSES).any():
        number = int(invalid.argmax())
        raise UserError(
            f"{file}: image {number} has the label {records[number, 0]}, and the last one is 9; {REMEDY}"
        )
    return records
