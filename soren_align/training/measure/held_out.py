"""Measure each held-out example alone, at the start and at the end of a run of a study; see
run/held_out.py.

transformers averages batches, whose means hide how much examples differ. So each example is a batch
of one here, and its metrics are those that TRL's trainer computes for it: any loss of any task.
Every rank measures every example, because TRL averages its metrics over ranks: one forward pass per
example, twice a run.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from ...core.files import digest
from ...run.folder import RunFolder
from ...run.held_out import End, add_values
from ...sharding.ranks import Ranks
from .samples import evaluating


class HeldOutRecorder(TrainerCallback):
    """Measures the held-out examples at the start of training; `record("end")` at its end.
    Collective.

    trainer: an instance of SorenTrainerMixin with held-out examples. metrics: "eval_loss", and
    others that TRL logs, such as "eval_rewards/margins".
    """

    def __init__(self, trainer: Any, metrics: Sequence[str], folder: RunFolder, ranks: Ranks):
        self.trainer, self.metrics, self.folder, self.ranks = trainer, metrics, folder, ranks

    def on_train_begin(self, args, state, control, **kwargs):
        """Measure the start; a resumed run has measured it before."""
        if not state.global_step:
            self.record("start")

    def record(self, at: End) -> None:
        """Measure all examples and write their metrics."""
        trainer, values, weights, hashes = self.trainer, [], [], []
        # TRL's: values of each metric, which its next log averages
        logged = trainer._metrics["eval"]
        # Measure: a batch of one example, so that the metrics that TRL notes are this example's.
        with evaluating(trainer.forward_model):
            for example in trainer.eval_dataset:
                batch = trainer.data_collator([example])
                # Token ids and masks identify an example; its floats may differ in their last bits.
                ids = {
                    k: v.tolist()
                    for k, v in batch.items()
                    if torch.is_tensor(v) and not v.is_floating_point()
                }
                labels = batch.get("labels")
                loss, _, _ = trainer.prediction_step(
                    trainer.forward_model, batch, prediction_loss_only=True
                )
                own = {
                    "eval_loss": [float(loss)],
                    **{f"eval_{key}": of_key for key, of_key in logged.items()},
                }
                values.append([own[metric][-1] for metric in self.metrics])
                # The first token is predicted from nothing, so that it has no loss.
                weights.append(1.0 if labels is None else float((labels[:, 1:] != -100).sum()))
                hashes.append(digest(ids))
                logged.clear()
        # Write: equal examples are one cluster, whose errors are not independent.
        if self.ranks.is_first:
            # The other examples have no token in the loss.
            trained = [i for i, weight in enumerate(weights) if weight]
            numbers = {
                text: number
                for number, text in enumerate(dict.fromkeys(hashes[i] for i in trained))
            }
            clusters = (
                [numbers[hashes[i]] for i in trained] if len(numbers) < len(trained) else None
            )
            by_metric = {
                metric: [values[i][k] for i in trained] for k, metric in enumerate(self.metrics)
            }
            add_values(
                self.folder.held_out,
                at,
                digest(hashes),
                [weights[i] for i in trained],
                clusters,
                by_metric,
            )
