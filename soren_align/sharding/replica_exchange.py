"""DDP: every rank has every matrix; the owner rank updates it and broadcasts the new weights.

Why not every map on every rank, without any communication? For Mistral-7B the default map takes 750 TFLOP a step
in float16, 1.3 s at 60% of an H100's peak, and 0.2 s divided over 8 ranks; the weights are 28 GB in float32, 0.1 s over
NVLink (by count, not measured). The two are even at 25 GB/s. And replicas stay equal bit for bit, even if a kernel is
not deterministic.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..optim import GroupUpdate
from .exchange_plan import ExchangePlan
from .geometry import piece_of


class ReplicaExchange:
    """Carries out `plan` between the ranks of `process_group`. The weights themselves are the buffers."""

    def __init__(self, plan: ExchangePlan, process_group: dist.ProcessGroup, device: torch.device):
        self.plan, self.process_group, self.device = plan, process_group, device
        self.rank = dist.get_rank(process_group)
        self.bytes_sent = self.peak_bytes = 0

    def run_(self, update: GroupUpdate, parameters: Sequence[Tensor]) -> None:
        """Map and update `parameters`, whose momentum is that of this step; a round is broadcast during the next."""
        pieces = [piece_of(matrix, matrix.fragments[0], parameters) for matrix in self.plan.layout.matrices]
        works, copies = [], []
        for indices in (self.plan.local, *self.plan.rounds):
            update.map_and_add_([pieces[i] for i in indices if self.plan.owners[i] == self.rank])
            for index in indices if self.plan.layout.num_ranks > 1 else ():
                owner = self.plan.owners[index]
                source = dist.get_global_rank(self.process_group, owner)
                for tensor in update.replicated_tensors(pieces[index]):
                    buffer = tensor.contiguous()  # the tensor itself, unless it is strided
                    works.append(dist.broadcast(buffer, source, group=self.process_group, async_op=True))
                    if buffer is not tensor and owner != self.rank:
                        copies.append((tensor, buffer))
                    self.bytes_sent += buffer.nbytes if owner == self.rank else 0
        for work in works:
            work.wait()
        for tensor, buffer in copies:
            tensor.copy_(buffer)
