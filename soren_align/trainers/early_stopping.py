"""Early stopping by transformers' callback, whose count survives a resume, and the record of it for run.json."""

from typing import Any

from transformers import EarlyStoppingCallback


class EarlyStopping(EarlyStoppingCallback):
    """Ends training after `patience` evaluations in a row that improve `metric_for_best_model` by `threshold` or less.

    transformers writes the count into checkpoints and reads it only with restore_callback_states_from_checkpoint, which
    would restore a flag to stop, too.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        """Restore the count of the checkpoint; stop at once if it was reached before."""
        saved = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(saved, dict):
            self.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]
        control.should_training_stop = self.has_stopped

    @property
    def has_stopped(self) -> bool:
        """Whether training was ended here."""
        return self.early_stopping_patience_counter >= self.early_stopping_patience

    def record(self, args: Any, state: Any) -> dict[str, Any] | None:
        """Return when training was ended and by which metric, for run.json; None if it was not."""
        if not self.has_stopped:
            return None
        best = best_evaluation(args, state)
        settings = {"patience": self.early_stopping_patience, "threshold": self.early_stopping_threshold}
        return {"max_steps": state.max_steps, **settings, "best": best}


def best_evaluation(args: Any, state: Any) -> dict[str, Any]:
    """Return {"metric", "value", "step"} of the best evaluation of a training."""
    metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
    steps = (log["step"] for log in state.log_history if log.get(metric) == state.best_metric)
    return {"metric": metric, "value": state.best_metric, "step": next(steps, None)}
