"""DDP: every rank has every matrix; the owner takes the step and all others receive the new weights.

Why not every rank every map, which needs no communication at all? For Mistral-7B the default map takes 307 TFLOP a
step, about 0.8 s at 400 TFLOP/s, and 0.1 s divided over 8 ranks; the weights are 28 GB in float32, 0.1 s over NVLink.
The two are even at 40 GB/s. And replicas stay equal bit for bit, whatever a kernel does on one of them.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..optim import GroupStep, Piece
from .step_plan import Plan


class ReplicaExchange:
    """Carries out `plan` between the ranks of `process_group`. The weights themselves are the buffers."""

    def __init__(self, plan: Plan, process_group: dist.ProcessGroup, device: torch.device):
        self.plan, self.process_group, self.device = plan, process_group, device
        self.rank = dist.get_rank(process_group)
        self.bytes_sent = self.peak_bytes = 0

    def run_(self, step: GroupStep, parameters: Sequence[Tensor]) -> None:
        """One step of `parameters`, the tensors that the layout numbers; a round's weights travel during the next."""
        matrices = self.plan.layout.matrices
        works, copies = [], []
        for indices in (self.plan.at_home, *self.plan.rounds):
            mine = [i for i in indices if self.plan.owners[i] == self.rank]
            pieces = [Piece(matrices[i].name, matrices[i].shape, parameters[i], 0, matrices[i].numel) for i in mine]
            step.take_(pieces)
            for index in indices if self.plan.layout.num_ranks > 1 else ():
                owner = self.plan.owners[index]
                source = dist.get_global_rank(self.process_group, owner)
                for changed in step.changed(parameters[index]):
                    buffer = changed.contiguous()  # the weights themselves, unless their rows are not in a row
                    works.append(dist.broadcast(buffer, source, group=self.process_group, async_op=True))
                    if buffer is not changed and owner != self.rank:
                        copies.append((changed, buffer))
                    self.bytes_sent += buffer.nbytes if owner == self.rank else 0
        for work in works:
            work.wait()
        for changed, buffer in copies:
            changed.copy_(buffer)
