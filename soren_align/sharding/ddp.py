"""DDP: every rank has all weights; the owner rank updates a matrix and broadcasts it.

Why not every map on every rank, without any communication? For Mistral-7B the default map takes 750
TFLOP a step in float16, 1.3 s at 60% of an H100's peak, and 0.2 s divided over 8 ranks; the weights
are 28 GB in float32, 0.1 s over NVLink (by count, not measured). The two are even at 25 GB/s. And
replicas stay equal bit for bit, even if a kernel is not deterministic.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..optim.exchange import Batch, MapRequest, Shard, whole_batches
from ..optim.layout import Named
from .collectives import broadcast
from .gather import RankExchange, RankStrategy
from .layout import Layout, replicas
from .plan import BUCKET_MB


class DDPStrategy(RankStrategy):
    """DDP: all ranks hold all matrices, and their gradients are averaged already."""

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, bucket_mb: float = BUCKET_MB
    ):
        super().__init__(bucket_mb)
        self._group = process_group
        self._device = torch.device("cpu")

    def has_layout(self, parameter: Tensor) -> bool:
        """Whether it is a whole matrix, or all experts of a layer."""
        return parameter.ndim in (2, 3) and not isinstance(parameter, DTensor)

    def check_gradients(
        self, named: Named, error: Exception | None, squares: Tensor, *others: Tensor
    ) -> list[float]:
        """See RankStrategy; on the device of the first parameter, whether it is a matrix or has a
        gradient.

        That is one device on all ranks, also on a rank with an error, and one that the group can
        reduce on.
        """
        self._device = named[0][1].device
        # The squares are the same on all ranks.
        return super().check_gradients(
            named, error, squares / dist.get_world_size(self._group), *others
        )

    def layout(self, named: Named) -> Layout:
        """The layout in which every rank has every parameter whole."""
        return replicas(
            {name: tuple(p.shape) for name, p in named}, dist.get_world_size(self._group)
        )

    def ranks(self) -> tuple[dist.ProcessGroup, torch.device]:
        """All ranks of the group, on the device of the parameters."""
        return self._group or dist.group.WORLD, self._device  # type: ignore[return-value]

    def exchange(self, *arguments: Any) -> RankExchange:
        """The exchange that broadcasts updated weights, in place of gathering shards."""
        return ReplicaExchange(*arguments)


class ReplicaExchange(RankExchange):
    """Carries out a plan between ranks that have all weights.
    The weights themselves are the buffers.
    """

    def whole_matrices(self, shards: Sequence[Shard], request: MapRequest) -> Iterator[Batch]:
        """The weights owned here, bucket by bucket; a bucket is broadcast, updated, while the next
        one is mapped.
        """
        # Broadcasts are asynchronous: they end behind the maps of the next bucket, and the last
        # ones are waited for at the end.
        # The update is made on the owner between two iterations: `whole_batches` yields, the caller
        # updates the weight, and only then is the weight broadcast.
        works, copies = [], []
        for indices in (self.plan.local, *self.plan.buckets):
            owned = [shards[i] for i in indices if self.plan.owners[i] == self.rank]
            yield from whole_batches(owned, request)
            for index in indices if self.plan.layout.num_ranks > 1 else ():
                shard, owner = shards[index], self.plan.owners[index]
                # All that the owner's step has changed, so that replicas stay equal bit for bit.
                tensors = [shard.weight.detach(), *map(shard.numbers_of, shard.map_state)]
                if request.adapt is not None:
                    tensors.append(shard.second_moments)
                if shard.compensation is not None:  # as bfloat16: neither gloo nor NCCL sends int16
                    tensors.append(
                        shard.view_of(shard.state["compensation"].view(shard.parameter.dtype))
                    )
                source = dist.get_global_rank(self.process_group, owner)
                for tensor in tensors:
                    # torch.distributed takes contiguous tensors only. A transposed weight is
                    # received in a copy, and written back when all broadcasts have ended.
                    buffer = tensor.contiguous()  # the tensor itself, unless it is strided
                    works.append(broadcast(buffer, source, self.process_group))
                    if buffer is not tensor and owner != self.rank:
                        copies.append((tensor, buffer))
                    self.bytes_sent += buffer.nbytes if owner == self.rank else 0
        for work in works:
            work.wait()
        for tensor, buffer in copies:
            tensor.copy_(buffer)
