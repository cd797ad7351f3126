"""Pre-training: the next token of plain texts, with an exact validation loss and its perplexity."""

import math
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader
from transformers.trainer_utils import EvalLoopOutput

from .samples import evaluating
from .trl_trainers import SorenSFTTrainer


class SorenPretrainer(SorenSFTTrainer):
    """SorenSFTTrainer for plain texts, whose evaluation loss is the mean over all held-out tokens.

    transformers averages the losses of batches instead, so that tokens of short examples count more, and TRL's entropy
    and accuracy are left out.
    """

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return this rank's batches: every num_ranks-th of those of one process, and as many on all ranks.

        All ranks take part in a sharded model's forward pass; a rank with one batch less gets the last one again.
        eval_dataset: default: the trainer's.
        """
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        batches = list(BatchSampler(range(len(dataset)), self.args.per_device_eval_batch_size, drop_last=False))
        ranks = self._ranks
        own = [batches[min(i + ranks.rank, len(batches) - 1)] for i in range(0, len(batches), ranks.num_ranks)]
        return DataLoader(dataset, batch_sampler=own, collate_fn=self.data_collator)

    def evaluation_loop(
        self, dataloader: DataLoader, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """Return the metrics loss, in nats per token, perplexity, its exponential, and tokens. Collective.

        dataloader: of `get_eval_dataloader`.
        """
        num_examples = len(dataloader.dataset)  # pyright: ignore[reportArgumentType] (a Dataset with a length)
        num_batches = math.ceil(num_examples / self.args.per_device_eval_batch_size)
        model: Any = self.model_wrapped if self.is_deepspeed_enabled else self.model
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
        metrics = {"loss": loss, "perplexity": perplexity(loss), "tokens": int(num_tokens)}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(None, None, metrics, num_examples)  # pyright: ignore[reportArgumentType]

    def validation(self) -> dict[str, Any] | None:
        """Return {"loss", "perplexity", "num_tokens"} of the trained model; None without held-out examples. Collective.

        It is evaluated again if the last evaluation was of other weights.
        """
        if self.eval_dataset is None:
            return None
        logs = [log for log in self.state.log_history if "eval_loss" in log]
        if not logs or logs[-1]["step"] != self.state.global_step or self.args.load_best_model_at_end:
            self.evaluate()
            logs = [log for log in self.state.log_history if "eval_loss" in log]
        last = logs[-1]
        return {"loss": last["eval_loss"], "perplexity": last["eval_perplexity"], "num_tokens": last["eval_tokens"]}


def perplexity(loss: float) -> float:
    """Return exp(loss); infinity beyond the largest float."""
    return math.exp(loss) if loss < 709 else math.inf
