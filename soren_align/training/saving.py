"""Write what a training leaves: the model folder, and sealed checkpoints.

transformers would save the bfloat16 weights that DeepSpeed computes with, under FSDP2 nothing, and
ignore the compensation. The exporter writes the weights that the optimizer updates, unsharded and
in the dtype of the model folder. Checkpoints are transformers' own; the sealer surrounds their
writing.
"""

import collections
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from ..core.errors import UserError
from ..core.files import remove, write
from ..optim import chunks, copied_to_cpu, master_weights
from ..recipe.model import QUANTIZATION_RECORD
from ..run.quantized import quantization_of
from ..sharding import full_weights, staged_saves
from . import checkpoints
from .checkpoints import STREAM_FILE, write_errors
from .reference import BatchHash
from .trained_optimizer import OptimizerCheck

Weight = tuple[str, Tensor, Tensor | None]
"""Name as in `state_dict`, tensor, compensation."""
CHANGED_BY_TRAINING = ("use_cache", "output_router_logits")
"""Settings of a model's config that transformers and TRL change, and that no training should
save."""
_NUM_TOKENS = "num_tokens"
"""The key of a checkpoint's state with TRL's number of tokens trained on."""
_MISSING = object()


class Exporter:
    """Writes the model folder. Made before TRL changes the config of the model."""

    def __init__(self, model: Any, dtype: torch.dtype | None):
        """dtype: of the saved weights; None: their own."""
        self.dtype = dtype
        config = getattr(model, "config", None)
        configs = [] if config is None else [config, config.get_text_config()]
        self._settings = [
            (part, key, getattr(part, key, _MISSING))
            for part in configs
            for key in CHANGED_BY_TRAINING
        ]

    @contextlib.contextmanager
    def starting_config(self) -> Iterator[None]:
        """Give the model, within the block, the settings of the starting checkpoint's config."""
        during_training = [
            (part, key, getattr(part, key, _MISSING)) for part, key, _ in self._settings
        ]
        _set(self._settings)
        try:
            yield
        finally:
            _set(during_training)

    def save(self, trainer: Any, folder: Path) -> None:
        """Write weights, config and tokenizer. Collective: a sharded model is gathered."""
        with self.starting_config():
            if isinstance(trainer.model, PeftModel):
                self._save_adapter(trainer, folder)
            else:
                self._save_model(trainer, folder)

    def _save_adapter(self, trainer: Any, folder: Path) -> None:
        """Write the trained adapter, in float32."""
        model = trainer.model
        weights = dict(full_weights(model)) if trainer.is_deepspeed_enabled else None
        if trainer.args.should_save:
            # Without TRL's frozen copy of the starting adapter.
            model.save_pretrained(str(folder), selected_adapters=["default"], state_dict=weights)
            # PEFT's card has only paths of this machine
            (folder / "README.md").unlink(missing_ok=True)
            if (quantization := quantization_of(model)) is not None:
                write(folder / QUANTIZATION_RECORD, json.dumps(quantization, indent=2) + "\n")

    def _save_model(self, trainer: Any, folder: Path) -> None:
        # Every rank gathers a sharded model; only one of DDP's, which are equal, rounds it.
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            weights = ((name, weight, None) for name, weight in full_weights(trainer.model))
            state_dict = export_weights(weights, self.dtype)
        elif trainer.args.should_save:
            state_dict = export_weights(_own_weights(trainer), self.dtype)
        if not trainer.args.should_save:
            return
        trainer.model.save_pretrained(str(folder), state_dict=state_dict)
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(str(folder))
        config_file = folder / "config.json"
        if self.dtype is not None and config_file.is_file():
            # transformers writes the dtype of the model in memory, to which from_pretrained would
            # round
            config = json.loads(config_file.read_text(encoding="utf-8"))
            config["dtype"] = str(self.dtype).removeprefix("torch.")
            write(config_file, json.dumps(config, indent=2) + "\n")


def _own_weights(trainer: Any) -> list[Weight]:
    """Return the parameters, each once, with their compensation, and the buffers."""
    model, states = trainer.model, trainer.attached.optimizer.state
    # A tied head is the embedding: exported once, as save_pretrained writes it once.
    weights: list[Weight] = [
        (name, p.detach(), states.get(p, {}).get("compensation"))
        for name, p in model.named_parameters()
    ]
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    weights += [
        (name, tensor, None) for name, tensor in model.state_dict().items() if name not in names
    ]
    return weights


def export_weights(weights: Iterable[Weight], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return a state dict, compensations added, in `dtype` (None: unchanged) on the CPU; rounded in
    chunks on their own device. Raises UserError if a weight does not fit in `dtype`.

    `weights` is always read to its end, also after an error: it may be collective, and the other
    ranks would wait.
    """
    exported: dict[str, Tensor] = {}
    # One tensor at a time, so that each wider copy is freed before the next tensor is gathered.
    try:
        for name, tensor, compensation in weights:
            if dtype is None or not tensor.is_floating_point():
                exported[name] = tensor
                continue
            if compensation is None and tensor.dtype == dtype:
                exported[name] = tensor.cpu()
                continue
            rounded = exported[name] = copied_to_cpu(tensor, compensation, dtype)
            if dtype == torch.float16 and not all(
                torch.equal(here.isfinite(), master_weights(part, rest).isfinite().cpu())
                for here, part, rest in chunks(rounded, tensor, compensation)
            ):
                raise UserError(
                    f"run.save_dtype: {name} has numbers above 65504, the largest number of "
                    "float16; write bfloat16 or float32"
                )
        return exported
    finally:
        collections.deque(weights, maxlen=0)


class CheckpointSealer(TrainerCallback):
    """Adds to transformers' checkpoints what they lack: our counts, the place in a stream, the
    seal.

    trainer: an instance of SorenTrainerMixin. check: called before anything is written; collective.
    """

    def __init__(self, trainer: Any, check: Callable[[], object] = lambda: None):
        self.trainer, self.check = trainer, check
        self.is_async = False
        """Whether FSDP2's shards are written, and the checkpoint sealed, in a thread."""
        # At the end of a process, Python waits for this thread, also after an error elsewhere.
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._unsealed: Future[None] | None = None
        self._ranks_of_thread: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Restore the number of trained tokens, which TRL would count from 0, and the intervals of
        the recipe, which may have changed since the checkpoint.
        """
        if state.global_step:
            state.compute_steps(args, state.max_steps)
            saved: Any = state.stateful_callbacks
            self.trainer._total_train_tokens = saved.get(_NUM_TOKENS, 0)

    def on_step_end(self, args, state, control, **kwargs):
        """Raise an error of the thread, on all ranks at the same step. Collective."""
        if self._unsealed is not None and self.trainer.ranks.any(self._unsealed.done()):
            self.wait()

    def wait(self) -> None:
        """Wait until the thread has sealed its checkpoint. Raises the thread's error."""
        unsealed, self._unsealed = self._unsealed, None
        if unsealed is not None:
            unsealed.result()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Prepare a checkpoint, which transformers writes within the block, and seal it, or have it
        sealed by the thread. Collective.
        """
        self.wait()
        trainer = self.trainer
        args, state, ranks = trainer.args, trainer.state, trainer.ranks
        self.check()
        folder = Path(str(args.output_dir))
        checkpoint = folder / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if args.should_save:
            remove(checkpoint)  # of a run that resumed from an earlier one by its path
            # The best checkpoint is the one before if transformers does not find this one's folder,
            # which under FSDP2 is made later.
            checkpoint.mkdir(parents=True)
        # Into trainer_state.json, which transformers writes and reads: no file of our own to lose.
        state.stateful_callbacks |= {
            BatchHash.__name__: trainer.batch_hash.state(),
            OptimizerCheck.__name__: trainer.optimizer_check.counts,
            _NUM_TOKENS: trainer._total_train_tokens,
        }
        # The thread's collectives are those of another group: a group's must have one order.
        staging = contextlib.nullcontext([])
        if self.is_async:
            ranks = self._ranks_of_thread = self._ranks_of_thread or ranks.with_own_group(
                args.ddp_timeout
            )
            staging = staged_saves(trainer.accelerator.state.fsdp_plugin, ranks.group)
        # Old checkpoints are deleted only after the new one is sealed: a kill between
        # transformers' own deletion and the seal would leave no complete checkpoint.
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            with write_errors(checkpoint), trainer.exporter.starting_config(), staging as writes:
                yield
                if trainer.stream is not None and args.should_save:
                    num_trained = trainer.num_sequences(state.global_step)
                    write(
                        checkpoint / STREAM_FILE,
                        json.dumps(trainer.stream.state(num_trained)) + "\n",
                    )
                # A rank must not hash a folder while another writes into it.
                trainer.accelerator.wait_for_everyone()
        finally:
            args.save_total_limit = limit
        best = state.best_model_checkpoint

        def finish() -> None:
            with write_errors(checkpoint):
                for write_shards in writes:
                    write_shards()
                checkpoints.seal(checkpoint, trainer.origin, ranks)
            if args.should_save:
                rotate_checkpoints(str(folder), limit, best)

        if self.is_async:
            self._unsealed = self._thread.submit(finish)
        else:
            finish()


def _set(settings: list[tuple[Any, str, Any]]) -> None:
    for config, key, value in settings:
        if value is not _MISSING:
            setattr(config, key, value)
        elif hasattr(config, key):
            delattr(config, key)
