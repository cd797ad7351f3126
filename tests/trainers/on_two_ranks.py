"""What test_ddp.py looks at, done by two ranks under torchrun: everything in one start, since imports dominate.

    torchrun --standalone --nproc-per-node 2 on_two_ranks.py FOLDER

Each rank writes what it saw into FOLDER/rank<r>.json.
"""

import json
import math
import signal
import sys
from pathlib import Path

import torch
from conftest import TinyRun
from safetensors.torch import save_file
from trl import SFTTrainer

from soren_align.optim import soren
from soren_align.recipe import UserError
from soren_align.sharding.ranks import join
from soren_align.spectral import newton_schulz
from soren_align.trainers.trainers import SorenTrainerMixin
from soren_align.trainers.watch import Watch
from soren_align.worker import _hush

# Ten steps at once at the full rate, 32 rows each; the norm of the gradients is about 3, so that the clip binds.
PARITY = (
    "trainer.max_steps=10",
    "trainer.warmup_steps=0",
    "trainer.lr_scheduler_type=constant",
    "trainer.save_steps=5",
)
GLOBAL = ("run.global_batch_size=32", "data.train.limit=320", "data.eval=null")


def without_bfloat16():
    """Let Muon iterate in float64: in its own bfloat16 a last bit of the gradient becomes 0.4% of an update."""
    soren.newton_schulz = lambda x, steps: newton_schulz(x.double(), steps).to(x.dtype)


class Kill(BaseException):
    pass


def instead(cls, name, method, then):
    """`then()` with a method replaced."""
    original = cls.__dict__.get(name)
    setattr(cls, name, method)
    try:
        return then()
    finally:
        if original is None:
            delattr(cls, name)
        else:
            setattr(cls, name, original)


def same_steps(make):
    """Ten steps of each: the weights, for comparison with one process, and the maps counted."""
    without_bfloat16()
    maps = {}
    for name, task, overrides in (
        ("soren", "sft", ()),
        ("sns", "sft", ("optimizer.spectral_map=sns",)),
        ("muon", "sft", ("optimizer.name=muon",)),
        ("dpo", "dpo", ()),
        ("unclipped", "sft", ("trainer.max_grad_norm=0",)),
    ):
        run = make(name, task, *PARITY, *GLOBAL, *overrides)
        trainer = run.trainer()
        trainer.train()
        optimizer = trainer.watch.optimizer
        maps[name] = [optimizer.num_maps, trainer.watch.num_matrices, trainer.args.gradient_accumulation_steps]
        # From every rank: replicas that have drifted apart would go unnoticed by the first one's file alone.
        weights = {k: v.detach().clone() for k, v in trainer.model.named_parameters()}
        save_file(weights, run.folder.path / f"weights{run.ranks.rank}.safetensors")
    return maps


def resumed(make):
    """A run, and one that both ranks leave after step 3 and take up again."""
    make("whole", "sft", *GLOBAL).train()
    original = Watch.on_optimizer_step

    def dying(self, args, state, control, **kwargs):
        original(self, args, state, control, **kwargs)
        if state.global_step == 3:
            raise Kill

    def killed():
        try:
            make("killed", "sft", *GLOBAL).train()
        except Kill:
            return True

    assert instead(Watch, "on_optimizer_step", dying, killed)
    make("killed", "sft", *GLOBAL).train()


def poisoned(make):
    """One rank alone meets a NaN in its rows."""
    run = make("poisoned", "sft", *GLOBAL)

    def loss(self, *args, **kwargs):
        return SFTTrainer.compute_loss(self, *args, **kwargs) * (math.nan if run.ranks.rank == 1 else 1)

    return refusal(run, loss)


def drifted(make):
    """A loss that goes around DDP, so that each rank keeps its own gradients."""
    run = make("drifted", "sft", *GLOBAL)

    def loss(self, model, *args, **kwargs):
        return SFTTrainer.compute_loss(self, self.accelerator.unwrap_model(model), *args, **kwargs)

    return refusal(run, loss)


def refusal(run, loss):
    """What training with this loss is refused with; None if it is not."""
    try:
        instead(SorenTrainerMixin, "compute_loss", loss, run.train)
    except UserError as error:
        return str(error)


def stopped(make):
    """One rank alone gets a signal."""
    run = make("stopped", "sft", *GLOBAL)
    original = Watch.on_optimizer_step

    def signalled(self, args, state, control, **kwargs):
        original(self, args, state, control, **kwargs)
        if state.global_step == 2 and run.ranks.rank == 1:
            signal.raise_signal(signal.SIGTERM)

    went_on = instead(Watch, "on_optimizer_step", signalled, run.train)
    return [went_on, [p.name for p in sorted(run.folder.checkpoints.glob("checkpoint-*"))]]


def main(folder):
    torch.set_num_threads(1)
    _hush()
    ranks = join(60)

    def make(name, task, *overrides):
        return TinyRun(folder / name, task, *overrides, ranks=ranks)

    seen = {
        "maps": same_steps(make),
        "resumed": resumed(make),
        "poisoned": poisoned(make),
        "drifted": drifted(make),
        "stopped": stopped(make),
        "of_first": ranks.of_first(f"told by rank {ranks.rank}"),
        "any": [ranks.any(ranks.rank == 1), ranks.any(False)],
    }
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(seen))
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
