"""Measure benchmarks during training: scores on a few questions, always the same ones.

No weight changes, no random number is drawn from the training's generators, and no second model is
loaded.
"""

from typing import Any

from rich.console import Console
from transformers import Trainer, TrainerCallback

from ...core.text import print_labelled
from ...run.folder import RunFolder
from ...tasks import BENCHMARK
from .samples import evaluating


class BenchmarkRecorder(TrainerCallback):
    """Logs the scores of the model: at the start, and at every `every` steps and the last one, or
    at each evaluation.

    Collective. trainer: an instance of SorenTrainerMixin. benchmark: an
    `evaluate.run.benchmark.Benchmark`. every:
    None: `values` belong to the logs of evaluations.
    """

    def __init__(self, trainer: Any, benchmark: Any, every: int | None):
        self.trainer, self.benchmark, self.every = trainer, benchmark, every

    def report(self, folder: RunFolder, console: Console, *, stops_early: bool) -> None:
        """Write the questions into run.json, and which score chooses the saved weights, if one
        does; print their numbers."""
        record, args = self.benchmark.record(), self.trainer.args
        metric = str(args.metric_for_best_model).removeprefix("eval_")
        # Questions that choose the saved weights are no longer held out, and the table must state
        # it.
        is_used = args.load_best_model_at_end or stops_early or args.save_strategy == "best"
        if is_used and metric.startswith(BENCHMARK):
            record["selected_by"] = metric.removeprefix(BENCHMARK)
        folder.update(benchmark=record)
        numbers = [
            f"{own['questions']:,} of {own['of']:,} of {name}"
            for name, own in record["columns"].items()
        ]
        when = f"every {self.every:,} steps" if self.every else "at evaluations"
        print_labelled(
            console, "benchmark", f"{record['suite']}, {when}: questions {', '.join(numbers)}"
        )
        for notice in self.benchmark.notices:
            print_labelled(console, "notice", notice)

    def on_train_begin(self, args, state, control, **kwargs):
        """Score the start; a resumed run has done so."""
        if not state.global_step and (self.every or not args.eval_on_start):
            self._log(control)

    def on_step_end(self, args, state, control, **kwargs):
        """Score at the steps of `every`.
        A checkpoint of this step is written later, and contains the log.
        """
        if self.every and (
            state.global_step % self.every == 0 or state.global_step >= state.max_steps
        ):
            self._log(control)

    def values(self) -> dict[str, float]:
        """Return the scores for the log of an evaluation; none if they have steps of their own.
        Collective.
        """
        return {} if self.every else self._scores()

    def _log(self, control: Any) -> None:
        should_log = control.should_log
        # TRL's own `log` would take the training's averages along, which belong to the next log.
        Trainer.log(self.trainer, self._scores())
        control.should_log = should_log  # of the training's loss, which is still to come

    def _scores(self) -> dict[str, float]:
        trainer, model = self.trainer, self.trainer.forward_model
        with evaluating(model):
            return self.benchmark.scores(model, trainer.model.config, trainer.args.device)
