"""Training by several ranks of a RankPool, for test_ddp.py, test_zero_runs.py, test_fsdp2.py and their neighbours.

`run(group, job, folder)` calls one of the functions below by its name; the runs are folders in `folder`.
"""

import contextlib
import errno
import gc
import math
import os
import signal
import threading
import weakref
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from soren_align.core import files
from soren_align.core.errors import UserError
from soren_align.recipe import checks
from soren_align.run.folder import RunFolder
from soren_align.sharding import local
from soren_align.sharding.ranks import current_ranks
from soren_align.spectral import iterate, newton_schulz
from soren_align.training import checkpoints
from soren_align.training import trainer as trl_trainers
from soren_align.training.lost_updates import FirstStepCheck
from soren_align.training.measure.sidecar import Sidecar
from soren_align.training.trainer import SorenTrainerMixin
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.tensor import DTensor
from trl import DPOTrainer, SFTTrainer

from tests.support import c4_replica
from tests.support.tiny_run import Kill, TinyRun, after_step, die, flip_bit

# Ten steps at once at the full rate, 32 rows each; the norm of the gradients is about 3, so that the clip binds.
PARITY = ("trainer.max_steps=10", "trainer.warmup_steps=0", "trainer.lr_scheduler_type=constant",
          "trainer.save_strategy=no", "run.log_spectra.steps=[2]")  # fmt: skip
GLOBAL = ("run.global_batch_size=32", "data.train.limit=320", "data.eval=null")
FOR_TWO_OR_THREE = ("run.global_batch_size=24", "data.train.limit=240", "data.eval=null")
FOR_TWO_OR_THREE += ("trainer.per_device_train_batch_size=4",)
PRECOMPUTED = ("trainer.precompute_ref_log_probs=true",)
RECOMPUTED = ("trainer.gradient_checkpointing=true",)
FOR_TWO = ("run.global_batch_size=16", "data.eval=null")
EVALUATED = ("data.eval.path=shipped:recipes/quickstart/data/chat_test.jsonl", "data.eval.limit=8")
EVALUATED += ("trainer.eval_strategy=steps", "trainer.eval_steps=10", "trainer.save_strategy=no")  # saving undoes it
DISPLACED = ("data.eval.path=shipped:recipes/quickstart/data/chat_test.jsonl", "data.eval.limit=8")
DISPLACED += ("trainer.eval_strategy=steps", "trainer.eval_steps=2", "run.kl_to_start=20", "data.retention.limit=6")
DISPLACED += ("data.retention.path=shipped:recipes/quickstart/data/chat_test.jsonl",)


def without_bfloat16():
    """Let Muon iterate in float64: in its own bfloat16 a last bit of the gradient becomes 0.4% of an update."""
    iterate.newton_schulz = lambda x, steps: newton_schulz(x.double(), steps).to(x.dtype)


SOREN, DPO = ("soren", "sft", ()), ("dpo", "dpo", ())
RUNS = (SOREN, ("muon", "sft", ("optimizer.name=muon",)), DPO)
"""The other maps take the steps of one process in test_parity.py, without a trainer."""
PACKED = ("packed", "sft", ("trainer.packing=true", "trainer.max_length=40", "data.train.limit=960"))
"""More than 320 sequences, and the probe of packed examples, which all ranks run before the first step."""

UNEVEN = ("uneven", "sft", ("data.train.limit=77",))
"""Epochs of 32, 32 and 13 rows: those of the last step are not as many on both ranks."""
STREAMED = ("streamed", "sft", ("data.streaming={shuffle_buffer: 100}",))
"""A stream, in blocks that are no multiple of the batch."""


HELD_OUT = ("data.train.limit=400", "data.eval={fraction: 0.02}", "trainer.per_device_eval_batch_size=3")
PRETRAINED = ("pretrained", "pretrain", (*HELD_OUT, "optimizer.aux_lr=1e-3"))
"""An odd number of batches of held-out texts: one of two ranks has a batch less.

aux_lr: at 5e-3 and ZeRO 3, three of the embedding's 7,744 entries differ by up to 3.3e-6, all other weights by less
than 1e-6: their gradients nearly vanish, and AdamW divides the rounding by their root mean square.
"""


UNCLIPPED = ("unclipped", "sft", ("trainer.max_grad_norm=0",))


def ddp(make):
    """All that test_ddp.py asks of two ranks."""
    return {
        "maps": same_steps(make, "ddp", *RUNS, PACKED, UNEVEN, STREAMED, PRETRAINED, UNCLIPPED),
        "resumed": resumed(make, "ddp"), "poisoned": poisoned(make, "ddp"), "references": references(make, "ddp"),
        "drifted": drifted(make), "stopped": stopped(make),
        "pairs": dealt_pairs(make),
        "of_first": make.ranks.broadcast(f"told by rank {make.ranks.rank}"),
        "any": [make.ranks.any(make.ranks.rank == 1), make.ranks.any(False)],
    }  # fmt: skip


def dealt_pairs(make):
    """The chosen sides that this rank trains in an epoch of 77 pairs, and those of all."""
    trainer = make("dealt", "dpo", "run.parallel=ddp", *GLOBAL, "data.train.limit=77").trainer()
    everything = [str(pair["prompt_ids"] + pair["chosen_ids"]) for pair in trainer.train_dataset]
    dealt = []
    for batch in trainer.get_train_dataloader():
        for row, mask in zip(batch["input_ids"].chunk(2)[0], batch["attention_mask"], strict=False):
            dealt.append(str(row[mask.bool()].tolist()))
    return dealt, everything


def zero(make):
    """All that test_zero_runs.py asks of two ranks."""
    runs = {"zero1": (SOREN,), "zero2": (*RUNS, UNEVEN, STREAMED, PRETRAINED, UNCLIPPED),
            "zero3": (*RUNS, ("precomputed", "dpo", PRECOMPUTED), ("recomputed", "sft", RECOMPUTED), PACKED),
            "zero3-offload": (SOREN,)}  # fmt: skip
    return {
        "maps": {mode: same_steps(make, mode, *runs) for mode, runs in runs.items()},
        "bfloat16": {mode: losses_in_bfloat16(make, mode) for mode in ("zero2", "zero3")},
        "resumed": {mode: resumed(make, mode) for mode in ("zero2", "zero3")},
        "poisoned": poisoned(make, "zero3"), "references": references(make, "zero3"), "scored": scored(make),
        "freed": [killed(make, f"freed-{mode}", mode, *overrides) for mode, overrides in FREED.items()],
    }  # fmt: skip


def scored(make):
    """The files that the process of run.benchmark would score, of a run under ZeRO 2."""
    run = make("scored", "sft", "run.parallel=zero2", "run.benchmark={every: 1}", "eval={suite: quickstart}", *GLOBAL)
    with mock.patch.object(Sidecar, "poll"):  # which starts it
        run.train()
    make.ranks.barrier()
    return sorted(file.name for file in run.folder.path.glob("benchmarks/checkpoint-2/model/*"))


def fsdp2(make):
    """All that test_fsdp2.py asks of two ranks."""
    with mock.patch.object(checks, "_check_parallel"):  # they refuse fsdp2 without GPUs
        alone = refusal(make("unsharded", "sft", "run.parallel=fsdp2", *GLOBAL), SFTTrainer.compute_loss)
    with fsdp2_on_cpus():
        return {
            "unsharded": alone,
            "maps": same_steps(make, "fsdp2", SOREN, DPO, PACKED, ("recomputed", "sft", RECOMPUTED)),
            "bfloat16": losses_in_bfloat16(make, "fsdp2", *EVALUATED), "kept_whole": kept_whole(make),
            "resumed": resumed(make, "fsdp2"), "poisoned": poisoned(make, "fsdp2"), "overflows": poisoned(make, "fsdp2", 1e30),
            "references": references(make, "fsdp2"), "background": background(make),
            "whole_layers": whole_layers(make),
        }  # fmt: skip


def precision(make):
    """All that test_precision.py asks of two ranks."""
    with fsdp2_on_cpus():
        seen = {mode: narrow(make, mode) for mode in ("ddp", "fsdp2")}
    return seen | {"zero3": narrow(make, "zero3")}


ADAPTERS = ("trainer.max_steps=4", "trainer.warmup_steps=0", "trainer.per_device_train_batch_size=4")
ADAPTERS += ("run.global_batch_size=8", "data.train.limit=64")


def adapters(make):
    """All that test_lora_on_ranks.py asks of two ranks."""
    for mode in ("ddp", "zero2"):
        for task, start in (("sft", ()), ("dpo", (f"model.name_or_path={make.folder / 'alone-sft/model'}",))):
            make(f"{mode}-{task}", f"{task}-lora", *ADAPTERS, *start, f"run.parallel={mode}").train()


def kto(make):
    """Ten steps of KTO under every mode, in batches of 12 on all ranks."""
    num_ranks = make.ranks.num_ranks
    modes = ("fsdp2", "ddp", "precomputed", "zero2", "zero3") if num_ranks == 2 else ("ddp",)
    for mode in modes:
        with fsdp2_on_cpus() if mode == "fsdp2" else nullcontext():
            keys = (*LABELLED, f"trainer.per_device_train_batch_size={12 // num_ranks}")
            keys += (
                (*PRECOMPUTED, "data.cache=false", "run.parallel=ddp")
                if mode == "precomputed"
                else (f"run.parallel={mode}",)
            )
            trainer = make(f"{mode}-{num_ranks}", "kto", *keys).trainer()
            trainer.train()
            trainer.save_model(str(make.folder / f"{mode}-{num_ranks}" / "model"))


LABELLED = (*PARITY, "run.global_batch_size=12", "data.train.limit=150", "trainer.eval_strategy=steps")
LABELLED += ("trainer.eval_steps=10", "run.log_spectra={}")

WATCHED = ("data.train.limit=64", "trainer.eval_strategy=steps", "trainer.eval_steps=1", "data.eval.limit=8")
WATCHED += ("trainer.save_steps=2", "run.early_stopping={patience: 1, threshold: 1}")
SAMPLED = ("run.samples={prompts: [Hello, What does the owl say?], max_new_tokens: 4}",)


def watched(make):
    """Under every mode a run that ends early without samples, and, where they can be made, one with them."""
    for mode in ("ddp", "zero2", "zero3"):
        if mode != "zero3":
            make(f"sampled-{mode}", "sft", f"run.parallel={mode}", *WATCHED, *SAMPLED).train()
        make(f"silent-{mode}", "sft", f"run.parallel={mode}", *WATCHED).train()


NARROW = ("optimizer.momentum_dtype=bfloat16", *GLOBAL)
QUANTIZED = ("model.lora={r: 4}", "optimizer.aux_lr=null", "model.quantize=4bit", *GLOBAL)


def small_memory(make):
    """All that test_small_memory.py asks of two ranks."""
    make("quantized-ddp", "sft", "run.parallel=ddp", *QUANTIZED).train()
    for mode in ("ddp", "zero2"):  # ZeRO last: accelerate keeps it
        make(f"states-{mode}", "sft", f"run.parallel={mode}", *NARROW).train()
    assert killed(make, "killed-zero2", "zero2", *NARROW)
    make("killed-zero2", "sft", "run.parallel=zero2", *NARROW).train()


MOMENTS = {"rows": ("optimizer.second_moment=rows",),
           "elements": ("optimizer.second_moment=elements", "optimizer.map_input=sign")}  # fmt: skip
MOMENTS_OF = {"fsdp2": "elements", "ddp": "elements", "zero2": "elements", "zero3": "rows"}  # ZeRO last, as above
TO_START = ("optimizer.weight_decay_to=start", "optimizer.weight_decay=20", "optimizer.aux_weight_decay=20")
FREED = {"zero2": (*FOR_TWO_OR_THREE, *MOMENTS["elements"][:1]), "zero3": (*FOR_TWO_OR_THREE, *MOMENTS["rows"])}
"""Runs that two ranks leave and three resume, with every kind of state."""


def moments(make):
    """All that test_second_moments.py asks of two ranks."""
    with fsdp2_on_cpus():
        interrupted(make, "blocks", "fsdp2", BLOCKS)
        interrupted(make, "moments", "fsdp2", (*MOMENTS[MOMENTS_OF["fsdp2"]], *TO_START))
    for mode in ("ddp", "zero2", "zero3"):
        interrupted(make, "moments", mode, (*MOMENTS[MOMENTS_OF[mode]], *TO_START))


BLOCKS = ("optimizer.split={'*up_proj': [100, 40, 20]}", "optimizer.second_moment=rows")
"""A rank's shard does not end where a block does."""


def interrupted(make, kind, mode, overrides):
    """A run, and one that all ranks leave after step 3 and take up again."""
    make(f"whole-{kind}-{mode}", "sft", f"run.parallel={mode}", *GLOBAL, *overrides).train()
    assert killed(make, f"killed-{kind}-{mode}", mode, *GLOBAL, *overrides)
    make(f"killed-{kind}-{mode}", "sft", f"run.parallel={mode}", *GLOBAL, *overrides).train()


def narrow(make, mode):
    """A run of bfloat16 weights at the paper's rate, and under DDP what becomes of one without a compensation."""
    slow = ("model.dtype=bfloat16", "trainer.bf16=true", "optimizer.lr=1e-6", "optimizer.adjust_lr_fn=none")
    slow += ("trainer.save_strategy=no", "run.save_dtype=bfloat16", f"run.parallel={mode}", *GLOBAL)
    run = make(f"narrow-{mode}", "sft", *slow, *(("optimizer.compensation=kahan",) if mode == "ddp" else ()))
    create = mock.patch.object(SorenTrainerMixin, "create_scheduler", autospec=True,
                               side_effect=SorenTrainerMixin.create_scheduler)  # fmt: skip
    with create as created:
        run.train()
    state = created.call_args.args[0].attached.optimizer.state
    kept = [value["compensation"].long() for value in state.values() if "compensation" in value]
    seen = {
        "stepped": sorted({str(tensor.dtype) for tensor in state}),
        "kept": [len(kept), sum(int((k * torch.arange(1, k.numel() + 1).view_as(k)).sum()) for k in kept)],
    }
    if mode == "ddp":
        lost = make("lost-ddp", "sft", *slow, "optimizer.compensation=none")
        seen["lost"] = refusal(lost, SFTTrainer.compute_loss)
    return seen


@contextmanager
def fsdp2_on_cpus():
    """Let accelerate take its way into FSDP on CPUs with gloo, which it takes for GPUs and other accelerators only.

    Our check, which refuses this, is left out, and the variables that FSDP2 sets are unset afterwards.

    Replaced is nothing but the answer MULTI_CPU, by MULTI_GPU, while AcceleratorState asks in which of its branches an
    `fsdp_plugin` counts (accelerate/state.py). What it finds there is FSDP; the device is the CPU before and after.
    """
    original = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        found = PartialState._shared_state
        if fsdp_plugin is not None and found["distributed_type"] == DistributedType.MULTI_CPU:
            found["distributed_type"] = DistributedType.MULTI_GPU
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)

    is_allowed, environment = mock.patch.object(checks, "_check_parallel"), mock.patch.dict(os.environ)
    with is_allowed, environment, mock.patch.object(AcceleratorState, "__init__", init):
        yield


RESHARDED = ("run.parallel=fsdp2", "trainer.max_steps=10", *FOR_TWO_OR_THREE)


def resharded(make):
    """A run that two ranks leave after step 3 and three after step 7; one ends it."""
    step = {1: None, 2: 3, 3: 7}[make.ranks.num_ranks]
    with fsdp2_on_cpus():
        if step:
            return killed(make, "resharded", "fsdp2", *RESHARDED[1:], step=step)
        return make("resharded", "sft", *RESHARDED).train()


def freed(make):
    """Three ranks go on where two have left."""
    for mode, overrides in FREED.items():
        make(f"freed-{mode}", "sft", f"run.parallel={mode}", *overrides).train()


def same_steps(make, mode, *runs):
    """Ten steps of each: the weights, for comparison with one process, and the maps counted."""
    without_bfloat16()
    maps = {}
    for name, task, overrides in runs:
        run = make(f"{name}-{mode}", task, *PARITY, *GLOBAL, *overrides, f"run.parallel={mode}")
        trainer = run.trainer()
        trainer.train()
        validation = trainer.validation() if task == "pretrain" else None
        optimizer, ranks = trainer.attached.optimizer, run.ranks
        maps[name] = {
            "all": ranks.sums([optimizer.num_maps])[0],
            "per_step": trainer.optimizer_check.record["maps_per_step"],
            "accumulation": trainer.args.gradient_accumulation_steps,
            "momentum": sum(local(state["exp_avg"]).numel() for state in optimizer.state.values()),
            "logged": trainer.state.log_history[-2],
            "validation": validation,
            "first_step": next(c for c in trainer.callback_handler.callbacks if isinstance(c, FirstStepCheck)).groups,
        }
        if mode == "ddp":
            # From every rank: replicas that have drifted apart would go unnoticed by the first one's file alone.
            weights = {k: v.detach().clone() for k, v in trainer.model.named_parameters()}
            save_file(weights, run.folder.path / f"weights{ranks.rank}.safetensors")
        else:
            trainer.save_model(str(run.folder.model))
    return maps


def references(make, mode):
    """Rewards at the first step of two DPOs with precomputed reference log-probabilities, and the refusal of a third.

    Their starts differ and nothing else. The third reads those of the second, which its key no longer tells apart.
    """
    settings = (*PRECOMPUTED, "trainer.max_steps=1", "trainer.save_strategy=no", "data.train.limit=32", *FOR_TWO)
    runs = [make(f"reference-{mode}-{seed}", "dpo", *settings, f"model.init_seed={seed}", f"run.parallel={mode}")
            for seed in (1, 2, 3)]  # fmt: skip
    rewards = []
    for run in runs[:2]:
        trainer = run.trainer()
        trainer.train()
        rewards += [trainer.state.log_history[0][f"rewards/{side}"] for side in ("chosen", "rejected")]
    with mock.patch.object(trl_trainers, "reference_key", return_value="0" * 64):
        runs[1].trainer()
        return rewards, refusal(runs[2], DPOTrainer.compute_loss)


def kept_whole(make):
    """After a step: how many of the parameters that were loaded are still there, and how often a rank summed alone."""
    run = make("kept", "sft", *PARITY, *GLOBAL, "run.parallel=fsdp2", "trainer.max_steps=1", "trainer.save_strategy=no")
    trainer = run.trainer()
    loaded = [weakref.ref(parameter) for parameter in trainer.model.parameters()]
    with mock.patch.object(Accelerator, "no_sync", wraps=trainer.accelerator.no_sync) as unsynchronised:
        trainer.train()
    gc.collect()
    return [sum(parameter() is not None for parameter in loaded), unsynchronised.call_count]


def whole_layers(make):
    """How many layers of DPO's reference are whole on this rank: before each of them in a forward pass, and after it."""
    run = make("blocks", "dpo", *PARITY, *GLOBAL, "run.parallel=fsdp2", "trainer.max_steps=1")
    trainer = run.trainer()
    layers, numbers = trainer.ref_model.model.layers, set()

    def count(*_):
        numbers.add(
            sum(not isinstance(parameter, DTensor) for layer in layers for parameter in [*layer.parameters()][:1])
        )

    for layer in layers:
        layer.register_forward_pre_hook(count)
    trainer.train()
    whole = [name for name, parameter in trainer.ref_model.named_parameters() if not isinstance(parameter, DTensor)]
    return len(layers), numbers, whole


def losses_in_bfloat16(make, mode, *overrides):
    """What ten steps log, with bfloat16 weights in the passes and float32 masters."""
    run = make(f"bfloat16-{mode}", "sft", *PARITY, *GLOBAL, "trainer.bf16=true", *overrides, f"run.parallel={mode}")
    trainer = run.trainer()
    trainer.train()
    trainer.save_model(str(run.folder.model))
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


SHARDS = {"ddp": "model.safetensors", "zero2": "*/*optim_states.pt", "zero3": "*/zero_*model_states.pt"}
SHARDS |= {"fsdp2": "optimizer_0/*.distcp"}
"""Files of a checkpoint: under DDP one that every rank reads, otherwise one of each rank."""


def resumed(make, mode):
    """A run, and one that both ranks leave after step 3 and take up again, also after its checkpoint was damaged.

    Returns the files that this rank has hashed for the seal, and the refusal of a checkpoint with one wrong bit.
    """
    again = (f"killed-{mode}", "sft", f"run.parallel={mode}", *GLOBAL, *DISPLACED)
    make(f"whole-{mode}", "sft", f"run.parallel={mode}", *GLOBAL, *DISPLACED).train()
    hashed = []

    def contents(paths, **settings):
        hashed.extend(paths := [*paths])
        return files.contents(paths, **settings)

    with mock.patch.object(checkpoints, "contents", contents):
        assert killed(make, f"killed-{mode}", mode, *GLOBAL, *DISPLACED)
    (checkpoint,) = RunFolder(make.folder / f"killed-{mode}").complete_checkpoints()
    before = {file: file.read_bytes() for file in checkpoint.glob(SHARDS[mode])}

    make.ranks.barrier()
    with make.ranks.main_process_first():
        if make.ranks.is_first:
            flip_bit(max(before))
    message = refusal(make(*again))
    make.ranks.barrier()  # the other has read it too
    with make.ranks.main_process_first():
        if make.ranks.is_first:
            for file, content in before.items():
                file.write_bytes(content)
    make(*again).train()
    return {"hashed": [path.relative_to(checkpoint).as_posix() for path in hashed], "refusal": message}


ASYNC = ("run.parallel=fsdp2", "run.async_save=true", "trainer.save_total_limit=1", *GLOBAL, *DISPLACED)
ASYNC += ("trainer.load_best_model_at_end=true",)  # the last: its folder must be there before transformers looks for it


def background(make):
    """A run whose checkpoint-2 is written after step 3, and which both ranks leave after step 5, while checkpoint-4 is
    written, and take up again; and the error of a disk that is full on one rank.

    Returns the checkpoints that the first leaves, and the error."""
    stepped, begun, left = threading.Event(), threading.Event(), threading.Event()

    def slow(path):
        if "checkpoint-2" in path:
            stepped.wait(60)
        if "checkpoint-4" in path:
            begun.set()
            left.wait(60)
            raise Kill

    def full(path):
        if "checkpoint-4" in path and make.ranks.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def disk(act):
        write = FileSystemWriter.write_data
        return mock.patch.object(
            FileSystemWriter, "write_data", lambda self, *a: act(str(self.path)) or write(self, *a)
        )

    run = make("killed-background", "sft", *ASYNC)
    with disk(slow), after_step(2, stepped.set), after_step(5, lambda: begun.wait(60) and die()):
        with contextlib.suppress(Kill):
            run.train()
        checkpoints = {path.name: (path / "soren_align.json").exists() for path in run.folder.checkpoints.iterdir()}
        make.ranks.barrier()
        left.set()
    make("killed-background", "sft", *ASYNC).train()
    with disk(full):
        return checkpoints, refusal(make("full-background", "sft", *ASYNC))


def killed(make, name, mode, *overrides, task="sft", step=3):
    """A run that all ranks leave after `step`; its last checkpoint is of the step before."""
    try:
        with after_step(step, die):
            make(name, task, f"run.parallel={mode}", *overrides).train()
    except Kill:
        return True


def c4(make):
    """The tokens of this rank's micro-batches in two runs of a C4 recipe; both ranks leave the second after step 5."""
    overrides = c4_replica.c4(make.folder / "data")
    whole = tokens_of(make("whole-ddp", c4_replica.RECIPE, *overrides).train)
    assert killed(make, "killed-ddp", "ddp", *overrides, task=c4_replica.RECIPE, step=5)
    return {"whole-ddp": whole, "killed-ddp": tokens_of(make("killed-ddp", c4_replica.RECIPE, *overrides).train)}


def tokens_of(train):
    """The token ids of each micro-batch that this rank trains on in `train()`."""
    seen = []

    def loss(self, model, inputs, *args, **kwargs):
        seen.append(inputs["input_ids"].tolist())
        return SFTTrainer.compute_loss(self, model, inputs, *args, **kwargs)

    with mock.patch.object(SorenTrainerMixin, "compute_loss", loss, create=True):
        train()
    return seen


def poisoned(make, mode, factor=math.nan):
    """One rank alone meets a NaN, or another factor of the loss, in its rows."""
    run = make(f"poisoned-{mode}-{factor}", "sft", f"run.parallel={mode}", *GLOBAL)

    def loss(self, *args, **kwargs):
        return SFTTrainer.compute_loss(self, *args, **kwargs) * (factor if run.ranks.rank == 1 else 1)

    return refusal(run, loss)


def drifted(make):
    """A loss that goes around DDP, so that each rank keeps its own gradients."""
    run = make("drifted", "sft", *GLOBAL)

    def loss(self, model, *args, **kwargs):
        return SFTTrainer.compute_loss(self, self.accelerator.unwrap_model(model), *args, **kwargs)

    return refusal(run, loss)


def refusal(run, loss=SFTTrainer.compute_loss):
    """What training with this loss is refused with; None if it is not."""
    try:
        with mock.patch.object(SorenTrainerMixin, "compute_loss", loss, create=True):
            run.train()
    except UserError as error:
        return str(error)


def stopped(make):
    """One rank alone gets a signal."""
    run = make("stopped", "sft", *GLOBAL)
    with after_step(2, lambda: run.ranks.rank == 1 and signal.raise_signal(signal.SIGTERM)):
        went_on = run.train()
    return [went_on, [p.name for p in sorted(run.folder.checkpoints.glob("checkpoint-*"))]]


def run(group, job, folder):
    """The result of one rank."""
    folders = []

    def make(name, task, *overrides):
        tiny_run = TinyRun(folder / name, task, *overrides, ranks=make.ranks)
        folders.append(tiny_run.folder)
        return tiny_run

    make.ranks, make.folder = current_ranks(), folder
    with mock.patch.object(iterate, "newton_schulz", iterate.newton_schulz):  # without_bfloat16() replaces it
        try:
            return globals()[job](make)
        finally:
            for run_folder in folders:
                run_folder.release()  # a rank that was killed would have ended and let go of its lock
