"""One model answers all requests, in pieces: by this process or by several, and never the same piece twice.

lm-eval sees a single model on a single rank, so that its few-shot prompts cannot depend on the number of processes (run
by lm-eval on two ranks, most prompts change). What is dealt out here are finished prompts.
"""

from collections.abc import Callable
from itertools import groupby
from typing import Any, cast

from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

from ..data.rendering import CPU_SECONDS, cpu_time_limit
from ..errors import UserError
from .backends import DoesNotFit, Setup
from .cache import Journal, digest
from .workers import Here, Several

BATCHES_PER_PIECE = 16
"""Of log-likelihoods: enough to sort by length within, few enough to lose little when killed."""


class Answering(LM):
    """lm-eval's model whose answers come from the journal or, piece by piece, from the processes at work."""

    def __init__(
        self, workers: Here | Several, tokenizer: Any, setup: Setup, journal: Journal, *, strict: bool = False
    ):
        """strict: a prompt that must be cut is an error."""
        super().__init__()
        self.workers, self.tokenizer, self.setup, self.journal = workers, tokenizer, setup, journal
        self.strict = strict
        self.chat_template_args: dict[str, Any] = {}  # as HFLM has it
        self.num_asked = self.num_kept = self.num_cut = 0
        self.asking = ""
        self.on_progress: Callable[[int, int], object] | None = None

    def begin(self, asking: str, on_progress: Callable[[int, int], object] | None) -> None:
        """Another column. asking: model and column, for errors. on_progress: gets requests done and in all."""
        self.asking, self.on_progress, self.num_cut = asking, on_progress, 0

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """lm-eval asks: how likely is each continuation after its context, and is it the likeliest?"""
        return self._answers("loglikelihood", [request.args for request in requests])

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """lm-eval asks: how does each context go on?"""
        return self._answers("generate_until", [request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """lm-eval asks: how likely is each text?"""
        return self._answers("loglikelihood_rolling", [request.args for request in requests])

    def _answers(self, kind: str, requests: list[tuple]) -> list[Any]:
        """The answers, in order."""
        alone = kind == "generate_until" and self.setup.backend == "hf"  # vLLM batches by itself
        numbered = pieces(requests, self.setup.batch_size * (1 if alone else BATCHES_PER_PIECE))
        names = [digest([kind, [requests[i] for i in piece]]) for piece in numbered]
        todo = {name: piece for name, piece in zip(names, numbered, strict=True) if name not in self.journal.answers}
        asked = sum(len(piece) for piece in todo.values())
        done = len(requests) - asked
        self.num_kept += done
        self._say(done, len(requests))
        work = [(name, kind, [requests[i] for i in piece]) for name, piece in todo.items()]
        try:
            for name, found, num_cut in self.workers.work_on(work):
                self._refuse_cut(num_cut)
                self.journal.add(name, found, num_cut)
                self.num_asked += len(found)
                done += len(found)
                self._say(done, len(requests))
        except DoesNotFit as error:
            raise UserError(f"{self.asking}: {error}") from None
        answers: list[Any] = [None] * len(requests)
        for name, piece in zip(names, numbered, strict=True):
            found, num_cut = self.journal.answers[name]
            self._refuse_cut(num_cut)
            self.num_cut += num_cut
            for i, given in zip(piece, found, strict=True):
                answers[i] = given
        return answers

    def _refuse_cut(self, num_cut: int) -> None:
        if num_cut and self.strict:
            raise UserError(f"{self.asking}: prompts do not fit the model's context and would be cut (--strict)")

    def _say(self, done: int, of: int) -> None:
        if self.on_progress:
            self.on_progress(done, of)

    def apply_chat_template(self, *args: Any, **how: Any) -> str:
        """lm-eval's, of one question."""
        with cpu_time_limit(CPU_SECONDS, f"{self.asking}: the chat template"):
            return HFLM.apply_chat_template(cast(Any, self), *args, **how)

    tokenizer_name = HFLM.tokenizer_name


def pieces(requests: list[tuple], size: int) -> list[list[int]]:
    """The requests' numbers in pieces: long contexts first (a batch too large shows at once), none of them torn.

    They depend on nothing but the requests and the size.
    """
    order = sorted(range(len(requests)), key=lambda i: (-len(requests[i][0]), requests[i][0], i))
    found: list[list[int]] = []
    for _, same_context in groupby(order, key=lambda i: requests[i][0]):
        alike = list(same_context)
        if not found or len(found[-1]) + len(alike) > size:
            found.append([])
        found[-1] += alike
    return found
