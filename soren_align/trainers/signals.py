"""Stop at the next step, with a checkpoint to resume from, on Ctrl-C or SIGTERM."""

import signal

from transformers import TrainerCallback

from ..sharding.ranks import Ranks


class StopOnSignal(TrainerCallback):
    """On the first signal, save and stop after this step; on the second, raise KeyboardInterrupt at once.

    A signal to one of several ranks stops all of them at the same step: they exchange a flag after every step.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.received: int | None = None
        self.stopped = False

    def on_train_begin(self, args, state, control, **kwargs):
        """Install the handlers."""
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}

    def _handle(self, number, frame):
        if self.received is not None:
            self._restore()
            raise KeyboardInterrupt
        self.received = number

    def on_step_end(self, args, state, control, **kwargs):
        """Save and stop between two steps if any rank received a signal. Collective."""
        if self.ranks.any(self.received is not None):
            self.stopped = True
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        """Restore the previous handlers."""
        self._restore()

    def _restore(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)
