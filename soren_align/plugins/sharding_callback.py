"""The sharding strategy of an optimizer in transformers' Trainer, and in the trainers of tools that
are built on it.
"""

from transformers import TrainerCallback

from ..sharding import set_strategy


class ShardingCallback(TrainerCallback):
    """Sets the strategy once accelerate has wrapped the optimizer: for DDP, FSDP2 and DeepSpeed.
    Collective.

    Without it, an optimizer maps every matrix on every rank of DDP, and refuses the shards of FSDP2
    and DeepSpeed.
    """

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        """Raise ValueError, on every rank, if the sharding is not supported."""
        set_strategy(optimizer)
