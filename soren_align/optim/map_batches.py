"""Batches of matrices of one shape, which are mapped together within a workspace of bounded memory."""

import math
from collections.abc import Sequence

from ..spectral import num_workspace_numbers
from .pieces import Whole
from .storage import map_shape, num_matrices

# MB (2^20 bytes), by device. On two CPU cores a batch of 64 x 64 takes a quarter of the time, of 256 x 256 four fifths,
# of 512 x 512 a third more: 16 MB keep those apart. Elsewhere 2048 is a guess, not measured: a product of
# 256 rows has 4 tiles of 128 x 128 for the 132 multiprocessors of an H100, and all 72 of Qwen2.5-3B make one batch.
WORKSPACE_MB = {"cpu": 16}
WORKSPACE_MB_ELSEWHERE = 2048


def map_batches(matrices: Sequence[Whole], workspace_mb: float | None) -> list[list[int]]:
    """Batches of indices into `matrices`: equal ones in order, as many as the workspace holds, without empty ones.

    A slab of two matrices is not divided.

    workspace_mb: MB (2^20 bytes); a matrix that needs more is a batch of its own. None: `default_workspace_mb`.
    """
    indices: dict[Whole, list[int]] = {}
    for index, matrix in enumerate(matrices):
        if 0 not in matrix.shape:
            indices.setdefault(matrix, []).append(index)
    batches = []
    for (shape, dtype, device, storage), equal in indices.items():
        limit = default_workspace_mb(device.type) if workspace_mb is None else workspace_mb
        of_maps = num_matrices(storage) * num_workspace_numbers(*map_shape(shape, storage), device.type)
        num_numbers = of_maps + math.prod(shape)  # with their input
        size = max(1, int(limit * 2**20 / (num_numbers * dtype.itemsize)))
        batches += [equal[start : start + size] for start in range(0, len(equal), size)]
    return batches


def default_workspace_mb(device_type: str) -> float:
    """MB (2^20 bytes) of the workspace on a type of device ("cpu", "cuda", ...)."""
    return WORKSPACE_MB.get(device_type, WORKSPACE_MB_ELSEWHERE)
