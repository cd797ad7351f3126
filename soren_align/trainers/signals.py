"""Stop at the next step, with a checkpoint to resume from, on Ctrl-C, SIGTERM or SIGHUP."""

import signal
from typing import Any

from transformers import TrainerCallback

from .. import signals
from ..sharding.ranks import Ranks


class StopOnSignal(TrainerCallback):
    """On the first signal, save and stop after this step; on a second one of its kind, raise KeyboardInterrupt at once.

    A second SIGHUP is none: a closed terminal sends two. A signal to one of several ranks stops all of them at the same
    step: they exchange a flag after every step.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.received: set[int] = set()
        self.stopped = False
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        """Install the handlers."""
        self.received |= signals.received.keys()
        self._before = {number: signal.signal(number, self._handle) for number in signals.stop_signals()}

    def _handle(self, number, frame):
        if number in self.received and number != signal.SIGHUP:
            self.close()
            raise KeyboardInterrupt
        self.received.add(number)

    def on_step_end(self, args, state, control, **kwargs):
        """Save and stop between two steps if any rank received a signal. Collective."""
        if self.ranks.any(bool(self.received)):
            self.stopped = True
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        """Restore the previous handlers."""
        self.close()

    def close(self) -> None:
        """Restore the previous handlers, also after an error."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
