"""TRL's SFTTrainer and DPOTrainer with this package's optimizers, and a trainer for pre-training.

TRL has no common way to pass an optimizer: SFTTrainer takes `optimizer_cls_and_kwargs`, DPOTrainer
does not, and DeepSpeed calls `create_optimizer` itself. So a mixin for both overrides that method.
transformers calls, in this order: `create_optimizer`, `create_scheduler`, `training_step` per
micro-batch, `optimizer.step()`, `log`, `_save_checkpoint`.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.utils.data import BatchSampler, DataLoader
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, rotate_checkpoints
from trl import DPOTrainer, SFTTrainer

from ..core.errors import UserError
from ..core.files import remove, write
from ..data import pair_of, uncached, verified_values
from ..optim import build_optimizer, completed_settings
from ..recipe import OptimizerSection
from ..recipe.model import QUANTIZATION_RECORD
from ..run.quantized import quantization_of
from ..run.weights import refuse_other_keys
from ..sharding import chain_of, full_weights, set_strategy, sum_in_float32
from ..sharding.ranks import current_ranks
from . import checkpoints
from .adapters import GradientCheck, export_weights
from .checkpoints import (
    STREAM,
    STREAM_FILE,
    checkpoint_bytes,
    read_form,
    refuse_full_disk,
    write_errors,
)
from .lost_updates import WARN, FirstStepCheck, LostUpdatesPolicy
from .measure.measurements import MeasurementLog, Measurements, SpectraRecorder
from .measure.samples import evaluating
from .packing import IsolationCheck, TokenStream
from .reference import BatchHash, ReferenceCheck, reference_key
from .trained_optimizer import AttachedOptimizer, OptimizerCheck, OptimizerMismatch, StartingWeights

OptimizerSettings = str | Mapping[str, Any] | OptimizerSection | None
"""None: Soren. A name: soren, muon, htmuon, adamw. A mapping: keywords of `build_optimizer`, any of
which may be left out. A recipe's optimizer section: complete, nothing is added."""
_TOKENS = "num_tokens"
"""The key of a checkpoint's state with TRL's number of tokens trained on."""
CHANGED_BY_TRAINING = ("use_cache", "output_router_logits")
"""Settings of a model's config that transformers and TRL change, and that no training should
save."""
_MISSING = object()


class SorenTrainerMixin(Trainer):
    """Put before a TRL trainer: builds the optimizer, checks and measures its steps, seals complete
    checkpoints.
    """

    def __init__(
        self,
        *args: Any,
        optimizer_settings: OptimizerSettings = None,
        origin: dict[str, Any] | None = None,
        measurement_log: MeasurementLog = MeasurementLog(),
        parallel: str | None = None,
        save_dtype: torch.dtype | None = None,
        lost_updates: LostUpdatesPolicy | None = WARN,
        stream: TokenStream | None = None,
        **kwargs: Any,
    ):
        """optimizer_settings: "muon", {"name": "soren", "lr": 1e-4, ...}; see `OptimizerSettings`.
        Default: Soren.

        origin: the run that the checkpoints belong to; written into each and compared when
        resuming.
        measurement_log: where measurements are written, and which.
        parallel: "ddp", "zero" or "fsdp2": refuse any other; None: whatever accelerate has set up.
        save_dtype: of the weights that `save_model` writes; None: their own dtype.
        lost_updates: whether to warn or stop; None: the first step is not measured.
        stream: whose `dataset()` the training examples are; its place is saved in checkpoints.
        """
        self.stream = stream
        self.parallel, self.save_dtype = parallel, save_dtype
        self.origin, self.lost_updates = origin or {}, lost_updates
        config = getattr(args[0] if args else kwargs.get("model"), "config", None)
        configs = [] if config is None else [config, config.get_text_config()]
        settings = [(part, key) for part in configs for key in CHANGED_BY_TRAINING]
        self._config_at_start = [
            (part, key, getattr(part, key, _MISSING)) for part, key in settings
        ]
        super().__init__(*args, **kwargs)
        model: Any = self.model
        if isinstance(model, PeftModel):
            # With a 4-bit base, TRL casts the factors to bfloat16, where small updates would be
            # lost to rounding
            # (test_what_trl_makes_bfloat16_beside_a_quantised_base_is_float32_again).
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.dtype != torch.float32:
                    parameter.data = parameter.data.float()
        if isinstance(optimizer_settings, OptimizerSection):
            self.optimizer_settings = optimizer_settings.model_dump(exclude_none=True)
        else:
            self.optimizer_settings = completed_settings(optimizer_settings or {}, self.args)
        # Never stepped: a model that it refuses is refused before training, and `_attach_optimizer`
        # compares with it.
        self.expected_optimizer = build_optimizer(model, **self.optimizer_settings)
        # callbacks whose `values()` belong to the log of an evaluation
        self.evaluated_with: list[Any] = []
        self.attached: Any = None  # these four: from `create_scheduler` on
        self.optimizer_check: Any = None
        self.measurements: Any = None
        self.starting_weights: Any = None
        self._ranks, self.measurement_log = current_ranks(), measurement_log
        self.batch_hash = BatchHash(self._ranks)
        self.add_callback(self.batch_hash)
        if self.is_fsdp_enabled:
            # FSDP2 replaces the parameters; with references to them, every rank would keep the
            # whole model.
            for group in self.expected_optimizer.param_groups:
                group["params"] = [torch.empty_like(p, device="meta") for p in group["params"]]
        elif not self.is_deepspeed_enabled:
            # Not later: a checkpoint is loaded into unsharded parameters before the optimizer is
            # created. All ranks hold all parameters; each measures its share.
            groups = enumerate(self.expected_optimizer.param_groups)
            parameters = [(index, p) for index, group in groups for p in group["params"]]
            self.starting_weights = StartingWeights(
                parameters[self._ranks.rank :: self._ranks.num_ranks]
            )

    @property
    def forward_model(self) -> Any:
        """The model whose forward pass gathers sharded weights, in the precision of training."""
        return self.model_wrapped if self.is_deepspeed_enabled else self.model

    def create_accelerator_and_postprocess(self) -> None:
        """As TRL; under FSDP2 only the weights in forward and backward are bfloat16, as under DDP
        and ZeRO.
        """
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled:
            sum_in_float32(self.accelerator.state.fsdp_plugin)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the recipe's optimizer over every trainable parameter."""
        if self.optimizer is None:
            trained: Any = self.model if model is None else model
            self.optimizer = build_optimizer(trained, **self.optimizer_settings)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """As TRL. At this call all wrappers are around the optimizer and no sharded checkpoint is
        loaded yet.
        """
        if optimizer is None and self.attached is None:
            self._attach_optimizer()
        return super().create_scheduler(num_training_steps, optimizer)

    def _attach_optimizer(self) -> None:
        """Find the optimizer inside accelerate's wrappers, set its sharding strategy, check and
        measure it. Collective.

        Raises OptimizerMismatch if its class is not that of the recipe, UserError if the sharding
        is not supported.
        """
        *wrappers, inner = chain_of(self.optimizer)
        expected, actual = type(self.expected_optimizer), type(inner)
        if actual is not expected:
            raise OptimizerMismatch(
                f"the recipe's optimizer is {expected.__name__}, but the trainer would use {actual.__name__}"
            )
        try:
            kind, tensors = set_strategy(self.optimizer, self._ranks)
        except ValueError as error:
            raise UserError(f"run.parallel: {error}") from error
        self.attached = AttachedOptimizer(
            inner, wrappers, self.expected_optimizer, kind, tensors, self._ranks
        )
        if self.parallel not in (None, self.attached.parallel):
            raise UserError(
                f"run.parallel: is {self.parallel}, but accelerate set up {self.attached.parallel}; write "
                f"run.parallel: {self.attached.parallel}, or change the launcher"
            )
        if self.attached.parallel != "ddp":
            by_group = enumerate(self.attached.tensors)
            self.starting_weights = StartingWeights(
                [(index, tensor) for index, group in by_group for tensor in group]
            )
        self.optimizer_check = OptimizerCheck(self.attached)
        self.measurements = Measurements(self.attached, self.starting_weights, self.measurement_log)
        self.add_callback(GradientCheck(self.attached))
        self.add_callback(self.optimizer_check)
        self.add_callback(self.measurements)
        if self.measurement_log.section.steps:
            self.add_callback(SpectraRecorder(self.attached, self.measurement_log))
        if self.lost_updates is not None:
            self.add_callback(FirstStepCheck(self.attached, self.lost_updates))

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        """As TRL, but a stream's sequences are complete."""
        if self.stream is not None and args[-1] == "train":
            return dataset
        # What TRL makes of the tokens lies in a temporary folder of this process: beside them,
        # `datasets` would read it again at each resume, whatever a disk has made of it.
        with uncached():
            return super()._prepare_dataset(dataset, *args)  # pyright: ignore[reportAttributeAccessIssue] (TRL's)

    def _sequences_of(self, num_batches: int) -> int:
        """Return the number of sequences in micro-batches, on all ranks."""
        return num_batches * self.args.train_batch_size * self.args.world_size

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # transformers compares with max_steps only after a step: resumed at the last one, it would
        # take one more. So it would after early stopping.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        if self.stream is not None and (checkpoint := kwargs["resume_from_checkpoint"]):
            num_passed_over = self._sequences_of(kwargs["steps_trained_in_current_epoch"])
            self.stream.resume(read_form(Path(checkpoint) / STREAM_FILE, STREAM), num_passed_over)
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As TRL; also counts the tokens and hashes the batch."""
        self.batch_hash.add(inputs)
        mask = inputs.get("attention_mask")
        self.measurements.num_tokens += (
            mask.sum() if mask is not None else inputs["input_ids"].numel()
        )
        return super().training_step(model, inputs, *args, **kwargs)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """As TRL. The norm, computed for clipping or for the log, serves the optimizer too."""
        norm = super()._get_grad_norm(model, grad_norm)
        if self.attached.parallel == "ddp" and torch.is_tensor(norm):
            limit = self.args.max_grad_norm if grad_norm is not None else math.inf
            # The norm before clipping; 1%: of rounding in bfloat16. An infinity makes clipped
            # gradients NaN.
            self.attached.optimizer.gradient_norm = torch.where(
                norm.isfinite(), norm.clamp(max=limit) * 1.01, norm
            )
        return norm

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As TRL, with our measurements beside the loss. Collective, as TRL's is."""
        if self.is_deepspeed_enabled:
            # computed from the number of parameters, which ZeRO 3 has emptied
            logs.pop("total_flos", None)
        if "loss" in logs:
            num_tokens: Any = torch.as_tensor(
                int(self.measurements.num_tokens), device=self.args.device
            )
            logs.update(self.measurements.values(int(self.accelerator.reduce(num_tokens, "sum"))))  # pyright: ignore
            if num_skipped_steps := self.optimizer_check.counts.get("num_skipped_steps"):
                logs["num_skipped_steps"] = num_skipped_steps
            if self.attached.parallel == "ddp":
                self.attached.refuse_unaveraged_gradients(self.state.global_step)
        elif "eval_loss" in logs:
            for measurement in self.evaluated_with:
                logs.update(measurement.values())
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As TRL, but saves the weights that the optimizer updates, unsharded and in `save_dtype`.
        Collective.

        transformers would save the bfloat16 weights that DeepSpeed computes with, under FSDP2
        nothing, and ignore the compensation. For checkpoints (_internal_call) that is enough: the
        optimizer's state is saved beside them. Of adapters, the trained one is saved, in float32.
        """
        model: Any = self.model
        folder = Path(str(output_dir or self.args.output_dir))
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        if isinstance(model, PeftModel) and not _internal_call:
            weights = dict(full_weights(model)) if self.is_deepspeed_enabled else None
            if self.args.should_save:
                # without TRL's frozen copy of the starting adapter
                model.save_pretrained(
                    str(folder), selected_adapters=["default"], state_dict=weights
                )
                # PEFT's card has only paths of this machine
                (folder / "README.md").unlink(missing_ok=True)
                if (quantization := quantization_of(model)) is not None:
                    write(folder / QUANTIZATION_RECORD, json.dumps(quantization, indent=2) + "\n")
            return
        converts = isinstance(model, PreTrainedModel) and self.save_dtype is not None
        if _internal_call or not (sharded or converts):
            super().save_model(output_dir, _internal_call)
            return
        if sharded:
            weights = export_weights(
                ((name, w, None) for name, w in full_weights(model)), self.save_dtype
            )
        elif self.args.should_save:
            states = self.attached.optimizer.state
            # the parameters, each once, with their compensation, and the buffers
            own: list[Any] = [
                (name, p.detach(), states.get(p, {}).get("compensation"))
                for name, p in model.named_parameters()
            ]
            names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            own += [
                (name, tensor, None)
                for name, tensor in model.state_dict().items()
                if name not in names
            ]
            weights = export_weights(own, self.save_dtype)
        else:
            weights = {}
        self._save(str(folder), state_dict=weights)
        config_file = folder / "config.json"
        if self.save_dtype is not None and self.args.should_save and config_file.is_file():
            # transformers writes the dtype of the model in memory, to which from_pretrained would
            # round
            config = json.loads(config_file.read_text(encoding="utf-8"))
            config["dtype"] = str(self.save_dtype).removeprefix("torch.")
            write(config_file, json.dumps(config, indent=2) + "\n")

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # As transformers, which warns, but a weight that is missing is an error; a tied head is its
        # embedding.
        model: Any = self.model
        missing, names = set(load_result.missing_keys), {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            names.setdefault(id(tensor), set()).add(name)
        missing = [name for tied in names.values() if tied <= missing for name in tied]
        refuse_other_keys("the checkpoint", missing, load_result.unexpected_keys)

    def _load_best_model(self) -> None:
        checkpoints.verify(Path(str(self.state.best_model_checkpoint)), self._ranks)
        # The compensation, part of the optimizer's state, belongs to the weights that it was saved
        # with.
        super()._load_best_model()
        if self.optimizer_settings.get("compensation") == "kahan":
            self._load_optimizer_and_scheduler(self.state.best_model_checkpoint)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        # As TRL, with the starting checkpoint's config: training turns the cache off, and routers'
        # logits on.
        changed = [
            (config, key, getattr(config, key, _MISSING))
            for config, key, _ in self._config_at_start
        ]
        _set(self._config_at_start)
        try:
            super()._save(output_dir, state_dict)
        finally:
            _set(changed)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no card per checkpoint; publish/card.py writes that of the model."""

    def _load_callback_state(self) -> None:
        """As transformers, when a run resumes. TRL would count the tokens from 0 again."""
        super()._load_callback_state()
        # of the recipe, where they may have changed
        self.state.compute_steps(self.args, self.state.max_steps)
        states: Any = self.state.stateful_callbacks
        self._total_train_tokens = states.get(_TOKENS, 0)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Old checkpoints are deleted only after the new one is sealed: a kill between transformers'
        # own deletion and the seal would leave no complete checkpoint.
        folder = Path(str(self.args.output_dir))
        checkpoint = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            remove(checkpoint)  # of a run that resumed from an earlier one by its path
        refuse_full_disk(
            folder, checkpoint_bytes(self.model, self.attached), "a checkpoint", self.attached
        )
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            states: Any = self.state.stateful_callbacks
            states[BatchHash.__name__] = self.batch_hash.state()
            states[OptimizerCheck.__name__] = self.optimizer_check.counts
            states[_TOKENS] = self._total_train_tokens
            with write_errors(checkpoint):
                super()._save_checkpoint(model, trial)
                if self.stream is not None and self.args.should_save:
                    num_batches = self.state.global_step * self.args.gradient_accumulation_steps
                    state = self.stream.state(self._sequences_of(num_batches))
                    write(checkpoint / STREAM_FILE, json.dumps(state) + "\n")
                # a rank must not hash a folder while another writes into it
                self.accelerator.wait_for_everyone()
                checkpoints.seal(checkpoint, self.origin, self._ranks)
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            rotate_checkpoints(str(folder), limit, self.state.best_model_checkpoint)


def _set(settings: list[tuple[Any, str, Any]]) -> None:
    for config, key, value in settings:
        if value is not _MISSING:
            setattr(config, key, value)
        elif hasattr(config, key):
            delattr(config, key)


class SorenSFTTrainer(SorenTrainerMixin, SFTTrainer):
    """trl.SFTTrainer with this package's optimizers; see SorenTrainerMixin for the added
    arguments.
    """

    def _attach_optimizer(self) -> None:
        super()._attach_optimizer()
        if self.padding_free:  # several examples are one sequence
            place = (
                "trainer.packing"
                if getattr(self.args, "packing", False)
                else "trainer.padding_free"
            )
            self.add_callback(IsolationCheck(self.train_dataset, self.data_collator, place))


class SorenDPOTrainer(SorenTrainerMixin, DPOTrainer):
    """trl.DPOTrainer with this package's optimizers; see SorenTrainerMixin for the added
    arguments.
    """

    def __init__(self, model: Any, ref_model: Any = None, *args: Any, **kwargs: Any):
        self._reference_key: str | None = None
        super().__init__(model, ref_model, *args, **kwargs)
        # An adapter is its own reference if TRL has copied it, or if a new one changes nothing yet.
        new_adapter, trained = kwargs.get("peft_config"), self.model
        changes_nothing = getattr(new_adapter, "init_lora_weights", None) in (True, "gaussian")
        is_copied = not isinstance(trained, PeftModel) or "ref" in trained.peft_config
        self.reference_check = ReferenceCheck(self, self._ranks)
        is_start = ref_model is None or bool(self.origin)  # a recipe's reference is its start
        if is_start and (changes_nothing if new_adapter is not None else is_copied):
            self.add_callback(self.reference_check)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """As TRL; the first step's loss is checked."""
        result = super().compute_loss(model, inputs, return_outputs, **kwargs)
        if self.reference_check.is_pending and model.training:
            self.reference_check.add(
                result[0] if return_outputs else result, inputs["completion_mask"]
            )
        return result

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        # As TRL, which calls it when it is constructed, and reads and writes a cache beside the
        # tokens.
        if self._reference_key is None:
            self._reference_key = self._precompute_model_hash = reference_key(self, current_ranks())
        with verified_values(dataset, self._reference_key, current_ranks().is_first):
            return super()._precompute_ref_logps(dataset, name, batch_size)

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, dataset_name: str
    ) -> Any:
        """As TRL, which tokenizes; of tokens, as SFTTrainer takes them, the pairs with a
        `drop_reason` are dropped.
        """
        if "prompt_ids" not in (dataset.column_names or ()):
            return super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if args.truncation_mode != "keep_start":
            return dataset
        # By indices in memory: `datasets.filter` would write a file beside the tokens.
        kept = [
            i for i, pair in enumerate(dataset) if not pair_of(pair).drop_reason(args.max_length)
        ]
        return dataset if len(kept) == len(dataset) else dataset.select(kept)


class SorenPretrainer(SorenSFTTrainer):
    """SorenSFTTrainer for the next token of plain texts, whose evaluation loss is the mean over all
    held-out tokens.

    transformers averages the losses of batches instead, so that tokens of short examples count
    more, and TRL's entropy and accuracy are left out.
    """

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return this rank's batches: every num_ranks-th of those of one process, and as many on
        all ranks.

        All ranks take part in a sharded model's forward pass; a rank with one batch less gets the
        last one again.
        eval_dataset: default: the trainer's.
        """
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        batches = list(
            BatchSampler(range(len(dataset)), self.args.per_device_eval_batch_size, drop_last=False)
        )
        ranks = self._ranks
        own = [
            batches[min(i + ranks.rank, len(batches) - 1)]
            for i in range(0, len(batches), ranks.num_ranks)
        ]
        return DataLoader(dataset, batch_sampler=own, collate_fn=self.data_collator)

    def evaluation_loop(
        self, dataloader: DataLoader, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """Return the metrics loss, in nats per token, perplexity, its exponential, and tokens.
        Collective.

        dataloader: of `get_eval_dataloader`.
        """
        num_examples = len(dataloader.dataset)  # pyright: ignore[reportArgumentType] (a Dataset with a length)
        num_batches = math.ceil(num_examples / self.args.per_device_eval_batch_size)
        model = self.forward_model
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)  # of losses and tokens
        handler: Any = self.callback_handler
        handler.eval_dataloader = dataloader
        with evaluating(model), self.compute_loss_context_manager():
            for index, batch in enumerate(dataloader):
                output = model(**self._prepare_inputs(batch), use_cache=False, fused_lm_head=True)
                if index * self._ranks.num_ranks + self._ranks.rank < num_batches:
                    # log_probs are zero where there is no label
                    sums += torch.stack([-output.log_probs.double().sum(), output.label_mask.sum()])
                self.control = handler.on_prediction_step(self.args, self.state, self.control)
        loss_sum, num_tokens = self._ranks.sums(sums.tolist())
        loss = loss_sum / max(num_tokens, 1.0)
        metrics = {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 709 else math.inf,
            "tokens": int(num_tokens),
        }
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(None, None, metrics, num_examples)  # pyright: ignore[reportArgumentType]

    def validation(self) -> dict[str, Any]:
        """Return {"loss", "perplexity", "num_tokens"} of the trained model on the held-out
        examples. Collective.

        It is evaluated again if the last evaluation was of other weights.
        """
        last: Any = next(
            (log for log in reversed(self.state.log_history) if "eval_loss" in log), None
        )
        if (
            last is None
            or last["step"] != self.state.global_step
            or self.args.load_best_model_at_end
        ):
            last = self.evaluate()
        return {
            "loss": last["eval_loss"],
            "perplexity": last["eval_perplexity"],
            "num_tokens": last["eval_tokens"],
        }
