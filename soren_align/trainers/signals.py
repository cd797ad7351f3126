"""Ctrl-C (or a scheduler's SIGTERM) ends a run at the next step, with a checkpoint to go on from."""

import signal

from transformers import TrainerCallback

from ..sharding.ranks import Ranks


class StopOnSignal(TrainerCallback):
    """First signal: save and stop after this step. Second: stop now, as without us.

    A signal to one of several ranks stops all of them at the same step: each asks the others after every step.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.received: int | None = None
        self.stopped = False

    def on_train_begin(self, args, state, control, **kwargs):
        """From here on there is something to save."""
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}

    def _handle(self, number, frame):
        if self.received is not None:
            self._restore()
            raise KeyboardInterrupt
        self.received = number

    def on_step_end(self, args, state, control, **kwargs):
        """Act between two steps, where a checkpoint is whole."""
        if self.ranks.any(self.received is not None):
            self.stopped = True
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        """Give the signals back."""
        self._restore()

    def _restore(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)
