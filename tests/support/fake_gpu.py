"""A device named "gpu" whose tensors compute on the CPU and which refuses mixed devices as CUDA and NCCL do.

FakeTensorMode knows devices too, but has no contents: a step reads a few on the host. These have them. torch has one
place for a device from outside, and it cannot be left again: for processes of their own.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

TRANSFERS = {"aten::copy_", "aten::_to_copy"}
READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}
host_reads = []
"""The operations since the last `clear` after which the host waited for the device."""


class WrongDevice(RuntimeError):
    """Of tensors that a GPU could not compute with, or NCCL could not send."""


class OnGPU(Tensor):
    """A tensor that says it is on the device; `contents` are on the CPU."""

    @staticmethod
    def __new__(cls, contents):
        known = {"strides": contents.stride(), "storage_offset": contents.storage_offset()}
        tensor = Tensor._make_wrapper_subclass(cls, contents.shape, dtype=contents.dtype, device="gpu:0", **known)
        tensor.contents = contents
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})

    def tolist(self):
        """A read by the host, which torch does not do for tensors of others."""
        host_reads.append("tolist")
        return self.contents.tolist()


class GPU(TorchDispatchMode):
    """Within it tensors can be made on "gpu", and collectives take no others."""

    def __enter__(self):
        if torch._C._get_privateuse1_backend_name() != "gpu":
            _setup_privateuseone_for_python_backend("gpu")
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(numbers, device="gpu") is made on the CPU and sent
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(False)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    """The operation on the contents, if the tensors are where they must be; its results are where they would be."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there, here = ([t for t in tensors if isinstance(t, OnGPU) == on_gpu] for on_gpu in (True, False))
    refuse_wrong_devices(func, args, there, here)
    target = kwargs.get("device")
    name, to_cpu = func._schema.name, target is not None and torch.device(target).type == "cpu"
    if there and (name in READS or (name in TRANSFERS and (to_cpu or any(t is args[0] for t in here)))):
        host_reads.append(name)
    if target is not None and torch.device(target).type == "gpu":
        kwargs, on_gpu = {**kwargs, "device": torch.device("cpu")}, True
    else:
        on_gpu = bool(there) and target is None
    args, kwargs = tree_map(lambda leaf: leaf.contents if isinstance(leaf, OnGPU) else leaf, (args, kwargs))
    known = {id(t.contents): t for t in there} | {id(t): t for t in here}

    def placed(leaf):
        return known.get(id(leaf), OnGPU(leaf) if on_gpu and isinstance(leaf, Tensor) else leaf)

    return tree_map(placed, func(*args, **kwargs))


def refuse_wrong_devices(func, args, there, here):
    """WrongDevice for a CPU tensor in a collective, and for one among the device's, unless it is a scalar to read."""
    name = func._schema.name
    if name.startswith("c10d::") and here:
        raise WrongDevice(f"{name}: a group of NCCL alone has a tensor of shape {tuple(here[0].shape)} on the CPU")
    if there and here and name not in TRANSFERS:
        written = func._schema.arguments[0].is_write and args[0] is here[0]
        if written or torch.Tag.pointwise not in func.tags or any(tensor.ndim for tensor in here):
            raise WrongDevice(f"{name}: some tensors are on gpu, of shape {tuple(here[0].shape)} one is on the CPU")
