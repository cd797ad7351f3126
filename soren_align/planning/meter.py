"""Memory, counted where tensors are made: no allocator can hide a buffer from it, or keep one that is gone."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """`peak`: the most bytes that tensors made within it held at once, on this rank."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._alive = {ref: num_bytes for ref, num_bytes in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))
        return output
