"""TRL's SFTTrainer, DPOTrainer and KTOTrainer with this package's optimizers, and a trainer for
pre-training.

TRL has no common way to pass an optimizer: SFTTrainer takes `optimizer_cls_and_kwargs`, DPOTrainer
does not, and DeepSpeed calls `create_optimizer` itself. So a mixin for both overrides that method.
transformers calls, in this order: `create_optimizer`, `create_scheduler`, `training_step` per
micro-batch, `optimizer.step()`, `log`, `_save_checkpoint`.

The mixin only joins parts: callbacks check and measure the steps (trained_optimizer.py, measure/),
an Exporter and a CheckpointSealer write (saving.py). core/patches.py lists the private names of
transformers and TRL that are used here, with the reason of each.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.utils.data import BatchSampler, DataLoader, Sampler
from transformers import Trainer
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput, has_length
from trl import DPOTrainer, KTOTrainer, SFTTrainer

from ..core.errors import UserError
from ..core.patches import patched
from ..data import (
    answered,
    auc,
    filled,
    filtered,
    token_lengths,
    uncached,
    verified_values,
    with_other_answers,
)
from ..optim import build_optimizer, completed_settings
from ..recipe import OptimizerSection
from ..sharding import chain_of, set_strategy, shard_reference, sum_in_float32
from ..sharding.ranks import current_ranks
from . import checkpoints
from .adapters import GradientCheck
from .lost_updates import WARN, FirstStepCheck, LostUpdatesPolicy
from .measure.measurements import MeasurementLog, Measurements, SpectraRecorder
from .measure.samples import evaluating
from .packing import IsolationCheck, TokenStream
from .reference import BatchHash, ReferenceCheck, reference_key
from .saving import CheckpointSealer, Exporter
from .trained_optimizer import AttachedOptimizer, OptimizerCheck, OptimizerMismatch, StartingWeights

OptimizerSettings = str | Mapping[str, Any] | OptimizerSection | None
"""None: Soren. A name: soren, muon, htmuon, adamw. A mapping: keywords of `build_optimizer`, any of
which may be left out. A recipe's optimizer section: complete, nothing is added."""


class SorenTrainerMixin(Trainer):
    """Put before a TRL trainer: builds the optimizer, checks and measures its steps, seals complete
    checkpoints.
    """

    # Made by `create_scheduler`, when the optimizer is complete.
    attached: AttachedOptimizer
    optimizer_check: OptimizerCheck
    measurements: Measurements
    starting_weights: StartingWeights
    train_sampler: Any = None
    saves_models_beside_shards: bool = True
    """Whether ZeRO's checkpoints have a copy of the model as well."""

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
        stream: whose `dataset` the training examples are; its place is saved in checkpoints.
        """
        self.stream, self.parallel, self.origin = stream, parallel, origin or {}
        self.lost_updates, self.measurement_log = lost_updates, measurement_log
        # Before TRL's constructor, which changes the model's config.
        self.exporter = Exporter(args[0] if args else kwargs.get("model"), save_dtype)
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
            # null means the optimizer's own default: it is left out.
            self.optimizer_settings = optimizer_settings.model_dump(exclude_none=True)
        else:
            self.optimizer_settings = completed_settings(optimizer_settings or {}, self.args)
        # Never stepped: a model that it refuses is refused before training, and `_attach_optimizer`
        # compares with it.
        self.expected_optimizer = build_optimizer(model, **self.optimizer_settings)
        self.ranks = current_ranks()
        # Callbacks whose `values()` belong to the log of an evaluation.
        self.evaluated_with: list[Any] = []
        self.logged_with: list[Any] = []  # the same of a log of the training
        self.batch_hash, self.sealer = BatchHash(self.ranks), CheckpointSealer(self)
        self.add_callback(self.batch_hash)
        self.add_callback(self.sealer)
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
                parameters[self.ranks.rank :: self.ranks.num_ranks]
            )

    @property
    def forward_model(self) -> Any:
        """The model whose forward pass gathers sharded weights, in the precision of training."""
        return self.model_wrapped if self.is_deepspeed_enabled else self.model

    def num_sequences(self, num_steps: int) -> int:
        """Return the number of training sequences in optimizer steps, on all ranks."""
        num_batches = num_steps * self.args.gradient_accumulation_steps
        return num_batches * self.args.train_batch_size * self.args.world_size

    # -- the optimizer -----------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """TRL's method; under FSDP2 only the weights in forward and backward are bfloat16, as under
        DDP and ZeRO. DDP's buckets are the gradients, not a copy of all: 12 GB of a 3B model.
        """
        super().create_accelerator_and_postprocess()
        if self.accelerator.ddp_handler is not None:
            self.accelerator.ddp_handler.gradient_as_bucket_view = True
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
        """TRL's method. At this call all wrappers are around the optimizer and no sharded
        checkpoint is loaded yet.
        """
        if optimizer is None and not hasattr(self, "attached"):
            self._attach_optimizer()
        return super().create_scheduler(num_training_steps, optimizer)

    def _attach_optimizer(self) -> None:
        """Find the optimizer inside accelerate's wrappers, set its sharding strategy, check and
        measure it. Collective.

        Raises OptimizerMismatch if its class is not that of the recipe, UserError if the sharding
        is not supported.
        """
        # Find: a library that wraps or replaces the optimizer would otherwise go unseen.
        *wrappers, inner = chain_of(self.optimizer)
        expected, actual = type(self.expected_optimizer), type(inner)
        if actual is not expected:
            raise OptimizerMismatch(
                f"the recipe's optimizer is {expected.__name__}, but the trainer would use "
                f"{actual.__name__}"
            )
        try:
            kind, tensors = set_strategy(self.optimizer, self.ranks)
        except ValueError as error:
            raise UserError(f"run.parallel: {error}") from error
        self.attached = AttachedOptimizer(
            inner, wrappers, self.expected_optimizer, kind, tensors, self.ranks
        )
        if self.parallel not in (None, kind):
            raise UserError(
                f"run.parallel: is {self.parallel}, but accelerate set up {kind}; write "
                f"run.parallel: {kind}, or change the launcher"
            )
        # Check and measure: sharded weights are copied here, in the shards that this rank updates.
        if kind != "ddp":
            self.starting_weights = StartingWeights(
                [(index, tensor) for index, group in enumerate(tensors) for tensor in group]
            )
        self.optimizer_check = OptimizerCheck(self.attached)
        self.measurements = Measurements(self.attached, self.starting_weights, self.measurement_log)
        callbacks = [GradientCheck(self.attached), self.optimizer_check, self.measurements]
        if self.measurement_log.section.steps:
            callbacks.append(SpectraRecorder(self.attached, self.measurement_log))
        if self.lost_updates is not None:
            callbacks.append(FirstStepCheck(self.attached, self.lost_updates))
        for callback in callbacks:
            self.add_callback(callback)

    # -- the loop ----------------------------------------------------------------------------------

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        if self.stream is not None and dataset is self.stream.dataset:
            return dataset  # its sequences are complete
        # What TRL makes of the tokens lies in a temporary folder of this process: beside them,
        # `datasets` would read it again at each resume, whatever a disk has made of it.
        with uncached():
            return super()._prepare_dataset(dataset, *args)  # pyright: ignore[reportAttributeAccessIssue] (TRL's)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        dataset = self.train_dataset if dataset is None else dataset
        columns = {*(getattr(dataset, "column_names", None) or ())}
        is_tokenized = hasattr(dataset, "__len__") and columns & {"input_ids", "prompt_ids"}
        if self.args.train_sampling_strategy == "group_by_length" and is_tokenized:
            # By the batch of all ranks, so that the order is that of one process. transformers'
            # own knows no pairs.
            examples: Any = dataset
            size = self.args.train_batch_size * self.args.gradient_accumulation_steps
            self.train_sampler = LengthGroupedSampler(
                size * self.ranks.num_ranks, lengths=token_lengths(examples)
            )
        else:
            self.train_sampler = super()._get_train_sampler(dataset)
        return self.train_sampler

    def get_train_dataloader(self) -> DataLoader:
        """TRL's; on several ranks, examples without labels fill an epoch's last batches."""
        loader: Any = super().get_train_dataloader()
        dataset: Any = loader.dataset
        number = len(dataset) if has_length(dataset) else 0  # of a stream
        columns = {*(getattr(dataset, "column_names", None) or ())}
        round_size = self.args.train_batch_size * self.ranks.num_ranks
        fillers = range(number, number + -number % round_size)
        # Not where a loss is the mean over a rank's own tokens, of which a filler has none.
        if (
            not fillers
            or self.ranks.num_ranks == 1
            or not {"labels"} <= columns <= {"input_ids", "labels", "seq_lengths"}
            or not (self.model_accepts_loss_kwargs and self.args.average_tokens_across_devices)
            or isinstance(self.train_sampler, BatchRebalanceSampler)  # which has its own ranks
            or self.args.dataloader_drop_last
        ):
            return loader
        # accelerate would repeat the first examples of the epoch, and the last step would not be
        # that of one process: weights differed by 3.9e-3, as much as by a whole step.
        # By `vars`, because torch refuses to assign it.
        vars(loader.base_dataloader)["dataset"] = filled(dataset, len(fillers))
        batches = loader.batch_sampler.batch_sampler  # accelerate gives each rank some of these
        batches.sampler = FilledSampler(batches.sampler, fillers)
        return loader

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # The order is that of seed and epoch, as a random sampler's: on all ranks, whatever they
        # drew before, and after a resume.
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if isinstance(self.train_sampler, LengthGroupedSampler):
            self.train_sampler.generator = torch.Generator().manual_seed(seed + kwargs["epoch"])
        elif isinstance(self.train_sampler, BatchRebalanceSampler):
            self.train_sampler.seed = seed
            self.train_sampler.set_epoch(kwargs["epoch"])
        # A run that is resumed at its last step, or after early stopping, takes none.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)
        if self.control.should_training_stop:  # what follows reads checkpoints
            self.sealer.wait()

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's step; also counts the tokens and hashes the batch."""
        # On the device of the batch: no host read per step.
        self.batch_hash.add(inputs)
        mask, num_places = inputs.get("attention_mask"), inputs["input_ids"].numel()
        num_tokens = mask.sum() if mask is not None else num_places
        self.measurements.num_tokens += num_tokens
        self.measurements.num_padding += num_places - num_tokens
        return super().training_step(model, inputs, *args, **kwargs)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # The norm, computed for clipping or for the log, serves the optimizer too.
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
        """TRL's log, with our measurements beside the loss. Collective, as TRL's is."""
        if self.is_deepspeed_enabled:
            # total_flos is computed from the number of parameters, which ZeRO 3 has emptied.
            logs.pop("total_flos", None)
        # Training's own log: what the last logging step has measured, summed over ranks.
        if "loss" in logs:
            counts = [int(self.measurements.num_tokens), int(self.measurements.num_padding)]
            on_all: Any = self.accelerator.reduce(
                torch.tensor(counts, device=self.args.device), "sum"
            )
            logs.update(self.measurements.values(*on_all.tolist()))
            for measurement in self.logged_with:
                logs.update(measurement.values())
            if num_skipped_steps := self.optimizer_check.counts.get("num_skipped_steps"):
                logs["num_skipped_steps"] = num_skipped_steps
            if self.attached.parallel == "ddp":
                self.attached.refuse_unaveraged_gradients(self.state.global_step)
            # DDP's optimizer refuses such a step, and DeepSpeed skips it; torch has made the
            # gradients of FSDP2 zero, and the step was one of the momentum alone.
            if self.attached.parallel == "fsdp2" and not math.isfinite(logs.get("grad_norm", 0.0)):
                raise FloatingPointError(
                    "the norm of the gradients overflowed in the step before, so that clipping made"
                    " them zero"
                )
        # An evaluation's log: the scores of the same weights, so that the best checkpoint can be
        # chosen by them.
        elif "eval_loss" in logs:
            for measurement in self.evaluated_with:
                logs.update(measurement.values())
        super().log(logs, *args, **kwargs)

    # -- what is written ---------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights that the optimizer updates, unsharded and in `save_dtype`; of adapters
        the trained one. Collective.

        For checkpoints (_internal_call) TRL's way is enough: the optimizer's state, with the
        compensation, is saved beside them. Under ZeRO no resume reads the whole model.
        """
        if not _internal_call:
            self.exporter.save(self, Path(str(output_dir or self.args.output_dir)))
        # 2 bytes per weight, which ZeRO 3 would gather on one rank at each checkpoint.
        elif (
            self.saves_models_beside_shards
            or not self.is_deepspeed_enabled
            or isinstance(self.model, PeftModel)
        ):
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self.sealer.writing():
            super()._save_checkpoint(model, trial)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write no card per checkpoint; publish/card.py writes that of the model."""

    def _load_best_model(self) -> None:
        checkpoints.verify(Path(str(self.state.best_model_checkpoint)), self.ranks)
        super()._load_best_model()
        # The compensation, part of the optimizer's state, belongs to the weights that it was saved
        # with.
        if self.optimizer_settings.get("compensation") == "kahan":
            self._load_optimizer_and_scheduler(self.state.best_model_checkpoint)


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


class ReferenceMixin(SorenTrainerMixin):
    """SorenTrainerMixin for a loss with a reference model: checks it, and keeps its values."""

    reference_settings: tuple[Any, ...] = ()
    """What TRL's cache key of log-probabilities has beside dataset and model."""

    def __init__(self, model: Any, ref_model: Any = None, *args: Any, **kwargs: Any):
        # Before TRL's constructor, which computes the log-probabilities.
        self._reference_key: str | None = None
        with (
            patched("trl.trainer.dpo_trainer.prepare_fsdp", shard_reference),
            patched("trl.trainer.kto_trainer.prepare_fsdp", shard_reference),
        ):
            super().__init__(model, ref_model, *args, **kwargs)
        # An adapter is its own reference if TRL has copied it, or if a new one changes nothing yet.
        new_adapter, trained = kwargs.get("peft_config"), self.model
        # PEFT's inits that begin with B = 0; others move the model before the first step.
        changes_nothing = getattr(new_adapter, "init_lora_weights", None) in (True, "gaussian")
        is_copied = not isinstance(trained, PeftModel) or "ref" in trained.peft_config
        self.reference_check = ReferenceCheck(self, self.ranks)
        is_start = ref_model is None or bool(self.origin)  # a recipe's reference is its start
        if is_start and (changes_nothing if new_adapter is not None else is_copied):
            self.add_callback(self.reference_check)

    def get_train_dataloader(self) -> DataLoader:
        """TRL's; on several ranks without an epoch's last pairs, if they fill no batch of all."""
        own = self.args.dataloader_drop_last
        # For the training examples alone: held-out pairs are read with the same arguments.
        is_uneven = self.ranks.num_ranks > 1 and has_length(self.train_dataset)
        self.args.dataloader_drop_last = own or is_uneven
        try:
            return super().get_train_dataloader()
        finally:
            self.args.dataloader_drop_last = own

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """TRL's loss; the first step's loss is checked."""
        result = super().compute_loss(model, inputs, return_outputs, **kwargs)
        # TRL calls this for evaluations too, whose examples belong to no step.
        if self.reference_check.is_pending and model.training:
            self.reference_check.add(inputs["completion_mask"])
        return result

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        if not hasattr(dataset, "cache_files"):  # a stream, which TRL refuses
            return super()._precompute_ref_logps(dataset, name, batch_size)  # pyright: ignore[reportAttributeAccessIssue] (TRL's)
        # As TRL, which calls it when it is constructed, and reads and writes a cache beside the
        # tokens.
        # Once per run: hashing sharded weights is collective and reads all of them.
        if self._reference_key is None:
            self._reference_key = self._precompute_model_hash = reference_key(self, current_ranks())
        key = (self._reference_key, *self.reference_settings)
        with verified_values(dataset, key, current_ranks()):
            return super()._precompute_ref_logps(dataset, name, batch_size)  # pyright: ignore[reportAttributeAccessIssue] (TRL's)


class SorenDPOTrainer(ReferenceMixin, DPOTrainer):
    """trl.DPOTrainer with this package's optimizers; see SorenTrainerMixin for the added
    arguments.
    """

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, dataset_name: str
    ) -> Any:
        """TRL's method, which tokenizes; of tokens, as SFTTrainer takes them, the pairs with a
        `drop_reason` are dropped.
        """
        if "prompt_ids" not in (dataset.column_names or ()):
            return super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        # A library user's setting: a recipe refuses it, since only cuts at the end can be foreseen
        # here.
        if args.truncation_mode != "keep_start":
            return dataset
        return filtered(dataset, lambda pair: not answered(pair).drop_reason(args.max_length))


class SorenKTOTrainer(ReferenceMixin, KTOTrainer):
    """trl.KTOTrainer with this package's optimizers; see SorenTrainerMixin for the added arguments.

    An evaluation also logs `thumbs_accuracy`: the share of all pairs of a held-out good answer and
    a held-out bad one in which the model gives the good one the higher mean log-probability of a
    token. It needs no reference, so that the starting model has one too.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self._thumbs: list[tuple[float, bool]] = []  # of the evaluation that is running
        super().__init__(*args, **kwargs)

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, dataset_name: str
    ) -> Any:
        """TRL's method; of tokens, the examples with a `drop_reason` are dropped.

        The answer to another prompt, of which TRL estimates the KL divergence, is that of the
        example before, within a batch of all ranks: TRL takes a batch of each rank, so that its
        training would depend on their number.
        """
        if "prompt_ids" not in (dataset.column_names or ()):
            return super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        dataset = filtered(dataset, lambda one: not answered(one).drop_reason(args.max_length))
        if not self.calculate_KL:
            return dataset
        size = args.per_device_train_batch_size * current_ranks().num_ranks
        return with_other_answers(dataset, size)

    @property
    def reference_settings(self) -> tuple[bool]:
        """Whether the answers to other prompts have log-probabilities too."""
        return (self.calculate_KL,)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """TRL's loss; notes the log-probabilities of an evaluation's answers."""
        if model.training:
            return super().compute_loss(model, inputs, return_outputs, **kwargs)
        outputs = []

        def noted(**inputs: Any) -> Any:
            outputs.append(model(**inputs))
            return outputs[-1]

        noted.training = False
        loss = super().compute_loss(noted, inputs, return_outputs, **kwargs)
        # The last pass of the policy is that of the answers; TRL's first one is of the others.
        num_tokens = inputs["completion_mask"][:, 1:].sum(-1)
        means = outputs[-1].log_probs[:, -(inputs["input_ids"].size(1) - 1) :].sum(-1) / num_tokens
        gathered = self.accelerator.gather_for_metrics((means, inputs["label"]))
        self._thumbs += zip(*(values.tolist() for values in gathered), strict=True)
        return loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """TRL's loop, with the accuracy in its metrics."""
        self._thumbs, prefix = [], kwargs.get("metric_key_prefix", "eval")
        output: Any = super().evaluation_loop(*args, **kwargs)
        if len({label for _, label in self._thumbs}) == 2:
            output.metrics[f"{prefix}_thumbs_accuracy"] = auc(*zip(*self._thumbs, strict=True))
        return output


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
        # TRL would give every rank its share of examples, and pad the last batch with repeated
        # ones, which would count twice.
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        batches = list(
            BatchSampler(range(len(dataset)), self.args.per_device_eval_batch_size, drop_last=False)
        )
        ranks = self.ranks
        # The minimum repeats the last batch for a rank that has one less; `evaluation_loop` leaves
        # it out of the sums.
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
        # Sums in float64 over batches of all ranks: a mean of means would weight the tokens of
        # short batches more.
        with evaluating(model), self.compute_loss_context_manager():
            for index, batch in enumerate(dataloader):
                output = model(**self._prepare_inputs(batch), use_cache=False, fused_lm_head=True)
                # A rank with one batch less has got the last one again, which must not count twice.
                if index * self.ranks.num_ranks + self.ranks.rank < num_batches:
                    # log_probs are zero where there is no label
                    sums += torch.stack([-output.log_probs.double().sum(), output.label_mask.sum()])
                self.control = handler.on_prediction_step(self.args, self.state, self.control)
        loss_sum, num_tokens = self.ranks.sums(sums.tolist())
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
        # The best checkpoint's weights, if it was loaded at the end, are others than the last
        # evaluation's.
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


class FilledSampler(Sampler):
    """The indices of a sampler, and behind them those of what fills the last batch."""

    def __init__(self, sampler: Any, fillers: range):
        """fillers: the indices behind those of the examples."""
        self.sampler, self.fillers = sampler, fillers

    def __iter__(self) -> Iterator[int]:
        return chain(self.sampler, self.fillers)

    def __len__(self) -> int:
        return len(self.sampler) + len(self.fillers)

    def set_epoch(self, epoch: int) -> None:
        """The order is the sampler's."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
