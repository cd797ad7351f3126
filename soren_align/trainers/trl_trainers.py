"""TRL's SFTTrainer and DPOTrainer, stepping with our optimizers.

TRL offers no common way in: SFTTrainer takes `optimizer_cls_and_kwargs`, DPOTrainer does not, and DeepSpeed calls
`create_optimizer` itself. So that one method is overridden, in a mixin for both, and calls the one factory.
"""

import collections
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl import DPOTrainer, SFTTrainer

from ..errors import UserError
from ..files import write
from ..optim import build_optimizer, chunks, copied_to_cpu, summed
from ..sharding import full_weights, place, sum_in_float32
from ..sharding.ranks import present
from . import adapters, checkpoints
from .measurements import Watch


class SorenTrainerMixin(Trainer):
    """Put before a TRL trainer: builds the optimizer, seals checkpoints, measures."""

    def __init__(
        self,
        *args: Any,
        optimizer_settings: dict[str, Any],
        origin: dict[str, Any] | None = None,
        metrics: Path | None = None,
        parallel: str | None = None,
        save_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ):
        """optimizer_settings: keywords of `soren_align.optim.build_optimizer` (name, lr, aux_lr, ...).

        origin: what checkpoints belong to; written into each and compared on resuming.
        metrics: a .jsonl file that gets a line per log.
        save_dtype: of the weights that `save_model` writes; None: as they are stepped.
        parallel: "ddp", "zero" or "fsdp2", if it must be that one; whatever accelerate has set up, otherwise.
        """
        self.optimizer_settings, self.parallel, self.save_dtype = optimizer_settings, parallel, save_dtype
        self.origin = origin or {}
        super().__init__(*args, **kwargs)
        # Built once to look at: a model that the optimizer cannot take is refused before training, and what really
        # steps is compared with it then.
        trained: Any = self.model
        if isinstance(trained, PeftModel):
            adapters.keep_float32(trained)
        self.reference = build_optimizer(trained, **optimizer_settings)
        self.watch = Watch(self.reference, present(), metrics)
        if self.is_fsdp_enabled:
            # FSDP2 puts others in the place of the parameters; kept here, every rank would hold the whole model.
            for group in self.reference.param_groups:
                group["params"] = [torch.empty_like(p, device="meta") for p in group["params"]]
        elif not self.is_deepspeed_enabled:
            self.watch.remember_whole()
        self.add_callback(self.watch)

    def create_accelerator_and_postprocess(self) -> None:
        """TRL's; under FSDP2 only the weights of a pass are bfloat16, as under DDP and ZeRO."""
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled:
            sum_in_float32(self.accelerator.state.fsdp_plugin)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """The recipe's optimizer over every trainable parameter."""
        if self.optimizer is None:
            whole: Any = self.model if model is None else model
            self.optimizer = build_optimizer(whole, **self.optimizer_settings)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """TRL's. It is made when all wrappers are around the optimizer and no checkpoint is loaded: look at it now."""
        if optimizer is None and self.watch.optimizer is None:
            self.watch.recognise(self.optimizer)
            try:
                placed = place(self.optimizer, self.watch.ranks)
            except ValueError as error:
                raise UserError(f"run.parallel: {error}") from error
            self.watch.begin(placed)
            if self.parallel not in (None, placed.kind):
                raise UserError(f"run.parallel asks for {self.parallel}, but accelerate has set up {placed.kind}")
        return super().create_scheduler(num_training_steps, optimizer)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # transformers looks for the end only after a step: resumed at its last one, it would take one too many.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's, with the tokens counted."""
        mask = inputs.get("attention_mask")
        self.watch.tokens += mask.sum() if mask is not None else inputs["input_ids"].numel()
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """TRL's, with our measurements beside the loss; collective, as TRL's is."""
        if self.is_deepspeed_enabled:
            logs.pop("total_flos", None)  # transformers counts parameters for it, which ZeRO 3 has emptied
        if "loss" in logs:
            tokens: Any = torch.as_tensor(int(self.watch.tokens), device=self.args.device)
            logs.update(self.watch.measures(int(self.accelerator.reduce(tokens, "sum"))))  # pyright: ignore
            if self.watch.record["parallel"] == "ddp":
                self.watch.refuse_drift(self.state.global_step)
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """TRL's; the weights that are stepped, whole and in `save_dtype`, wherever they lie.

        transformers would write the bfloat16 weights that DeepSpeed computes with, under FSDP2 nothing, and no
        compensation. For checkpoints (_internal_call) that will do: what is resumed from lies beside it. Of adapters,
        the trained one, in float32.
        """
        trained: Any = self.model
        if isinstance(trained, PeftModel) and not _internal_call:
            weights = dict(full_weights(trained)) if self.is_deepspeed_enabled else None
            if self.args.should_save:
                adapters.save_trained(trained, str(output_dir or self.args.output_dir), weights)
            return
        whole = isinstance(trained, PreTrainedModel) and self.save_dtype is not None
        if _internal_call or not (self.is_deepspeed_enabled or self.is_fsdp_enabled or whole):
            super().save_model(output_dir, _internal_call)
            return
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            stepped = ((name, weight, None) for name, weight in full_weights(trained))
        else:
            stepped = self._stepped_weights() if self.args.should_save else ()
        try:  # one tensor at a time: nothing of a wider copy is left when the next is put together
            weights = {name: _exported(name, weight, rest, self.save_dtype) for name, weight, rest in stepped}
        finally:
            collections.deque(stepped, maxlen=0)  # to its end, also after an error: the other ranks would wait
        self._save(output_dir, state_dict=weights)
        config = Path(str(output_dir or self.args.output_dir)) / "config.json"
        if self.save_dtype is not None and self.args.should_save and config.is_file():
            # transformers writes the dtype of the model in memory, and from_pretrained would round to it.
            said = json.loads(config.read_text(encoding="utf-8"))
            write(config, json.dumps(said | {"dtype": str(self.save_dtype).removeprefix("torch.")}, indent=2) + "\n")

    def _stepped_weights(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """(name as in `state_dict`, tensor, compensation) of a whole model's weights, each once, and of its buffers."""
        trained: Any = self.model
        for name, parameter in trained.named_parameters():
            yield name, parameter.detach(), self.watch.optimizer.state.get(parameter, {}).get("compensation")
        twice = {name for name, _ in trained.named_parameters(remove_duplicate=False)}
        for name, tensor in trained.state_dict().items():
            if name not in twice:
                yield name, tensor, None

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None per checkpoint: run.json says more than TRL's card."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Rotation waits for the seal: transformers deletes the old checkpoint before anyone knows that the new one
        # is complete, so that a kill between the two leaves none.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()  # each rank writes the state of its random numbers
        if not self.args.should_save:
            return
        folder = Path(str(self.args.output_dir))
        checkpoints.seal(folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}", self.origin)
        rotate_checkpoints(
            output_dir=str(folder),
            save_total_limit=limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=False,
        )


def _exported(
    name: str, held: torch.Tensor, compensation: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor:
    """The weight in `dtype` (None: its own), on the CPU; UserError if it does not fit. Chunks are made in passing."""
    if dtype is None or not held.is_floating_point():
        return held
    if compensation is None and held.dtype == dtype:
        return held.cpu()
    narrow = copied_to_cpu(held, compensation, dtype)
    if dtype == torch.float16:
        for here, part, rest in chunks(narrow, held, compensation):
            if not torch.equal(here.isfinite(), summed(part, rest).isfinite().cpu()):
                raise UserError(f"run.save_dtype: float16 ends at 65504, {name} is beyond; write bfloat16 or float32")
    return narrow


class SorenSFTTrainer(SorenTrainerMixin, SFTTrainer):
    """trl.SFTTrainer with an optimizer of ours; see SorenTrainerMixin for the added arguments."""


class SorenDPOTrainer(SorenTrainerMixin, DPOTrainer):
    """trl.DPOTrainer with an optimizer of ours; see SorenTrainerMixin for the added arguments."""
