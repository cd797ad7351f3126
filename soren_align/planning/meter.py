"""Peak memory of newly created tensors, counted by storage and independent of the allocator."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """`peak`: the most bytes that tensors created within this context held at the same time, in this process."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._num_bytes = {}  # of each living storage

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in inputs:
                storage = tensor.untyped_storage()
                self._num_bytes[StorageWeakRef(storage)] = storage.nbytes()
        self._num_bytes = {ref: num_bytes for ref, num_bytes in self._num_bytes.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._num_bytes.values()))
        return output
