"""Ctrl-C (or a scheduler's SIGTERM) ends a run at the next step, with a checkpoint to go on from."""

import signal

from transformers import TrainerCallback


class StopOnSignal(TrainerCallback):
    """First signal: save and stop after this step. Second: stop now, as without us."""

    def __init__(self):
        self.received: int | None = None

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
        if self.received is not None:
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        """Give the signals back."""
        self._restore()

    def _restore(self):
        for number, handler in self._before.items():
            signal.signal(number, handler)
